"""Number of rows of a strategy that pay off on this device, learned from its past trees."""

from __future__ import annotations

import numpy as np

from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.request import Acceptance
from outrider.decoding.tree import DraftTree

_RATE = 0.08  # smoothing factor of the expected gains
_PRIOR = 0.4  # prior: accepted tokens that each doubling of the rows adds
_SLACK = 1.5  # maximum time of a step with guesses for later steps, relative to one without
_FURTHER = 2  # rows drafted beyond the best number (or half as many again, if more), to see whether more pay off


class RowBudget:
    """Row limit of a drafter that would otherwise draft as many rows as allowed, at most ``most`` per request and rank.

    Strategies put their best guesses first. So each step shows how many tokens every smaller number of rows would have given: the
    accepted rows among the first n. The best n maximizes expected tokens over step time; a few more rows are drafted so that it
    can grow. A drafter that computes guesses for later steps (``Drafter.looks_ahead``) gets the rows that cost little.

    Example: a step takes 6 ms without drafts and 0.2 ms more for each row, and of ten rows the first two are accepted in every
    second step: 2 tokens in 6.4 ms are more than 1 in 6 and 2 in 8. Four rows are drafted.
    """

    def __init__(self, most: int, looks_ahead: bool) -> None:
        self._counts, self._looks_ahead = np.arange(most + 1), looks_ahead
        self._gains = _PRIOR * np.log2(1.0 + self._counts)  # [most + 1] expected accepted tokens by number of rows

    def rows(self, curve: LatencyCurve, load: StepLoad, requests: int, ranks: int) -> int:
        """Return the rows to draft for each of ``requests`` requests, on all ranks together."""
        seconds = curve.seconds(load.rows + requests * self._counts.astype(np.float64), load)
        if self._looks_ahead:
            return int(np.count_nonzero(seconds <= _SLACK * seconds[0]) - 1) * ranks
        best = int(np.argmax((1.0 + self._gains) / seconds))
        return min(best + max(_FURTHER, best // 2), len(self._counts) - 1) * ranks

    def observe(self, tree: DraftTree, acceptance: Acceptance, ranks: int) -> None:
        """Update the expected gains from a verified tree."""
        drafted = min(-(-(tree.num_candidates - 1) // ranks), len(self._counts) - 1)
        if drafted > 0:
            known, further = self._gains[: drafted + 1], self._gains[drafted + 1 :] - self._gains[drafted]
            found = np.searchsorted(np.array(acceptance.rows), self._counts[: drafted + 1] * ranks, side="right")
            known += _RATE * (found - known)
            self._gains[drafted + 1 :] = known[-1] + further
