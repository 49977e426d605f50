"""Row budget: the number of drafted rows that pay off, by expected tokens against the measured time of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from outrider.decoding.budget.candidates import Float64Array
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.budget.step_price import fill_counts, price_rows, seconds_of
from outrider.decoding.tree import Int32Array

_START_STEPS, _DECAY = 10.0, 0.998  # weight of the initial guess in steps; decay per step
_PRICED_ROWS = 64  # rows of a request with separate prices; further rows have the last price


_NO_DEPTHS = np.zeros(0, np.int32)


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

    The rows of all requests are sorted by chance. The first n are expected to add the sum of their chances in tokens, and cost
    the extra time of a step with n more rows. A token is worth ``token_s``, its recent average time. The n with the highest gain
    is chosen; 0 is allowed.

    Example: steps of one, two and three rows take 1.0, 1.1 and 1.8 ms, the chances are 0.5 and 0.4, and a token is worth 0.8 ms:
    one row gains 0.4 and costs 0.1 ms, the second gains 0.32 and costs 0.7 ms more, so one row is drafted, and the step takes
    1.1 ms. With two ranks and both rows below the root, one rank computes either: the second row costs nothing, and both are
    drafted.

    Args:
        chances: chances of the rows of each request, non-increasing; at least one request.
        depths: depths of the same rows, each after its parent; required if ranks share the step.
        ranks, spine: see ``decoding.budget.step_price.largest_part``.
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
    """Choice of the rows that pay off in each step, with token prices learned while serving.

    Each number of ranks and power of two of requests has its own token price, so a load that has passed does not affect others.
    The initial price is that of plain decoding. Rows beside a prefill cost only what they add. A token is worth the recent
    average over steps with and without prefills, because it is unknown which of them an accepted token saves.

    Example: plain decoding alone takes 10 ms a token. Among eight requests a step takes 12 ms, a token 1.5: there a row that adds
    1 ms needs a chance of 0.67, alone one of 0.1.
    """

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
        # Requests without a draft count too, otherwise the price would never fall.
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
        key = self._ranks, self.level
        held = self._times.get(key)
        if held is None:
            count = self._decoding
            step = self.curve.seconds(np.array([count], np.float64), StepLoad(count, count, self.curve.context * count))
            held = self._times[key] = TokenTime(float(step[0]) / self.curve.one_row_s / count)
        self._now = held
        return held
