"""One engine behind an async generator, without Ray: streams, failed steps and devices, and grammars."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
from outrider.decoding.request import QUARANTINE_TOKENS, FinishReason, Request, SamplingParams, StepOutput
from outrider.engine import target
from outrider.engine.engine import Engine
from outrider.engine.errors import ContextLengthError, ModelLoadError, QueueFullError, StreamTakenError
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.measures.metrics import EngineCounts
from outrider.engine.text.grammar import Grammars, regex_grammar
from tests.helpers.models import llama_config, save_model
from tests.helpers.waiting import eventually

CONTEXT = 8192
MAX_RUNNING, MAX_WAITING = 2, 2
OPTIONS = (EngineOptions(max_running=MAX_RUNNING, max_waiting=MAX_WAITING), SpeculationOptions(strategy="prompt_lookup"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    """A tiny random Llama with room for generations that take minutes."""
    folder = save_model(tmp_path_factory.mktemp("replica"), llama_config(max_position_embeddings=CONTEXT))
    return ModelOptions(path=str(folder), dtype="float32", threads=1)


@pytest.fixture
def replica(model: ModelOptions) -> Iterator[Replica]:
    """A running replica."""
    running = Replica(model, *OPTIONS)
    yield running
    running.stop()


def request(name: str, num_tokens: int = 24, first: int = 5) -> Request:
    """A request that ends by length only."""
    return Request(name, [first, 6, 7, first, 6], SamplingParams(max_tokens=num_tokens, ignore_eos=True))


def endless(name: str) -> Request:
    """A request that outlives its test unless it is ended."""
    return request(name, CONTEXT - 5)


async def collect(replica: Replica, request: Request) -> list[StepOutput]:
    """All outputs of a request."""
    return [output async for output in replica.generate(request)]


def ids(outputs: list[StepOutput]) -> list[int]:
    """The emitted tokens."""
    return [token for output in outputs for token in output.token_ids]


async def until(condition: Any, seconds: float = 3.0) -> None:
    """Waits for a condition, and fails when it does not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


def healthy(replica: Replica) -> bool:
    """Whether Serve would keep the replica."""
    try:
        replica.check_health()
    except ReplicaError:
        return False
    return True


def test_outputs_are_those_of_the_engine_alone_together_and_resumed(replica: Replica, model: ModelOptions) -> None:
    engine = Engine.load(model, *OPTIONS)
    engine.add(request("direct"))
    direct: list[StepOutput] = []
    while engine.has_work:
        direct += engine.step()

    async def run() -> None:
        outputs = await collect(replica, request("a"))
        assert outputs[0] == StepOutput("a", (), "")
        assert ids(outputs) == ids(direct)
        assert "".join(output.text for output in outputs) == "".join(output.text for output in direct)
        assert outputs[-1].finish_reason is FinishReason.LENGTH and outputs[-1].stats is not None
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        alone = [ids(await collect(replica, request(f"alone{first}", first=first))) for first in range(4)]
        together = await asyncio.gather(*(collect(replica, request(f"together{first}", first=first)) for first in range(4)))
        assert [ids(outputs) for outputs in together] == alone and len({tuple(tokens) for tokens in alone}) > 1
        whole = ids(direct)
        rest = Request("rest", request("").prompt_ids, request("").params, emitted=whole[:9])
        outputs = await collect(replica, rest)
        assert outputs[0] == StepOutput("rest", (), "")
        assert ids(outputs) == whole[9:] and rest.output_ids.tolist() == whole

    asyncio.run(run())


def test_description(replica: Replica) -> None:
    async def run() -> None:
        assert replica.describe().info.max_model_len == CONTEXT
        assert replica.describe().counts.free_slots == MAX_RUNNING
        streams = [replica.generate(endless(f"r{index}")) for index in range(3)]
        for stream in streams:
            await anext(stream)
        await until(lambda: replica.describe().counts == EngineCounts(running=MAX_RUNNING, waiting=1, free_slots=0))
        for stream in streams:
            await stream.aclose()

    asyncio.run(run())


def test_a_closed_generator_or_loop_frees_the_slot(replica: Replica) -> None:
    async def run() -> None:
        stream = replica.generate(endless("a"))
        emitted = 0
        while emitted <= 3:
            emitted += len((await anext(stream)).token_ids)
        await stream.aclose()
        await until(lambda: replica.describe().counts.free_slots == MAX_RUNNING)

    asyncio.run(run())
    loop, stream = asyncio.new_event_loop(), replica.generate(endless("b"))
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(until(lambda: replica.describe().counts.free_slots == MAX_RUNNING))


