"""What becomes of a request that comes to a replica with less memory, and so a shorter context, than others have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import outrider.cluster.serving.handle_engine as module
from outrider.cluster.serving.generation import GenerationJob
from outrider.cluster.serving.handle_engine import HandleEngine, Item
from outrider.decoding.request import FinishReason, SamplingParams, StepOutput
from outrider.engine.errors import ContextLengthError

TOKENS = (7, 8, 9)
TOO_LONG = ContextLengthError("max_tokens", "the context is 4 tokens")


class Replicas:
    """The handle of a deployment, whose calls are answered in turn; an answer that is too short loses its replica."""

    def __init__(self, *answers: Sequence[Item]) -> None:
        self._answers, self.jobs = list(answers), list[GenerationJob]()
        self.generate = self

    def remote(self, jobs: Sequence[GenerationJob]) -> Any:
        self.jobs += jobs
        return _Response(self._answers.pop(0))


class _Response:
    def __init__(self, items: Sequence[Item]) -> None:
        self._items = iter(items)

    async def __anext__(self) -> list[tuple[int, Item]]:
        for item in self._items:
            return [(0, item)]
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


def emits(*tokens: int) -> list[StepOutput]:
    return [StepOutput("a/0", (), "")] + [
        StepOutput("a/0", (token,), "", FinishReason.LENGTH if token == TOKENS[-1] else None) for token in tokens
    ]


def ask(monkeypatch: pytest.MonkeyPatch, replicas: int, *answers: Sequence[Item]) -> tuple[list[int], list[GenerationJob]]:
    """The tokens that come, and the jobs that were sent."""
    for name in ("for_threads", "for_this_loop"):
        monkeypatch.setattr(module, name, lambda handle: handle)
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    handle, tokens = Replicas(*answers), list[int]()
    engine = HandleEngine(handle, resume_timeout_s=60.0, replicas=replicas)  # type: ignore[arg-type]

    async def run() -> None:
        async for output in engine.generate(GenerationJob("a/0", np.array([5], np.int32), SamplingParams(3)))[0]:
            tokens.extend(output.token_ids)

    asyncio.run(asyncio.wait_for(run(), 60))
    return tokens, handle.jobs


def test_who_lost_a_replica_goes_on_at_one_that_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs = ask(monkeypatch, 3, emits(7), [TOO_LONG], [TOO_LONG], emits(8, 9))
    assert tuple(tokens) == TOKENS and [job.emitted for job in jobs] == [(), (7,), (7,), (7,)]


def test_a_new_request_is_sent_to_another_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, jobs = ask(monkeypatch, 2, [TOO_LONG], emits(*TOKENS))
    assert tuple(tokens) == TOKENS and len(jobs) == 2
    with pytest.raises(ContextLengthError):
        ask(monkeypatch, 2, [TOO_LONG], [TOO_LONG])


def test_where_there_is_no_other_one_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContextLengthError):
        ask(monkeypatch, 1, [TOO_LONG])
    with pytest.raises(ContextLengthError):
        ask(monkeypatch, 1, emits(7), [TOO_LONG])
