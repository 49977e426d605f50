"""A rank looks for itself which tokens of a request it has, and computes no others than those that it lacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.actors.lookahead.messages import OpenMessage, StepMessage, WorkMessage
from outrider.actors.lookahead.rank import Rank
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import SamplingParams
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import VOCAB
from tests.helpers.ranks import twin

PROMPT = np.random.default_rng(2).integers(1, VOCAB, 50).astype(np.int32)
NONE = np.zeros(0, np.int32)
TREE = np.array([-1, 0, 0], np.int32)
PARAMS = SamplingParams(8, ignore_eos=True)


class Watched:
    """A rank, and how many rows each of its forwards computed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.rank, self.rows = Rank(LocalExecutor(runner)), list[int]()
        self._sequence = 0
        runner.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        self.rows.append(kwargs["input_ids"].shape[1])

    def step(self, *works: WorkMessage, opened: tuple[OpenMessage, ...] = (), closed: tuple[int, ...] = ()) -> list[list[int]]:
        """The likeliest tokens below the rows of each tree."""
        self._sequence += 1
        reply = self.rank.handle(StepMessage(self._sequence, opened, closed, works, 0))
        return [outcome.ids.tolist() for outcome in reply.outcomes]


@pytest.fixture
def watched() -> Watched:
    return Watched(twin("llama", "float32"))


def opening(number: int, scope: str | None = "s", prompt: Int32Array = PROMPT) -> OpenMessage:
    return OpenMessage(number, f"r{number}", prompt, PARAMS, (), scope)


def work(number: int, slot: int, start: int, end: int, tree: bool = True, prompt: Int32Array = PROMPT) -> WorkMessage:
    tokens = np.array([prompt[-1], 3, 4], np.int32) if tree else NONE
    return WorkMessage(number, slot, start, end, NONE, tokens, TREE if tree else NONE, 3 if tree else 0)


def test_rows_that_are_there_are_not_computed_again_in_place_or_in_another_slot(watched: Watched) -> None:
    first = watched.step(work(1, 0, 0, 50), opened=(opening(1),))
    copied = watched.step(work(2, 1, 0, 50), opened=(opening(2),))
    in_place = watched.step(work(3, 0, 0, 50), opened=(opening(3),), closed=(1,))
    assert first == copied == in_place
    assert watched.rows == [52, 3, 3]


def test_chunks_that_are_there_are_left_out_and_the_rest_is_computed(watched: Watched) -> None:
    first = watched.step(work(1, 0, 0, 50), opened=(opening(1),))
    longer = np.concatenate([PROMPT[:40], PROMPT[:20]])
    alone = Watched(twin("llama", "float32")).step(work(9, 0, 0, 60, prompt=longer), opened=(opening(9, prompt=longer),))
    watched.rows.clear()
    assert watched.step(work(2, 1, 0, 16, tree=False), opened=(opening(2, prompt=longer),)) == []
    assert watched.step(work(2, 1, 16, 32, tree=False)) == []
    assert watched.rows == []  # all of it was copied
    assert watched.step(work(2, 1, 32, 48, tree=False)) == []
    assert watched.step(work(2, 1, 48, 60, prompt=longer)) == alone and alone != first
    assert watched.rows == [8, 14]


def test_requests_of_other_scopes_and_of_none_are_computed_whole(watched: Watched) -> None:
    answers = [
        watched.step(work(number, number % 2, 0, 50), opened=(opening(number, scope),), closed=(number - 1,) if number else ())
        for number, scope in enumerate(("s", None, "t", None))
    ]
    assert answers == [answers[0]] * 4
    assert watched.rows == [52] * 4


def test_a_request_that_was_preempted_is_placed_anew(watched: Watched) -> None:
    first = watched.step(work(1, 0, 0, 50), opened=(opening(1),))
    other = PROMPT[::-1].copy()
    watched.step(work(2, 0, 0, 50, prompt=other), opened=(opening(2, prompt=other),))  # it has taken the slot
    assert watched.step(work(1, 1, 0, 50)) == first  # nothing is left of it
    assert watched.step(work(1, 0, 0, 50), closed=(2,)) == first  # and again: a copy of its own
    assert watched.rows == [52, 52, 52, 3]


def test_nothing_is_reused_after_a_failure(watched: Watched) -> None:
    watched.step(work(1, 0, 0, 50), opened=(opening(1),))
    watched.rank.forget(failed=True)
    watched.step(work(2, 0, 0, 50), opened=(opening(2),))
    assert watched.rows == [52, 52]
