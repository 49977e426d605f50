"""What becomes of a request whose replicas say that their devices failed: replicas by script, without Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

import cluster.serving.handle_engine as module
from actors.description import DeviceLostError
from cluster.http.errors import ApiError
from cluster.observe.device_failures import DeviceFailures
from cluster.serving.generation import Job
from cluster.serving.handle_engine import HandleEngine, Item
from decoding.request import FinishReason, SamplingParams, StepOutput

TOKENS = tuple(range(100, 120))  # of the answer
Script = Callable[[Job], Sequence[Item]]  # what a replica says of a job


class Scripted:
    """The handle of a deployment whose calls are answered by scripts, one after another."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts, self.jobs = list(scripts), list[Job]()
        self.generate = self

    def remote(self, jobs: Sequence[Job]) -> Any:
        (job,) = jobs
        self.jobs.append(job)
        return _Response(self._scripts.pop(0)(job))


class _Response:
    def __init__(self, items: Sequence[Item]) -> None:
        self._items = self._batches(items)

    async def _batches(self, items: Sequence[Item]) -> AsyncIterator[list[tuple[int, Item]]]:
        for item in items:
            yield [(0, item)]

    def __anext__(self) -> Any:
        return self._items.__anext__()

    def cancel(self) -> None:
        pass


def emits(job: Job, count: int) -> list[Item]:
    """The next outputs of a replica that took the job, of which the last may be the answer's."""
    first = len(job.emitted)
    outputs: list[Item] = [StepOutput(job.request_id, (), "")] * (2 if job.suspect else 1)
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


def whole(job: Job) -> Sequence[Item]:
    """A replica that emits the rest of the answer."""
    return emits(job, len(TOKENS))


def ask(monkeypatch: pytest.MonkeyPatch, *scripts: Script) -> tuple[list[int], list[Job], dict[str, int]]:
    """The tokens of an answer, the jobs that were sent, and what was counted."""
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "for_threads", lambda handle: handle)
    monkeypatch.setattr(module, "for_this_loop", lambda handle: handle)
    handle, failures = Scripted(*scripts), DeviceFailures()
    engine = HandleEngine(handle, resume_timeout_s=60.0, failures=failures)  # type: ignore[arg-type]
    tokens: list[int] = []

    async def run() -> None:
        job = Job("a/0", np.array([5], np.int32), SamplingParams(len(TOKENS), ignore_eos=True))
        async for output in engine.generate(job)[0]:
            tokens.extend(output.token_ids)

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        asked = {kind: count for kind, count in failures.counts().items() if count}
    return tokens, handle.jobs, asked


def test_a_request_goes_on_elsewhere_and_is_no_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, counted = ask(monkeypatch, loses("one", 7), whole)
    assert tuple(tokens) == TOKENS
    assert [(len(job.emitted), job.suspect) for job in jobs] == [(0, False), (7, False)]
    assert jobs[1].avoid_s > 0 and counted == {"uncorrectable_ecc": 1}


def test_a_replica_that_has_not_ended_yet_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, counted = ask(monkeypatch, loses("one", 7), *[is_ending("one")] * 3, whole)
    assert tuple(tokens) == TOKENS and not any(job.suspect for job in jobs)
    assert counted == {"uncorrectable_ecc": 1}


def test_tokens_between_two_failures_clear_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [loses(f"engine {number}", 2) for number in range(6)]
    tokens, jobs, counted = ask(monkeypatch, *scripts, whole)
    assert tuple(tokens) == TOKENS and not any(job.suspect for job in jobs)
    assert counted == {"uncorrectable_ecc": 6}


def test_who_loses_two_devices_in_a_row_is_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs, counted = ask(monkeypatch, loses("one", 4), loses("two", kind="illegal_memory_access"), whole)
    assert tuple(tokens) == TOKENS
    assert [job.suspect for job in jobs] == [False, False, True]
    assert counted == {"uncorrectable_ecc": 1, "illegal_memory_access": 1}


def test_who_makes_the_third_device_fail_as_well_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError) as raised:
        ask(monkeypatch, loses("one", 4), loses("two"), loses("three"), whole)
    assert (raised.value.status, raised.value.code) == (500, "engine_crashed")
