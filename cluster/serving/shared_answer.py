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
        self._pending: asyncio.Task[T] | None = None
        self._answered_s = 0.0

    async def __call__(self) -> T:
        """Return the answer."""
        answer = self._pending
        if answer is None or (answer.done() and self._clock() - self._answered_s >= FRESH_S):
            answer = self._pending = asyncio.create_task(self._answer())
        # One caller's cancellation must not end the call for the others.
        return await asyncio.shield(answer)

    async def _answer(self) -> T:
        try:
            return await self._ask()
        finally:
            self._answered_s = self._clock()
