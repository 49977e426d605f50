"""A strategy drafts as many rows as pay: by what its trees gave, and by what rows cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from decoding.budget.latency import LatencyCurve, StepLoad
from decoding.budget.paying import PayingDrafter
from decoding.drafters import build_drafters
from decoding.drafters.auto import AutoDrafter
from decoding.drafters.base import Drafter, TargetRows
from decoding.request import Acceptance, Request, SamplingParams
from decoding.tree import DraftTree, Int32Array

MOST = 64
CURVE = LatencyCurve((1, 9, 65), (6e-3, 6.4e-3, 30e-3), 256, 0.0, 0.0)  # eight rows are nearly free, further ones are not


class Timed:
    """A target of which only the time of its steps is asked."""

    vocab_size, end_token_ids, max_model_len = 10, (0,), 100

    def latency(self) -> LatencyCurve:
        return CURVE

    def bigram_table(self, width: int) -> Int32Array:
        raise NotImplementedError

    def unigram_ranking(self, width: int) -> Int32Array:
        raise NotImplementedError


class Chain(Drafter):
    """Drafts as long a chain as it may."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        return [
            DraftTree.chain(request.root, np.ones(budget, np.int32)) for request, budget in zip(requests, budgets, strict=True)
        ]


class AheadChain(Chain):
    looks_ahead = True


def drafted(drafter: PayingDrafter, accepted: int, steps: int, count: int = 1, ranks: int = 1) -> list[int]:
    """Rows of each step for one of some requests, whose first ``accepted`` rows are right."""
    requests = [Request(str(number), [1, 2, 3], SamplingParams(max_tokens=500)) for number in range(count)]
    found = []
    for _ in range(steps):
        drafter.plan(StepLoad(count, count, 3 * count))
        for request, tree in zip(requests, drafter.propose(requests, [MOST * ranks] * count), strict=True):
            rows = tuple(range(1, min(accepted, len(tree) - 1) + 1))
            drafter.observe(request, tree, TargetRows(np.ones(len(tree), np.int32), None), Acceptance(rows, 1))
        found.append(len(tree) - 1)
    return found


def made(kind: type[Drafter] = Chain) -> PayingDrafter:
    drafter = PayingDrafter(kind(), MOST)
    drafter.prepare(Timed())
    return drafter


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
    assert drafted(made(AheadChain), 0, 2, count=16)[-1] < drafted(made(AheadChain), 0, 2)[-1]


def test_rows_are_those_of_a_rank() -> None:
    drafter = made()
    drafter.scale(4)
    rows = drafted(drafter, 0, 60, ranks=4)
    assert rows[-1] == 8 and len(drafter.propose([], [])) == 0


def test_who_looks_ahead_gets_what_costs_little() -> None:
    rows = drafted(made(AheadChain), 0, 30)
    assert set(rows) == {next(n for n in range(MOST) if CURVE.seconds(np.array([n + 2.0]), StepLoad(1, 1, 3))[0] > 9e-3)}


def test_who_decides_itself_is_left_alone() -> None:
    assert isinstance(build_drafters("auto", {}, (), MOST), AutoDrafter)
    assert isinstance(build_drafters("trie", {}, (), MOST), PayingDrafter)
    assert not isinstance(build_drafters("trie", {}, ()), PayingDrafter)
