"""A circuit breaker around what a thread asks of Redis: failures are counted by kind, an outage makes two lines in the log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis
from pybreaker import STATE_CLOSED, STATE_OPEN, CircuitBreaker, CircuitBreakerListener

logger = logging.getLogger(__name__)

FAILURES_TO_OPEN = 2  # in a row: one may be a connection that was closed while nobody used it
_SOON_S = 0.02  # before the attempt after a failure that opens nothing
_MESSAGE_CHARS = 160  # of an error in the log


class Guard(CircuitBreakerListener):
    """One thread's way to Redis. Open: nothing is asked for ``retry_s``, then one attempt decides.

    pybreaker holds a lock while the guarded operation runs, so two threads have a guard each; reading and writing also fail apart
    from each other: a Redis that is full can still be read.
    """

    def __init__(self, doing: str, retry_s: float) -> None:
        """
        Args:
            doing: for the log, such as "writing to Redis".
            retry_s: how long Redis is left alone after failures.
        """
        self.failures: Counter[str] = Counter()  # by kind
        self.opened = 0  # times
        self.succeeded = False  # at the last attempt
        self._doing, self._retry_s = doing, retry_s
        self._last: BaseException | None = None
        self._again_s = 0.0
        self._breaker = CircuitBreaker(
            fail_max=FAILURES_TO_OPEN, reset_timeout=retry_s, listeners=[self], name=doing, throw_new_error_on_trip=False
        )

    @property
    def state(self) -> str:
        """ "closed" (all is well), "open" or "half-open"."""
        return self._breaker.current_state

    def attempt(self, operation: Callable[[], object]) -> float:
        """Runs the operation if it may; seconds to wait before the next attempt, 0 if this one succeeded. It never raises."""
        if self.state == STATE_OPEN:
            # By the monotonic clock: pybreaker's own is the wall clock, which may be set back by hours.
            left_s = self._again_s - time.monotonic()
            if left_s > 0:
                return left_s
            self._breaker.half_open()
        try:
            self._breaker.call(operation)
        # Redis and the network fail in ways of their own, and whatever it is, the thread that serves this process must go on.
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
        """Counts; called by pybreaker."""
        self.failures[failure_kind(exc)] += 1
        self._last = exc

    def state_change(self, cb: CircuitBreaker, old_state: Any, new_state: Any) -> None:
        """Logs the beginning and the end of an outage, but not the attempts in between; called by pybreaker."""
        if old_state.name == STATE_CLOSED and new_state.name == STATE_OPEN:
            assert self._last is not None
            words = " ".join(str(self._last).split())[:_MESSAGE_CHARS]
            logger.warning(
                "%s: %s (%s: %s); going on without, next attempt every %g s",
                self._doing, failure_kind(self._last), type(self._last).__name__, words, self._retry_s,
            )  # fmt: skip
            self.opened += 1  # who waits for it finds the line said
        elif new_state.name == STATE_CLOSED:
            logger.info("%s: works again", self._doing)


def failure_kind(error: BaseException) -> str:
    """One of a few words for what went wrong, fit for the label of a counter.

    >>> failure_kind(redis.TimeoutError())
    'timeout'
    """
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
    """Errors inside a script come as text."""
    for word, name in (("OOM", "full"), ("READONLY", "read-only"), ("WRONGTYPE", "wrong type"), ("wrong kind", "wrong type"),
                       ("NOPERM", "refused"), ("permission", "refused")):  # fmt: skip
        if word in message:
            return name
    return "other"
