"""The actor around an engine: several jobs of an answer in one call."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import outrider.cluster.serving.engine_replica as module
from outrider.actors.description import DeviceLostError
from outrider.cluster.cli.doctor import missing_optional_deps
from outrider.cluster.serving.engine_replica import EngineReplica
from outrider.cluster.serving.generation import GenerationJob, OtherVersionError
from outrider.cluster.serving.handle_engine import Item
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding import jit
from outrider.decoding.request import FinishReason, SamplingParams, StepOutput
from outrider.engine.engine import Engine
from outrider.engine.errors import ContextLengthError, StreamTakenError
from outrider.engine.executor import VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from tests.cluster.circle import CONTEXT

PROMPT = np.array([5], np.int32)


@pytest.fixture(scope="module")
def replica(circle_model: Path) -> Iterator[EngineReplica]:
    model = ModelOptions(path=str(circle_model), dtype="float32", threads=1)
    options = EngineOptions(max_running=4), SpeculationOptions("llma"), ParallelismOptions()
    made = EngineReplica(model, *options, None, 60.0, version="this")
    yield made
    made._replica.stop()


def job(name: str, tokens: int = 24) -> GenerationJob:
    return GenerationJob(name, PROMPT, SamplingParams(tokens, ignore_eos=True))


async def batches(replica: EngineReplica, jobs: list[GenerationJob]) -> list[list[tuple[int, Item]]]:
    return [batch async for batch in replica.generate(jobs)]


def test_what_comes_of_several_jobs_comes_together(replica: EngineReplica) -> None:
    async def run() -> None:
        calls = replica.generate([job(f"one/{at}", CONTEXT - 1) for at in range(4)])
        async for batch in calls:
            if {place for place, _ in batch} == {0, 1, 2, 3}:
                break
            time.sleep(0.05)  # nobody listens meanwhile
        else:
            pytest.fail("no event had something of each job")
        await calls.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_each_job_gets_its_own_outputs(replica: EngineReplica) -> None:
    names = [f"two/{at}" for at in range(6)]  # two of them wait at first
    found = asyncio.run(batches(replica, [job(name) for name in names]))
    for place, name in enumerate(names):
        outputs = [item for batch in found for at, item in batch if at == place and isinstance(item, StepOutput)]
        assert {output.request_id for output in outputs} == {name}
        assert outputs[0] == StepOutput(name, (), "") and outputs[-1].finish_reason == "length"
        assert sum(len(output.token_ids) for output in outputs) == 24


def test_what_is_missing_is_said_in_one_line_at_the_start(
    circle_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "of-another-processor").mkdir()
    monkeypatch.setattr(jit, "IMAGE", tmp_path)
    monkeypatch.setattr(jit, "BROUGHT", None)
    model = ModelOptions(path=str(circle_model), dtype="float32", threads=1)
    made = EngineReplica(model, EngineOptions(max_running=4), SpeculationOptions("llma"), ParallelismOptions(), None, 60.0)
    made._replica.stop()
    (said,) = (record.getMessage() for record in caplog.records if "lacks" in record.getMessage())
    assert said.startswith("this environment lacks compiled code: the image has it for of-another-processor, but this")
    assert said.endswith("(build the image on such a processor)") and "\n" not in said
    monkeypatch.setattr(jit, "BROUGHT", tmp_path)
    assert missing_optional_deps("cpu", "none") == "" and "flash-attn: not installed" in missing_optional_deps("cuda", "none")
    monkeypatch.setattr(jit, "tiles_are_refused", lambda: True)
    assert missing_optional_deps("cpu", "none").startswith(
        "processor: it has AMX, but this process may not use its tiles (allow the system call"
    )


def test_a_job_that_is_refused_leaves_the_others_alone(replica: EngineReplica) -> None:
    found = asyncio.run(batches(replica, [job("a"), job("long", CONTEXT), job("b")]))
    items = [pair for batch in found for pair in batch]
    assert [type(item) for place, item in items if place == 1] == [ContextLengthError]
    ends = [item.finish_reason for place, item in items if place != 1 and isinstance(item, StepOutput)]
    assert ends.count(FinishReason.LENGTH) == 2


def test_a_job_of_another_version_is_refused(replica: EngineReplica) -> None:
    asked = [dataclasses.replace(job(version), version=version) for version in ("this", "that", "")]
    items = [pair for batch in asyncio.run(batches(replica, asked)) for pair in batch]
    assert [type(item) for place, item in items if place == 1] == [OtherVersionError]
    assert sorted(place for place, item in items if isinstance(item, StepOutput) and item.finish_reason) == [0, 2]
    assert asyncio.run(replica.describe()).version == "this"


def test_a_resumed_job_takes_the_place_of_the_old_one(replica: EngineReplica) -> None:
    async def run() -> None:
        old = replica.generate([job("cut/0", CONTEXT - 1)])
        await anext(old)
        again = dataclasses.replace(job("cut/0", CONTEXT - 1), resumed=True)
        new = replica.generate([again])
        await anext(new)
        *_, last = [pair async for batch in old for pair in batch]
        assert isinstance(last[1], StreamTakenError)
        await new.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_beats_come_while_nothing_else_does(replica: EngineReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    go_on, step = threading.Event(), Engine.step

    def slow(engine: Engine) -> list[StepOutput]:
        go_on.wait(30)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)

    async def run() -> None:
        found = []
        async for batch in replica.generate([job("a")]):
            found.append(batch)
            if found.count([]) == 3:
                go_on.set()
        assert found[0] == [(0, StepOutput("a", (), ""))] and found.count([]) >= 3

    asyncio.run(asyncio.wait_for(run(), 60))


def test_who_stops_listening_frees_all_slots(replica: EngineReplica) -> None:
    async def run() -> None:
        endless = [job(f"endless/{at}", CONTEXT - 1) for at in range(4)]
        calls = replica.generate(endless)
        await anext(calls)
        await calls.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            while (await replica.describe()).counts.running:
                await asyncio.sleep(0.01)
        assert (await replica.describe()).counts.free_slots == 4

    asyncio.run(run())


def test_a_failed_device_is_the_last_word_on_each_job_and_then_the_process_ends(
    circle_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelOptions(path=str(circle_model), dtype="float32", threads=1)
    made = EngineReplica(model, EngineOptions(max_running=4), SpeculationOptions("llma"), ParallelismOptions(), None, 60.0)
    streams: list[int] = []  # that had not ended when the process would have
    ended = threading.Event()

    def end() -> None:
        streams.append(made._streams)
        ended.set()

    monkeypatch.setattr(module, "LEAVE_S", 60.0)
    monkeypatch.setattr(module, "end_process", end)
    executor = made._replica._engine._executor
    execute = executor.execute

    def fails(works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        if all(work.request.num_output > 30 for work in works):
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        return execute(works, top_k)

    executor.execute = fails  # type: ignore[method-assign]

    async def run() -> None:
        calls = [batches(made, [job(f"{call}/{at}", CONTEXT - 1) for at in range(3)]) for call in range(2)]  # two jobs wait
        for found in await asyncio.gather(*calls):
            for place in range(3):
                *outputs, last = [item for batch in found for at, item in batch if at == place]
                assert isinstance(last, DeviceLostError) and last.kind == "uncorrectable_ecc"
                assert all(isinstance(item, StepOutput) and item.finish_reason is None for item in outputs)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert ended.wait(60) and streams == [0]
    late = asyncio.run(batches(made, [job("late/0")]))
    assert [type(item) for batch in late for _, item in batch] == [DeviceLostError]
    made._replica.stop()
