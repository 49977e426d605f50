"""One answer for simultaneous callers of the same question."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

FRESH_S = 0.5  # seconds for which an answer is reused


class SharedAnswer(Generic[T]):
    """Asynchronous call whose result or exception is shared by all callers meanwhile and shortly after. For one event loop."""

    def __init__(self, ask: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._asked: asyncio.Task[T] | None = None
        self._answered_s = 0.0

    async def __call__(self) -> T:
        """Return the answer. A caller that is cancelled does not cancel the call."""
        asked = self._asked
        if asked is None or (asked.done() and self._clock() - self._answered_s >= FRESH_S):
            asked = self._asked = asyncio.create_task(self._answer())
        return await asyncio.shield(asked)

    async def _answer(self) -> T:
        try:
            return await self._ask()
        finally:
            self._answered_s = self._clock()
