"""Limits of HTTP/1.1 that count without a key: the size of heads, the time for them, and what connections hold unread.

Neither Ray Serve nor uvicorn has any. Each server of a process, Serve's proxy and the operator's port, speaks this protocol. The
size of a body, and the time for it, are the application's (``middleware``).
"""

from __future__ import annotations

import json
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cluster.http.errors import ApiError

HEADER_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 * 1024  # of a request line with its headers; of trailers and the lines of chunks as well
MAX_HEADERS = 256  # trailers among them
MAX_TARGET_BYTES = 16 * 1024
MAX_HELD_BYTES = 256 * 2**20  # of heads and bodies that the connections of a process hold
SMALL_BYTES = 16 * 1024  # who holds no more is not refused for what others hold
_PIECE_BYTES, _BODY_PIECE_BYTES = 512, 4096  # parsed at once: what is asked after a request in its piece is parsed ahead
_MAX_AHEAD = 32  # requests that are parsed ahead: then the connection is closed after their answers
_CHUNK_BYTES = 16  # of the line before a chunk and the end after it
_LINGER_S = 2.0  # in which a client may read why it was refused, while it still sends


@dataclass(slots=True)
class HeldBytes:
    """What this process holds of requests."""

    bytes: int = 0


HELD = HeldBytes()


class _Flow(FlowControl):
    """uvicorn's, but nothing is read while a connection holds enough of later requests."""

    def __init__(self, transport: Transport, is_full: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_full = is_full

    def resume_reading(self) -> None:
        if not self._is_full():
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 within the limits above.

    Heads have to come in time: from the connection's first moment, later from a request's first byte, and so have trailers and
    what is left of a body after its answer. What follows a request is parsed once that one is answered. Nothing is upgraded.
    """

    header_timeout_s = HEADER_TIMEOUT_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ws_protocol_class = None
        self._deadline: TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the request that the application answers, or has answered last
        self._is_over = False  # nothing that comes is looked at any more
        self._in_message = self._in_head = False
        self._fault: ApiError | None = None  # raised in a callback of the parser
        self._rest = b""  # has come and is not parsed
        self._head_bytes = 0  # of the request that is answered
        self._framing_bytes = 0  # since a message began, or its head ended, that are no body
        self._header_count = 0
        self._held_bytes = 0  # as counted in ``HELD``

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's does
        """Wait for the first request."""
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: len(self._rest) > SMALL_BYTES)
        self._expect(self.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is answered, and hold nothing any more."""
        self._forget()
        if self._is_answering and self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._is_over, self._rest, self._head_bytes, self._framing_bytes = True, b"", 0, 0
        HELD.bytes -= self._held_bytes
        self._held_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what has come, as far as the limits and earlier requests allow."""
        self._unset_keepalive_if_required()
        if self._is_over:
            return
        if self._deadline is None and not self._is_answering:
            self._expect(self.header_timeout_s)
        self._parse(self._rest + data)

    def on_response_complete(self) -> None:
        """Go on with what came meanwhile."""
        rest, self._rest, self._head_bytes = self._rest, b"", 0
        super().on_response_complete()
        if self.transport.is_closing() or self._is_over:
            return
        if rest:
            self._unset_keepalive_if_required()
        if self._in_message and self._deadline is None:
            self._expect(self.header_timeout_s)
        self._parse(rest)

    def on_message_begin(self) -> None:
        """Count anew."""
        if len(self.pipeline) >= _MAX_AHEAD:
            self._fail(ApiError(400, "too many requests are sent ahead of their answers", code="invalid_http"))
        self._in_message = self._in_head = True
        self._header_count = self._framing_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request's target."""
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._fail(ApiError(414, f"the URL has more than {MAX_TARGET_BYTES} bytes: shorten it", code="url_too_long"))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. A trailer is counted and left out: the application may have read the headers by now."""
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            self._fail(_too_large(f"the request has more than {MAX_HEADERS} headers"))
        if self._in_head:
            super().on_header(name, value)
        elif self._deadline is None:
            self._expect(self.header_timeout_s)

    def on_headers_complete(self) -> None:
        """Start the request, or put it behind the one that is answered."""
        self._forget()
        super().on_headers_complete()
        self._in_head, self._head_bytes, self._framing_bytes = False, self._framing_bytes, 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """Allow each chunk its line."""
        self._framing_bytes -= _CHUNK_BYTES

    def on_message_complete(self) -> None:
        """Wait for the next head where the answer is there already."""
        self._in_message = False
        self._forget()
        if not self._is_answering:
            self._expect(self.header_timeout_s)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _parse(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        while at < len(view) and not self._is_over and (self._in_message or not self._is_answering) and not self.pipeline:
            piece = view[at : at + (_BODY_PIECE_BYTES if self._in_message and not self._in_head else _PIECE_BYTES)]
            at += len(piece)
            self._framing_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:  # what follows is of another protocol, or a body that the parser has left out
                self._end_after_answers()
            except httptools.HttpParserError:
                self._refuse(self._fault or ApiError(400, "this is not HTTP/1.1", code="invalid_http"))
            self._framing_bytes = max(0, self._framing_bytes)
            if self._framing_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large(f"the head of the request, or of a chunk, has more than {MAX_HEAD_BYTES} bytes"))
        self._rest = b"" if self._is_over else bytes(view[at:])
        if len(self._rest) > SMALL_BYTES:
            self.flow.pause_reading()
        self._weigh()
        if HELD.bytes > MAX_HELD_BYTES and self._held_bytes > SMALL_BYTES:
            self._give_way()

    def _give_way(self) -> None:
        """Refuse this request where connections do hold too much."""
        for other in self.connections:
            if isinstance(other, LimitedProtocol):
                other._weigh()  # the application may have taken its body
        if HELD.bytes > MAX_HELD_BYTES:
            message = "connections hold too many bytes that are not read yet: try again"
            self._refuse(ApiError(503, message, code="connections_full", headers={"Retry-After": "1"}))
            self._weigh()

    def _weigh(self) -> None:
        body_bytes = 0 if self.cycle is None else len(self.cycle.body)
        held = self._head_bytes + self._framing_bytes + len(self._rest) + body_bytes
        HELD.bytes += held - self._held_bytes
        self._held_bytes = held

    def _fail(self, error: ApiError) -> NoReturn:
        self._fault = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, after earlier requests were answered, and close."""
        if self._is_over:
            return
        in_body, cycle = self._in_message and not self._in_head, self.cycle
        if in_body and self.pipeline:
            self.pipeline.popleft()  # the newest
        elif in_body:
            if cycle.response_started:  # the answer is there, or cannot become another
                self.transport.close()
            cycle.disconnected, cycle.body = True, bytearray()
            cycle.message_event.set()
        self._end_after_answers()
        if self.transport.is_closing() or (self._is_answering and not (in_body and cycle.disconnected)):
            return
        body = json.dumps(error.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **error.headers}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{name}: {headers[name]}" for name in headers)]
        self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._expect(_LINGER_S)

    def _end_after_answers(self) -> None:
        """Look at nothing that comes any more, and close once what was asked is answered."""
        self._is_over, self._framing_bytes, self._rest = True, 0, b""
        self.flow.resume_reading()
        self._forget()
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is not None:
            last.keep_alive = False

    def _expect(self, timeout_s: float) -> None:
        self._forget()
        self._deadline = self.loop.call_later(timeout_s, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _too_large(fault: str) -> ApiError:
    return ApiError(431, f"{fault}: send fewer, or shorter ones", code="headers_too_large")
