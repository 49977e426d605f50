"""Clock for the age of texts that detects clock jumps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_STEP_S = (1.0, 60.0)  # bounds of the jump threshold, which is a tenth of the time to live; measured against the monotonic clock
_CONFIRM_S = 3600.0  # after a jump a clock must run evenly for this long, or a tenth of the time to live if shorter
_LOOKS = 3  # and for this many looks


@dataclass(slots=True)
class _ClockState:
    """Clock, and its offset from the monotonic clock."""

    name: str
    step_s: float  # see ``_STEP_S``
    confirm_s: float  # see ``_CONFIRM_S``
    ahead_s: float = 0.0
    since_s: float | None = None  # monotonic time of the first look after the last jump
    looks: int = 0
    believed_s: float | None = None  # offset when the clock was last trusted

    def look(self, now_s: float, at_s: float) -> bool:
        """Record the clock's time ``now_s`` at monotonic time ``at_s``. Return whether the clock is trusted."""
        ahead_s = now_s - at_s
        if self.since_s is None or abs(ahead_s - self.ahead_s) > self.step_s:
            if self.since_s is not None:
                logger.warning(
                    "the clock of %s jumped by %+.0f s: texts do not expire until it has run evenly for %.0f s",
                    self.name, ahead_s - self.ahead_s, self.confirm_s,
                )  # fmt: skip
            self.since_s, self.looks = at_s, 0
        self.ahead_s = ahead_s
        self.looks += 1
        back = self.believed_s is not None and abs(ahead_s - self.believed_s) <= self.step_s
        if not back and (self.looks < _LOOKS or at_s - self.since_s < self.confirm_s):
            return False
        self.believed_s = ahead_s
        return True


class AgeClock:
    """Earlier one of the clocks of Redis (which dates texts) and of this machine, if both run evenly.

    A clock that jumped is not trusted until it has run evenly for an hour or is back at its old offset; nor is a clock at first.
    If the clocks differ, the earlier one counts, so that no text expires too early.
    """

    def __init__(self, ttl_s: float, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        """Set the thresholds for a time to live. ``wall`` is this machine's clock, ``steady`` one that never jumps."""
        low, high = _STEP_S
        self._step_s, confirm_s = min(max(low, ttl_s / 10), high), min(_CONFIRM_S, ttl_s / 10)
        self._wall, self._steady = wall, steady
        self._redis, self._machine = (_ClockState(name, self._step_s, confirm_s) for name in ("Redis", "this machine"))
        self._apart = False

    def look(self, redis_s: float) -> float | None:
        """Return the time for expiry in seconds since 1970, or None if it is not trusted. ``redis_s`` is the time of Redis."""
        at_s, wall_s = self._steady(), self._wall()
        apart = abs(wall_s - redis_s) > self._step_s
        if apart and not self._apart:
            logger.warning(
                "the clocks of Redis and this machine differ by %.0f s: the earlier one is used", abs(wall_s - redis_s)
            )
        self._apart = apart
        believed = [self._redis.look(redis_s, at_s), self._machine.look(wall_s, at_s)]
        return min(redis_s, wall_s) if all(believed) else None
