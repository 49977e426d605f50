"""How many rows pay: expected tokens against the measured time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from decoding.candidates import Float64Array

if TYPE_CHECKING:  # the drafters import this file
    from decoding.drafters.base import Target

_TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)


class RowCosts:
    """Time of one step by its rows, relative to a step of one row.

    Between measurements it is linear, beyond the last one it goes on with the last slope, and it never falls.
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
        self._costs = np.maximum.accumulate(np.asarray(seconds, np.float64) / seconds[0])
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

    def least_chance(self, chances: Sequence[Float64Array]) -> float:
        """The chance from which on rows pay, over all requests of a step.

        With rows in order of their chance, the first n are expected to add the sum of their chances to one token per request.
        The n that gives most tokens per time is taken; 0 is among the answers. Rows of equal chance are taken or left together.

        Example: costs 1.0, 1.1 and 1.8 for one, two and three rows and chances 0.5 and 0.4: 1.0, 1.36 and 1.06 tokens per time,
        so one row is drafted and the answer is 0.5.

        Args:
            chances: of the rows of each request, non-increasing.

        Returns:
            Rows of this chance and above are worth computing; infinity where none is.
        """
        ordered = np.sort(np.concatenate(chances))[::-1]
        base = float(len(chances))
        gain = base + np.concatenate(([0.0], np.cumsum(ordered)))
        rate = gain / self.of(np.arange(len(gain), dtype=np.float64) + base)
        rate[1:-1][ordered[:-1] == ordered[1:]] = 0.0  # an equal chance follows: the answer would let it in as well
        best = int(np.argmax(rate))
        return float(ordered[best - 1]) if best else float("inf")
