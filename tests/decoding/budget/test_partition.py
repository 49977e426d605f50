"""Trees dealt to ranks, against every way to cut them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding import jit
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.jacobi_window import JacobiWindow, WindowRows
from outrider.decoding.tree import DraftTree, TreePart
from outrider.decoding.tree_rows import compile_partition, partition
from tests.helpers.targets import tree_of


@st.composite
def trees(draw: st.DrawFn, max_rows: int = 40) -> DraftTree:
    """Random trees, deep ones and wide ones."""
    reach = draw(st.integers(1, 8))
    parents = [-1]
    for row in range(1, draw(st.integers(1, max_rows))):
        parents.append(draw(st.integers(max(0, row - reach), row - 1)))
    return tree_of(parents[1:], draw(st.integers(1, len(parents))))


def leaves_in_order(tree: DraftTree, row: int = 0) -> list[int]:
    """Depth first, children in order of their rows."""
    below = [leaf for child in np.flatnonzero(tree.parents == row).tolist() for leaf in leaves_in_order(tree, child)]
    return below or [row]


def with_ancestors(tree: DraftTree, leaves: list[int]) -> set[int]:
    return {0}.union(*(tree.path(leaf) for leaf in leaves))


def largest_part(tree: DraftTree, ranks: int) -> int:
    """Rows of the largest part where it is smallest, among all ways to cut the leaves into runs."""
    leaves = leaves_in_order(tree)
    best = len(tree)
    for cuts in itertools.combinations_with_replacement(range(len(leaves) + 1), ranks - 1):
        ends = [0, *cuts, len(leaves)]
        best = min(best, max(len(with_ancestors(tree, leaves[a:b])) for a, b in itertools.pairwise(ends)))
    return best


def leaves_of(tree: DraftTree, part: TreePart) -> list[int]:
    """The leaves of a tree that a part holds, in depth-first order."""
    return [leaf for leaf in leaves_in_order(tree) if leaf in part.rows.tolist()]


def check_parts(tree: DraftTree, parts: list[TreePart], ranks: int) -> None:
    """What holds for every deal, but for how large the parts are."""
    assert len(parts) == ranks
    partitioned = []
    for part in parts:
        part.tree.check()
        rows, own = part.rows.tolist(), leaves_of(tree, part)
        assert rows == sorted(with_ancestors(tree, own))  # ascending, closed under ancestors, and nothing in vain
        assert (
            part.tree.tokens.tolist() == tree.tokens[rows].tolist() and part.tree.sources.tolist() == tree.sources[rows].tolist()
        )
        assert [rows[parent] for parent in part.tree.parents[1:].tolist()] == tree.parents[rows[1:]].tolist()
        assert part.tree.num_candidates == sum(row < tree.num_candidates for row in rows)
        assert {array.dtype for array in (part.rows, part.tree.tokens, part.tree.parents)} == {np.dtype(np.int32)}
        partitioned.append(own)
    assert list(itertools.chain(*partitioned)) == leaves_in_order(tree)  # each once, in runs: so all rows are there
    shares = [len(own) > 0 for own in partitioned]
    assert shares == sorted(shares, reverse=True)  # ranks without a share are the last


@given(trees(), st.integers(1, 9))
def test_parts_are_runs_of_leaves_with_their_ancestors(tree: DraftTree, ranks: int) -> None:
    parts = tree.partition(ranks)
    if len(tree) > 1:
        check_parts(tree, parts, ranks)
    for part in parts:
        taken = tree.take(part.rows)
        assert [a.tolist() for a in (taken.tokens, taken.parents, taken.sources)] == [
            a.tolist() for a in (part.tree.tokens, part.tree.parents, part.tree.sources)
        ]
        assert taken.num_candidates == part.tree.num_candidates


def every_tree(most: int) -> Iterator[DraftTree]:
    for n in range(1, most + 1):
        for parents in itertools.product(*(range(row) for row in range(1, n))):
            yield tree_of(parents)


def test_the_largest_part_is_as_small_as_runs_allow() -> None:
    for tree in every_tree(6):
        for ranks in (2, 3, 4):
            assert max(len(part.rows) for part in tree.partition(ranks)) == largest_part(tree, ranks), (tree.parents, ranks)


@given(trees(14), st.integers(2, 4))
def test_the_largest_part_of_larger_trees_is_as_small_as_runs_allow(tree: DraftTree, ranks: int) -> None:
    assert max(len(part.rows) for part in tree.partition(ranks)) == largest_part(tree, ranks)


def test_what_cannot_be_cut_is_the_first_ranks() -> None:
    tree = tree_of([0, 1, 0])
    (only,) = tree.partition(1)
    assert only.tree is tree and only.rows.tolist() == [0, 1, 2, 3]
    chain, root = DraftTree.chain(7, [1, 2]), DraftTree.chain(7, ())
    assert [part.rows.tolist() for part in chain.partition(3)] == [[0, 1, 2], [0], [0]]
    assert [part.rows.tolist() for part in root.partition(3)] == [[0], [0], [0]]
    for part in (*chain.partition(3)[1:], *root.partition(3)):
        part.tree.check()
        assert part.tree.tokens.tolist() == [7] and part.tree.num_candidates == 1


def test_a_spine_is_repeated_and_a_rank_is_left_out_rather_than_given_more_than_the_deepest_branch() -> None:
    tree = tree_of([0, 1, 2, 3, 3, 3, 3])  # spine 1 2 3, four leaves below it
    assert [part.rows.tolist() for part in tree.partition(2)] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7]]
    deep = tree_of([0, 1, 2, 3, 0, 0, 0])  # a branch of four beside three leaves
    assert [part.rows.tolist() for part in deep.partition(3)] == [[0, 1, 2, 3, 4], [0, 5, 6, 7], [0]]


def comb(width: int, ngram: int, candidates: int) -> tuple[DraftTree, WindowRows]:
    """A full window behind some candidates of ``ngram - 1`` tokens."""
    window = JacobiWindow(width, ngram, np.arange(width + ngram - 3, dtype=np.int32))
    while not window.full:
        window.advance(np.arange(window.columns, dtype=np.int32))
    rows = WindowRows.of(window, width)
    parents = [-1]
    for _ in range(candidates):
        parents.extend([0, *range(len(parents), len(parents) + ngram - 2)])
    before = len(parents)
    return tree_of([*parents[1:], *np.where(rows.parents < 0, 0, rows.parents + before).tolist()], before), rows


@pytest.mark.parametrize(("width", "ranks"), [(7, 2), (7, 3), (5, 4), (4, 4), (3, 4), (2, 4), (1, 3)])
@pytest.mark.parametrize("ngram", [3, 5])
def test_columns_of_a_window_go_as_runs_with_block_0_up_to_their_last(width: int, ranks: int, ngram: int) -> None:
    tree, rows = comb(width, ngram, 0)
    parts, teeth = tree.partition(ranks), ngram - 2
    check_parts(tree, parts, ranks)
    ends = (rows.ends + 1).tolist()
    owned = [[column for column in range(width) if ends[column] in part.rows.tolist()] for part in parts]
    assert sorted(itertools.chain(*owned)) == list(range(width))
    for part, columns in zip(parts, owned, strict=True):
        assert part.tree.num_candidates == 1
        if columns:
            assert columns == list(range(columns[0], columns[-1] + 1))
            assert len(part.rows) == 1 + columns[-1] + len(columns) * teeth  # root, its prefix of block 0, its columns
        else:
            assert part.rows.tolist() == [0]
    largest = max(len(part.rows) for part in parts)
    if ranks >= width:
        assert largest == width + teeth  # the last column alone has all of block 0
    assert largest == largest_part(tree, ranks)


def test_candidates_and_columns_are_balanced_together() -> None:
    tree, _ = comb(7, 4, 5)
    parts = tree.partition(4)
    check_parts(tree, parts, 4)
    assert [(part.tree.num_candidates, len(part.tree)) for part in parts] == [(13, 13), (4, 12), (1, 12), (1, 9)]


def compilations() -> int:
    """For how many combinations of types the deal was compiled."""
    return len(getattr(partition, "signatures", ()))


def test_nothing_is_compiled_after_the_start() -> None:
    compile_partition()
    known = compilations()
    prompt = [5, 6, 7, 8, 5, 6, 9, 5, 6, 7, 5]
    for strategy in ("auto", "jacobi", "trie", "prompt_lookup", "suffix"):
        request = Request("r", prompt, SamplingParams(max_tokens=9), tenant="a")
        options: dict[str, object] = {"all_rows": True} if strategy == "auto" else {}
        (tree,) = build_drafter(strategy, options).propose([request], [20])
        clipped = tree.clipped(4, 3, 1000)
        for drafted in (tree, clipped, tree.take(np.arange(len(clipped), dtype=np.int32)), tree.partition(2)[0].tree):
            assert len(drafted) > 1, strategy
            assert len(drafted.partition(3)) == 3
    wide = np.arange(-1, 19, dtype=np.int32)
    wide.flags.writeable = False
    DraftTree(wide, wide, np.broadcast_to(np.int8(3), 20), 20).partition(2)  # read-only
    DraftTree(wide[::2], np.where(wide < 0, wide, wide // 2)[::2], np.zeros(20, np.int8)[::2], 10).partition(2)  # views
    assert compilations() == known == (1 if jit.NATIVE else 0)


def test_the_worked_example() -> None:
    tree = tree_of([0, 1, 0, 3, 0])
    first, second = tree.partition(2)
    assert first.rows.tolist() == [0, 1, 2] and second.rows.tolist() == [0, 3, 4, 5]
    assert second.tree.tokens.tolist() == [100, 103, 104, 105] and second.tree.parents.tolist() == [-1, 0, 1, 0]
