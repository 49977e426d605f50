"""How many rows pay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.budget.row_pricing import RowPricing, TokenTime, largest_part, rows_to_draft
from outrider.decoding.tree import DraftTree
from tests.helpers.targets import tree_of

ONE, TWO = StepLoad(1, 1, 0), StepLoad(2, 2, 0)


def curve(rows: Sequence[int], seconds: Sequence[float]) -> LatencyCurve:
    """Without a price for sequences and context."""
    return LatencyCurve(tuple(rows), tuple(seconds), 0, 0.0, 0.0)


EXAMPLE = curve([1, 2, 3], [1.0, 1.1, 1.8])


def test_what_else_a_step_computes_moves_it_along_the_curve() -> None:
    """Up to eight rows are free: a step that has them already drafts none where another drafts six."""
    device, chances = curve([1, 8, 9], [1.0, 1.0, 2.0]), [np.full(6, 0.5)]
    assert rows_to_draft(device, ONE, chances, 1.0)[0] == [6]
    assert rows_to_draft(device, StepLoad(2, 5, 0, prefill_rows=4), chances, 1.0)[0] == [3]
    assert rows_to_draft(device, StepLoad(2, 8, 0, prefill_rows=7), chances, 1.0)[0] == [0]


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=8), min_size=1, max_size=3),
    st.lists(st.floats(1.0, 4.0), min_size=4, max_size=4),
    st.floats(0.2, 2.0),
)
def test_the_highest_gain_of_all_selections(chances: list[list[float]], seconds: list[float], token_s: float) -> None:
    device, load = curve([1, 2, 8, 16], seconds), StepLoad(len(chances), len(chances), 0)
    sorted_chances = [np.array(sorted(each, reverse=True)) for each in chances]
    drafted, step_s = rows_to_draft(device, load, sorted_chances, token_s)

    def took(counts: Sequence[int]) -> float:
        return float(device.seconds(np.array([load.rows + sum(counts)], np.float64), load)[0])

    def gain(counts: Sequence[int]) -> float:
        tokens = sum(float(each[:count].sum()) for each, count in zip(sorted_chances, counts, strict=True))
        return tokens * token_s - took(counts)

    every = itertools.product(*(range(len(each) + 1) for each in chances))
    assert gain(drafted) == pytest.approx(max(map(gain, every)))
    assert step_s == pytest.approx(took(drafted))


def partitioned(tree: DraftTree, ranks: int) -> int:
    """Rows of the largest part."""
    return max(len(part.rows) for part in tree.partition(ranks))


def shared(tree: DraftTree, ranks: int) -> float:
    """What ``largest_part`` takes the largest part for."""
    return 1 + largest_part(len(tree) - 1.0, float(tree.depths().max()), ranks, 0)


def test_the_rows_of_a_rank() -> None:
    chain, star = tree_of(range(60)), tree_of([0] * 60)
    for ranks in (1, 2, 3, 4, 8):
        assert shared(chain, ranks) == partitioned(chain, ranks) == 61
        assert shared(star, ranks) == pytest.approx(partitioned(star, ranks), abs=0.5)
    assert largest_part(60.0, 8.0, 4, 0) == 18.0 and largest_part(60.0, 8.0, 4, 5) == 18.0 + 5
    assert largest_part(60.0, 8.0, 1, 5) == 60.0  # its KV is here


@given(st.lists(st.floats(0.0, 0.999), min_size=1, max_size=200), st.sampled_from([2, 3, 4, 8]))
def test_the_rows_of_a_rank_are_near_those_of_the_largest_part(places: list[float], ranks: int) -> None:
    """Of any tree: never below the longest path, nor off by more than the depth."""
    tree = tree_of([int(place * (row + 1)) for row, place in enumerate(places)])
    depth = int(tree.depths().max())
    assert depth + 1 <= shared(tree, ranks) <= len(tree)
    assert abs(shared(tree, ranks) - partitioned(tree, ranks)) <= depth


def test_more_ranks_draft_more_branches_and_no_longer_chains() -> None:
    device, chances = curve([1, 11], [1.0, 2.0]), np.linspace(0.9, 0.0, 100)
    branches, chain = np.ones(100, np.int32), np.arange(1, 101, dtype=np.int32)

    def drafted(depths: Int32Array, ranks: int) -> int:
        return rows_to_draft(device, ONE, [chances], 0.25, [depths], ranks)[0][0]

    wide = [drafted(branches, ranks) for ranks in (1, 2, 4, 8)]
    assert wide[0] < wide[1] < wide[2] < wide[3]
    assert [drafted(chain, ranks) for ranks in (1, 2, 4, 8)] == [wide[0]] * 4
    (few, many), _ = rows_to_draft(device, TWO, [chances, chances], 0.25, [chain, branches], 4)
    assert few <= many  # of rows that are as likely the order is the same: what differs is who comes first
    assert rows_to_draft(EXAMPLE, ONE, [np.array([0.5, 0.4])], 0.8, [np.array([1, 1], np.int32)], 2)[0] == [2]


def test_what_was_accepted_elsewhere_costs_rows() -> None:
    device = curve([1, 8, 16], [1.0, 1.0, 30.0])  # free up to eight rows
    chances, depths = [np.full(40, 0.1)], [np.ones(40, np.int32)]
    drafted = [rows_to_draft(device, ONE, chances, 1.0, depths, 2, spine)[0][0] for spine in (0, 3, 6)]
    assert drafted == [13, 7, 1]  # seven rows of each rank beside the root, or what the spine leaves of them


def planned(pricing: RowPricing, requests: int, prefill_rows: int = 0, ranks: int = 1) -> int:
    """Rows of a chance of 0.3 that one of so many requests drafts."""
    sequences = requests + (prefill_rows > 0)
    pricing.plan(StepLoad(sequences, requests + prefill_rows, 0, prefill_rows), ranks)
    chances = [np.full(10, 0.3), *[np.zeros(0)] * (requests - 1)]
    counts, saved = pricing.rows_to_draft(chances, [np.ones(len(each), np.int32) for each in chances], 0)
    assert all((count > 0) == (seconds > 0) for count, seconds in zip(counts, saved, strict=True))
    return counts[0]


def test_each_number_of_ranks_has_its_own_price() -> None:
    pricing = RowPricing(curve([1, 2, 64], [1.0, 1.2, 13.6]))
    alone = planned(pricing, 1)
    assert alone == 10
    assert planned(pricing, 1, ranks=4) == 10
    for _ in range(3000):
        planned(pricing, 1, ranks=4)
        pricing.emitted(60)  # much faster than a row of 0.3 tokens
    assert planned(pricing, 1, ranks=4) == 0
    assert planned(pricing, 1) == alone


def test_a_load_that_went_leaves_its_price_behind() -> None:
    """Among 32 a token takes little of a step; alone it is worth a whole one again at once, and among 32 as little as before."""
    pricing = RowPricing(curve([1, 2, 64], [1.0, 1.1, 7.3]))
    alone = planned(pricing, 1)
    assert alone == 10
    for _ in range(2000):
        assert planned(pricing, 32) == 0
        for _ in range(32):
            pricing.emitted(1)
    assert planned(pricing, 1) == alone
    assert planned(pricing, 32) == 0


def test_the_time_of_a_prefill_is_not_a_tokens() -> None:
    """Steps that prefill take long: were that the price of a token, rows would be drafted that cost more than they bring."""
    device = curve([1, 2, 64], [1.0, 1.5, 32.5])
    alone, mixed = RowPricing(device), RowPricing(device)
    for _ in range(3000):
        planned(alone, 1)
        alone.emitted(3)
        planned(mixed, 1, prefill_rows=63)
        mixed.emitted(3)
    assert planned(alone, 1) == 0
    assert planned(mixed, 1) == 0


def test_long_contexts_are_not_one_prefills() -> None:
    """A token beside a prefill takes at least what its row adds."""
    device = LatencyCurve((1, 512), (1.0, 52.1), 256, 0.0, 0.0, 1e-4)
    pricing = RowPricing(device)
    for _ in range(200):
        pricing.plan(StepLoad(16, 515, 16 * 1000, 500))
        pricing.rows_to_draft([np.empty(0)] * 15, [np.empty(0, np.int32)] * 15, 0)
        for _ in range(15):
            pricing.emitted(1)
    assert pricing.least_chances()[0] == pytest.approx(1.0, abs=0.05)


def test_a_token_has_one_price_beside_a_prefill_and_without() -> None:
    device = LatencyCurve((1, 2, 512), (1.0, 1.1, 52.1), 0, 0.0, 0.0)
    pricing = RowPricing(device)
    for number in range(400):
        pricing.plan(StepLoad(4, 4, 0) if number % 2 else StepLoad(4, 103, 0, 100))
        decoding = 4 if number % 2 else 3
        pricing.rows_to_draft([np.empty(0)] * decoding, [np.empty(0, np.int32)] * decoding, 0)
        for _ in range(decoding):
            pricing.emitted(1)
    pricing.plan(StepLoad(4, 103, 0, 100))
    beside = pricing.least_chances()[0]
    pricing.plan(StepLoad(4, 4, 0))
    assert pricing.least_chances()[0] == pytest.approx(beside) and 0.3 < beside < 0.7


def test_rows_below_the_least_chance_never_pay() -> None:
    device = curve([1, 2, 64], [1.0, 1.2, 13.6])
    for requests in (1, 2, 8, 30):
        pricing = RowPricing(device)
        planned(pricing, requests)
        least = pricing.least_chances()[0]
        load = StepLoad(requests, requests, 0)
        token_s = float(device.seconds(np.array([float(requests)]), load)[0]) / requests
        for chance, pays in ((least * 0.99, False), (least * 1.01, True)):
            counts, _ = rows_to_draft(device, load, [np.full(16, min(chance, 1.0))], token_s)
            assert bool(counts[0]) == (pays and chance <= 1.0)


@pytest.mark.parametrize("requests", [1, 3])
def test_rows_that_are_not_grown_would_not_have_paid(requests: int) -> None:
    """Each tree ends where a row has less than the chance of its place: what is drafted is the same as of whole trees."""
    rng = np.random.default_rng(requests)
    ended = 0
    for _ in range(300):
        device = curve([1, 2, 4, 8, 16, 32, 64, 256], np.cumsum(rng.exponential([5, 0.1, 0.2, 0.5, 1, 2, 4, 20])).tolist())
        pricing = RowPricing(device)
        load = StepLoad(requests, requests, 0)
        pricing.plan(load)
        least = pricing.least_chances()
        assert (np.diff(least) >= 0).all()
        whole = [np.sort(rng.random(64) ** rng.integers(1, 6))[::-1].copy() for _ in range(requests)]
        grown = [chances[: np.argmax(np.append(chances < least, True))] for chances in whole]
        ended += sum(map(len, whole)) - sum(map(len, grown))
        token_s = float(device.seconds(np.array([float(requests)]), load)[0]) / requests
        assert rows_to_draft(device, load, grown, token_s) == rows_to_draft(device, load, whole, token_s)
    assert ended > 300


def test_rows_save_what_is_expected_and_a_token_is_worth_as_many_steps_when_these_become_faster() -> None:
    """Plain decoding takes 1 s a token alone. Rows of 0.5 and 0.45 save 0.95 s and take 0.8 s more."""
    pricing = RowPricing(curve([1, 3, 4], [1.0, 1.8, 9.0]))
    pricing.plan(StepLoad(1, 1, 0))
    least = pricing.least_chances()
    counts, saved = pricing.rows_to_draft([np.array([0.5, 0.45])], [np.ones(2, np.int32)], 0)
    assert counts == [2] and saved == pytest.approx([0.15])
    faster = RowPricing(curve([1, 3, 4], [1.0, 1.8, 9.0]))
    faster.plan(StepLoad(1, 1, 0))
    faster.curve = curve([1, 3, 4], [0.5, 0.9, 4.5])
    faster.plan(StepLoad(1, 1, 0))
    assert faster.least_chances() == pytest.approx(least)


def test_the_time_of_a_token_follows_the_steps_and_shares_of_a_step_are_the_step() -> None:
    time, whole, parts = TokenTime(1.0), TokenTime(1.0), TokenTime(1.0)
    assert time.steps == 1.0
    for _ in range(5000):
        time.add(3.0, 1.5)
    assert time.steps == pytest.approx(0.5, rel=0.01)
    whole.add(8.0, 2.0)
    for _ in range(4):
        parts.add(8.0, 2.0, 0.25)
    assert parts.steps == pytest.approx(whole.steps, rel=1e-3)
