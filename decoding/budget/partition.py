"""Partition of a draft tree's rows among the ranks that share a step, as compiled loops."""

from __future__ import annotations

import numpy as np

from decoding.jit import compiled
from decoding.tree import DraftTree, Int8Array, Int32Array

Partition = tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int8Array]


@compiled
def lay_out(parents: Int32Array, places: Int32Array, ends: Int32Array, depths: Int32Array) -> None:
    """The place of each row in depth-first order, children in order of their rows. (Heavy subtrees first cut no better.)

    Args:
        parents: [n] of a tree.
        places: [n] filled with places.
        ends: [n] filled: the subtree of row r has the places from ``places[r]`` to ``ends[r] - 1``.
        depths: [n] filled with the edges from the root.
    """
    n = len(parents)
    sizes, free = np.ones(n, np.int32), np.empty(n, np.int32)  # free: the place of the next child
    for row in range(n - 1, 0, -1):
        sizes[parents[row]] += sizes[row]
    places[0], free[0], ends[0], depths[0] = 0, 1, n, 0
    for row in range(1, n):
        parent = parents[row]
        places[row], ends[row], depths[row] = free[parent], free[parent] + sizes[row], depths[parent] + 1
        free[row], free[parent] = places[row] + 1, ends[row]


@compiled
def list_leaves(places: Int32Array, ends: Int32Array, depths: Int32Array, firsts: Int32Array, lasts: Int32Array) -> int:
    """The leaves in depth-first order, as two numbers each: leaves i to j and their ancestors are ``lasts[j] - firsts[i]`` rows.

    Those are the rows from the place of leaf i to that of leaf j, and the path to leaf i.

    Args:
        firsts: [n] filled with places less depths.
        lasts: [n] filled with the places behind.

    Returns:
        Leaves, the entries in use.
    """
    n = len(places)
    depth_at = np.full(n, -1, np.int32)  # by place, -1 where no leaf is
    for row in range(n):
        if ends[row] == places[row] + 1:
            depth_at[places[row]] = depths[row]
    leaves = 0
    for place in range(n):
        if depth_at[place] >= 0:
            firsts[leaves], lasts[leaves] = place - depth_at[place], place + 1
            leaves += 1
    return leaves


@compiled
def least_limit(firsts: Int32Array, lasts: Int32Array, ranks: int) -> int:
    """The rows of the largest part where it is smallest.

    A run with more leaves never has fewer rows: the fewest runs within a limit are those that each go on as long as they can, and
    the limit is found by bisection.
    """
    low, high = (lasts[-1] - 2 + ranks) // ranks + 1, lasts[-1]  # a part has the root and its share of the others at the least
    for leaf in range(len(lasts)):
        low = max(low, lasts[leaf] - firsts[leaf])
    while low < high:
        middle = (low + high) // 2
        runs, first = 1, 0
        for leaf in range(len(lasts)):
            if lasts[leaf] - firsts[first] > middle:
                runs, first = runs + 1, leaf
        if runs <= ranks:
            high = middle
        else:
            low = middle + 1
    return int(high)


@compiled
def cut(firsts: Int32Array, lasts: Int32Array, starts: Int32Array, stops: Int32Array) -> int:
    """Gives each rank its run of leaves.

    Args:
        starts: [ranks] filled with the place of the first leaf of each run; as ``stops`` left alone behind the last run.
        stops: [ranks] filled with the place behind its last leaf.

    Returns:
        Rows of all parts, those of ranks without a run included.
    """
    ranks = len(starts)
    limit = least_limit(firsts, lasts, ranks)
    rank, first, rows = 0, 0, 0
    for leaf in range(len(lasts)):
        if lasts[leaf] - firsts[first] > limit:
            rows += lasts[leaf - 1] - firsts[first]
            rank, first = rank + 1, leaf
        if leaf == first:
            starts[rank] = lasts[leaf] - 1
        stops[rank] = lasts[leaf]
    return int(rows + lasts[-1] - firsts[first] + ranks - 1 - rank)


@compiled
def partition(tokens: Int32Array, parents: Int32Array, sources: Int8Array, num_candidates: int, ranks: int) -> Partition:
    """The parts of a tree (see ``DraftTree.partition``), one behind the other.

    Args:
        tokens: [n] of the tree, as the other arrays.
        ranks: at least 1.

    Returns:
        ``bounds`` [ranks + 1], where each part begins in the last four; ``candidates`` [ranks] of each part; and then the rows of
        the parts in the tree, their tokens, their parents in their part and their sources.
    """
    n = len(parents)
    places, ends, depths = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    lay_out(parents, places, ends, depths)
    firsts, lasts = np.empty(n, np.int32), np.empty(n, np.int32)
    leaves = list_leaves(places, ends, depths, firsts, lasts)
    starts, stops = np.full(ranks, n, np.int32), np.zeros(ranks, np.int32)
    total = cut(firsts[:leaves], lasts[:leaves], starts, stops)
    bounds, candidates, renumbered = np.zeros(ranks + 1, np.int32), np.zeros(ranks, np.int32), np.zeros(n, np.int32)
    rows, part_tokens, part_parents = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.int32)
    part_sources = np.empty(total, np.int8)
    at = 0
    for rank in range(ranks):
        for row in range(n):
            if row == 0 or (places[row] < stops[rank] and ends[row] > starts[rank]):  # a leaf of the run is in its subtree
                renumbered[row] = at - bounds[rank]
                rows[at], part_tokens[at], part_sources[at] = row, tokens[row], sources[row]
                part_parents[at] = renumbered[parents[row]] if row else -1
                candidates[rank] += 1 if row < num_candidates else 0
                at += 1
        bounds[rank + 1] = at
    return bounds, candidates, rows, part_tokens, part_parents, part_sources


def compile_partition() -> None:
    """Calls what is compiled at its first call, so that no request waits for it."""
    DraftTree.chain(0, (1,)).partition(2)
