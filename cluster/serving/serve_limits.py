"""Limits that Serve is given: those of HTTP/1.1 in its proxies, and of bodies that nobody has read yet, there and in the API.

A proxy calls what the environment's ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names before it makes its server. Private to
Ray is that a proxy keeps a body in a ``MessageQueue``, and a replica in an ``ASGIReceiveProxy``: each looks it up in its module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve._private import proxy, replica
from ray.serve._private.http_util import ASGIReceiveProxy, MessageQueue
from starlette.middleware import Middleware
from starlette.types import Message, Scope
from uvicorn.config import HTTP_PROTOCOLS

from cluster.admission.http_limits import HELD, LimitedProtocol

AHEAD_BYTES = 256 * 1024  # of a body that nobody has read: then uvicorn's flow control stops the client
_MESSAGE_BYTES = 512  # that a message takes beside its piece of the body


class BoundedQueue(MessageQueue):
    """Serve's queue of what a client sends to a proxy, which waits while it holds ``AHEAD_BYTES`` that the API has not taken."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._taken = 0, asyncio.Event()

    async def __call__(self, message: Message) -> None:
        """Put a message into the queue, once there is room."""
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
        """Take no message any more: the client has left, or the request has ended."""
        super().close()
        self._count(-self._bytes)

    def _count(self, size: int) -> None:
        self._bytes += size
        HELD.bytes += size
        self._taken.set()


class BoundedReceive(ASGIReceiveProxy):
    """Serve's ``receive`` of a replica, which fetches no more while it holds ``AHEAD_BYTES`` that nobody has read."""

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
    """Set the limits of the proxy that this process will start; Serve expects middlewares, and there are none."""
    HTTP_PROTOCOLS["auto"] = f"{LimitedProtocol.__module__}:{LimitedProtocol.__name__}"
    proxy.MessageQueue = BoundedQueue  # type: ignore[misc]  # a class in place of another
    return []


def use_bounded_receive() -> None:
    """Set the limit of bodies that this replica has not read yet."""
    replica.ASGIReceiveProxy = BoundedReceive  # type: ignore[misc,assignment]  # a class in place of another
