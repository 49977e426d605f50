"""Buddy allocation of ranks: examples, and what must hold of every load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.actors.lookahead.elastic import block, share_ranks


@pytest.mark.parametrize(
    ("rank", "busy", "world", "expected"),
    [
        (0, {0}, 1, [0]),
        (2, {2}, 4, [0, 1, 2, 3]),
        (1, {1}, 3, [0, 1, 2]),
        (0, {0, 2}, 4, [0, 1]),
        (3, {0, 3}, 4, [2, 3]),
        (2, {0, 2}, 3, [2]),
        (0, {0, 1}, 4, [0]),
        (4, {0, 4, 6}, 8, [4, 5]),
        (5, {0}, 8, [4, 5, 6, 7]),  # not busy itself: what it would have
        (4, {4}, 5, [0, 1, 2, 3, 4]),
    ],
)
def test_blocks_by_hand(rank: int, busy: set[int], world: int, expected: list[int]) -> None:
    assert list(block(rank, busy, world)) == expected


@pytest.mark.parametrize(
    ("busy", "present", "expected"),
    [
        ([], [0, 1], {}),
        ([1], [0, 1, 2, 3], {1: (0, 1, 2, 3)}),
        ([0, 1], [0, 1, 2, 3], {0: (0, 2), 1: (1, 3)}),
        ([0, 2], [0, 1, 2, 3], {0: (0, 1), 2: (2, 3)}),
        ([0, 1, 2], [0, 1, 2, 3], {0: (0,), 1: (1,), 2: (2, 3)}),
        ([0, 1, 2, 3], [0, 1, 2, 3], {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
        ([0, 3], [0, 3, 5], {0: (0, 5), 3: (3,)}),
        ([7], [7], {7: (7,)}),
        ([0, 1], list(range(8)), {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)}),
    ],
)
def test_groups_by_hand(busy: list[int], present: list[int], expected: dict[int, tuple[int, ...]]) -> None:
    assert share_ranks(busy, present) == expected


worlds = st.integers(1, 33)
loads = worlds.flatmap(lambda world: st.tuples(st.just(world), st.sets(st.integers(0, world - 1), min_size=1)))


@given(loads)
def test_blocks_are_aligned_disjoint_and_cannot_grow(load: tuple[int, set[int]]) -> None:
    world, busy = load
    blocks = {rank: block(rank, busy, world) for rank in busy}
    for rank, found in blocks.items():
        assert rank in found and not (busy - {rank}) & set(found)
        size = 1
        while size < len(found):
            size *= 2
        assert found.start % size == 0 and found.stop == min(found.start + size, world)
        wider = range(rank // (2 * size) * 2 * size, min(rank // (2 * size) * 2 * size + 2 * size, world))
        assert found == range(world) or len(set(wider) & busy) > 1 or set(wider) == set(found)
    everyone = [rank for found in blocks.values() for rank in found]
    assert len(everyone) == len(set(everyone))


@given(st.sets(st.integers(0, 20), min_size=1), st.data())
def test_groups_share_all_who_are_there(present: set[int], data: st.DataObject) -> None:
    busy = data.draw(st.sets(st.sampled_from(sorted(present)), min_size=1))
    groups = share_ranks(busy, present)
    assert set(groups) == busy
    assert sorted(rank for group in groups.values() for rank in group) == sorted(present)
    world = max(present) + 1
    for rank, group in groups.items():
        assert rank in group and list(group) == sorted(group)
        assert set(block(rank, busy, world)) & present <= set(group)
    partitioned = {rank: len(group) - len(set(block(rank, busy, world)) & present) for rank, group in groups.items()}
    narrowest = min(len(group) for group in groups.values())
    # Who was dealt something was the narrowest at the time: nobody is narrower than it by more than that one.
    assert all(len(groups[rank]) <= narrowest + 1 for rank, count in partitioned.items() if count)


@given(loads)
def test_the_same_load_gives_the_same_groups_whatever_the_order(load: tuple[int, set[int]]) -> None:
    world, busy = load
    assert share_ranks(sorted(busy), range(world)) == share_ranks(sorted(busy, reverse=True), list(range(world))[::-1])


@given(st.integers(0, 5), st.data())
def test_equal_loads_in_equal_blocks_have_equal_groups(power: int, data: st.DataObject) -> None:
    """With one busy rank in every block of a size, the groups are these blocks."""
    size, blocks = 2**power, data.draw(st.sampled_from([1, 2, 4]))
    busy = [index * size + data.draw(st.integers(0, size - 1)) for index in range(blocks)]
    groups = share_ranks(busy, range(blocks * size))
    assert [groups[rank] for rank in busy] == [tuple(range(index * size, (index + 1) * size)) for index in range(blocks)]
