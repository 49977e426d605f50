"""Compiled loops over the rows of draft trees: depths, ancestors, masks and leaves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outrider.decoding.jit import compiled
from outrider.decoding.tree import BoolArray, Int8Array, Int32Array

Int64Array = npt.NDArray[np.int64]


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
            another. Spine rows (uncomputed committed tokens) see all before them; tree rows see the whole spine and their
            ancestors.
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
