"""Energy by request: the meter's readings during steps, shared among their requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.decoding.request import Request

if TYPE_CHECKING:
    from outrider.engine.forward.batch import ScheduledRequest
    from outrider.engine.measures.energy import EnergyMeter

READ_S = 0.1  # interval of readings while requests run
FRESH_S = 0.02  # minimum time between readings: the counter would not have changed


@dataclass(frozen=True, slots=True)
class EnergyCounts:
    """Joules since the start of an engine."""

    source: str  # nvml or rapl
    steps_j: float  # used during windows, including idle power
    idle_w: float | None  # idle power before the first request


class EnergyLedger:
    """Attribution of metered energy to requests, in proportion to their rows (``SpecStats.energy_j``).

    A *window* lasts from one reading to the next; there is none without requests. Its energy is shared in proportion to the rows,
    drafts included, that the target computed.

    Example: a window of 30 J with two steps, of 1 row of A and 9 rows of B, then of 5 rows of A: A has 12 J, B has 18 J.
    """

    def __init__(self, meter: EnergyMeter, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._clock = meter, clock
        self._rows: dict[str, tuple[Request, int]] = {}  # rows of the window by request id
        self._nobodys_rows = 0  # rows of the window of ended requests
        self._open = False
        self._read_s: float | None = None  # start of the window, None if the counter cannot be read
        self._read_j = 0.0
        self._steps_j = 0.0

    def counts(self) -> EnergyCounts | None:
        """Return the totals so far, None if nothing is metered; callable from any thread."""
        if not self._meter.works:
            return None
        return EnergyCounts(self._meter.source, round(self._steps_j, 3), self._meter.idle_w)

    def begin(self) -> None:
        """Open a window, if none is open, before a step is computed."""
        if self._open:
            return
        now = self._clock()
        # The counter would not have changed: the window begins at the last reading.
        if self._read_s is not None and now - self._read_s < FRESH_S:
            self._open = True
            return
        joules = self._meter.read_j()
        if joules is not None:
            self._open, self._read_j, self._read_s = True, joules, now

    def record_step(self, works: Sequence[ScheduledRequest]) -> None:
        """Record the rows of a step, and charge the requests if a reading is due."""
        if not self._open or self._read_s is None:
            return
        for work in works:
            rows = work.end - work.start + (0 if work.tree is None else len(work.tree) - 1)
            request = work.request
            _, before = self._rows.get(request.request_id, (request, 0))
            self._rows[request.request_id] = request, before + rows
        if self._clock() - self._read_s >= READ_S:
            self._book()

    def record_end(self, request: Request, last: bool) -> None:
        """Finalise the figure of an ended request. ``last``: no request is left, so the window ends."""
        # A request that ends less than ``FRESH_S`` after a reading, while others run, is charged up to that reading and may have
        # no figure. Its last rows stay in the window, so that no other request pays for them.
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
