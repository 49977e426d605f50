"""A replica whose device fails: who is told what, and that its process is ended then. Without a GPU and without Ray."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.actors import replica as replica_module
from outrider.actors.description import DeviceLostError, ReplicaError
from outrider.actors.replica import Replica
from outrider.actors.sharded import group as group_module
from outrider.actors.sharded.group import ShardedGroup
from outrider.actors.sharded.shard import ShardSpec
from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, Request, SamplingParams, StepOutput
from outrider.engine.forward.batch import ScheduledRequest
from tests.helpers.models import llama_config, save_model
from tests.helpers.waiting import eventually

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
OPTIONS = (EngineOptions(max_running=4, max_waiting=4), SpeculationOptions(strategy="prompt_lookup"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    folder = save_model(tmp_path_factory.mktemp("replica"), llama_config(max_position_embeddings=4096))
    return ModelOptions(path=str(folder), dtype="float32", threads=1)


@pytest.fixture
def ended() -> threading.Event:
    """Is set when the process would end."""
    return threading.Event()


@pytest.fixture
def replica(model: ModelOptions, ended: threading.Event) -> Iterator[Replica]:
    running = Replica(model, *OPTIONS, end=ended.set)
    yield running
    running.stop()


def request(name: str, num_tokens: int) -> Request:
    return Request(name, [5, 6, 7, 5, 6], SamplingParams(max_tokens=num_tokens, ignore_eos=True))


def fail_when(replica: Replica, wanted: Callable[[Sequence[ScheduledRequest]], bool], error: Exception) -> None:
    """Has the first step of which this is true, and all later ones, raise an error behind the forward."""
    executor, failed = replica._engine._executor, False
    execute = executor.execute

    def guarded(works: Sequence[ScheduledRequest], top_k: int = 0) -> Any:
        nonlocal failed
        outcomes = execute(works, top_k)
        failed = failed or wanted(works)
        if failed:
            raise error
        return outcomes

    executor.execute = guarded  # type: ignore[method-assign]


async def collect(replica: Replica, asked: Request) -> tuple[list[int], Exception | None]:
    """What came, and what it ended with."""
    tokens: list[int] = []
    try:
        async for output in replica.generate(asked):
            assert output.finish_reason is not FinishReason.ERROR, output
            tokens += output.token_ids
    except ReplicaError as error:
        return tokens, error
    return tokens, None


def test_everyone_is_told_that_the_device_failed_and_then_the_process_ends(
    replica: Replica, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    fail_when(replica, lambda works: works[0].request.num_output >= 20, torch.AcceleratorError(ILLEGAL))
    engine = replica.describe().metrics
    assert engine is not None

    async def run() -> None:
        answers = await asyncio.gather(*(collect(replica, request(str(number), 200)) for number in range(6)))  # two of them wait
        answers.append(await collect(replica, request("late", 5)))
        for tokens, error in answers:
            assert isinstance(error, DeviceLostError) and len(tokens) < 200
            assert (error.engine, error.kind) == (engine.engine, "illegal_memory_access") and "\n" not in str(error)
        assert [bool(tokens) for tokens, _ in answers] == [True] * 4 + [False] * 3

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(asyncio.wait_for(run(), 60))
    eventually(ended.is_set)
    with pytest.raises(DeviceLostError):
        replica.check_health()
    (event,) = (record for record in caplog.records if record.levelno == logging.CRITICAL)
    assert event.getMessage().startswith("device_failed: illegal_memory_access on cpu")


def test_what_was_emitted_before_comes_first(replica: Replica, ended: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what streams hold back while many are computed."""
    monkeypatch.setattr(replica_module, "STREAM_PERIOD_S", 3600.0)
    monkeypatch.setattr("outrider.actors.replica.MOST_HELD", 4096)
    whole, _ = asyncio.run(collect(replica, request("whole", 60)))
    live: dict[str, Request] = {str(number): request(str(number), 60) for number in range(4)}
    fail_when(replica, lambda works: min(work.request.num_output for work in works) >= 30, torch.AcceleratorError(ILLEGAL))

    async def run() -> None:
        for (tokens, error), asked in zip(
            await asyncio.gather(*(collect(replica, one) for one in live.values())), live.values(), strict=True
        ):
            assert isinstance(error, DeviceLostError)
            assert len(tokens) == asked.num_output >= 30 and tokens == whole[: len(tokens)]

    asyncio.run(asyncio.wait_for(run(), 60))
    eventually(ended.is_set)


def test_an_error_that_the_device_survives_fails_a_step_and_ends_nothing(replica: Replica, ended: threading.Event) -> None:
    executor = replica._engine._executor
    execute = executor.execute

    def once(works: Sequence[ScheduledRequest], top_k: int = 0) -> Any:
        executor.execute = execute  # type: ignore[method-assign]
        raise RuntimeError("wrong shape")

    executor.execute = once  # type: ignore[method-assign]

    async def run() -> list[StepOutput]:
        return [output async for output in replica.generate(request("a", 20))]

    assert asyncio.run(run())[-1].finish_reason is FinishReason.ERROR
    assert asyncio.run(run())[-1].finish_reason is FinishReason.LENGTH
    replica.check_health()
    assert not ended.is_set()


def test_steps_that_run_out_of_memory_end_no_request(replica: Replica, ended: threading.Event) -> None:
    expected = asyncio.run(collect(replica, request("alone", 80)))
    executor, lacked = replica._engine._executor, 0
    execute = executor.execute

    def short(works: Sequence[ScheduledRequest], top_k: int = 0) -> Any:
        nonlocal lacked
        if len(works) > 2:
            lacked += 1
            raise torch.OutOfMemoryError
        return execute(works, top_k)

    executor.execute = short  # type: ignore[method-assign]

    async def run() -> None:
        answers = await asyncio.gather(*(collect(replica, request(str(number), 80)) for number in range(7)))
        assert answers == [expected] * 7

    asyncio.run(asyncio.wait_for(run(), 60))
    assert lacked and not ended.is_set()
    metrics = replica.describe().metrics
    assert metrics is not None and metrics.out_of_memory_steps == lacked


def test_word_of_a_failed_device_travels() -> None:
    lost = DeviceLostError("engine", "uncorrectable_ecc", "uncorrectable ECC error encountered")
    again = pickle.loads(pickle.dumps(lost))
    assert (again.engine, again.kind, again.reason, str(again)) == (lost.engine, lost.kind, lost.reason, str(lost))


def test_a_second_thread_that_notices_a_lost_rank_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came between the first one's notice and its telling, and the process was gone before the requests were told."""
    told: list[str] = []
    group = ShardedGroup(ShardSpec("pipeline", 0, 2, "cpu"), cast(Any, SimpleNamespace(close=lambda: None)), cast(Any, None))
    group._all_ready.set()
    group.device_failed = lambda error: told.append(f"told: {error.kind}")
    monkeypatch.setattr(group_module, "end_process", lambda: told.append("ended"))

    def notice_again(*_: object) -> None:
        other = threading.Thread(target=group._lose, args=("the ranks are out of step, a forward failed",))
        monkeypatch.setattr(group_module, "logger", logging.getLogger("of the second"))
        other.start()
        other.join()
        assert not told

    monkeypatch.setattr(group_module, "logger", SimpleNamespace(error=notice_again))
    group._lose("rank 1 is gone: EOFError")
    assert told == ["told: rank_lost", "ended"]