def test_cancelling_the_task_frees_the_slot_and_the_place_in_the_queue(replica: Replica) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(collect(replica, endless(f"r{index}"))) for index in range(4)]
        await until(lambda: (replica.describe().counts.running, replica.describe().counts.waiting) == (2, 2))
        for task in tasks[2:]:
            task.cancel()
        await until(lambda: replica.describe().counts.waiting == 0)
        assert replica.describe().counts.running == MAX_RUNNING
        for task in tasks[:2]:
            task.cancel()
        await until(lambda: replica.describe().counts.free_slots == MAX_RUNNING)
        assert len(ids(await collect(replica, request("after")))) == 24

    asyncio.run(run())


def test_refusals_come_before_any_output(replica: Replica) -> None:
    async def run() -> None:
        with pytest.raises(ContextLengthError, match="max_tokens"):
            await collect(replica, request("long", CONTEXT))
        streams = [replica.generate(endless(f"r{index}")) for index in range(MAX_RUNNING + MAX_WAITING)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(QueueFullError, match="max_waiting"):
            await collect(replica, request("one too many"))
        with pytest.raises(ValueError, match="in use"):
            await collect(replica, request("r0"))
        for stream in streams:
            await stream.aclose()
        assert len(ids(await collect(replica, request("after")))) == 24

    asyncio.run(run())


def test_a_resumed_request_takes_the_place_of_the_same_one_of_its_account(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.actors.replica.RESUME_PERIOD_S", math.inf)

    def named(name: str, account: str, num_tokens: int = CONTEXT - 5) -> Request:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        return Request(name, [5, 6, 7, 5, 6], params, account=account)

    async def run() -> None:
        old, left, queued = (replica.generate(named(name, "acme")) for name in ("a", "b", "c"))
        for stream in (old, left, queued):  # the last one waits
            await anext(stream)
        for refused in (named("a", "umbrella"), named("a", "")):
            with pytest.raises(ValueError, match="in use"):
                await anext(replica.generate(refused, resumed=True))
        with pytest.raises(ValueError, match="in use"):
            await anext(replica.generate(named("a", "acme")))
        for name, other in (("a", old), ("c", queued)):
            new = replica.generate(named(name, "acme"), resumed=True)
            assert await anext(new) == StepOutput(name, (), "")
            with pytest.raises(StreamTakenError, match="another client"):
                [output async for output in other]
            with pytest.raises(StreamTakenError, match="less than a second ago"):
                await anext(replica.generate(named(name, "acme"), resumed=True))
            monkeypatch.setattr("outrider.actors.replica.RESUME_PERIOD_S", 0.0)
            newest = replica.generate(named(name, "acme"), resumed=True)
            assert await anext(newest) == StepOutput(name, (), "")
            with pytest.raises(StreamTakenError, match="has resumed"):
                [output async for output in new]
            monkeypatch.setattr("outrider.actors.replica.RESUME_PERIOD_S", math.inf)
            await newest.aclose()
        new = replica.generate(named("b", "acme", 24), resumed=True)
        await anext(new)
        await left.aclose()  # that nobody waits for the old one any more does not end the new one
        assert len(ids([output async for output in new])) == 24
        assert len(ids([output async for output in replica.generate(named("d", "acme", 24), resumed=True)])) == 24
        await until(lambda: replica.describe().counts == EngineCounts(0, 0, MAX_RUNNING), 30)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_failed_step_ends_its_requests_only(
    ended_replica: Replica, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, step, replica = threading.Event(), Engine.step, ended_replica

    def breakable(engine: Engine) -> list[StepOutput]:
        if fail.is_set():
            fail.clear()
            raise RuntimeError("wrong shape\nin layer 3")
        return step(engine)

    monkeypatch.setattr(Engine, "step", breakable)

    async def run() -> None:
        running = [asyncio.create_task(collect(replica, endless(f"r{index}"))) for index in range(4)]
        await until(lambda: replica.describe().counts.running == 4)
        waiting = asyncio.create_task(collect(replica, request("waiting")))
        await until(lambda: replica.describe().counts.waiting == 1)
        fail.set()
        for outputs in await asyncio.gather(*running):
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert outputs[-1].error == "the engine failed: RuntimeError: wrong shape in layer 3"
        assert (await waiting)[-1].finish_reason is FinishReason.LENGTH
        replica.check_health()
        await until(lambda: replica.describe().counts.free_slots == 4)
        assert not ended.is_set()

    asyncio.run(run())


def test_steps_that_keep_failing_make_the_replica_unhealthy(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: Engine) -> list[StepOutput]:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Engine, "step", broken)

    async def run() -> None:
        for index in range(replica_module.MAX_FAILED_STEPS):
            replica.check_health()
            outputs = await collect(replica, endless(f"r{index}"))
            assert outputs[-1].finish_reason is FinishReason.ERROR
        await until(lambda: not healthy(replica))
        with pytest.raises(ReplicaError, match="device lost"):
            await collect(replica, request("late"))
        with pytest.raises(ReplicaError, match="device lost"):
            replica.check_health()
        with pytest.raises(ReplicaError):
            replica.describe()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_step_that_hangs_makes_the_replica_unhealthy(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    step = Engine.step

    def slow(engine: Engine) -> list[StepOutput]:
        go_on.wait(30)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow)
    monkeypatch.setattr(replica_module, "STALL_S", 0.2)

    async def run() -> None:
        task = asyncio.create_task(collect(replica, request("a")))
        await asyncio.sleep(0.5)
        with pytest.raises(ReplicaError, match="has been running"):
            replica.check_health()
        go_on.set()
        assert (await task)[-1].finish_reason is FinishReason.LENGTH
        replica.check_health()

    asyncio.run(run())


def test_stop_ends_the_thread_and_leaves_nobody_waiting(model: ModelOptions) -> None:
    replica = Replica(model, *OPTIONS)

    async def run() -> None:
        tasks = [asyncio.create_task(collect(replica, endless(f"r{index}"))) for index in range(3)]
        await until(lambda: replica.describe().counts.running == 2)
        await asyncio.to_thread(replica.stop)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, ReplicaError) and str(error) == "the replica was stopped"
        with pytest.raises(ReplicaError, match="stopped"):
            await collect(replica, request("late"))

    before = threading.active_count()
    asyncio.run(asyncio.wait_for(run(), 30))
    assert threading.active_count() < before
    with pytest.raises(ReplicaError, match="stopped"):
        replica.check_health()
    replica.stop()


@pytest.mark.slow
def test_what_was_put_off_is_done_between_requests_and_changes_no_answer(
    replica: Replica, model: ModelOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = ids(asyncio.run(collect(replica, request("alone"))))
    monkeypatch.setattr(target, "cache_folder", lambda: tmp_path)  # in which nothing is kept yet
    for wait in ("SETTLED_S", "QUIET_S"):
        monkeypatch.setattr(replica_module, wait, 0.0)
    busy = Replica(model, OPTIONS[0], SpeculationOptions("auto", strategies=("ngrammys",)))
    try:
        turns = 0
        while busy._engine.has_warmup or turns < 2:
            for strategy in (None, "ngrammys"):
                asked = request(f"{strategy} {turns}")
                asked.strategy = strategy
                assert ids(asyncio.run(collect(busy, asked))) == expected
            turns += 1
            assert turns < 1000
            time.sleep(0.005)  # a quick client leaves no moment between two requests
    finally:
        busy.stop()
    assert {path.suffix for path in tmp_path.iterdir()} >= {".npy"}  # the curve is kept where the machine was quiet


def test_an_idle_replica_does_not_spin(replica: Replica) -> None:
    asyncio.run(collect(replica, request("a")))
    time.sleep(0.1)
    used = time.process_time()
    time.sleep(0.6)
    assert time.process_time() - used < 0.2


def test_a_model_that_cannot_be_loaded_is_an_error_of_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        Replica(ModelOptions(path=str(tmp_path / "nothing")), *OPTIONS)


@pytest.fixture
def rarely_told(model: ModelOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    """A replica of more slots whose streams hold what they can."""
    monkeypatch.setattr(replica_module, "STREAM_PERIOD_S", 3600.0)
    monkeypatch.setattr("outrider.actors.replica.MOST_HELD", CONTEXT)
    running = Replica(model, EngineOptions(max_running=8, max_waiting=8), OPTIONS[1])
    yield running
    running.stop()


def test_many_streams_leave_in_fewer_events(rarely_told: Replica) -> None:
    """First tokens, ends, and what is reported by step leave at once, and nothing is lost."""

    async def run() -> None:
        alone = await collect(rarely_told, request("alone"))
        reported = request("reported")
        reported.report = True
        many = [request(f"{number}") for number in range(replica_module.MANY)]
        *streams, by_step = await asyncio.gather(*(collect(rarely_told, one) for one in (*many, reported)))
        for stream in (*streams, by_step):
            assert ids(stream) == ids(alone) and stream[-1].finish_reason is FinishReason.LENGTH
            assert "".join(output.text for output in stream) == "".join(output.text for output in alone)
        assert [sum(bool(output.token_ids) for output in stream) for stream in streams] == [2] * len(streams)
        assert len(by_step) == len(alone) > 3

    asyncio.run(run())


def test_a_stream_that_stands_still_holds_nothing(rarely_told: Replica) -> None:
    """While a quarantined request has its steps alone the others are told what they have emitted."""
    events = [0] * replica_module.MANY

    async def read(number: int) -> None:
        async for output in rarely_told.generate(endless(f"{number}")):
            events[number] += bool(output.token_ids)

    async def run() -> None:
        readers = [asyncio.create_task(read(number)) for number in range(len(events))]
        await until(lambda: events == [1] * len(events))
        quarantined = request("quarantined")
        quarantined.quarantined = True
        await collect(rarely_told, quarantined)
        await until(lambda: min(events) >= 2)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(run())


def test_a_quarantined_request_is_told_before_each_step_whether_it_is_computed_alone(replica: Replica) -> None:
    async def run() -> None:
        expected = ids(await collect(replica, request("before")))
        other = asyncio.create_task(collect(replica, endless("other")))
        await until(lambda: replica.describe().counts.running == 1)
        quarantined = request("quarantined")
        quarantined.quarantined = True
        outputs = [output async for output in replica.generate(quarantined, announced=True)]
        assert ids(outputs) == expected
        told = [output.alone for output in outputs if output.alone is not None]
        assert told[0] is True and len(told) > 2 and all(one is not two for one, two in itertools.pairwise(told))
        alone, emitted = None, 0
        for output in outputs:
            alone = alone if output.alone is None else output.alone
            assert not output.token_ids or alone or emitted >= QUARANTINE_TOKENS
            emitted += len(output.token_ids)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    asyncio.run(run())


ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@pytest.fixture
def ended() -> threading.Event:
    """Is set when the process would end."""
    return threading.Event()


@pytest.fixture
def ended_replica(model: ModelOptions, ended: threading.Event) -> Iterator[Replica]:
    """A replica of four slots that sets ``ended`` where its process would end."""
    running = Replica(model, EngineOptions(max_running=4, max_waiting=4), OPTIONS[1], end=ended.set)
    yield running
    running.stop()


def fail_when(ended_replica: Replica, wanted: Callable[[Sequence[ScheduledRequest]], bool], error: Exception) -> None:
    """Has the first step of which this is true, and all later ones, raise an error behind the forward."""
    executor, failed = ended_replica._engine._executor, False
    execute = executor.execute

    def guarded(works: Sequence[ScheduledRequest], top_k: int = 0) -> Any:
        nonlocal failed
        outcomes = execute(works, top_k)
        failed = failed or wanted(works)
        if failed:
            raise error
        return outcomes

    executor.execute = guarded  # type: ignore[method-assign]


async def collect_tokens(ended_replica: Replica, asked: Request) -> tuple[list[int], Exception | None]:
    """What came, and what it ended with."""
    tokens: list[int] = []
    try:
        async for output in ended_replica.generate(asked):
            assert output.finish_reason is not FinishReason.ERROR, output
            tokens += output.token_ids
    except ReplicaError as error:
        return tokens, error
    return tokens, None


def test_everyone_is_told_that_the_device_failed_and_then_the_process_ends(
    ended_replica: Replica, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    fail_when(ended_replica, lambda works: works[0].request.num_output >= 20, torch.AcceleratorError(ILLEGAL))
    engine = ended_replica.describe().metrics
    assert engine is not None

    async def run() -> None:
        answers = await asyncio.gather(
            *(collect_tokens(ended_replica, request(str(number), 200)) for number in range(6))
        )  # two of them wait
        answers.append(await collect_tokens(ended_replica, request("late", 5)))
        for tokens, error in answers:
            assert isinstance(error, DeviceLostError) and len(tokens) < 200
            assert (error.engine, error.kind) == (engine.engine, "illegal_memory_access") and "\n" not in str(error)
        assert [bool(tokens) for tokens, _ in answers] == [True] * 4 + [False] * 3

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(asyncio.wait_for(run(), 60))
    eventually(ended.is_set)
    with pytest.raises(DeviceLostError):
        ended_replica.check_health()
    (event,) = (record for record in caplog.records if record.levelno == logging.CRITICAL)
    assert event.getMessage().startswith("device_failed: illegal_memory_access on cpu")


def test_what_was_emitted_before_comes_first(
    ended_replica: Replica, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what streams hold back while many are computed."""
    monkeypatch.setattr(replica_module, "STREAM_PERIOD_S", 3600.0)
    monkeypatch.setattr("outrider.actors.replica.MOST_HELD", 4096)
    whole, _ = asyncio.run(collect_tokens(ended_replica, request("whole", 60)))
    live: dict[str, Request] = {str(number): request(str(number), 60) for number in range(4)}
    fail_when(ended_replica, lambda works: min(work.request.num_output for work in works) >= 30, torch.AcceleratorError(ILLEGAL))

    async def run() -> None:
        for (tokens, error), asked in zip(
            await asyncio.gather(*(collect_tokens(ended_replica, one) for one in live.values())), live.values(), strict=True
        ):
            assert isinstance(error, DeviceLostError)
            assert len(tokens) == asked.num_output >= 30 and tokens == whole[: len(tokens)]

    asyncio.run(asyncio.wait_for(run(), 60))
    eventually(ended.is_set)


def test_steps_that_run_out_of_memory_end_no_request(ended_replica: Replica, ended: threading.Event) -> None:
    expected = asyncio.run(collect_tokens(ended_replica, request("alone", 80)))
    executor, lacked = ended_replica._engine._executor, 0
    execute = executor.execute

    def short(works: Sequence[ScheduledRequest], top_k: int = 0) -> Any:
        nonlocal lacked
        if len(works) > 2:
            lacked += 1
            raise torch.OutOfMemoryError
        return execute(works, top_k)

    executor.execute = short  # type: ignore[method-assign]

    async def run() -> None:
        answers = await asyncio.gather(*(collect_tokens(ended_replica, request(str(number), 80)) for number in range(7)))
        assert answers == [expected] * 7

    asyncio.run(asyncio.wait_for(run(), 60))
    assert lacked and not ended.is_set()
    assert ended_replica.describe().metrics.out_of_memory_steps == lacked


def test_a_device_error_can_be_pickled() -> None:
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


DATE = r"20[0-9]{2}-[01][0-9]"


def test_steps_go_on_while_a_grammar_is_compiled(ended_replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, proceed, threads = threading.Event(), threading.Event(), set()
    compile_it = Grammars._compile

    def blocked(self: Grammars, grammar: str, vocabulary: Any) -> Any:
        threads.add(threading.current_thread().name)
        entered.set()
        assert proceed.wait(60)
        return compile_it(self, grammar, vocabulary)

    def bound(name: str, pattern: str) -> Request:
        return Request(name, [5, 6, 7], SamplingParams(max_tokens=16, grammar=regex_grammar(pattern)), account="a")

    monkeypatch.setattr(Grammars, "_compile", blocked)

    async def run() -> None:
        first = asyncio.create_task(collect(ended_replica, bound("first", DATE)))
        queued = asyncio.create_task(collect(ended_replica, bound("second", "[xyz]{4}")))  # has its turn behind it
        gone = asyncio.create_task(collect(ended_replica, bound("gone", "[uvw]{4}")))
        assert await asyncio.to_thread(entered.wait, 60)
        plain = await collect(ended_replica, request("plain"))
        assert plain[-1].finish_reason is FinishReason.LENGTH and not first.done()
        gone.cancel()
        proceed.set()
        for outputs, pattern in ((await first, DATE), (await queued, "[xyz]{4}")):
            assert re.fullmatch(pattern, "".join(output.text for output in outputs))

    try:
        asyncio.run(run())
    finally:
        proceed.set()
    assert threads and all(name.startswith("grammars") for name in threads)
