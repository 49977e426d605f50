"""A real server under 32 streams at once, of which some are closed halfway: every text is the one that the request gets alone,
and nothing is left behind."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cache_service.namespace import hash_key
from outrider.cluster.serving.shared_answer import FRESH_S
from outrider.decoding.request import SamplingParams
from tests.cluster.circle import Server, bearer
from tests.cluster.service.applications import TWIN_RUNNING, Answer, Twins, plain_answers, serving, tiny_config
from tests.helpers.models import HYBRIDS, SENTENCES, save_model

STREAMS, EACH = 32, 3  # streams at once, and requests that each makes one after another
LONG = 64  # tokens
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
)
STRATEGIES = (None, "suffix", "autoregressive", "recycling")


@dataclass(frozen=True)
class Question:
    """The body of a request, and what plain decoding answers alone."""

    body: dict[str, Any]
    answer: Answer


@pytest.fixture(scope="module")
def questions(twins: Twins) -> list[Question]:
    """With prompts that share beginnings, under all settings."""
    prompts = [" ".join(SENTENCES[: 1 + number % 3]) + f" {number // 3}" * (number % 4) for number in range(16)]
    bodies = [{"max_tokens": LONG - number, "temperature": 0.0, **SETTINGS[number % len(SETTINGS)]} for number in range(16)]
    asked = [(prompts[number], SamplingParams(**settings)) for number, settings in enumerate(bodies)]
    answers = plain_answers(twins.model, *asked)
    return [
        Question({"model": "tiny", "prompt": prompt, **settings}, answer)
        for prompt, settings, answer in zip(prompts, bodies, answers, strict=True)
    ]


async def stream(http: httpx.AsyncClient, question: Question, leave_after: int | None, **more: Any) -> bool:
    """Reads an answer to its end, or closes the stream after some events. Whether it was read to its end."""
    text, reason, usage = "", None, None
    body = {**question.body, **more, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = 0
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event["usage"]
            for choice in event["choices"]:
                text, reason = text + choice["text"], choice["finish_reason"]
            assert question.answer.text.startswith(text)
            events += 1
            if events == leave_after:
                return False
    assert (text, reason) == (question.answer.text, question.answer.reason)
    assert usage is not None and usage["completion_tokens"] == len(question.answer.ids)
    return True


def test_many_streams_at_once_say_what_each_says_alone(twins: Twins, questions: list[Question]) -> None:
    assert sum(len(question.answer.ids) for question in questions) > len(questions) * LONG // 3  # most do not end at once

    async def client(http: httpx.AsyncClient, number: int) -> int:
        whole = 0
        for turn in range(EACH):
            question = questions[(7 * number + turn) % len(questions)]
            leave_after = 1 + number % 5 if (number + turn) % 3 == 0 else None
            strategy = STRATEGIES[(number + turn) % len(STRATEGIES)]
            more: dict[str, Any] = {"priority": (number + turn) % 4}
            if strategy is not None:
                more["speculation"] = {"strategy": strategy}
            whole += await stream(http, question, leave_after, **more)
        return whole

    async def run() -> int:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=twins.url, headers=bearer("key of many"), timeout=120, limits=limits) as http:
            return sum(await asyncio.gather(*(client(http, number) for number in range(STREAMS))))

    whole = asyncio.run(run())
    assert STREAMS * EACH // 2 < whole < STREAMS * EACH  # some left
    twins.becomes(status="ok", running=0, waiting=0, free_slots=2 * TWIN_RUNNING)


@pytest.mark.parametrize("family", ["qwen3_5", *(pytest.param(each, marks=pytest.mark.proof) for each in ("lfm2", "granite4"))])
def test_conversations_with_a_model_that_keeps_states(family: str, api_server: Server, tmp_path: Path) -> None:
    """Two at once that begin alike, drafted for, behind snapshots of the state: their texts are those of plain decoding."""
    shape = copy.deepcopy(HYBRIDS[family])
    shape.max_position_embeddings = 1024
    save_model(tmp_path / "tiny", shape, seed=2)
    config = tiny_config(
        tmp_path, speculation={"strategy": "auto", "max_draft_tokens": 16, "options": {"all_rows": True}},
        tenancy={"tenants": {"one": {"keys": [hash_key("key of one")]}}},
    )  # fmt: skip
    params = SamplingParams(48, ignore_eos=True)
    alike = " ".join(SENTENCES) * 3
    beginnings = [alike + " And then?", alike + " What of the fox?"]
    answers = plain_answers(config.model, *((prompt, params) for prompt in beginnings))
    further = beginnings[0] + answers[0].text + " Why?"
    (last,) = plain_answers(config.model, (further, params))
    common = next(at for at, pair in enumerate(zip(*(each.prompt_ids for each in answers), strict=False)) if pair[0] != pair[1])
    assert common > 128 and len({tuple(each.ids) for each in (*answers, last)}) == 3

    async def read(http: httpx.AsyncClient, prompt: str, begun: asyncio.Event | None = None) -> tuple[str, int, int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True}
        text, usage = "", {}
        async with http.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line and line != "data: [DONE]":
                    if begun is not None:
                        begun.set()
                    event = json.loads(line.removeprefix("data: "))
                    usage = event["usage"] or usage
                    text += "".join(choice["text"] for choice in event["choices"])
        return text, usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    async def talk(url: str) -> list[tuple[str, int, int]]:
        async with httpx.AsyncClient(base_url=url, headers=bearer("key of one"), timeout=120) as http:
            first = await read(http, beginnings[0])
            # The second one begins behind the first: in the other order it may replace the snapshot that the first one continues.
            begun = asyncio.Event()
            on = asyncio.create_task(read(http, further, begun))
            await asyncio.wait({on, asyncio.create_task(begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
            return [first, *await asyncio.gather(on, read(http, beginnings[1]))]

    with serving(api_server, f"states-{family.replace('_', '-')}", config, 8) as served:
        served.becomes(status="ok")
        first, on, beside = asyncio.run(talk(served.url))
        time.sleep(FRESH_S)  # until states are asked for anew
        metrics = httpx.get(f"{served.url}/metrics", timeout=60).text
    assert first == (answers[0].text, 48, 0)
    assert on == (last.text, 48, len(answers[0].prompt_ids) - 1)  # behind the first prompt; its answer is cut into other tokens
    assert beside[:2] == (answers[1].text, 48) and beside[2] in (128, 256) and beside[2] <= common  # from a snapshot
    accepted = [line for line in metrics.splitlines() if line.startswith("outrider:accepted_tokens")]
    assert any(float(line.rsplit(" ", 1)[1]) > 0 for line in accepted), accepted
