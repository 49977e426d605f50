"""Limits that Ray Serve lacks: HTTP/1.1 limits in its proxies, and a limit on unread bodies in proxies and API replicas."""

# A proxy calls the function named by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH before it creates its server. Private parts of
# Ray: a proxy keeps a body in a `MessageQueue`, a replica in an `ASGIReceiveProxy`; each is looked up in its module.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve._private import proxy, replica
from ray.serve._private.http_util import ASGIReceiveProxy, MessageQueue
from starlette.middleware import Middleware
from starlette.types import Message, Scope
from uvicorn.config import HTTP_PROTOCOLS

from outrider.cluster.admission.http_limits import HELD, LimitedProtocol

AHEAD_BYTES = 256 * 1024  # unread bytes of a body at which uvicorn's flow control stops the client
_MESSAGE_BYTES = 512  # memory of a message in addition to its piece of the body


class BoundedQueue(MessageQueue):
    """Serve's queue of a proxy for a client's messages, which waits while ``AHEAD_BYTES`` are unread by the API."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._taken = 0, asyncio.Event()

    async def __call__(self, message: Message) -> None:
        """Add a message once there is room."""
        while self._bytes >= AHEAD_BYTES:
            self._taken.clear()
            await self._taken.wait()
        await super().__call__(message)
        self._count(len(message.get("body", b"")) + _MESSAGE_BYTES)

    def get_messages_nowait(self) -> list[Message]:
        """Return all messages."""
        self._count(-self._bytes)
        return list(super().get_messages_nowait())

    def close(self) -> None:
        """Accept no more messages: the client has left, or the request has ended."""
        super().close()
        self._count(-self._bytes)

    def _count(self, size: int) -> None:
        self._bytes += size
        HELD.bytes += size
        self._taken.set()


class BoundedReceive(ASGIReceiveProxy):
    """Serve's ``receive`` of a replica, which stops fetching while ``AHEAD_BYTES`` are unread."""

    def __init__(self, scope: Scope, metadata: Any, fetch: Callable[[Any], Awaitable[bytes]]) -> None:
        super().__init__(scope, metadata, self._fetch)
        self._fetch_now, self._bytes, self._read = fetch, 0, asyncio.Event()

    async def __call__(self) -> Message:
        """Return the next message once there is one."""
        message: Message = await super().__call__()
        if self.queue.empty():
            self._bytes = 0
            self._read.set()
        return message

    async def _fetch(self, metadata: Any) -> bytes:
        while self._bytes >= AHEAD_BYTES:
            self._read.clear()
            await self._read.wait()
        pickled = await self._fetch_now(metadata)
        self._bytes += len(pickled)
        return pickled


def use_http_limits() -> list[Middleware]:
    """Set the limits of this process's future proxy; return no middlewares, which Serve expects."""
    HTTP_PROTOCOLS["auto"] = f"{LimitedProtocol.__module__}:{LimitedProtocol.__name__}"
    proxy.MessageQueue = BoundedQueue  # type: ignore[misc]  # replaces a class
    return []


def use_bounded_receive() -> None:
    """Set the limit of unread bodies in this replica."""
    replica.ASGIReceiveProxy = BoundedReceive  # type: ignore[misc,assignment]  # replaces a class
