"""Histograms with fixed bounds, and the bounds that an engine's have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# Seconds. Those of vLLM, so that its dashboards fit, and finer ones below them: its first bound is 0.3 s for a whole request.
FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def one_two_five(most: int) -> tuple[int, ...]:
    """Bounds 1, 2, 5, 10, 20, 50 and so on up to ``most``: ``one_two_five(30) == (1, 2, 5, 10, 20)``."""
    bounds = []
    power = 1
    while power <= most:
        bounds += [power * factor for factor in (1, 2, 5) if power * factor <= most]
        power *= 10
    return tuple(bounds)


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram at one moment.

    Example: bounds 1 and 5 with the values 0.5, 1, 3 and 9 have the counts 2, 1, 1 and the total 13.5.
    """

    bounds: tuple[float, ...]  # upper ones, themselves included
    counts: tuple[int, ...]  # of values up to each bound and above the one before; the last one of values above all bounds
    total: float  # sum of the values


class Histogram:
    """Counts values by bounds."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """
        Args:
            bounds: upper ones, increasing; a value at a bound counts below it.
        """
        self._bounds, self._counts, self._total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> HistogramCounts:
        """The counts of this moment; from any thread."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)
