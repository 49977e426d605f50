"""Energy by request: what a meter counts while a step is computed, shared among the requests in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoding.request import Request

if TYPE_CHECKING:
    from engine.forward.batch import Work
    from engine.measures.energy import EnergyMeter

READ_S = 0.1  # while requests run the counter is read that often
FRESH_S = 0.02  # but not again after so short a time when a request ends: the counter would say the same


@dataclass(frozen=True, slots=True)
class EnergyCounts:
    """Joules since the start of an engine."""

    source: str  # of the meter: nvml or rapl
    steps_j: float  # used while there were requests, idle power included
    idle_w: float | None  # drawn before the first request


class EnergyLedger:
    """Reads the meter between steps, and books what was used on the requests in them by their rows (``SpecStats.energy_j``).

    A *window* reaches from one reading to the next; there is none while there are no requests. Its energy goes to the requests in
    it in proportion to the rows that the target computed for them, drafts included: rows are what a step's work is made of. What
    one request cost beside others is this convention; what they cost together is the counter's.

    A request that ends beside others, less than ``FRESH_S`` after a reading, is booked up to that reading, and has no figure
    where that was before its first step. Its last rows stay in the window, so that no other request pays for them.

    Example: a window of 30 J with two steps, of 1 row of A and 9 rows of B, then of 5 rows of A: A has 12 J, B has 18 J.
    """

    def __init__(self, meter: EnergyMeter, clock: Callable[[], float] = time.monotonic) -> None:
        """The meter is of all devices that compute the steps; the clock spaces readings."""
        self._meter, self._clock = meter, clock
        self._rows: dict[str, tuple[Request, int]] = {}  # of the window, by the id of a live request
        self._nobodys_rows = 0  # of the window, of requests that have ended
        self._open = False
        self._read_s: float | None = None  # when the window began, None while nothing can be read, and the counter there
        self._read_j = 0.0
        self._steps_j = 0.0

    def counts(self) -> EnergyCounts | None:
        """What was used so far, None where nothing is metered; from any thread."""
        if not self._meter.works:
            return None
        return EnergyCounts(self._meter.source, round(self._steps_j, 3), self._meter.idle_w)

    def begin(self) -> None:
        """Opens a window where there is none: a step is about to be computed."""
        if self._open:
            return
        now = self._clock()
        if self._read_s is not None and now - self._read_s < FRESH_S:
            self._open = True
            return
        joules = self._meter.read_j()
        if joules is not None:
            self._open, self._read_j, self._read_s = True, joules, now

    def computed(self, works: Sequence[Work]) -> None:
        """Takes down the rows of a step, and books them when it is time."""
        if not self._open or self._read_s is None:
            return
        for work in works:
            rows = work.end - work.start + (0 if work.tree is None else len(work.tree) - 1)
            request = work.request
            _, before = self._rows.get(request.request_id, (request, 0))
            self._rows[request.request_id] = request, before + rows
        if self._clock() - self._read_s >= READ_S:
            self._book()

    def ended(self, request: Request, last: bool) -> None:
        """Books what can be booked: a request has ended, and its figure is final. ``last``: no other is left; the window ends."""
        if self._open and self._read_s is not None and (last or self._clock() - self._read_s >= FRESH_S):
            self._book()
        _, rows = self._rows.pop(request.request_id, (request, 0))
        self._nobodys_rows += rows
        if last:
            self._open = False

    def _book(self) -> None:
        joules = self._meter.read_j()
        if joules is None:
            self._open, self._read_s = False, None
            self._clear()
            return
        used, rows = joules - self._read_j, self._nobodys_rows + sum(count for _, count in self._rows.values())
        self._read_j, self._read_s = joules, self._clock()
        self._steps_j += used
        for request, count in self._rows.values():
            request.stats.energy_j = (request.stats.energy_j or 0.0) + used * count / rows
        self._clear()

    def _clear(self) -> None:
        self._rows.clear()
        self._nobodys_rows = 0
