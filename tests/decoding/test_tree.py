"""Draft trees against naive walks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.tree import DraftTree
from tests.helpers.targets import is_chain


@st.composite
def trees(draw: st.DrawFn, max_rows: int = 12, vocab: int = 5) -> DraftTree:
    """A random tree with tokens around the vocabulary [0, vocab)."""
    n = draw(st.integers(1, max_rows))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    tokens = draw(st.lists(st.integers(-1, vocab), min_size=n, max_size=n))
    candidates = draw(st.integers(1, n))
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(n, np.int8), candidates)


def naive_ancestors(tree: DraftTree, row: int) -> list[int]:
    rows = []
    while row != -1:
        rows.append(row)
        row = int(tree.parents[row])
    return rows


@given(trees())
def test_depths_and_paths_follow_the_parents(tree: DraftTree) -> None:
    tree.check()
    depths = tree.depths()
    for row in range(len(tree)):
        ancestors = naive_ancestors(tree, row)
        assert depths[row] == len(ancestors) - 1
        assert tree.path(row) == ancestors[::-1][1:]


@given(trees(), st.integers(1, 12), st.integers(0, 6))
def test_clipped_keeps_exactly_what_may_be_computed(tree: DraftTree, max_rows: int, max_depth: int) -> None:
    vocab = 5
    clipped = tree.clipped(max_rows, max_depth, vocab)
    clipped.check()
    assert len(clipped) <= max_rows
    valid = {
        row
        for row in range(1, len(tree))
        if all(0 <= tree.tokens[a] < vocab for a in naive_ancestors(tree, row)[:-1]) and tree.depths()[row] <= max_depth
    }
    assert len(clipped) == min(max_rows, len(valid) + 1)
    kept = [tuple(tree.tokens[tree.path(row)]) for row in [0, *sorted(valid)][:max_rows]]
    assert [tuple(clipped.tokens[clipped.path(row)]) for row in range(len(clipped))] == kept
    assert clipped.num_candidates <= tree.num_candidates


@given(trees(), st.data())
def test_take_keeps_rows_with_their_paths(tree: DraftTree, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    rows = sorted({0}.union(*(naive_ancestors(tree, row) for row in wanted)))
    taken = tree.take(np.array(rows, np.int32))
    taken.check()
    assert taken.tokens.tolist() == tree.tokens[rows].tolist() and taken.sources.tolist() == tree.sources[rows].tolist()
    for at, row in enumerate(rows):
        assert [rows[above] for above in taken.path(at)] == tree.path(row)
    assert taken.num_candidates == sum(row < tree.num_candidates for row in rows)


def test_take_wants_the_root_and_all_ancestors() -> None:
    tree = DraftTree.chain(7, [1, 2])
    for rows in ([], [1, 2], [0, 2]):
        with pytest.raises(AssertionError):
            tree.take(np.array(rows, np.int32))


@given(trees(), st.integers(0, 11), st.integers(0, 4))
def test_children_are_the_candidates_that_hold_the_token(tree: DraftTree, row: int, token: int) -> None:
    expected = [i for i in range(1, tree.num_candidates) if tree.parents[i] in (row, row + 1) and tree.tokens[i] == token]
    assert tree.children([row, row + 1], token) == expected


def test_chain_and_broken_parents() -> None:
    tree = DraftTree.chain(7, [1, 2], source=2)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist()) == ([7, 1, 2], [-1, 0, 1], [2, 2, 2])
    assert is_chain(tree) and tree.num_candidates == 3 and len(DraftTree.chain(7, ())) == 1
    with pytest.raises(AssertionError):
        DraftTree(np.array([1, 2], np.int32), np.array([-1, 1], np.int32), np.zeros(2, np.int8), 2).check()
