"""How many rows pay: expected tokens against the measured time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from decoding.candidates import Float64Array

if TYPE_CHECKING:  # the drafters import this file
    from decoding.drafters.base import Target

_TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)
_START, _DECAY = 10.0, 0.998  # steps that the first guess counts for, and how fast old steps are forgotten


class RowCosts:
    """Time of one step by its rows, relative to a step of one row.

    Between measurements it is linear, beyond the last one it goes on with the last slope. It never falls: where more rows take
    less time, as may be in half precision on a CPU, their time stands for fewer rows as well.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """
        Args:
            rows: ascending numbers of rows, the first is 1; at least two.
            seconds: of a step with each.

        Raises:
            ValueError: fewer than two measurements, rows out of order, or a time that is not positive.
        """
        if len(rows) < 2 or len(rows) != len(seconds) or rows[0] != 1 or list(rows) != sorted(set(rows)):
            raise ValueError(f"rows must be ascending from 1 and have a time each, got {list(rows)} and {list(seconds)}")
        if min(seconds) <= 0:
            raise ValueError(f"seconds must be positive, got {list(seconds)}")
        self._rows = np.asarray(rows, np.float64)
        least = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]  # of so many rows or more
        self._costs = least / least[0]
        self._slope = (self._costs[-1] - self._costs[-2]) / (self._rows[-1] - self._rows[-2])

    @classmethod
    def measured(cls, target: Target, most: int) -> RowCosts:
        """Times the target for up to ``most`` rows of a step."""
        rows = [1, *(count for count in _TIMED_ROWS[1:] if count < most), max(2, most)]
        return cls(rows, target.step_seconds(rows))

    def of(self, rows: Float64Array) -> Float64Array:
        """[n] cost of steps with so many rows in all."""
        beyond = np.maximum(rows - self._rows[-1], 0.0)
        costs: Float64Array = np.interp(rows, self._rows, self._costs) + beyond * self._slope
        return costs

    def rows_to_draft(self, chances: Sequence[Float64Array], rate: float) -> list[int]:
        """How many rows pay for each request of a step.

        With the rows of all requests in order of their chance, the first n are expected to add the sum of their chances to the
        one token that each request gets anyway, and cost what a step of n more rows takes longer. Time has a price: the tokens
        that it brings elsewhere. The n with the highest gain after that price is taken; 0 is among the answers.

        Example: costs 1.0, 1.1 and 1.8 for one, two and three rows, chances 0.5 and 0.4, and 1.3 tokens per time: one row gains
        0.5 and costs 0.1 * 1.3, the second gains 0.4 and costs 0.7 * 1.3 more, so one row is drafted.

        Args:
            chances: of the rows of each request, non-increasing; of at least one request.
            rate: tokens that steps bring in the time of a step of one row, on average.
        """
        joined = np.concatenate(chances)
        order = np.argsort(-joined, kind="stable")
        costs = self.of(np.arange(len(joined) + 1, dtype=np.float64) + len(chances))
        gain = np.concatenate(([0.0], np.cumsum(joined[order]))) - rate * costs
        taken = np.zeros(len(joined), np.bool_)
        taken[order[: int(np.argmax(gain))]] = True
        return [int(part.sum()) for part in np.split(taken, np.cumsum([len(part) for part in chances])[:-1])]


class Throughput:
    """Tokens per time of late, in the units of ``RowCosts``."""

    def __init__(self) -> None:
        self._tokens = self._cost = _START

    @property
    def rate(self) -> float:
        """Tokens that steps bring in the time of a step of one row."""
        return self._tokens / self._cost

    def add(self, tokens: float, cost: float) -> None:
        """Counts a step, or a request's part of one."""
        self._tokens = self._tokens * _DECAY + tokens
        self._cost = self._cost * _DECAY + cost
