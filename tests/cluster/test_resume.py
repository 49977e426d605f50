"""Replicas are killed in the middle of answers: clients see a pause, and the text that they would have seen."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from openai import OpenAI
from ray import serve

from cluster.app import application
from cluster.errors import ApiError
from cluster.generation import Job
from cluster.handle_engine import HandleEngine
from configs.schema import Config
from configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions
from decoding.request import FinishReason, Request, SamplingParams, StepOutput
from decoding.tree import Int32Array
from engine.engine import Engine
from tests import waiting
from tests.models import SENTENCES, VOCAB, llama_config, save_model

eventually = functools.partial(waiting.eventually, timeout_s=90.0)
PROMPT = SENTENCES[0]
TOKENS = 1200  # of an answer: seconds, so that what happens after its beginning happens in its middle
BEGUN = 40  # events of a stream that show that it has begun
SAMPLING = {"temperature": 1.0, "seed": 77}
NAME = "resume"


@dataclass(frozen=True)
class Service:
    """Two replicas, and what each answer has to be."""

    url: str
    prompt_ids: Int32Array
    expected_ids: list[int]
    expected: str

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180)

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=60).json())

    def is_whole(self) -> bool:
        health = self.health()
        return (health.get("status"), health.get("replicas")) == ("ok", 2)

    def pids(self) -> set[int]:
        """The processes of the engine replicas."""
        title = f"ray::ServeReplica:{NAME}:engine"
        found = set()
        for process in psutil.Process().children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                    found.add(process.pid)
            except psutil.NoSuchProcess:
                continue
        return found


def ask(client: OpenAI, **changes: Any) -> Any:
    body = {"ignore_eos": True}
    return client.completions.create(model="tiny", prompt=PROMPT, max_tokens=TOKENS, extra_body=body, **{**SAMPLING, **changes})


@pytest.fixture(scope="module")
def service(api_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A second application beside that of the other tests."""
    folder: Path = save_model(tmp_path_factory.mktemp("models") / "tiny", llama_config(max_position_embeddings=2048))
    model = ModelOptions(path=str(folder), dtype="float32", threads=1)
    plain = Engine.load(model, EngineOptions(max_running=1), SpeculationOptions("autoregressive"))
    assert plain.tokenizer is not None
    ids = plain.tokenizer.encode(PROMPT)
    plain.add(Request("plain", ids, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **SAMPLING)))  # type: ignore[arg-type]
    outputs = []
    while plain.has_work:
        outputs += plain.step()
    expected_ids = [token for output in outputs for token in output.token_ids]
    config = Config(
        model=model,
        engine=EngineOptions(max_running=4),
        speculation=SpeculationOptions("prompt_lookup", max_draft_tokens=4),
        server=ServerOptions(replicas=2, cpus_per_replica=0.25, stop_timeout_s=1.0),
    )
    serve.run(application(config, b""), name=NAME, route_prefix=f"/{NAME}")
    expected = "".join(output.text for output in outputs)
    yield Service(f"{api_server.url}/{NAME}", np.asarray(ids, np.int32), expected_ids, expected)
    serve.delete(NAME)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def stream_with(service: Service, strike: Callable[[], None]) -> tuple[str, str | None, Any]:
    """A stream's text, its finish reason and its usage, when something happens in its middle."""
    text, reason, usage = "", None, None
    with service.client() as client:
        for number, event in enumerate(ask(client, stream=True, stream_options={"include_usage": True})):
            usage = event.usage
            for choice in event.choices:
                text, reason = text + choice.text, choice.finish_reason
            if number == BEGUN:
                assert len(text) < len(service.expected) // 2
                strike()
    return text, reason, usage


def test_a_stream_goes_on_at_the_other_replica_when_its_own_is_killed(service: Service) -> None:
    eventually(service.is_whole)
    began = {pid: processor_seconds(pid) for pid in service.pids()}
    killed = []

    def strike() -> None:
        assert len(began) == 2
        killed.append(max(began, key=lambda pid: processor_seconds(pid) - began[pid]))
        kill(killed)
        eventually(lambda: service.health().get("status") == "degraded")

    text, reason, usage = stream_with(service, strike)
    assert text == service.expected
    assert reason == "length" and usage.completion_tokens == TOKENS
    eventually(service.is_whole)
    assert killed[0] not in service.pids()


def test_a_request_that_makes_steps_fail_ends_alone(service: Service) -> None:
    eventually(service.is_whole)
    engine = HandleEngine(serve.get_deployment_handle("engine", NAME), resume_timeout_s=60.0)
    params = SamplingParams(max_tokens=200, ignore_eos=True, **SAMPLING)  # type: ignore[arg-type]
    poison = Job("poison/0", service.prompt_ids, params, emitted=(VOCAB + 7,))  # no such row in the model's table

    async def collect(job: Job) -> list[StepOutput]:
        return [output async for output in engine.generate(job)]

    async def run() -> None:
        running = [asyncio.create_task(collect(Job(f"fine/{n}", service.prompt_ids, params))) for n in range(6)]
        while service.health().get("running") != 6:
            await asyncio.sleep(0.01)
        outputs = await collect(poison)
        assert outputs[-1].finish_reason is FinishReason.ERROR and "IndexError" in (outputs[-1].error or "")
        for outputs in await asyncio.gather(*running):
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert [token for output in outputs for token in output.token_ids] == service.expected_ids[:200]

    asyncio.run(asyncio.wait_for(run(), 180))


def test_answers_survive_the_loss_of_every_replica(service: Service) -> None:
    eventually(service.is_whole)
    before = service.pids()
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(ask, client) for _ in range(3)]
        leaves = ask(client, stream=True)
        next(iter(leaves))
        eventually(lambda: service.health().get("running") == 4)

        def strike() -> None:
            assert not any(answer.done() for answer in answers)
            kill(before)
            leaves.close()  # in the pause

        text, reason, usage = stream_with(service, strike)
        assert text == service.expected
        assert reason == "length" and usage.completion_tokens == TOKENS
        for answer in answers:
            done = answer.result(180)
            assert done.choices[0].text == service.expected
            assert done.usage.completion_tokens == TOKENS
    eventually(lambda: service.is_whole() and service.health()["running"] == 0)
    assert service.pids().isdisjoint(before)


def test_a_replica_that_does_not_come_back_in_time_is_an_error(service: Service) -> None:
    eventually(service.is_whole)
    engine = HandleEngine(serve.get_deployment_handle("engine", NAME), resume_timeout_s=0.0)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    async def run() -> None:
        outputs = engine.generate(Job("late/0", service.prompt_ids, params))
        async for output in outputs:
            if output.token_ids:
                kill(service.pids())
                break
        with pytest.raises(ApiError, match=r"\((RayActorError|ActorDiedError|ActorUnavailableError)\)") as raised:
            async for _ in outputs:
                pass
        assert (raised.value.status, raised.value.code) == (503, "engine_unavailable")

    asyncio.run(asyncio.wait_for(run(), 60))
