"""How many rows of a strategy pay on this device, by what its trees gave so far."""

from __future__ import annotations

import numpy as np

from decoding.budget.latency import LatencyCurve, StepLoad
from decoding.request import Acceptance
from decoding.tree import DraftTree

_RATE = 0.08  # of what is expected is of the last step
_PRIOR = 0.4  # accepted tokens that each doubling of the rows is expected to add before anything was seen
_SLACK = 1.5  # a step with guesses for later steps may take so many times as long as one without
_FURTHER = 2  # rows beyond the best number that are drafted to see whether more would pay, or half as many again


class PayingRows:
    """Bounds the rows of a drafter that drafts as many as it may.

    Strategies put their best guesses first. So a step tells, of each smaller number of rows, how many tokens it would have
    given: the accepted ones among the first so many rows. What is expected of a number of rows, over the time of a step with so
    many, has a best number; a few more are drafted, so that it can rise. Who computes guesses for later steps beside its
    candidates (``Drafter.looks_ahead``) gets the rows that cost little.

    Example: a step takes 6 ms without drafts and 0.2 ms more for each row, and of ten rows the first two are accepted in every
    second step: 2 tokens in 6.4 ms are more than 1 in 6 and 2 in 8. Four rows are drafted.
    """

    def __init__(self, most: int, looks_ahead: bool) -> None:
        """
        Args:
            most: rows of a request in a step, for each rank.
            looks_ahead: see ``Drafter``.
        """
        self._counts, self._looks_ahead = np.arange(most + 1), looks_ahead
        self._gains = _PRIOR * np.log2(1.0 + self._counts)  # [most + 1] expected accepted tokens of so many rows

    def rows(self, curve: LatencyCurve, load: StepLoad, requests: int, ranks: int) -> int:
        """To draft for each of the requests, on all ranks together.

        Args:
            curve: of the device.
            load: what the step computes besides.
            requests: that are drafted for.
            ranks: that share the step.
        """
        seconds = curve.seconds(load.rows + requests * self._counts.astype(np.float64), load)
        if self._looks_ahead:
            return int(np.count_nonzero(seconds <= _SLACK * seconds[0]) - 1) * ranks
        best = int(np.argmax((1.0 + self._gains) / seconds))
        return min(best + max(_FURTHER, best // 2), len(self._counts) - 1) * ranks

    def observe(self, tree: DraftTree, acceptance: Acceptance, ranks: int) -> None:
        """Learns what a step gave."""
        drafted = min(-(-(tree.num_candidates - 1) // ranks), len(self._counts) - 1)
        if drafted > 0:
            known, further = self._gains[: drafted + 1], self._gains[drafted + 1 :] - self._gains[drafted]
            found = np.searchsorted(np.array(acceptance.rows), self._counts[: drafted + 1] * ranks, side="right")
            known += _RATE * (found - known)
            self._gains[drafted + 1 :] = known[-1] + further
