"""What becomes of a request whose replicas fail, refuse or say nothing: replicas by script, without Serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

import outrider.cluster.serving.handle_engine as module
from outrider.actors.description import DeviceLostError
from outrider.cluster.http.errors import ApiError
from outrider.cluster.observe.device_failures import DeviceFailures
from outrider.cluster.serving.generation import GenerationJob
from outrider.cluster.serving.handle_engine import FIRST_WORD_S, SILENCE_S, HandleEngine, Item
from outrider.decoding.request import FinishReason, SamplingParams, StepOutput
from outrider.engine.errors import ContextLengthError, QueueFullError

TOKENS = tuple(range(100, 120))  # of the answer
Script = Callable[[GenerationJob], Iterable[Item]]  # what a replica says of a job


class Scripted:
    """The handle of a deployment whose calls are answered by scripts, one after another."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts, self.jobs = list(scripts), list[GenerationJob]()
        self.generate = self

    def remote(self, jobs: Sequence[GenerationJob]) -> Any:
        (job,) = jobs
        self.jobs.append(job)
        return _Response(batches(self._scripts.pop(0)(job)))


async def batches(items: Iterable[Item]) -> AsyncIterator[list[tuple[int, Item]]]:
    for item in items:
        yield [(0, item)]


class _Response:
    def __init__(self, batches: AsyncIterator[list[tuple[int, Item]]]) -> None:
        self._batches = batches

    def __anext__(self) -> Any:
        return self._batches.__anext__()

    def cancel(self) -> None:
        pass


def emits(job: GenerationJob, count: int) -> list[Item]:
    """The next outputs of a replica that took the job, of which the last may be the answer's."""
    first = len(job.emitted)
    outputs: list[Item] = [StepOutput(job.request_id, (), "")]
    if job.announced:
        outputs.append(StepOutput(job.request_id, (), "", alone=True))
    for token in TOKENS[first : first + count]:
        reason = FinishReason.LENGTH if token == TOKENS[-1] else None
        outputs.append(StepOutput(job.request_id, (token,), "", reason))
    return outputs


def loses(engine: str, count: int = 0, kind: str = "uncorrectable_ecc") -> Script:
    """A replica that emits so many tokens until its device fails."""
    return lambda job: [*emits(job, count), DeviceLostError(engine, kind, "the reason")]


def is_ending(engine: str) -> Script:
    """A replica whose device had failed before the job came."""
    return lambda job: [DeviceLostError(engine, "uncorrectable_ecc", "the reason")]


def whole(job: GenerationJob) -> Sequence[Item]:
    """A replica that emits the rest of the answer."""
    return emits(job, len(TOKENS))


def ask(
    monkeypatch: pytest.MonkeyPatch, *scripts: Script, replicas: int = 1
) -> tuple[list[int], list[GenerationJob], dict[str, int]]:
    """The tokens of an answer, the jobs that were sent, and what was counted."""
    for name in ("_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(module, "for_threads", lambda handle: handle)
    monkeypatch.setattr(module, "for_this_loop", lambda handle: handle)
    handle, failures = Scripted(*scripts), DeviceFailures()
    engine = HandleEngine(handle, resume_timeout_s=60.0, replicas=replicas, failures=failures)  # type: ignore[arg-type]
    tokens: list[int] = []

    async def run() -> None:
        job = GenerationJob("a/0", np.array([5], np.int32), SamplingParams(len(TOKENS), ignore_eos=True))
        async for output in engine.generate(job)[0]:
            tokens.extend(output.token_ids)

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        asked = {kind: count for kind, count in failures.counts().items() if count}
    return tokens, handle.jobs, asked


def test_a_request_goes_on_elsewhere_and_is_not_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, counted = ask(monkeypatch, loses("one", 7), whole)
    assert tuple(tokens) == TOKENS
    assert [(len(job.emitted), job.quarantined) for job in jobs] == [(0, False), (7, False)]
    assert jobs[1].avoid_s > 0 and counted == {"uncorrectable_ecc": 1}


def test_a_replica_that_has_not_ended_yet_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, counted = ask(monkeypatch, loses("one", 7), *[is_ending("one")] * 3, whole)
    assert tuple(tokens) == TOKENS and not any(job.quarantined for job in jobs)
    assert counted == {"uncorrectable_ecc": 1}


def test_tokens_between_two_failures_clear_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [loses(f"engine {number}", 2) for number in range(6)]
    tokens, jobs, counted = ask(monkeypatch, *scripts, whole)
    assert tuple(tokens) == TOKENS and not any(job.quarantined for job in jobs)
    assert counted == {"uncorrectable_ecc": 6}


def test_who_loses_two_devices_in_a_row_is_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, counted = ask(monkeypatch, loses("one", 4), loses("two", kind="illegal_memory_access"), whole)
    assert tuple(tokens) == TOKENS
    assert [(job.quarantined, job.announced) for job in jobs] == [(False, False), (False, False), (True, True)]
    assert counted == {"uncorrectable_ecc": 1, "illegal_memory_access": 1}


def test_who_makes_the_third_device_fail_as_well_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError) as raised:
        ask(monkeypatch, loses("one", 4), loses("two"), loses("three"), whole)
    assert (raised.value.status, raised.value.code) == (500, "engine_crashed")


def fails(count: int, field: str | None = None) -> Script:
    """A replica where a request ends with an error after so many tokens: its own fault where a field is named."""

    def script(job: GenerationJob) -> Sequence[Item]:
        error = StepOutput(job.request_id, (), "", FinishReason.ERROR, "nothing goes on", fault_field=field)
        return [*emits(job, count), error]

    return script


