"""Draining: a server that stops refuses new requests and lets running ones end within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cluster.http.errors import ApiError, is_anthropic

RETRY_S = 5  # seconds until another server, or this one restarted, may answer
_CLOSE_S = 2.0  # seconds for ended requests to free their slots
_PUBLIC = ("/v1/", "/tokenize", "/detokenize", "/ready")  # refused paths; /health and the operator's routes stay available


@dataclass(eq=False, slots=True)
class _Exchange:
    task: asyncio.Task[object] | None
    ended: bool = False  # cancelled by this server before its answer was complete
    began: bool = False  # the answer has started
    is_stream: bool = False

    def note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.began = True
            self.is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")


class Draining:
    """Registry of the requests that are being answered. For one event loop."""

    def __init__(self) -> None:
        self._exchanges: set[_Exchange] = set()
        self._changed = asyncio.Event()
        self.begun = False  # new requests are refused

    @property
    def running(self) -> int:
        """Return the number of public requests without a complete answer."""
        return len(self._exchanges)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Wrap the application: register public requests, and refuse them once ``stop`` was called."""

        async def entered(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
            if scope["type"] != "http" or not path.startswith(_PUBLIC):
                await app(scope, receive, send)
            elif self.begun:
                await _shutting_down().response(scope)(scope, receive, send)
            else:
                await self._answer(app, scope, receive, send)

        return entered

    async def stop(self, timeout_s: float) -> int:
        """Refuse new requests, wait for running ones, and cancel the rest after ``timeout_s``; return the number cancelled."""
        # A cancelled request gets a 503 or, if it streams, an event with the error, so that clients notice the incomplete answer.
        self.begun = True
        await self._until_idle(timeout_s)
        late = [exchange for exchange in self._exchanges if exchange.task is not None]
        for exchange in late:
            exchange.ended = True
            exchange.task.cancel()  # type: ignore[union-attr]  # not None, as checked above
        await self._until_idle(_CLOSE_S)
        return len(late)

    async def _until_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._exchanges:
                    self._changed.clear()
                    await self._changed.wait()

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(asyncio.current_task())

        async def noted(message: Message) -> None:
            exchange.note(message)
            await send(message)

        self._exchanges.add(exchange)
        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError:
            if not exchange.ended or exchange.task is None:
                raise  # the client has left
            # This cancellation is handled here; the task must not count as cancelled any more while it sends the error.
            exchange.task.uncancel()
            await _break_off(exchange, scope, receive, send)
        finally:
            self._exchanges.discard(exchange)
            self._changed.set()


def _shutting_down() -> ApiError:
    message = "the server is shutting down; try again, on another server if possible"
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": str(RETRY_S)})


async def _break_off(exchange: _Exchange, scope: Scope, receive: Receive, send: Send) -> None:
    """End an incomplete answer with an error. One that has begun and is no stream ends before its declared length."""
    error = _shutting_down().response(scope)
    if not exchange.began:
        await error(scope, receive, send)
    elif exchange.is_stream:
        event = b"event: error\n" if is_anthropic(scope) else b""
        await send({"type": "http.response.body", "body": event + b"data: " + bytes(error.body) + b"\n\n"})
