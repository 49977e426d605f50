"""Latency curve that follows the measured steps, because the speed of a device changes over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.budget.row_pricing import seconds_of
from outrider.engine.forward.batch import ScheduledRequest

_KEPT = 0.99  # decay of older steps per step
_TIMED = 0.5  # weight of the timed curve in each factor, in steps
_REDRAWN = 16  # steps between updates of ``curve``
_MOST_OFF = 1.5  # largest deviation of one step from the expectation, as a factor
_LEAST, _MOST = 0.2, 5.0  # bounds of the factors


class LiveCurve:
    """Timed latency curve with two factors, fitted to the latest steps by least squares relative to the timed seconds.

    One factor scales the fixed time of a step (mostly memory), the other the time that its rows add (mostly compute). If all
    steps have equal rows, which cannot separate the two, the larger part changes more.

    Example: one row was timed at 6 ms, nine at 8. The neighbours of the machine go, and steps of one row take 4 ms, of nine 6.
    The factors go to 0.67 and 1: a row, which added a 24th to a step, adds a 16th.
    """

    def __init__(self, timed: LatencyCurve) -> None:
        self.curve = self._timed = timed
        self._fixed = self._added = 1.0  # the factors
        self._since = 0  # steps since the last update of ``curve``
        # Decayed sums of products of: f, the fixed part of the timed step; a, the part added by rows; t, the time taken.
        self._ff = self._fa = self._aa = self._ft = self._at = 0.0

    def record_step(self, works: Sequence[ScheduledRequest], seconds: float) -> None:
        """Update the fit with a step and its seconds; steps that compute prompts are ignored."""
        rows = context = 0
        for work in works:
            if work.tree is None or work.end - work.start != 1:
                return
            rows += len(work.tree)
            context += work.start
        parts = self._timed.parts(StepLoad(len(works), len(works), context))
        timed = seconds_of(float(rows), parts)
        fixed = min(max(self._timed.one_row_s + parts[3], parts[5]), timed) / timed
        added = 1.0 - fixed
        expected = self._fixed * fixed + self._added * added
        taken = min(max(seconds / timed, expected / _MOST_OFF), expected * _MOST_OFF)
        self._ff = _KEPT * self._ff + fixed * fixed
        self._fa = _KEPT * self._fa + fixed * added
        self._aa = _KEPT * self._aa + added * added
        self._ft = _KEPT * self._ft + fixed * taken
        self._at = _KEPT * self._at + added * taken
        self._since += 1
        if self._since == _REDRAWN:
            self._redraw()

    def _redraw(self) -> None:
        ff, fa, aa, ft, at = self._ff + _TIMED, self._fa, self._aa + _TIMED, self._ft + _TIMED, self._at + _TIMED
        over = ff * aa - fa * fa
        fixed = self._fixed = min(max((ft * aa - at * fa) / over, _LEAST), _MOST)
        added = self._added = min(max((at * ff - ft * fa) / over, _LEAST), _MOST)
        timed, one_s = self._timed, self._timed.one_row_s
        self.curve = replace(
            timed,
            rows_s=tuple(fixed * one_s + added * (seconds - one_s) for seconds in timed.rows_s),
            sequence_s=fixed * timed.sequence_s,
            entry_s=fixed * timed.entry_s,
            row_entry_s=added * timed.row_entry_s,
        )
        self._since = 0
