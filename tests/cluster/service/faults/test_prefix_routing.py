"""Requests go where their prefix is, between two real replicas, and elsewhere when that one is killed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import time
from collections import Counter
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from outrider.cluster.serving.generation import GenerationJob
from outrider.cluster.serving.handle_engine import FIRST_WORD_S, SILENCE_S, HandleEngine
from outrider.cluster.serving.shared_answer import FRESH_S
from outrider.decoding.request import SamplingParams
from tests.cluster.circle import bearer
from tests.cluster.service.applications import OPERATOR, Application, Twins, kill
from tests.helpers.models import VOCAB
from tests.helpers.waiting import eventually

ASKED = 10  # times: by chance a replica is met as often once in a thousand runs


def tokens(seed: int, length: int = 160) -> list[int]:
    """A prompt that begins as no other one."""
    return [int(token) for token in np.random.default_rng(seed).integers(5, VOCAB, length)]


def ask(twins: Twins, prompt: list[int], tenant: str = "routed", n: int = 1, **more: Any) -> int:
    """Tokens of the prompt that were not computed again."""
    with twins.client(tenant) as client:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0, n=n, **more)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def served(twins: Twins) -> Counter[str]:
    """Choices that were served to their end, by replica."""
    time.sleep(FRESH_S)  # until states are asked for anew
    page = httpx.get(f"{twins.admin_url}/metrics", headers=bearer(OPERATOR), timeout=60).raise_for_status().text
    found = Counter[str]()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "vllm:request_success_total" and sample.labels["finished_reason"] != "abort":
                found[sample.labels["engine"]] += int(sample.value)
    return found


def test_a_prompt_finds_the_replica_that_has_its_beginning(twins: Twins) -> None:
    twins.becomes_whole()
    for seed in range(ASKED):
        document = tokens(seed)
        assert ask(twins, document) == 0
        assert ask(twins, document + tokens(100 + seed, 20)) >= len(document) - 16
        assert ask(twins, document, tenant="routed-too") == 0  # another tenant's is not seen


@pytest.mark.parametrize("pin", [{"extra_headers": {"X-Session-ID": "s"}}, {"extra_body": {"prompt_cache_key": "s"}}])
def test_a_session_stays_at_a_replica(twins: Twins, pin: dict[str, Any]) -> None:
    twins.becomes_whole()
    before = served(twins)
    for seed in range(ASKED):
        ask(twins, tokens(200 + seed), **pin)
    assert sorted((served(twins) - before).values()) == [ASKED]
    for seed in range(2 * ASKED):
        ask(twins, tokens(200 + seed), extra_body={"prompt_cache_key": f"s{seed}"}, tenant="routed-too")
    assert len(served(twins) - before) == 2


def test_what_was_given_up_is_no_load(twins: Twins) -> None:
    """Else all that is new would go to the other replica."""
    twins.becomes_whole()
    before = served(twins)
    engine = HandleEngine(serve.get_deployment_handle("engine", twins.name), resume_timeout_s=60.0, replicas=2)

    async def run() -> None:
        for number in range(3 * ASKED):
            given_up = number < ASKED
            params = SamplingParams(1500 if given_up else 2, ignore_eos=True)
            session = "given-up" if given_up else f"new-{number}"
            job = GenerationJob(
                f"given-up-{number}/0", np.array(tokens(400 + number), np.int32), params, tenant="routed", session=session
            )
            async with contextlib.aclosing(engine.generate(job)[0]) as outputs:
                async for output in outputs:
                    if given_up and output.token_ids:
                        break

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(served(twins) - before) == 2


def test_choices_of_an_answer_are_computed_by_all_replicas(twins: Twins) -> None:
    twins.becomes_whole()
    before, prompt = served(twins), tokens(300)
    for _ in range(ASKED):
        ask(twins, prompt, n=2)
    assert sorted((served(twins) - before).values()) == [ASKED, ASKED]


@pytest.mark.proof
def test_answers_to_one_prefix_are_whole_when_their_replica_is_killed(twins: Twins) -> None:
    twins.becomes_whole()
    running = 3
    with twins.client("routed") as client, concurrent.futures.ThreadPoolExecutor(running) as threads:
        answers = [threads.submit(Application.ask, twins, client) for _ in range(running)]
        eventually(lambda: twins.load()[0] == running, 60)
        kill(list(twins.engines())[:1])
        for answer in answers:
            assert answer.result(180).choices[0].text == twins.expected.text
        twins.becomes_whole()
        kill(list(twins.engines())[:1])  # maybe the other one
        assert Application.ask(twins, client).choices[0].text == twins.expected.text
    twins.becomes_whole()


def test_a_replica_that_hangs_loses_its_prefixes_to_the_others(twins: Twins) -> None:
    """One request waits for it; those after it do not, though Serve takes it for alive still."""
    twins.becomes_whole()
    document, waits = tokens(500), list[float]()

    def wait(more: list[int]) -> float:
        began = time.monotonic()
        ask(twins, document + more, extra_body={"prompt_cache_key": "hangs"})
        return time.monotonic() - began

    wait([])
    for pid in twins.engines():
        os.kill(pid, signal.SIGSTOP)
        try:
            waits.append(wait([]))
            if waits[-1] > FIRST_WORD_S:  # else it is the other one that has the prefix
                assert max(wait([5 + at]) for at in range(5)) < FIRST_WORD_S
                break
        finally:
            os.kill(pid, signal.SIGCONT)
    assert FIRST_WORD_S < max(waits) < SILENCE_S, waits
    twins.becomes_whole()
