"""A strategy drafts as many rows as pay: by what its trees gave, and by what rows cost."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.decoding.budget.draft_budget import RowBudget
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.drafters.auto import AutoDrafter
from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.drafters.registry import build_drafters
from outrider.decoding.request import Acceptance, Request, SamplingParams
from outrider.decoding.tree import DraftTree
from tests.helpers.targets import Target

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
