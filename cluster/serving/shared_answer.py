"""One answer for all who ask the same at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

FRESH_S = 0.5  # in which an answer is given again


class SharedAnswer(Generic[T]):
    """A question that is asked once at a time, and whose answer is given to all who ask meanwhile and shortly after.

    So probes of any number of clients cost the engines no more than those of one. For one event loop.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            ask: the question; what it raises is given to all as well.
            clock: in seconds.
        """
        self._ask, self._clock = ask, clock
        self._asked: asyncio.Task[T] | None = None
        self._answered_s = 0.0

    async def __call__(self) -> T:
        """Return the answer; a caller that leaves ends nobody's question."""
        asked = self._asked
        if asked is None or (asked.done() and self._clock() - self._answered_s >= FRESH_S):
            asked = self._asked = asyncio.create_task(self._answer())
        return await asyncio.shield(asked)

    async def _answer(self) -> T:
        try:
            return await self._ask()
        finally:
            self._answered_s = self._clock()
