"""How many rows pay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.budget import RowCosts, Throughput
from decoding.tree import Int32Array


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
    assert costs.rows_to_draft([np.array([0.5, 0.4])], 1.3) == [1]


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
    assert costs.rows_to_draft([np.array([0.5, 0.001])], 1.0) == [2]
    assert costs.rows_to_draft([np.array([0.5]), np.array([0.3, 0.2])], 2.0) == [1, 2]


def test_no_row_pays_where_it_costs_more_than_it_gives() -> None:
    costs = RowCosts([1, 2], [1.0, 2.0])
    assert costs.rows_to_draft([np.array([0.9, 0.8])], 1.0) == [0]
    assert costs.rows_to_draft([np.zeros(0), np.zeros(0)], 1.0) == [0, 0]


def test_rows_that_pay_together_but_not_alone() -> None:
    # The second row costs as much as a step, those behind it nothing.
    assert RowCosts([1, 2, 64], [1.0, 2.0, 2.0]).rows_to_draft([np.full(10, 0.9)], 1.0) == [10]


def test_the_faster_steps_are_the_more_a_row_must_give() -> None:
    costs, chances = RowCosts([1, 11], [1.0, 2.0]), [np.linspace(0.9, 0.0, 10)]
    drafted = [costs.rows_to_draft(chances, rate)[0] for rate in (0.5, 1.0, 2.0, 4.0, 8.0)]
    assert drafted == sorted(drafted, reverse=True) and drafted[0] > drafted[2] > drafted[-1]


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=8), min_size=1, max_size=3),
    st.lists(st.floats(1.0, 4.0), min_size=4, max_size=4),
    st.floats(0.5, 5.0),
)
def test_the_most_tokens_after_the_price_of_time(chances: list[list[float]], seconds: list[float], rate: float) -> None:
    costs = RowCosts([1, 2, 8, 16], seconds)
    sorted_chances = [np.array(sorted(each, reverse=True)) for each in chances]
    drafted = costs.rows_to_draft(sorted_chances, rate)
    base = len(chances)

    def gain(counts: tuple[int, ...]) -> float:
        tokens = sum(float(each[:count].sum()) for each, count in zip(sorted_chances, counts, strict=True))
        return tokens - rate * float(costs.of(np.array([base + sum(counts)], np.float64))[0])

    every = itertools.product(*(range(len(each) + 1) for each in chances))
    assert gain(tuple(drafted)) == pytest.approx(max(map(gain, every)))


def test_throughput_follows_the_steps() -> None:
    throughput = Throughput()
    assert throughput.rate == 1.0
    for _ in range(5000):
        throughput.add(3.0, 1.5)
    assert throughput.rate == pytest.approx(2.0, rel=0.01)
