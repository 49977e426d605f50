"""Circuit breaker for a thread's use of Redis: counts failures by kind, and logs two lines per outage."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis
from pybreaker import STATE_CLOSED, STATE_OPEN, CircuitBreaker, CircuitBreakerListener

logger = logging.getLogger(__name__)

FAILURES_TO_OPEN = 2  # consecutive: a single one may be a connection closed while idle
_SOON_S = 0.02  # retry delay after a failure that does not open the breaker
_MESSAGE_CHARS = 160  # most characters of an error in the log


class RedisCircuitBreaker(CircuitBreakerListener):
    """Circuit breaker of one thread. While open, Redis is not used for ``retry_s``; then one attempt decides."""

    # Threads need separate breakers: pybreaker holds a lock during the operation, and a full Redis can still be read.

    def __init__(self, doing: str, retry_s: float) -> None:
        """Create a closed breaker. ``doing`` names the operation in the log, such as "writing to Redis"."""
        self.failures: Counter[str] = Counter()  # by kind
        self.opened = 0  # number of outages
        self.succeeded = False  # whether the last attempt succeeded
        self._doing, self._retry_s = doing, retry_s
        self._last: BaseException | None = None
        self._again_s = 0.0
        self._breaker = CircuitBreaker(
            fail_max=FAILURES_TO_OPEN, reset_timeout=retry_s, listeners=[self], name=doing, throw_new_error_on_trip=False
        )

    @property
    def state(self) -> str:
        """Return "closed" (working), "open" or "half-open"."""
        return self._breaker.current_state

    def attempt(self, operation: Callable[[], object]) -> float:
        """Run the operation if allowed. Return the seconds until the next attempt, 0 after success. Never raises."""
        if self.state == STATE_OPEN:
            # Monotonic clock: pybreaker uses the wall clock, which may be set back by hours.
            left_s = self._again_s - time.monotonic()
            if left_s > 0:
                return left_s
            self._breaker.half_open()
        try:
            self._breaker.call(operation)
        # Any exception: the thread must continue whatever fails.
        except Exception as error:
            self.succeeded = False
            if not isinstance(error, redis.RedisError | OSError):
                logger.exception("%s: unexpected error", self._doing)
            if self.state != STATE_OPEN:
                return min(_SOON_S, self._retry_s)
            self._again_s = time.monotonic() + self._retry_s
            return self._retry_s
        self.succeeded = True
        return 0.0

    def failure(self, cb: CircuitBreaker, exc: BaseException) -> None:
        """Count a failure; called by pybreaker."""
        self.failures[failure_kind(exc)] += 1
        self._last = exc

    def state_change(self, cb: CircuitBreaker, old_state: Any, new_state: Any) -> None:
        """Log the start and the end of an outage, but not the attempts between; called by pybreaker."""
        if old_state.name == STATE_CLOSED and new_state.name == STATE_OPEN:
            assert self._last is not None
            words = " ".join(str(self._last).split())[:_MESSAGE_CHARS]
            logger.warning(
                "%s failed: %s (%s: %s); continuing without it, retrying every %g s",
                self._doing, failure_kind(self._last), type(self._last).__name__, words, self._retry_s,
            )  # fmt: skip
            self.opened += 1  # after the log line, so that a waiter for the counter finds it
        elif new_state.name == STATE_CLOSED:
            logger.info("%s: works again", self._doing)


def failure_kind(error: BaseException) -> str:
    """Return the kind of an error, as a metric label: ``timeout`` for ``redis.TimeoutError``."""
    kinds: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
        ((redis.TimeoutError, TimeoutError), "timeout"),
        ((redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError), "refused"),
        (redis.exceptions.OutOfMemoryError, "full"),
        (redis.ReadOnlyError, "read-only"),
        ((redis.InvalidResponse, redis.DataError), "nonsense"),
        ((redis.ConnectionError, OSError), "connection"),
        (redis.ResponseError, _answer_kind(str(error))),
        (redis.RedisError, "other"),
    )
    return next((name for kind, name in kinds if isinstance(error, kind)), "internal")


def _answer_kind(message: str) -> str:
    """Return the kind of an error inside a script, which arrives as text."""
    for word, name in (("OOM", "full"), ("READONLY", "read-only"), ("WRONGTYPE", "wrong type"), ("wrong kind", "wrong type"),
                       ("NOPERM", "refused"), ("permission", "refused")):  # fmt: skip
        if word in message:
            return name
    return "other"
