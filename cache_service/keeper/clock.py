"""The time by which texts are old, as far as the clocks that tell it can be believed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_STEP_S = (1.0, 60.0)  # moving by less against the monotonic clock is no jump: a tenth of the time to live, within this
_CONFIRM_S = 3600.0  # for so long a clock has to run on after a jump; a tenth of the time to live, where that is shorter
_LOOKS = 3  # and so many looks


@dataclass(slots=True)
class _Watched:
    """A clock beside the monotonic one: how far it is ahead of that, and since when it is known to be."""

    name: str
    step_s: float  # see ``_STEP_S``
    confirm_s: float  # see ``_CONFIRM_S``
    ahead_s: float = 0.0
    since_s: float | None = None  # monotonic; of the first look after the last jump
    looks: int = 0
    believed_s: float | None = None  # how far it was ahead when it was believed last

    def look(self, now_s: float, at_s: float) -> bool:
        """Note what the clock says, and return whether that is believed.

        Args:
            now_s: by the clock.
            at_s: by the monotonic clock.
        """
        ahead_s = now_s - at_s
        if self.since_s is None or abs(ahead_s - self.ahead_s) > self.step_s:
            if self.since_s is not None:
                logger.warning(
                    "the clock of %s has jumped by %+.0f s: no text is let go of for its age until it has run on for %.0f s",
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
    """The time of Redis, by whose clock texts are dated, and of this machine: the earlier of both, while both run on evenly.

    A clock that jumped says nothing until it has run on for an hour, or is back where it was; nor does any at first, when nobody
    can tell whether it jumped before. Where both differ for good the earlier counts: no text is let go of too soon.
    """

    def __init__(self, ttl_s: float, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            ttl_s: time to live of texts.
            wall: this machine's clock.
            steady: a clock that never jumps.
        """
        low, high = _STEP_S
        self._step_s, confirm_s = min(max(low, ttl_s / 10), high), min(_CONFIRM_S, ttl_s / 10)
        self._wall, self._steady = wall, steady
        self._redis, self._machine = (_Watched(name, self._step_s, confirm_s) for name in ("Redis", "this machine"))
        self._apart = False

    def look(self, redis_s: float) -> float | None:
        """Return the seconds since 1970 by which texts may be said to be old; None while they cannot be told.

        Args:
            redis_s: what the clock of Redis says.
        """
        at_s, wall_s = self._steady(), self._wall()
        apart = abs(wall_s - redis_s) > self._step_s
        if apart and not self._apart:
            logger.warning("the clocks of Redis and this machine are %.0f s apart: the earlier counts", abs(wall_s - redis_s))
        self._apart = apart
        believed = [self._redis.look(redis_s, at_s), self._machine.look(wall_s, at_s)]
        return min(redis_s, wall_s) if all(believed) else None
