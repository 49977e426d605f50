"""Compiled loops over the rows of draft trees: depths, masks, layout of a forward, and partition among ranks."""

from __future__ import annotations

import numpy as np

from outrider.decoding.arrays import BoolArray, Int8Array, Int32Array, Int64Array
from outrider.decoding.jit import compiled


@compiled
def fill_depths(parents: Int32Array, depths: Int32Array) -> None:
    """Fill [n] ``depths`` with the edges from the root."""
    depths[0] = 0
    for row in range(1, len(parents)):
        depths[row] = depths[parents[row]] + 1


@compiled
def keep_rows(
    tokens: Int32Array,
    parents: Int32Array,
    candidates: int,
    max_rows: int,
    max_depth: int,
    max_window_depth: int,
    vocab_size: int,
    kept: BoolArray,
) -> int:
    """Fill [n] ``kept`` with the rows that may be computed (see ``DraftTree.clipped``), and return their number."""
    n = len(tokens)
    depths = np.zeros(n, np.int32)
    kept[0] = True
    count = 1
    for row in range(1, n):
        parent, token = parents[row], tokens[row]
        depths[row] = depths[parent] + 1
        deepest = max_depth if row < candidates else max_window_depth
        kept[row] = count < max_rows and kept[parent] and 0 <= token < vocab_size and depths[row] <= deepest
        count += kept[row]
    return count


@compiled
def lay_rows(
    parents: Int32Array,
    sizes: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    positions: Int64Array,
    logit_rows: Int64Array,
    chains: BoolArray,
    masks: Int8Array,
) -> None:
    """Lay out the rows of one forward, and the mask of each tree (see ``engine.forward.batch.pack``).

    Args:
        parents: [sum of sizes] of all trees, each counted from its own root.
        sizes: [requests] rows of each tree, the root included; 0 for no tree.
        starts, ends: [requests] range of committed tokens to compute; the last of them is the root of the tree.
        positions: [rows] filled.
        logit_rows: [sum of sizes] filled with the batch row of each tree row.
        chains: [requests] filled with whether each row continues the one before it, so that a causal mask is sufficient.
        masks: [sum of rows ** 2 over the requests with trees of several rows] filled, except for chains, with 1 where a row sees
            another. Spine rows (uncomputed committed tokens) see all before them; tree rows see the spine and their ancestors.
    """
    offset = below = cell = 0  # first row of the request, first row of its tree, first cell of its mask
    for one in range(len(sizes)):
        start, end, size = starts[one], ends[one], sizes[one]
        spine = end - start
        for row in range(spine):
            positions[offset + row] = start + row
        root = offset + spine - 1
        chain = True
        for row in range(size):
            logit_rows[below + row] = root + row
            if row > 0:
                parent = parents[below + row]
                positions[root + row] = positions[root + parent] + 1
                chain = chain and parent == row - 1
        chains[one] = chain
        if size > 1:
            rows = spine - 1 + size
            for row in range(0 if chain else rows):
                line = cell + row * rows
                masks[line : line + rows] = 0
                if row < spine:
                    masks[line : line + row + 1] = 1
                else:
                    seen = cell + (spine - 1 + parents[below + row - spine + 1]) * rows
                    # A tree row sees what its parent sees, and itself.
                    masks[line : line + row] = masks[seen : seen + row]
                    masks[line + row] = 1
            cell += rows * rows
            offset += size - 1
        offset += spine
        below += size


def compile_rows() -> None:
    """Compile the functions ahead of time, so that no request waits for it."""
    parents = np.array([-1, 0], np.int32)
    kept = np.empty(2, np.bool_)
    fill_depths(parents, parents.copy())
    keep_rows(parents, parents, 2, 2, 1, 1, 1, kept)
    one = np.ones(1, np.int64)
    places = np.empty(2, np.int64)
    lay_rows(parents, one * 2, one * 0, one, places, places, np.empty(1, np.bool_), np.empty(4, np.int8))


Partition = tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int8Array]


@compiled
def lay_out(parents: Int32Array, places: Int32Array, ends: Int32Array, depths: Int32Array) -> None:
    """Fill each row's place in depth-first order (children in order of their rows), the end of its subtree, and its depth."""
    n = len(parents)
    sizes, free = np.ones(n, np.int32), np.empty(n, np.int32)  # free: the place of the next child
    # From the last row on, because children come after their parents.
    for row in range(n - 1, 0, -1):
        sizes[parents[row]] += sizes[row]
    # Ordering heavy subtrees first does not yield smaller parts.
    places[0], free[0], ends[0], depths[0] = 0, 1, n, 0
    for row in range(1, n):
        parent = parents[row]
        # The subtree of row r has the places from ``places[r]`` to ``ends[r] - 1``.
        places[row], ends[row], depths[row] = free[parent], free[parent] + sizes[row], depths[parent] + 1
        free[row], free[parent] = places[row] + 1, ends[row]


@compiled
def list_leaves(places: Int32Array, ends: Int32Array, depths: Int32Array, firsts: Int32Array, lasts: Int32Array) -> int:
    """List the leaves, depth first, in ``firsts`` (place minus depth) and ``lasts`` (place plus 1); return their number."""
    n = len(places)
    depth_at = np.full(n, -1, np.int32)  # by place, -1 if not a leaf
    for row in range(n):
        if ends[row] == places[row] + 1:
            depth_at[places[row]] = depths[row]
    leaves = 0
    for place in range(n):
        if depth_at[place] >= 0:
            # Leaves i to j and their ancestors are ``lasts[j] - firsts[i]`` rows: the places from leaf i to leaf j, and the path
            # to leaf i.
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
    """Fill [ranks] ``starts`` and ``stops`` (first and end place of a rank's run of leaves); return the rows of all parts."""
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
    partition(np.array([0, 1], np.int32), np.array([-1, 0], np.int32), np.zeros(2, np.int8), 2, 2)
