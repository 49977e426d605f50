"""Replicas are killed in the middle of answers: clients see a pause, and the text that they would have seen."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from ray import serve

from outrider.cluster.http.errors import ApiError
from outrider.cluster.serving.engine_replica import EngineReplica
from outrider.cluster.serving.generation import GenerationJob
from outrider.cluster.serving.handle_engine import HandleEngine
from outrider.configs.slices import EngineOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, SamplingParams, StepOutput
from tests.cluster.service.applications import Twins, kill, tiny_config
from tests.helpers.models import VOCAB
from tests.helpers.waiting import eventually

CHOICES = 10  # of an answer, in two calls
FEW = 600  # tokens of an answer: seconds, so that what happens after its beginning happens in its middle


def processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def test_a_stream_goes_on_at_the_other_replica_when_its_own_is_killed(twins: Twins) -> None:
    twins.becomes_whole()
    began = {pid: processor_seconds(pid) for pid in twins.engines()}
    killed = []

    def strike() -> None:
        assert len(began) == 2
        killed.append(max(began, key=lambda pid: processor_seconds(pid) - began[pid]))
        kill(killed)
        twins.becomes(status="degraded")

    twins.stream_with(strike)
    twins.becomes_whole()
    assert killed[0] not in twins.engines()


@pytest.mark.proof
def test_all_choices_of_an_answer_go_on_when_their_replicas_are_killed(twins: Twins) -> None:
    twins.becomes_whole()
    before = twins.engines()
    with twins.client() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        expected = [choice.text for choice in twins.ask(client, n=CHOICES).choices]
        answer = threads.submit(twins.ask, client, n=CHOICES)
        eventually(lambda: sum(twins.load()[:2]) == CHOICES, 60)
        kill(before)
        assert [choice.text for choice in answer.result(180).choices] == expected
    twins.becomes_whole()
    assert twins.engines().isdisjoint(before)


def test_a_request_that_makes_steps_fail_ends_alone(twins: Twins) -> None:
    twins.becomes_whole()
    engine = HandleEngine(serve.get_deployment_handle("engine", twins.name), resume_timeout_s=60.0)
    params = dataclasses.replace(twins.params, max_tokens=FEW)
    poison = GenerationJob(
        "poison/0", twins.expected.prompt_ids, params, emitted=(VOCAB + 7,)
    )  # no such row in the model's table

    async def collect(job: GenerationJob, begun: asyncio.Event) -> list[StepOutput]:
        outputs = []
        async for output in engine.generate(job)[0]:
            outputs.append(output)
            if output.token_ids:
                begun.set()
        return outputs

    async def run() -> None:
        begun = [asyncio.Event() for _ in range(6)]
        fine = [GenerationJob(f"fine/{n}", twins.expected.prompt_ids, params) for n in range(6)]
        running = [asyncio.create_task(collect(*pair)) for pair in zip(fine, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        outputs = await collect(poison, asyncio.Event())
        assert outputs[-1].finish_reason is FinishReason.ERROR and "IndexError" in (outputs[-1].error or "")
        for outputs in await asyncio.gather(*running):
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert [token for output in outputs for token in output.token_ids] == twins.expected.ids[:FEW]

    asyncio.run(asyncio.wait_for(run(), 180))


@pytest.mark.proof
def test_a_request_is_drafted_for_as_it_asked_also_at_the_replica_that_goes_on_with_it(twins: Twins) -> None:
    twins.becomes_whole()
    engine = HandleEngine(serve.get_deployment_handle("engine", twins.name), resume_timeout_s=120.0)
    params = dataclasses.replace(twins.params, max_tokens=FEW)

    async def collect(name: str, strategy: str | None, strike: bool) -> StepOutput:
        tokens: list[int] = []
        async for output in engine.generate(GenerationJob(name, twins.expected.prompt_ids, params, strategy=strategy))[0]:
            if strike and len(tokens) < 30 <= len(tokens) + len(output.token_ids):
                kill(twins.engines())
            tokens += output.token_ids
        assert tokens == twins.expected.ids[:FEW]
        return output

    for name, strategy, strike in (("drafts", None, False), ("plain", "autoregressive", True)):
        last = asyncio.run(asyncio.wait_for(collect(f"{name}/0", strategy, strike), 240))
        assert last.stats is not None and (last.stats.drafted > 0) == (strategy is None)
        assert (last.stats.steps < FEW) or not strike  # the counters are those of the last replica
    twins.becomes_whole()


FATAL = 20  # output tokens of a request after which it ends a fragile replica


class Fragile(EngineReplica):
    """A replica whose process ends when it computes a certain request."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        with (Path(arguments[0].path).parent / "started").open("a") as started:
            started.write("x")
        executor = self._replica._engine._executor
        execute = executor.execute

        def guarded(works: Any, top_k: int) -> Any:
            if any(work.request.request_id.startswith("fatal") and work.request.num_output >= FATAL for work in works):
                os.kill(os.getpid(), signal.SIGKILL)
            return execute(works, top_k)

        executor.execute = guarded  # type: ignore[method-assign]


