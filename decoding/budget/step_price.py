"""Cost of a step and rows that pay off in it, as compiled loops: see ``decoding.budget.row_pricing``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.decoding.budget.candidates import Float64Array
from outrider.decoding.jit import compiled
from outrider.decoding.tree import Int32Array

if TYPE_CHECKING:
    from outrider.decoding.budget.latency import CurveParts

Int64Array = npt.NDArray[np.int64]


@compiled
def seconds_of(rows: float, curve: CurveParts) -> float:
    """Return the seconds of a step of ``rows`` rows, bit-identical to ``LatencyCurve.seconds``."""
    at, least, slope, other, row_s, floor = curve
    last = len(at) - 1
    if rows >= at[last]:
        step = least[last]
    elif rows <= at[0]:
        step = least[0]
    else:
        low = 0
        while at[low + 1] <= rows:
            low += 1
        step = least[low]
        if at[low] != rows:
            step = (least[low + 1] - least[low]) / (at[low + 1] - at[low]) * (rows - at[low]) + least[low]
    return float(max(step + max(rows - at[last], 0.0) * slope + rows * row_s + other, floor))


@compiled
def price_rows(curve: CurveParts, base: int, ranks: int, prices: Float64Array) -> float:
    """Fill in the minimum price of further rows, and return the seconds of a step that drafts nothing (``base`` rows).

    [n] ``prices`` is non-decreasing: minimum seconds that a row adds with at least that many drafted rows before it, averaged
    with any number of rows after it.
    """
    at, _, slope, _, row_s, _ = curve
    seconds = np.empty(len(at))
    for knot in range(len(at)):
        seconds[knot] = seconds_of(at[knot], curve)
    # With several ranks the cost of a later row depends on the tree, so that the first row's price applies to all.
    least = (slope + row_s) / ranks
    for drafted in range(0 if ranks > 1 else len(prices) - 1, -1, -1):
        here = seconds_of(float(drafted + base), curve)
        for knot in range(len(at) - 1, -1, -1):  # time is linear in the rows between knots
            further = (at[knot] - base) * ranks - drafted
            if further <= 0:
                break
            least = min(least, (seconds[knot] - here) / further)
        prices[drafted] = least
    if ranks > 1:
        prices[:] = prices[0]
    return seconds_of(float(base), curve)


@compiled
def largest_part(drafted: float, deepest: float, ranks: int, spine: int) -> float:
    """Return the drafted rows of the rank that computes the most, which determines the time of the step.

    Trees are partitioned as runs of leaves with their ancestors (``DraftTree.partition``): no part is smaller than the longest
    path, and the first rows of a run repeat a path from the root. Half of a path of the tree's depth is assumed to be repeated,
    on each rank but one.

    Example: 60 drafted rows of depth 8 are 60 rows of one rank, 15 + 8 * 3/4 / 2 = 18 rows of each of four. A chain of 60 is 60
    rows of one of them.

    Args:
        drafted: rows of all trees, without roots.
        deepest: sum of the depths of all trees.
        ranks: ranks that share the step, each with a copy of the model.
        spine: tokens of all requests that the previous step accepted, computed again on ranks that did not compute them.
    """
    if ranks == 1:
        return drafted
    return max(deepest, drafted / ranks + deepest * ((ranks - 1) / ranks / 2)) + spine


@compiled
def fill_counts(
    curve: CurveParts, base: int, chances: Float64Array, depths: Int32Array, token_s: float, ranks: int, spine: int,
    ends: Int64Array, counts: Int64Array,
) -> float:  # fmt: skip
    """Fill in how many rows of each request pay off (see ``rows_to_draft``), and return the seconds of the step.

    Args:
        chances: chances of the rows of all requests, contiguous and non-increasing per request.
        depths: depths of the same rows; not read with one rank.
        ends, counts: [requests] end of the rows of each request; filled with its paying rows.
    """
    heads, deep = np.empty(len(ends), np.int64), np.zeros(len(ends), np.int64)
    for one in range(len(ends)):
        heads[one] = ends[one - 1] if one else 0
    taken = np.empty(len(chances), np.int64)  # request of each row, likeliest row first
    best = 0
    expected = deepest = 0.0
    best_s = seconds_of(largest_part(0.0, 0.0, ranks, spine) + base, curve)
    best_gain = -best_s
    for drafted in range(1, len(chances) + 1):
        owner = -1
        for one in range(len(ends)):
            if heads[one] < ends[one] and (owner < 0 or chances[heads[one]] > chances[heads[owner]]):
                owner = one
        taken[drafted - 1] = owner
        expected += chances[heads[owner]]
        if ranks > 1:
            depth = depths[heads[owner]]
            deepest += max(depth - deep[owner], 0)
            deep[owner] = max(depth, deep[owner])
        heads[owner] += 1
        seconds = seconds_of(largest_part(float(drafted), deepest, ranks, spine) + base, curve)
        gain = expected * token_s - seconds
        if gain > best_gain:
            best, best_gain, best_s = drafted, gain, seconds
    counts[:] = 0
    for at in range(best):
        counts[taken[at]] += 1
    return best_s
