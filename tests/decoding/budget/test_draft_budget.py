"""How many rows are drafted: over all requests of a step, by strategies alone, and how often a request is asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from outrider.decoding.budget.draft_budget import Backoff, DraftBudget, Explorer, RowBudget
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.budget.tree_builder import TreeRows
from outrider.decoding.drafters.auto import AutoDrafter
from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.drafters.registry import build_drafters
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import Acceptance, DraftTree
from tests.helpers.targets import Target

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


def steps_between(requests: int, proposals: int) -> list[int]:
    """Steps that a request which never finds anything is left alone for after each of its proposals."""
    backoff, waits = Backoff(), []
    for number in range(1, proposals + 1):
        backoff.drafted(0, requests, number, 0.0, 0.0)
        waits.append(0)
        while not backoff.should_draft():
            waits[-1] += 1
    return waits


def test_a_request_among_many_is_asked_less_and_less() -> None:
    assert steps_between(1, 10) == [0] * 10
    assert steps_between(3, 4) == [0, 1, 2, 2]
    assert steps_between(8, 6) == [0, 1, 2, 4, 7, 7]
    assert steps_between(64, 8) == [0, 1, 2, 4, 8, 16, 16, 16]


def test_a_draft_ends_the_count() -> None:
    backoff = Backoff()
    for number in range(1, 6):
        backoff.drafted(0, 64, number, 0, 0.0)
    while not backoff.should_draft():
        pass
    backoff.drafted(3, 64, 6, 3, 0.0)
    assert backoff.should_draft() and backoff.drafted_at == 6
    backoff.drafted(0, 64, 7, 0, 0.0)
    assert backoff.should_draft()  # once without is no habit


def test_drafts_that_save_less_than_asking_are_none() -> None:
    backoff = Backoff()
    for number in range(1, 40):
        backoff.drafted(4, 64, number, saved_s=1e-5, asking_s=5e-5)
        waited = 0
        while not backoff.should_draft():
            waited += 1
    assert waited == 16 and backoff.drafted_at == 39
    backoff.drafted(4, 64, 40, saved_s=1e-3, asking_s=5e-5)
    assert backoff.should_draft()
    backoff.drafted(4, 64, 41, saved_s=1e-5, asking_s=5e-5)
    assert backoff.should_draft()  # of late it was worth it


def test_a_fallen_load_asks_at_once() -> None:
    backoff = Backoff()
    for number in range(1, 6):
        backoff.drafted(0, 64, number, 0, 0.0)
    backoff.end_step()
    assert backoff.should_draft()
    backoff.drafted(0, 64, 6, 0, 0.0)
    assert backoff.should_draft()


def test_nobody_explores_while_all_draft() -> None:
    backoffs, explorer = [Backoff(), Backoff()], Explorer()
    for number in range(1, 100):
        assert explorer.pick(backoffs, number) is None
        for backoff in backoffs:
            backoff.drafted(1, 2, number, 1, 0.0)


def test_who_drafted_nothing_for_longest_explores_one_proposal_in_sixteen() -> None:
    backoffs, explorer, picked = [Backoff(), Backoff(), Backoff()], Explorer(), []
    backoffs[0].drafted(1, 3, 1, 1, 0.0)
    for number in range(2, 2 + 16 * 6):
        at = explorer.pick(backoffs, number)
        if at is not None:
            picked.append((number, at))
            backoffs[at].drafted(2, 3, number, 2, 0.0)
    assert len(picked) == 6
    assert [at for _, at in picked[:3]] == [1, 2, 0]  # the first of those that never drafted, then by how long ago
    assert all(later - earlier == 16 for (earlier, _), (later, _) in itertools.pairwise(picked))


MOST = 64
CURVE = LatencyCurve((1, 9, 65), (6e-3, 6.4e-3, 30e-3), 256, 0.0, 0.0)  # eight rows are nearly free, further ones are not


def drafted(paying: RowBudget, accepted: int, steps: int, count: int = 1, ranks: int = 1) -> list[int]:
    """Rows of each step for one of some requests, whose first ``accepted`` rows are right."""
    found = []
    for _ in range(steps):
        rows = paying.rows(CURVE, StepLoad(count, count, 3 * count), count, ranks)
        found.append(min(rows, MOST * ranks))
        tree = DraftTree.chain(1, np.ones(found[-1], np.int32))
        for _ in range(count):
            paying.observe(tree, Acceptance(tuple(range(1, min(accepted, found[-1]) + 1)), 1), ranks)
    return found


def made(looks_ahead: bool = False) -> RowBudget:
    return RowBudget(MOST, looks_ahead)


def test_what_is_never_right_costs_little() -> None:
    rows = drafted(made(), 0, 60)
    assert 2 < rows[0] < MOST and rows[-1] == 2


@pytest.mark.parametrize(("accepted", "least", "most"), [(3, 5, 12), (8, 10, 14), (40, 50, MOST)])
def test_as_many_as_are_right_and_some_more(accepted: int, least: int, most: int) -> None:
    rows = drafted(made(), accepted, 200)
    assert least <= rows[-1] <= most, rows


def test_it_rises_again() -> None:
    drafter = made()
    assert drafted(drafter, 0, 60)[-1] == 2 and drafted(drafter, 30, 200)[-1] >= 30


def test_beside_others_fewer_pay() -> None:
    assert drafted(made(looks_ahead=True), 0, 2, count=16)[-1] < drafted(made(looks_ahead=True), 0, 2)[-1]


def test_rows_are_those_of_a_rank() -> None:
    assert drafted(made(), 0, 60, ranks=4)[-1] == 8


def test_who_looks_ahead_gets_what_costs_little() -> None:
    rows = drafted(made(looks_ahead=True), 0, 30)
    assert set(rows) == {next(n for n in range(MOST) if CURVE.seconds(np.array([n + 2.0]), StepLoad(1, 1, 3))[0] > 9e-3)}


def test_who_decides_itself_is_left_alone_and_others_draft_what_pays() -> None:
    assert isinstance(build_drafters("auto", {}, (), MOST), AutoDrafter)
    request = Request("r", [5, 6, 7, 8] * 8, SamplingParams(max_tokens=500), strategy="prompt_lookup")
    for others, strategy in (((), "prompt_lookup"), (("prompt_lookup",), "auto")):
        for most_rows in (MOST, None):
            drafter = build_drafters(strategy, {}, others, most_rows)
            drafter.prepare(Target(curve=CURVE))
            sizes = []
            for _ in range(60):
                (tree,) = drafter.propose([request], [MOST], StepLoad(1, 1, 6))
                sizes.append(len(tree) - 1)
                drafter.observe(request, tree, TargetRows(np.full(len(tree), 9, np.int32), None), Acceptance((), 9))
            assert sizes[0] == 10 and sizes[-1] == (10 if most_rows is None else 2)