@pytest.fixture
def fragile(twins: Twins, tmp_path: Path) -> Iterator[HandleEngine]:
    """One replica of that kind."""
    model = tiny_config(tmp_path).model
    options = EngineOptions(max_running=8), SpeculationOptions("prompt_lookup", max_draft_tokens=4), ParallelismOptions()
    deployment = serve.deployment(name="engine", max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.1})(Fragile)
    handle = serve.run(deployment.bind(model, *options, None, 60.0), name="fragile", route_prefix=None)
    yield HandleEngine(handle, resume_timeout_s=90.0)
    serve.delete("fragile")


def test_a_request_that_ends_its_replica_is_tried_once_more_alone_and_then_refused(fragile: HandleEngine, tmp_path: Path) -> None:
    prompt = np.arange(5, 25, dtype=np.int32)
    params = SamplingParams(max_tokens=FEW, ignore_eos=True)

    async def collect(name: str) -> list[int]:
        tokens: list[int] = []
        async for output in fragile.generate(GenerationJob(f"{name}/0", prompt, params))[0]:
            tokens += output.token_ids
        return tokens

    async def run() -> None:
        expected = await collect("before")
        answers = [asyncio.create_task(collect(f"fine{number}")) for number in range(4)]
        with pytest.raises(ApiError, match="not retried") as raised:
            await collect("fatal")
        assert (raised.value.status, raised.value.code) == (500, "engine_crashed")
        assert raised.value.headers == {"x-should-retry": "false"}
        assert await asyncio.gather(*answers) == [expected] * 4

    asyncio.run(asyncio.wait_for(run(), 240))
    # It ended two. The third may start after the last answer: the others may run to their ends before it is tried alone.
    eventually(lambda: (tmp_path / "started").read_text() == "x" * 3, 120)


async def lost_with_its_replica(twins: Twins) -> ApiError:
    """The error of a request that does not wait for a replica to come back."""
    engine = HandleEngine(serve.get_deployment_handle("engine", twins.name), resume_timeout_s=0.0)
    with pytest.raises(ApiError, match=r"\((RayActorError|ActorDiedError|ActorUnavailableError)\)") as raised:
        async for _ in engine.generate(GenerationJob("late/0", twins.expected.prompt_ids, twins.params))[0]:
            pass
    return raised.value


@pytest.mark.proof
def test_answers_survive_the_loss_of_every_replica_unless_none_comes_back_in_time(twins: Twins) -> None:
    twins.becomes_whole()
    before = twins.engines()
    with twins.client() as client, concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(twins.ask, client) for _ in range(3)]
        late = threads.submit(asyncio.run, asyncio.wait_for(lost_with_its_replica(twins), 180))
        leaves = twins.ask(client, stream=True)
        next(iter(leaves))
        twins.becomes(running=5)

        def strike() -> None:
            assert not any(answer.done() for answer in (*answers, late))
            kill(before)
            leaves.close()  # in the pause

        twins.stream_with(strike)
        for answer in answers:
            done = answer.result(180)
            assert done.choices[0].text == twins.expected.text
            assert done.usage.completion_tokens == twins.params.max_tokens
        error = late.result(180)
        assert (error.status, error.code) == (503, "engine_unavailable")
    twins.becomes(replicas=2, running=0)
    assert twins.engines().isdisjoint(before)
