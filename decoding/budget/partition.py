"""Partition of a draft tree's rows among the ranks that share a step, as compiled loops."""

from __future__ import annotations

import numpy as np

from outrider.decoding.jit import compiled
from outrider.decoding.tree import DraftTree, Int8Array, Int32Array

Partition = tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int8Array]


@compiled
def lay_out(parents: Int32Array, places: Int32Array, ends: Int32Array, depths: Int32Array) -> None:
    """Fill each row's place in depth-first order, children in order of their rows, and its depth.

    The subtree of row r has the places from ``places[r]`` to ``ends[r] - 1``.
    """
    n = len(parents)
    sizes, free = np.ones(n, np.int32), np.empty(n, np.int32)  # free: the place of the next child
    for row in range(n - 1, 0, -1):
        sizes[parents[row]] += sizes[row]
    # Ordering heavy subtrees first does not yield smaller parts.
    places[0], free[0], ends[0], depths[0] = 0, 1, n, 0
    for row in range(1, n):
        parent = parents[row]
        places[row], ends[row], depths[row] = free[parent], free[parent] + sizes[row], depths[parent] + 1
        free[row], free[parent] = places[row] + 1, ends[row]


@compiled
def list_leaves(places: Int32Array, ends: Int32Array, depths: Int32Array, firsts: Int32Array, lasts: Int32Array) -> int:
    """List the leaves in depth-first order and return their number.

    Fills ``firsts`` with place minus depth, and ``lasts`` with place plus 1, so that leaves i to j and their ancestors are
    ``lasts[j] - firsts[i]`` rows: the places from leaf i to leaf j, and the path to leaf i.
    """
    n = len(places)
    depth_at = np.full(n, -1, np.int32)  # by place, -1 if not a leaf
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
    """Return the smallest possible number of rows of the largest part."""
    # Bisection over the limit. Longer runs never have fewer rows, so for a given limit the greedy longest runs are the fewest.
    low, high = (lasts[-1] - 2 + ranks) // ranks + 1, lasts[-1]  # low: the root and an equal share
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
    """Assign each rank its run of leaves, and return the total rows of all parts, including ranks without a run.

    Fills [ranks] ``starts`` and ``stops``: place of a run's first leaf, and the place after its last. Ranks without a run are
    unchanged.
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
    """Return the parts of a tree (see ``DraftTree.partition``), concatenated.

    Returns:
        ``bounds`` [ranks + 1], the start of each part in the last four arrays; ``candidates`` [ranks] of each part; then per row
        of the parts: its row in the tree, its token, its parent within the part, and its source.
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
            if row == 0 or (places[row] < stops[rank] and ends[row] > starts[rank]):  # the subtree holds a leaf of the run
                renumbered[row] = at - bounds[rank]
                rows[at], part_tokens[at], part_sources[at] = row, tokens[row], sources[row]
                part_parents[at] = renumbered[parents[row]] if row else -1
                candidates[rank] += 1 if row < num_candidates else 0
                at += 1
        bounds[rank + 1] = at
    return bounds, candidates, rows, part_tokens, part_parents, part_sources


def compile_partition() -> None:
    """Compile ahead of time, so that no request waits for it."""
    DraftTree.chain(0, (1,)).partition(2)
