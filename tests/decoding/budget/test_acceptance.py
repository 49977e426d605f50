"""What is learned of how often rows are accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.budget.acceptance import AcceptanceTable, AcceptanceTables, prior
from outrider.decoding.budget.features import (
    ALONE,
    COPY,
    HISTORY,
    KIND_FEATURES,
    LEVELS,
    LIKELY,
    MATCH_BUCKETS,
    NUM_FEATURES,
    NUM_KINDS,
    RECYCLING,
    SHARE_BUCKETS,
    UNIGRAM,
    UNRANKED,
    feature,
)

HALF = feature(COPY, 0, SHARE_BUCKETS - 1, 0)  # a copy that agrees in one token and has no rival: prior 0.5


def observe(table: AcceptanceTable, parents: Sequence[int], features: Sequence[int], accepted: tuple[int, ...]) -> None:
    table.observe(np.array(parents, np.int32), np.array(features, np.int32), accepted)


@pytest.mark.parametrize(
    ("parents", "accepted", "tried"),
    [
        ([-1, 0, 0, 1, 1, 2, 3], (1, 4), {1: 1, 2: 0, 3: 0, 4: 1}),  # root with 1 and 2; 3 and 4 below 1, 5 below 2, 6 below 3
        ([-1, 0, 1], (), {1: 0}),
        ([-1, 0, 1], (1,), {1: 1, 2: 0}),
        ([-1], (), {}),
    ],
)
def test_only_children_of_reached_rows_count(parents: list[int], accepted: tuple[int, ...], tried: dict[int, int]) -> None:
    table, base = AcceptanceTable(), prior()
    observe(table, parents, range(len(parents)), accepted)
    for entry in range(7):
        expected = (tried[entry] + 4 * base[entry]) / 5 if entry in tried else base[entry]
        assert table.chances()[entry] == pytest.approx(expected)


def test_old_observations_fade() -> None:
    table = AcceptanceTable()
    tell(table, HALF, True, 5000)
    assert table.chances()[HALF] > 0.998
    later = [float(step % 10 == 0) for step in range(2500)]
    for hit in later:
        tell(table, HALF, bool(hit))
    seen, accepted = 0.0, 0.0
    for hit in [1.0] * 5000 + later:
        seen, accepted = seen + 1, accepted + hit
        if seen > 4096:
            seen, accepted = seen / 2, accepted / 2
    assert table.chances()[HALF] == pytest.approx((accepted + 2) / (seen + 4))
    assert table.chances()[HALF] < 0.5 < 5250 / 7500


@given(st.lists(st.tuples(st.integers(0, NUM_FEATURES - 1), st.booleans()), max_size=16))  # of more a kind may be set aside
def test_chances_stay_within_bounds_and_follow_the_counts(steps: list[tuple[int, bool]]) -> None:
    table, base = AcceptanceTable(), prior()
    for entry, hit in steps:
        observe(table, [-1, 0], [0, entry], (1,) if hit else ())
    for entry in {entry for entry, _ in steps}:
        hits = [hit for seen, hit in steps if seen == entry]
        assert table.chances()[entry] == pytest.approx((sum(hits) + 4 * base[entry]) / (len(hits) + 4))
    assert (table.chances() > 0).all() and (table.chances() <= 1).all()


def test_the_prior_orders_evidence() -> None:
    base = prior().reshape(NUM_KINDS, MATCH_BUCKETS, SHARE_BUCKETS, LEVELS)
    assert base.size == NUM_FEATURES and ((base > 0) & (base <= 1)).all()
    assert (base[:UNIGRAM, ..., UNRANKED] < base[:UNIGRAM, ..., 0]).all()  # the target said something else there
    assert (base[:UNIGRAM, ..., LIKELY] >= base[:UNIGRAM, ..., 0]).all()
    assert (np.diff(base[:UNIGRAM], axis=1) >= 0).all() and (
        np.diff(base[:UNIGRAM], axis=2) >= 0
    ).all()  # longer, and a larger share
    assert (np.diff(base[[UNIGRAM, RECYCLING]], axis=1) < 0).all()  # of ranks the first
    assert (np.diff(base[UNIGRAM], axis=1) < 0).all()  # where occurrences agree, they know better
    assert (np.diff(base[RECYCLING, ..., ALONE], axis=1) < 0).all()
    assert (np.diff(base[RECYCLING, :, :-1, ALONE + 1 :], axis=1) <= 0).all()  # the nearer the context


def tell(table: AcceptanceTable, entry: int, hit: bool, times: int = 1) -> None:
    """A drafted row of a feature, so often."""
    for _ in range(times):
        observe(table, [-1, 0], [0, entry], (1,) if hit else ())


LONG = feature(HISTORY, 8, SHARE_BUCKETS - 1, 0)  # a history that agrees in more than twelve tokens
OF_HISTORY = slice(HISTORY * KIND_FEATURES, (HISTORY + 1) * KIND_FEATURES)


def test_what_one_teaches_moves_nobody_else() -> None:
    tables = AcceptanceTables()
    tell(tables.of("flood"), HALF, False, 4000)
    tell(tables.of("flood"), LONG, True, 100)
    tell(tables.of(None), LONG, False, 4000)  # a private request
    assert tables.of("flood").disabled_sources == (COPY,) and tables.of("flood").chances()[LONG] > 0.9
    for tenant in ("acme", None):
        assert tables.of(tenant).disabled_sources == () and (tables.of(tenant).chances() == prior()).all()
    tell(tables.of("acme"), HALF, True)
    assert tables.of("acme").chances()[HALF] == pytest.approx((1 + 4 * 0.5) / 5)


def test_a_source_that_keeps_failing_is_set_aside_and_tried_again() -> None:
    table = AcceptanceTable()
    first = float(prior()[LONG])
    needed = int(16 / first) + 1
    tell(table, LONG, False, needed - 1)
    assert table.disabled_sources == () and table.chances()[LONG] > 0
    tell(table, LONG, False)
    assert table.disabled_sources == (HISTORY,)
    assert (table.chances()[OF_HISTORY] == 0).all() and table.chances()[HALF] == pytest.approx(0.5)
    tell(table, HALF, True, 255)  # steps in which nothing of the history is drafted
    assert table.disabled_sources == (HISTORY,) and (table.chances()[OF_HISTORY] == 0).all()
    tell(table, HALF, True)
    assert table.disabled_sources == ()
    assert table.chances()[LONG] == pytest.approx(first)  # what made it fail is forgotten
    tell(table, LONG, False, needed)
    assert table.disabled_sources == (HISTORY,)
    tell(table, HALF, True, 511)
    assert table.disabled_sources == (HISTORY,)  # twice as long
    tell(table, HALF, True)
    tell(table, LONG, True, needed)
    assert table.disabled_sources == () and table.chances()[LONG] > 0.7
    tell(table, LONG, False, needed)
    assert table.disabled_sources == (HISTORY,)
    tell(table, HALF, True, 256)
    assert table.disabled_sources == ()  # it worked in between: as long as at first


def test_a_source_that_works_now_and_then_is_kept() -> None:
    table = AcceptanceTable()
    for step in range(400):
        tell(table, LONG, step % 10 == 0)
        assert table.disabled_sources == ()
    assert table.chances()[LONG] == pytest.approx(0.1, abs=0.02)


def test_the_tables_of_a_thousand_tenants_are_kept() -> None:
    tables = AcceptanceTables()
    tell(tables.of("first"), HALF, True, 50)
    high = tables.of("first").chances()[HALF]
    for number in range(1023):
        tables.of(f"tenant {number}")
    assert tables.of("first").chances()[HALF] == high
    for number in range(1024):
        tables.of(f"tenant {number}")
    assert tables.of("first").chances()[HALF] == prior()[HALF]


def test_a_rejected_tree_counts_below_the_root() -> None:
    table = AcceptanceTable()
    observe(table, [-1, 0, 1], [0, 10, 11], ())
    assert table.chances()[10] < prior()[10] and table.chances()[11] == prior()[11]


def test_the_last_accepted_rows_children_were_tried() -> None:
    table = AcceptanceTable()
    observe(table, [-1, 0, 1], [0, 10, 11], (1,))
    assert table.chances()[10] > prior()[10] and table.chances()[11] < prior()[11]


def test_a_root_alone_teaches_nothing() -> None:
    table = AcceptanceTable()
    observe(table, [-1], [0], ())
    assert (table.chances() == prior()).all()
