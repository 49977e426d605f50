"""Clock of a process with an emulated device, whose time may be dilated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator

_LONGEST_LEAD_S = 1e-3
_LEAD_STEP_S = 2e-5


class EmulatedClock:
    """Emulated seconds: those of the wall clock, of which dilation hides all but a part while the device works.

    Device times are ``dilation`` times as long as emulated, and the work of the host is not. So while the device works, the
    emulated clock runs at ``1 / dilation``, and while it waits for the host at full speed: a step that takes w seconds, in h of
    which the device waited, has w / dilation + (1 - 1 / dilation) * h emulated seconds.

    Example: dilation 4, a device time of 10 ms, and a host that takes 2 ms: the step ends after 42 ms, and 12 emulated ones.
    """

    def __init__(
        self, dilation: float, wall: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.dilation = dilation
        self.hidden_s = 0.0  # wall seconds that are no emulated seconds
        self._wall, self._sleep = wall, sleep
        self._lead_s = 0.0  # median seconds by which a sleep ends too late
        self._last = 0.0, 0.0, 0.0  # wall seconds at which the last work began and ended, and ``hidden_s`` before it

    def now(self) -> float:
        """Return the emulated seconds since some moment."""
        return self._wall() - self.hidden_s

    @contextlib.contextmanager
    def working(self, seconds: float) -> Iterator[list[float]]:
        """Let the device work for ``seconds`` from now on: run the block, and sleep until they are over.

        Yields a list that holds the emulated seconds of the device afterwards, and the emulated seconds of the block beyond them.
        """
        booked: list[float] = []
        began, hidden_s = self._wall(), self.hidden_s
        yield booked
        ends = began + self.dilation * seconds
        left = ends - self._wall()
        if left <= 0.0:  # the host was not ready when the device was
            self.hidden_s += (self.dilation - 1.0) * seconds
            self._last = began, ends - left, hidden_s
            booked += [seconds, -left]
            return
        if left > self._lead_s:
            self._sleep(left - self._lead_s)
        ended = self._wall()
        # By equal steps, so that one long disturbance changes no more than a short one.
        self._lead_s = min(max(self._lead_s + (_LEAD_STEP_S if ended > ends else -_LEAD_STEP_S), 0.0), _LONGEST_LEAD_S)
        took = ended - began
        self.hidden_s += took - took / self.dilation
        self._last = began, ended, hidden_s
        booked += [took / self.dilation, 0.0]

    def hidden_at(self, wall_s: float) -> float:
        """Return ``hidden_s`` at a moment since the last work began: a request arrives while the device works."""
        began, ended, hidden_s = self._last
        share = min(max((wall_s - began) / (ended - began), 0.0), 1.0) if ended > began else 1.0
        return hidden_s + share * (self.hidden_s - hidden_s)

    def wall(self) -> float:
        """Return the seconds of the wall clock, which all processes of a machine share."""
        return self._wall()

    def join(self, hidden_s: float, began: float, others: Collection[tuple[float, float]]) -> None:
        """Book a wait for other processes, whose devices worked at the same time, when all have answered.

        Args:
            hidden_s: ``hidden_s`` of this clock when they were asked.
            began: wall seconds at which the wait began.
            others: wall seconds at which each one answered, and the wall seconds of its device that dilation hid until then.

        Example: dilation 4; two devices of 10 ms, and the other process starts its own after 1 ms. It answers after 41 ms of wall
        clock and 11 emulated ones, so this clock is 11 ms after the question, and not 10.25.
        """
        last = max([began, *(at for at, _ in others)])
        reached = max([began - self.hidden_s, *(at - hidden_s - hidden for at, hidden in others)])
        self.hidden_s = last - reached
        self._last = self._last[0], last, self._last[2]
