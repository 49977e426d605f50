"""What a step costs and which rows pay in it, as compiled loops over single numbers: see ``decoding.budget``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from decoding.candidates import Float64Array
from decoding.jit import compiled
from decoding.tree import Int32Array

if TYPE_CHECKING:
    from decoding.latency import CurveParts

Int64Array = npt.NDArray[np.int64]


@compiled
def seconds_of(rows: float, curve: CurveParts) -> float:
    """Seconds of a step of so many rows: to the last bit what ``LatencyCurve.seconds`` says."""
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
def price_rows(curve: CurveParts, base: int, probes: Float64Array, ranks: int) -> tuple[float, float]:
    """Seconds of a step that drafts nothing, and the least that a drafted row adds where as many as any probe are.

    Args:
        base: rows that the step computes anyway.
        probes: drafted rows, shared by ``ranks``.
    """
    first, least = seconds_of(float(base), curve), math.inf
    for probe in probes:
        least = min(least, (seconds_of(probe / ranks + base, curve) - first) / probe)
    return first, least


@compiled
def fill_counts(
    curve: CurveParts, base: int, chances: Float64Array, depths: Int32Array, token_s: float, ranks: int, spine: int,
    ends: Int64Array, counts: Int64Array,
) -> float:  # fmt: skip
    """How many rows of each request pay (see ``decoding.budget.rows_to_draft``), and how long the step then takes.

    Args:
        chances: of the rows of all requests, those of a request side by side and non-increasing.
        depths: of the same rows; not read where one rank computes the step.
        ends: [requests] where the rows of each request end.
        counts: [requests] filled.
    """
    heads, deep = np.empty(len(ends), np.int64), np.zeros(len(ends), np.int64)
    for one in range(len(ends)):
        heads[one] = ends[one - 1] if one else 0
    taken = np.empty(len(chances), np.int64)  # the request of each row, the likeliest row first
    best = 0
    expected = deepest = 0.0
    best_s = seconds_of((float(spine) if ranks > 1 else 0.0) + base, curve)
    best_gain = -best_s
    for drafted in range(1, len(chances) + 1):
        owner = -1
        for one in range(len(ends)):
            if heads[one] < ends[one] and (owner < 0 or chances[heads[one]] > chances[heads[owner]]):
                owner = one
        taken[drafted - 1] = owner
        expected += chances[heads[owner]]
        rows = float(drafted)
        if ranks > 1:
            depth = depths[heads[owner]]
            deepest += max(depth - deep[owner], 0)
            deep[owner] = max(depth, deep[owner])
            rows = max(deepest, drafted / ranks + deepest * ((ranks - 1) / ranks / 2)) + spine
        heads[owner] += 1
        seconds = seconds_of(rows + base, curve)
        gain = expected * token_s - seconds
        if gain > best_gain:
            best, best_gain, best_s = drafted, gain, seconds
    counts[:] = 0
    for at in range(best):
        counts[taken[at]] += 1
    return best_s
