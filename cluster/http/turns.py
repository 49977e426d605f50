"""Threads that API keys take in turns, so that many large bodies of one key keep no other key waiting."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from cluster.admission.rate_limits import BUSY_S, too_many
from cluster.http.errors import ApiError

PLACES = 3  # threads of one kind
LEAST_BYTES = 1 << 16  # that a request counts for while it waits, however short its body
_MOST_WAITING_BYTES = 64 << 20  # of the bodies of one key that wait: eight of the default size

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of the request that is being answered, and the size of its body."""

    tenant: str | None = None
    key: str = ""  # hash of the API key; empty for all senders without one
    size: int = 0  # bytes of the body, which bound all texts in it


_NOBODY = Sender()
SENDER: ContextVar[Sender] = ContextVar("the sender of the request that is being answered", default=_NOBODY)


def _give_way(nice: int) -> None:
    """Lower the priority of this thread alone: on Linux each has its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + nice)


class Turns:
    """A pool of threads. A key has one of them at a time, the keys of a tenant all but one where there are several.

    Tenants take free threads in turns, and so do the keys of each tenant. A thread is taken until its work has ended, also where
    nobody waits for the result any more. For one event loop.
    """

    def __init__(
        self, name: str, places: int = PLACES, refuse: Callable[[ApiError], ApiError] = lambda error: error, nice: int = 0
    ) -> None:
        """
        Args:
            name: of its threads.
            places: how many there are.
            refuse: counts the error.
            nice: by so much they give way to other threads and processes.
        """
        self._places, self._refuse = places, refuse
        self._threads = ThreadPoolExecutor(places, name, functools.partial(_give_way, nice))
        self._working: set[tuple[str | None, str]] = set()
        self._waiting: dict[str | None, dict[str, deque[asyncio.Future[None]]]] = {}  # tenants, then keys, next ones first
        self._waiting_bytes: Counter[tuple[str | None, str]] = Counter()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread, when the request that is being answered has its turn, and return its result.

        Raises:
            ApiError: 429, too much of the key waits already; and what the function raises.
        """
        sender, loop = SENDER.get(), asyncio.get_running_loop()
        who = sender.tenant, sender.key
        await self._turn(who, max(sender.size, LEAST_BYTES))
        future = self._threads.submit(work, *args, **kwargs)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._leave, who)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    async def _turn(self, who: tuple[str | None, str], size: int) -> None:
        if self._waiting_bytes[who] and self._waiting_bytes[who] + size > _MOST_WAITING_BYTES:
            message = "too many texts of requests with this API key wait for their turn: wait for answers before you send more"
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
                self._leave(who)  # the turn had come
            raise
        finally:
            self._waiting_bytes[who] -= size
            if not self._waiting_bytes[who]:
                del self._waiting_bytes[who]

    def _leave(self, who: tuple[str | None, str]) -> None:
        self._working.remove(who)
        self._give()

    def _give(self) -> None:
        """Give free threads to those whose turn it is. Who gets one is the last in the next round."""
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
        taken, most = Counter(tenant for tenant, _ in self._working), max(1, self._places - 1)
        ready = ((tenant, key) for tenant, keys in self._waiting.items() if taken[tenant] < most for key in keys)
        return next((who for who in ready if who not in self._working), None)

    def _remove(self, who: tuple[str | None, str], turn: asyncio.Future[None]) -> None:
        """Forget a turn whose request has left before it came."""
        tenant, key = who
        keys = self._waiting.get(tenant, {})
        if turn in keys.get(key, ()):
            keys[key].remove(turn)
            if not keys[key]:
                del keys[key]
            if not keys:
                del self._waiting[tenant]
