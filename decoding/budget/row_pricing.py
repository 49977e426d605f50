"""Row budget: the number of drafted rows that pay off, by expected tokens against the measured time of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from outrider.decoding.arrays import Float64Array, Int32Array, Int64Array
from outrider.decoding.budget.latency import CurveParts, LatencyCurve, StepLoad
from outrider.decoding.jit import compiled

_START_STEPS, _DECAY = 10.0, 0.998  # weight of the initial guess in steps; decay per step
_PRICED_ROWS = 64  # rows of a request with separate prices; further rows have the last price
_NO_DEPTHS = np.zeros(0, np.int32)


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
    # Beyond the last knot each further row adds the last slope.
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

    Args:
        drafted: rows of all trees, without roots.
        deepest: sum of the depths of all trees.
        ranks: ranks that share the step, each with a copy of the model.
        spine: tokens of all requests that the previous step accepted, computed again on ranks that did not compute them.
    """
    if ranks == 1:
        return drafted
    # Trees are partitioned as runs of leaves with their ancestors (``DraftTree.partition``): no part is smaller than the longest
    # path. Half of a path of the tree's depth is assumed to be repeated, on each rank but one.
    return max(deepest, drafted / ranks + deepest * ((ranks - 1) / ranks / 2)) + spine


@compiled
def fill_counts(
    curve: CurveParts, base: int, chances: Float64Array, depths: Int32Array, token_s: float, ranks: int, spine: int,
    ends: Int64Array, counts: Int64Array,
) -> float:  # fmt: skip
    """Fill in how many rows of each request pay off (see ``rows_to_draft``), and return the seconds of the step.

    Args:
        chances, depths: of the rows of all requests, contiguous; chances are non-increasing per request.
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
    # The gain may fall and rise again, because the time per row is not constant: every number of rows is tried.
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


def rows_to_draft(
    curve: LatencyCurve,
    load: StepLoad,
    chances: Sequence[Float64Array],
    token_s: float,
    depths: Sequence[Int32Array] = (),
    ranks: int = 1,
    spine: int = 0,
) -> tuple[list[int], float]:
    """Return how many rows pay off for each request of a step, and the seconds that the step then takes.

    The n likeliest rows of all requests are drafted, with the n (0 included) of the highest gain: the sum of their chances in
    tokens, each worth its recent average time ``token_s``, less the extra time of a step with n more rows.

    Example: steps of one, two and three rows take 1.0, 1.1 and 1.8 ms, the chances are 0.5 and 0.4, and a token is worth 0.8 ms:
    one row gains 0.4 and costs 0.1 ms, the second gains 0.32 and costs 0.7 ms more, so one row is drafted.

    Args:
        chances: chances of the rows of each request, non-increasing; at least one request.
        depths: depths of the same rows, each after its parent; required if ranks share the step.
        ranks, spine: see ``largest_part``.
    """
    shared = np.concatenate(depths, dtype=np.int32) if ranks > 1 else _NO_DEPTHS
    ends, counts = np.array([*itertools.accumulate(map(len, chances))], np.int64), np.empty(len(chances), np.int64)
    joined = np.concatenate(chances) if len(chances) > 1 else chances[0]
    seconds = fill_counts(curve.parts(load), load.rows, joined, shared, token_s, ranks, spine, ends, counts)
    return counts.tolist(), seconds


class TokenTime:
    """Recent time per token, in units of one-row steps, so that a change of these applies to all tokens at once."""

    def __init__(self, steps: float) -> None:
        self._tokens, self._steps = _START_STEPS, _START_STEPS * steps

    @property
    def steps(self) -> float:
        """Return one-row steps per token, recent steps weighted most."""
        return self._steps / self._tokens

    def add(self, tokens: float, steps: float, share: float = 1.0) -> None:
        """Count a step that took as long as ``steps`` one-row steps, or a request's share of it."""
        decay: float = _DECAY**share
        self._tokens = self._tokens * decay + tokens * share
        self._steps = self._steps * decay + steps * share


class RowPricing:
    """Choice of the rows that pay off in each step, with token prices learned while serving."""

    def __init__(self, curve: LatencyCurve) -> None:
        self.curve, self._ranks = curve, 1
        self._times: dict[tuple[int, int], TokenTime] = {}  # by ranks and level
        self._load, self._decoding, self._decode_s = StepLoad(1, 1, 0), 1, 0.0
        self._prices = np.zeros(_PRICED_ROWS)  # see ``price_rows``
        self._now: TokenTime | None = None  # price of the planned step
        self.level = 1  # bit length of the number of requests in the planned step: 1, 2 for 2 and 3, 3 for 4 to 7, ...

    def plan(self, load: StepLoad, ranks: int = 1) -> None:
        """Set the load of the step that the next calls refer to, and the number of ranks that share it."""
        self._load, self._decoding, self._now = load, max(1, load.rows - load.prefill_rows), None
        self._ranks = ranks
        self.level = max(1, load.sequences).bit_length()
        self._decode_s = self._own(price_rows(self.curve.parts(load), load.rows, self._ranks, self._prices))

    def least_chances(self) -> Float64Array:
        """Return [n] the minimum chance that pays off by the number of a request's rows before it; the last holds beyond n."""
        return self._prices / self._token_s()

    def rows_to_draft(
        self, chances: Sequence[Float64Array], depths: Sequence[Int32Array], spine: int
    ) -> tuple[list[int], list[float]]:
        """Return how many rows pay off for each request, and its saved seconds. All rows share the common cost equally."""
        token_s = self._token_s()
        counts, seconds = rows_to_draft(self.curve, self._load, chances, token_s, depths, self._ranks, spine)
        decode_s = self._own(seconds)
        row_s = (decode_s - self._decode_s) / max(1, sum(counts))
        self._decode_s = decode_s
        return counts, [
            float(np.add.reduce(part[:count])) * token_s - count * row_s if count else 0.0
            for part, count in zip(chances, counts, strict=True)
        ]

    def emitted(self, tokens: int) -> None:
        """Count the tokens that a request got from the step."""
        # Requests without a draft count too, otherwise the price would never fall. The average is over steps with and without
        # prefills, because it is unknown which of them an accepted token saves.
        self._time().add(tokens * self._decoding, self._decode_s / self.curve.one_row_s, 1 / self._decoding)

    def _own(self, seconds: float) -> float:
        """Return the part of a step's seconds that its prefills do not account for."""
        load = self._load
        if not load.prefill_rows:
            return seconds
        count = max(1, load.sequences - self._decoding)
        context = load.context * count // load.sequences  # mean over all requests: their own contexts are not known
        prefills = StepLoad(count, load.prefill_rows, context, load.prefill_rows)
        return max(seconds - seconds_of(float(load.prefill_rows), self.curve.parts(prefills)), 0.0)

    def _token_s(self) -> float:
        return self._time().steps * self.curve.one_row_s

    def _time(self) -> TokenTime:
        if self._now is not None:
            return self._now
        # Each number of ranks and power of two of requests has its own token price, initially that of plain decoding.
        key = self._ranks, self.level
        held = self._times.get(key)
        if held is None:
            count = self._decoding
            step = self.curve.seconds(np.array([count], np.float64), StepLoad(count, count, self.curve.context * count))
            held = self._times[key] = TokenTime(float(step[0]) / self.curve.one_row_s / count)
        self._now = held
        return held
