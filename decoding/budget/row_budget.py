"""Row budget: how many drafted rows pay, by expected tokens against the measured time of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from decoding.budget.candidates import Float64Array
from decoding.budget.latency import LatencyCurve, StepLoad
from decoding.budget.step_price import fill_counts, price_rows, seconds_of
from decoding.tree import Int32Array

_START_STEPS, _DECAY = 10.0, 0.998  # steps that the first guess counts for, and how fast old steps are forgotten
_PRICED_ROWS = 64  # rows of a request behind which further ones cost no more


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
    """How many rows pay for each request of a step, and how long the step then takes.

    One selection over the rows of all requests, the likeliest first: the first n are expected to add the sum of their chances to
    the tokens that the step brings anyway, and cost what a step of n more rows takes longer. A token is worth the time that it
    takes otherwise. The n with the highest gain is taken; 0 is among the answers.

    Example: steps of one, two and three rows take 1.0, 1.1 and 1.8 ms, the chances are 0.5 and 0.4, and a token is worth 0.8 ms:
    one row gains 0.4 and costs 0.1 ms, the second gains 0.32 and costs 0.7 ms more, so one row is drafted, and the step takes
    1.1 ms. With two ranks and both rows below the root, one rank computes either: the second row costs nothing, and both are
    drafted.

    Args:
        curve: of the device.
        load: what the step computes besides.
        chances: of the rows of each request, non-increasing; of at least one request.
        token_s: seconds that a token takes of late, on average.
        depths: of the same rows, each behind its parent; needed where ranks share the step.
        ranks: that share the step, see ``decoding.budget.step_price.largest_part``.
        spine: tokens of all requests that the step before accepted.
    """
    shared = np.concatenate(depths, dtype=np.int32) if ranks > 1 else _NO_DEPTHS
    ends, counts = np.array([*itertools.accumulate(map(len, chances))], np.int64), np.empty(len(chances), np.int64)
    joined = np.concatenate(chances) if len(chances) > 1 else chances[0]
    seconds = fill_counts(curve.parts(load), load.rows, joined, shared, token_s, ranks, spine, ends, counts)
    return counts.tolist(), seconds


class TokenTime:
    """How long a token takes, of late, in steps of one row: what these take changes at once for all tokens."""

    def __init__(self, steps: float) -> None:
        """Begins with a guess."""
        self._tokens, self._steps = _START_STEPS, _START_STEPS * steps

    @property
    def steps(self) -> float:
        """Of what was counted, the latest most."""
        return self._steps / self._tokens

    def add(self, tokens: float, steps: float, share: float = 1.0) -> None:
        """Counts a step, which took as long as so many of one row, or a request's share of it."""
        decay: float = _DECAY**share
        self._tokens = self._tokens * decay + tokens * share
        self._steps = self._steps * decay + steps * share


class Pricing:
    """Which rows are worth their time in each step, with a price that is learned while serving.

    What a token is worth depends on how many requests share a step, and on how many ranks do: each number, in powers of two, has
    its own price, so that a load that came and went leaves none behind that is not its own. The first guess is plain decoding.

    Time that a step spends on prefills is theirs: rows that are drafted beside a prefill cost what they add. A token is worth
    what tokens take of late, in steps with prefills and without: which of them one that is accepted now saves is not known.

    Example: plain decoding alone takes 10 ms a token. Among eight requests a step takes 12 ms, a token 1.5: there a row that adds
    1 ms needs a chance of 0.67, alone one of 0.1.
    """

    def __init__(self, curve: LatencyCurve) -> None:
        """
        Args:
            curve: of the steps of one rank.
        """
        self.curve, self._ranks = curve, 1
        self._times: dict[tuple[int, int], TokenTime] = {}  # by ranks and level
        self._load, self._decoding, self._decode_s = StepLoad(1, 1, 0), 1, 0.0
        self._prices = np.zeros(_PRICED_ROWS)  # see ``price_rows``
        self._now: TokenTime | None = None  # of the planned step
        self.level = 1  # powers of two below the requests in the planned step: 1, 2 for 2 and 3, 3 for 4 to 7, ...

    def plan(self, load: StepLoad, ranks: int = 1) -> None:
        """The step that the next calls are about, and how many ranks share it."""
        self._load, self._decoding, self._now = load, max(1, load.rows - load.prefill_rows), None
        self._ranks = ranks
        self.level = max(1, load.sequences).bit_length()
        self._decode_s = self._own(price_rows(self.curve.parts(load), load.rows, self._ranks, self._prices))

    def least_chances(self) -> Float64Array:
        """[n] non-decreasing: a row of a request that stands behind so many others of it does not pay below that chance.

        Those further behind pay no less than the last one's.
        """
        return self._prices / self._token_s()

    def rows_to_draft(
        self, chances: Sequence[Float64Array], depths: Sequence[Int32Array], spine: int
    ) -> tuple[list[int], list[float]]:
        """How many rows pay for each request, and the seconds that they are expected to save.

        See ``rows_to_draft``. What the rows cost together is divided among them alike.
        """
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
        """Counts what a request got of the step: also of one without a draft, else the price would never fall."""
        self._time().add(tokens * self._decoding, self._decode_s / self.curve.one_row_s, 1 / self._decoding)

    def _own(self, seconds: float) -> float:
        """The part of a step that its prefills do not account for."""
        load = self._load
        if not load.prefill_rows:
            return seconds
        count = max(1, load.sequences - self._decoding)
        context = load.context * count // load.sequences  # the mean of all: whose entries they are is not known
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
