"""Thread pool with fair scheduling by API key, so that many large bodies of one key do not delay other keys."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from outrider.cluster.admission.rate_limits import BUSY_S, too_many
from outrider.cluster.http.errors import ApiError

PLACES = 3  # threads per pool
LEAST_BYTES = 1 << 16  # minimum size that a waiting request counts for
_MOST_WAITING_BYTES = 64 << 20  # waiting bodies of one key: eight of the default maximum size

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sender:
    """Sender of the current request, and the size of its body."""

    tenant: str | None = None
    key: str = ""  # hash of the API key; empty without one
    size: int = 0  # bytes of the body


_NOBODY = Sender()
SENDER: ContextVar[Sender] = ContextVar("the sender of the request that is being answered", default=_NOBODY)


def _lower_priority(nice: int) -> None:
    """Lower the priority of this thread. Only on Linux do threads have their own."""
    if nice and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nice)


class Turns:
    """Thread pool with round-robin scheduling by tenant, then API key, in one event loop. ``refuse`` counts refused requests."""

    def __init__(
        self, name: str, places: int = PLACES, refuse: Callable[[ApiError], ApiError] = lambda error: error, nice: int = 0
    ) -> None:
        self._places, self._refuse = places, refuse
        self._threads = ThreadPoolExecutor(places, name, functools.partial(_lower_priority, nice))
        self._working: set[tuple[str | None, str]] = set()
        self._waiting: dict[str | None, dict[str, deque[asyncio.Future[None]]]] = {}  # by tenant, then key, in order of turns
        self._waiting_bytes: Counter[tuple[str | None, str]] = Counter()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread when it is the request's turn. Raises its errors, or ApiError (429) for a full queue."""
        sender, loop = SENDER.get(), asyncio.get_running_loop()
        who = sender.tenant, sender.key
        await self._turn(who, max(sender.size, LEAST_BYTES))
        future = self._threads.submit(work, *args, **kwargs)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing is waiting
                loop.call_soon_threadsafe(self._leave, who)

        # The thread is held until its work ends, even if the request was cancelled.
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    async def _turn(self, who: tuple[str | None, str], size: int) -> None:
        if self._waiting_bytes[who] and self._waiting_bytes[who] + size > _MOST_WAITING_BYTES:
            message = "too many texts of requests with this API key are waiting: wait for responses before you send more"
            raise self._refuse(too_many(message, "too_many_texts", BUSY_S))
        tenant, key = who
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {}).setdefault(key, deque()).append(turn)
        self._waiting_bytes[who] += size
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(who, turn)
            else:
                self._leave(who)  # the turn was granted already
            raise
        finally:
            self._waiting_bytes[who] -= size
            if not self._waiting_bytes[who]:
                del self._waiting_bytes[who]

    def _leave(self, who: tuple[str | None, str]) -> None:
        self._working.remove(who)
        self._give()

    def _give(self) -> None:
        """Assign free threads to the next keys in turn, and move those keys to the end."""
        while (who := self._next()) is not None:
            tenant, key = who
            keys = self._waiting.pop(tenant)
            queue = keys.pop(key)
            turn = queue.popleft()
            if queue:
                keys[key] = queue
            if keys:
                self._waiting[tenant] = keys
            if not turn.cancelled():
                self._working.add(who)
                turn.set_result(None)

    def _next(self) -> tuple[str | None, str] | None:
        if len(self._working) == self._places:
            return None
        # The keys of a tenant hold at most all threads but one (at least one), and each key holds one: other tenants find a
        # thread.
        taken, most = Counter(tenant for tenant, _ in self._working), max(1, self._places - 1)
        ready = ((tenant, key) for tenant, keys in self._waiting.items() if taken[tenant] < most for key in keys)
        return next((who for who in ready if who not in self._working), None)

    def _remove(self, who: tuple[str | None, str], turn: asyncio.Future[None]) -> None:
        tenant, key = who
        keys = self._waiting.get(tenant, {})
        if turn in keys.get(key, ()):
            keys[key].remove(turn)
            if not keys[key]:
                del keys[key]
            if not keys:
                del self._waiting[tenant]