def ends(job: GenerationJob) -> Iterator[Item]:
    """A replica that ends in a step of the job alone."""
    yield from emits(job, 2)
    raise RayActorError


def ends_beside(job: GenerationJob) -> Iterator[Item]:
    """A replica that ends in a step of others, which it says before."""
    yield from emits(job, 2)
    yield StepOutput(job.request_id, (), "", alone=False)
    raise RayActorError


def test_a_failed_step_is_tried_again_and_an_own_fault_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, _ = ask(monkeypatch, fails(3), whole)
    assert tuple(tokens) == TOKENS
    assert [(len(job.emitted), job.quarantined, job.announced) for job in jobs] == [(0, False, False), (3, True, False)]
    for first in (0, 3):
        tokens, jobs, _ = ask(monkeypatch, fails(first, "structured_outputs.grammar"))
        assert len(tokens) == first and len(jobs) == 1


def test_a_quarantined_request_waits_until_its_replica_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses: Script = lambda job: [QueueFullError("another one is computed alone")]  # noqa: E731
    tokens, jobs, _ = ask(monkeypatch, fails(0), *[refuses] * 20, whole)
    assert tuple(tokens) == TOKENS and len(jobs) == 22
    never_taken: Script = lambda job: [StepOutput(job.request_id, (), "", FinishReason.ERROR, "not begun")]  # noqa: E731
    tokens, _, _ = ask(monkeypatch, never_taken, refuses, whole)
    assert tuple(tokens) == TOKENS


def test_who_is_computed_alone_when_a_second_replica_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError) as raised:
        ask(monkeypatch, ends, ends, whole)
    assert (raised.value.status, raised.value.code) == (500, "engine_crashed")


def test_who_is_not_computed_when_a_replica_ends_bears_no_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the steps of a quarantined request are those of others, which may end the replica as well."""
    tokens, jobs, _ = ask(monkeypatch, ends, *[ends_beside] * 4, whole)
    assert tuple(tokens) == TOKENS and len(jobs) == 6


def begins(job: GenerationJob) -> Sequence[Item]:
    """A replica that is lost after some tokens."""
    return emits(job, 7)


def too_short(job: GenerationJob) -> Sequence[Item]:
    """A replica with less memory, and so a shorter context, than the job needs."""
    return [ContextLengthError("max_tokens", "the context is 4 tokens")]


def test_who_lost_a_replica_goes_on_at_one_that_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, _ = ask(monkeypatch, begins, too_short, too_short, whole, replicas=3)
    assert tuple(tokens) == TOKENS and [len(job.emitted) for job in jobs] == [0, 7, 7, 7]


def test_a_new_request_is_sent_to_another_replica_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, _ = ask(monkeypatch, too_short, whole, replicas=2)
    assert tuple(tokens) == TOKENS and len(jobs) == 2
    for scripts, replicas in (((too_short, too_short), 2), ((too_short,), 1), ((begins, too_short), 1)):
        with pytest.raises(ContextLengthError):
            ask(monkeypatch, *scripts, replicas=replicas)


class FakeTime(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while it waits for a timer, or when it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, select = 0.0, self._selector.select  # type: ignore[attr-defined]

        def waits(timeout: float | None) -> Any:
            assert timeout is not None, "nothing will ever happen"
            self.now_s += timeout
            return select(0)

        self._selector.select = waits  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


def read(monkeypatch: pytest.MonkeyPatch, says: Callable[[FakeTime], AsyncIterator[list[tuple[int, Item]]]]) -> tuple[int, float]:
    """How many tokens come of a call of a replica, and the loop's time when it ends, which is when the replica is lost."""
    loop, tokens = FakeTime(), 0
    scripted = Scripted()
    monkeypatch.setattr(scripted, "remote", lambda jobs: _Response(says(loop)))

    async def run() -> None:
        nonlocal tokens
        job = GenerationJob("a/0", np.array([5], np.int32), SamplingParams(len(TOKENS)))
        async for item in module._Call(lambda: scripted, [job], FIRST_WORD_S).items(0):  # type: ignore[arg-type,return-value]
            assert isinstance(item, StepOutput)
            tokens += len(item.token_ids)

    with asyncio.Runner(loop_factory=lambda: loop) as runner, contextlib.suppress(module.ReplicaLostError):
        runner.run(run())
    return tokens, loop.now_s


@pytest.mark.parametrize("turns", [1, 10])
def test_a_replica_is_not_silent_while_the_event_loop_is_held(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """All that it says comes while something holds the loop for a minute, and is read some turns of the loop later."""

    async def says(loop: FakeTime) -> AsyncIterator[list[tuple[int, Item]]]:
        async for batch in batches(emits(GenerationJob("a/0", np.array([5], np.int32), SamplingParams(1)), len(TOKENS))):
            came = loop.create_future()
            loop.call_later(0.01, came.set_result, None)
            loop.now_s += 60.0
            await came
            for _ in range(turns - 1):
                loop.now_s += 60.0
                await asyncio.sleep(0)
            yield batch

    assert read(monkeypatch, says)[0] == len(TOKENS)


@pytest.mark.parametrize(("words", "lost_s"), [(0, FIRST_WORD_S), (1, SILENCE_S), (4, SILENCE_S)])
def test_a_replica_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, words: int, lost_s: float) -> None:
    async def says(loop: FakeTime) -> AsyncIterator[list[tuple[int, Item]]]:
        for _ in range(words):
            yield []
        await asyncio.sleep(3600.0)

    part_s = max(FIRST_WORD_S, lost_s) / module._PARTS
    assert lost_s - part_s <= read(monkeypatch, says)[1] <= lost_s + part_s
