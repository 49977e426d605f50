"""One selection over all requests of a step, step by step."""

from __future__ import annotations

import numpy as np

from outrider.decoding.budget.draft_budget import Backoff, DraftBudget
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.budget.tree_builder import TreeRows

DEVICE = LatencyCurve((1, 2, 64), (1.0, 1.1, 7.3), 0, 0.0, 0.0)  # a tenth of a step for each further row


class Requests:
    """Requests whose drafts have one chance each, and what they are asked."""

    def __init__(self, chances: list[float]) -> None:
        self.chances = chances
        self.backoffs = [Backoff() for _ in chances]
        self.asked: list[tuple[int, float]] = []
        self.selection = DraftBudget(lambda: DEVICE)

    def grow(self, at: int, least_chances: np.ndarray) -> TreeRows:
        least_chance = float(least_chances[0])
        self.asked.append((at, least_chance))
        rows = TreeRows.empty(8)
        rows.chances[:], rows.depths[:] = self.chances[at], np.arange(9)
        return rows if self.chances[at] >= least_chance else rows.first(0)

    def step(self, live: int | None = None, tokens: int = 1) -> list[int]:
        """Rows that each of the first so many requests drafts; each then gets so many tokens."""
        count = len(self.chances) if live is None else live
        load = StepLoad(count, count, 0)
        self.asked.clear()
        grown = self.selection.rows(load, 1, self.backoffs[:count], self.backoffs, 0, self.grow)
        for _ in range(count * bool(tokens)):
            self.selection.emitted(tokens)
        return [len(rows.chances) for rows in grown]


def test_rows_go_to_whom_they_help_most() -> None:
    requests = Requests([0.9, 0.01, 0.9, 0.01])
    assert requests.step() == [8, 0, 8, 0]


def test_at_high_load_nothing_is_drafted_and_hardly_anyone_asked() -> None:
    requests = Requests([0.3] * 32)
    drafted = asked = 0
    for number in range(160):
        counts = requests.step()
        if number >= 16:
            drafted, asked = drafted + sum(counts), asked + len(requests.asked)
    assert drafted == 2 * 144 // 16  # two rows in one step of sixteen: to learn whether it would pay again
    assert asked < 144 * 32 / 6


def test_what_may_pay_is_told_to_who_grows() -> None:
    """A token among 32 takes 1/32 of a step of 4.1, a row 0.1: it needs a chance of 0.78."""
    requests = Requests([0.3] * 32)
    requests.step()
    assert {round(least, 2) for _, least in requests.asked} == {round(0.9 * 0.1 / (4.1 / 32), 2)}


def test_when_the_load_falls_it_drafts_at_once() -> None:
    requests = Requests([0.3] * 32)
    for _ in range(200):
        requests.step()
    assert requests.step(live=1) == [8]
    assert requests.step(live=2)[0] == 8
    assert requests.step() == [0] * 32


def test_a_request_that_begins_to_copy_among_many_drafts_within_sixteen_steps() -> None:
    requests = Requests([0.3] * 32)
    for _ in range(200):
        requests.step()
    requests.chances[7] = 0.99
    waited = next(number for number in range(100) if requests.step()[7] > 2)
    assert waited <= 16
    assert requests.step()[7] == 8


def test_asking_for_drafts_has_to_pay() -> None:
    """A row of 0.8 saves 0.8 * 0.128 - 0.1 s, which is less than asking takes: who says so is asked less and less."""
    requests, asked = Requests([0.8] * 32), 0
    for number in range(464):
        requests.step(tokens=0)
        asked += len(requests.asked) if number >= 400 else 0
        assert number >= 100 or len(requests.asked) == 32
        if number >= 100:
            requests.selection.timed(0.05 * len(requests.asked))
    assert asked < 64 * 32 / 4
