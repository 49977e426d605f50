"""How many rows pay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.budget import Pricing, RowCosts, Sharing, Throughput
from decoding.tree import DraftTree, Int32Array


class Timed:
    """A target of a known step time."""

    vocab_size = 8
    end_token_ids = (2,)
    max_model_len = 64

    def __init__(self, per_row: float) -> None:
        self._per_row = per_row
        self.asked: list[int] = []

    def bigram_table(self, width: int) -> Int32Array:
        return np.zeros((self.vocab_size, width), np.int32)

    def unigram_ranking(self, width: int) -> Int32Array:
        return np.arange(width, dtype=np.int32)

    def step_seconds(self, rows: Sequence[int]) -> list[float]:
        self.asked = list(rows)
        return [0.01 * (1 + self._per_row * (count - 1)) for count in rows]


def test_the_example_of_the_docstring() -> None:
    costs = RowCosts([1, 2, 3], [2.0, 2.2, 3.6])
    assert costs.of(np.array([1.0, 2.0, 3.0])) == pytest.approx([1.0, 1.1, 1.8])
    assert costs.rows_to_draft([np.array([0.5, 0.4])], 1.3) == ([1], pytest.approx(1.1))


def test_costs_between_and_beyond_the_measurements() -> None:
    costs = RowCosts([1, 4, 8], [1.0, 1.3, 2.1])
    assert costs.of(np.array([2.0, 6.0, 8.0, 10.0, 108.0])) == pytest.approx([1.1, 1.7, 2.1, 2.5, 22.1])


def test_noise_does_not_make_more_rows_cheaper() -> None:
    costs = RowCosts([1, 2, 4, 8], [1.0, 0.8, 1.5, 1.2])
    assert costs.of(np.array([1.0, 2.0, 4.0, 8.0, 100.0])) == pytest.approx([1.0, 1.0, 1.5, 1.5, 1.5])


@given(st.lists(st.floats(0.001, 10.0), min_size=2, max_size=6))
def test_costs_never_fall(seconds: list[float]) -> None:
    costs = RowCosts([2**power for power in range(len(seconds))], seconds).of(np.arange(1.0, 100.0))
    assert (np.diff(costs) >= -1e-12 * costs[1:]).all() and costs[0] == 1.0


@pytest.mark.parametrize(
    ("rows", "seconds", "field"),
    [
        ([1], [1.0], "rows"), ([2, 4], [1.0, 1.0], "rows"), ([1, 4, 2], [1.0, 1.0, 1.0], "rows"), ([1, 1], [1.0, 1.0], "rows"),
        ([1, 2], [1.0], "rows"), ([1, 2], [1.0, 0.0], "seconds"), ([1, 2], [-1.0, 1.0], "seconds"),
    ],
)  # fmt: skip
def test_measurements_are_checked(rows: list[int], seconds: list[float], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RowCosts(rows, seconds)


@pytest.mark.parametrize(("most", "rows"), [(64, [1, 2, 4, 8, 16, 32, 64]), (10, [1, 2, 4, 8, 10]), (2, [1, 2]), (1, [1, 2])])
def test_the_target_is_timed_up_to_the_most_rows(most: int, rows: list[int]) -> None:
    target = Timed(0.5)
    costs = RowCosts.measured(target, most)
    assert target.asked == rows
    assert costs.of(np.array([1.0, 2.0, 3.0])) == pytest.approx([1.0, 1.5, 2.0])


def test_rows_that_cost_nothing_all_pay() -> None:
    costs = RowCosts([1, 64], [1.0, 1.0])
    assert costs.rows_to_draft([np.array([0.5, 0.001])], 1.0)[0] == [2]
    assert costs.rows_to_draft([np.array([0.5]), np.array([0.3, 0.2])], 2.0)[0] == [1, 2]


def test_no_row_pays_where_it_costs_more_than_it_gives() -> None:
    costs = RowCosts([1, 2], [1.0, 2.0])
    assert costs.rows_to_draft([np.array([0.9, 0.8])], 1.0)[0] == [0]
    assert costs.rows_to_draft([np.zeros(0), np.zeros(0)], 1.0)[0] == [0, 0]


def test_rows_that_pay_together_but_not_alone() -> None:
    # The second row costs as much as a step, those behind it nothing.
    assert RowCosts([1, 2, 64], [1.0, 2.0, 2.0]).rows_to_draft([np.full(10, 0.9)], 1.0)[0] == [10]


def test_the_faster_steps_are_the_more_a_row_must_give() -> None:
    costs, chances = RowCosts([1, 11], [1.0, 2.0]), [np.linspace(0.9, 0.0, 10)]
    drafted = [costs.rows_to_draft(chances, rate)[0][0] for rate in (0.5, 1.0, 2.0, 4.0, 8.0)]
    assert drafted == sorted(drafted, reverse=True) and drafted[0] > drafted[2] > drafted[-1]


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=8), min_size=1, max_size=3),
    st.lists(st.floats(1.0, 4.0), min_size=4, max_size=4),
    st.floats(0.5, 5.0),
)
def test_the_most_tokens_after_the_price_of_time(chances: list[list[float]], seconds: list[float], rate: float) -> None:
    costs = RowCosts([1, 2, 8, 16], seconds)
    sorted_chances = [np.array(sorted(each, reverse=True)) for each in chances]
    drafted, cost = costs.rows_to_draft(sorted_chances, rate)
    base = len(chances)

    def gain(counts: tuple[int, ...]) -> float:
        tokens = sum(float(each[:count].sum()) for each, count in zip(sorted_chances, counts, strict=True))
        return tokens - rate * float(costs.of(np.array([base + sum(counts)], np.float64))[0])

    every = itertools.product(*(range(len(each) + 1) for each in chances))
    assert gain(tuple(drafted)) == pytest.approx(max(map(gain, every)))
    assert cost == pytest.approx(float(costs.of(np.array([base + sum(drafted)], np.float64))[0]))


def dealt(tree: DraftTree, ranks: int) -> int:
    """Rows of the largest part."""
    return max(len(part.rows) for part in tree.partition(ranks))


def shared(tree: DraftTree, ranks: int) -> float:
    """What ``Sharing`` takes the largest part for."""
    drafted, deepest = np.array([len(tree) - 1.0]), np.array([float(tree.depths().max())])
    return float(Sharing(ranks).rows(1, drafted, deepest)[0])


def tree_of(parents: Sequence[int]) -> DraftTree:
    below = np.array([-1, *parents], np.int32)
    return DraftTree(np.arange(len(below), dtype=np.int32), below, np.zeros(len(below), np.int8), len(below))


def test_the_rows_of_a_rank() -> None:
    chain, star = tree_of(range(60)), tree_of([0] * 60)
    for ranks in (1, 2, 3, 4, 8):
        assert shared(chain, ranks) == dealt(chain, ranks) == 61
        assert shared(star, ranks) == pytest.approx(dealt(star, ranks), abs=0.5)
    example = Sharing(4).rows(1, np.array([60.0]), np.array([8.0]))
    assert example == pytest.approx([1 + 18.0])
    assert Sharing(4, spine=5).rows(1, np.array([60.0]), np.array([8.0])) == pytest.approx(example + 5)
    assert Sharing(1, spine=5).rows(1, np.array([60.0]), np.array([8.0])) == [61.0]  # its KV is here


@given(st.lists(st.floats(0.0, 0.999), min_size=1, max_size=200), st.sampled_from([2, 3, 4, 8]))
def test_the_rows_of_a_rank_are_near_those_of_the_largest_part(places: list[float], ranks: int) -> None:
    """Of any tree: never below the longest path, nor off by more than the depth."""
    tree = tree_of([int(place * (row + 1)) for row, place in enumerate(places)])
    depth = int(tree.depths().max())
    assert depth + 1 <= shared(tree, ranks) <= len(tree)
    assert abs(shared(tree, ranks) - dealt(tree, ranks)) <= depth


def test_more_ranks_draft_more_branches_and_no_longer_chains() -> None:
    costs, chances = RowCosts([1, 11], [1.0, 2.0]), np.linspace(0.9, 0.0, 100)
    branches, chain = np.ones(100, np.int32), np.arange(1, 101, dtype=np.int32)
    wide = [costs.rows_to_draft([chances], 4.0, [branches], Sharing(ranks))[0][0] for ranks in (1, 2, 4, 8)]
    assert wide[0] < wide[1] < wide[2] < wide[3]
    deep = [costs.rows_to_draft([chances], 4.0, [chain], Sharing(ranks))[0][0] for ranks in (1, 2, 4, 8)]
    assert deep == [wide[0]] * 4
    (few, many), _ = costs.rows_to_draft([chances, chances], 4.0, [chain, branches], Sharing(4))
    assert few <= many  # of rows that are as likely the order is the same: what differs is who comes first
    assert costs.rows_to_draft([np.array([0.5, 0.4])], 1.3, [np.array([1, 1], np.int32)], Sharing(2))[0] == [2]


def test_what_was_accepted_elsewhere_costs_rows() -> None:
    costs = RowCosts([1, 8, 16], [1.0, 1.0, 30.0])  # free up to eight rows
    chances, depths = [np.full(40, 0.1)], [np.ones(40, np.int32)]
    drafted = [costs.rows_to_draft(chances, 1.0, depths, Sharing(2, spine))[0][0] for spine in (0, 3, 6)]
    assert drafted == [13, 7, 1]  # seven rows of each rank beside the root, or what the spine leaves of them


def test_each_number_of_ranks_has_its_own_price_of_time() -> None:
    chances, depths = [np.full(10, 0.3)], [np.ones(10, np.int32)]

    def drafted(pricing: Pricing) -> int:
        return pricing.rows_to_draft(chances, depths, 0)[0]

    pricing = Pricing(RowCosts([1, 2, 64], [1.0, 1.2, 13.6]))
    alone = drafted(pricing)
    pricing.scale(4)
    assert drafted(pricing) >= alone
    for _ in range(3000):
        drafted(pricing)
        pricing.emitted(60)  # much faster than a row of 0.3 tokens
    assert drafted(pricing) == 0
    pricing.scale(1)
    assert drafted(pricing) == alone


def test_throughput_follows_the_steps() -> None:
    throughput = Throughput()
    assert throughput.rate == 1.0
    for _ in range(5000):
        throughput.add(3.0, 1.5)
    assert throughput.rate == pytest.approx(2.0, rel=0.01)
