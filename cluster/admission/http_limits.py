"""Limits of HTTP/1.1 that apply without a key: size and time of heads, and unread bytes held by connections."""

# Neither Ray Serve nor uvicorn has them. Serve's proxy and the operator's port use this protocol; `middleware` limits bodies.

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

from outrider.cluster.http.errors import ApiError

HEADER_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 * 1024  # request line with headers; also trailers and chunk lines
MAX_HEADERS = 256  # including trailers
MAX_TARGET_BYTES = 16 * 1024
MAX_HELD_BYTES = 256 * 2**20  # heads and bodies held by the connections of a process
SMALL_BYTES = 16 * 1024  # a connection that holds no more is never refused because of the others
_PIECE_BYTES, _BODY_PIECE_BYTES = 512, 4096  # bytes parsed at once; a pipelined request in the same piece is parsed ahead
_MAX_AHEAD = 32  # requests parsed ahead; more are refused, and the connection closes after the answers
_CHUNK_BYTES = 16  # allowance for the line before a chunk and the line end after it
_LINGER_S = 2.0  # seconds in which a refused client that is still sending can read the answer


@dataclass(slots=True)
class HeldBytes:
    """Bytes of requests held by this process."""

    bytes: int = 0


HELD = HeldBytes()


class _Flow(FlowControl):
    """uvicorn's flow control, which also pauses while a connection holds enough of later requests."""

    def __init__(self, transport: Transport, is_full: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_full = is_full

    def resume_reading(self) -> None:
        if not self._is_full():
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with the limits above."""

    # A head must arrive within the timeout after the connection opens, or after the first byte of a later request; so must
    # trailers and the rest of a body after its answer. Pipelined requests are parsed once the previous one is answered.

    header_timeout_s = HEADER_TIMEOUT_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # No upgrades: uvicorn would hand the connection to another protocol, which has none of these limits.
        self.ws_protocol_class = None
        self._deadline: TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # the request that the application answers, or has answered last
        self._is_over = False  # all further input is ignored
        self._in_message = self._in_head = False
        self._fault: ApiError | None = None  # raised in a parser callback
        self._rest = b""  # received but not parsed
        self._head_bytes = 0  # head of the request that is being answered
        self._framing_bytes = 0  # bytes outside the body since the message began or its head ended
        self._header_count = 0
        self._held_bytes = 0  # this connection's share of ``HELD``

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # like uvicorn's
        """Wait for the first request."""
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: len(self._rest) > SMALL_BYTES)
        self._expect(self.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the running request and release all held bytes."""
        self._forget()
        if self._is_answering and self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._is_over, self._rest, self._head_bytes, self._framing_bytes = True, b"", 0, 0
        HELD.bytes -= self._held_bytes
        self._held_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse the received data as far as the limits and earlier requests allow."""
        self._unset_keepalive_if_required()
        if self._is_over:
            return
        if self._deadline is None and not self._is_answering:
            self._expect(self.header_timeout_s)
        self._parse(self._rest + data)

    def on_response_complete(self) -> None:
        """Continue with the data received in the meantime."""
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
        """Reset the counters of a message."""
        if len(self.pipeline) >= _MAX_AHEAD:
            self._fail(ApiError(400, "too many pipelined requests", code="invalid_http"))
        self._in_message = self._in_head = True
        self._header_count = self._framing_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Add a piece of the request's target."""
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._fail(ApiError(414, f"the URL has more than {MAX_TARGET_BYTES} bytes: shorten it", code="url_too_long"))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; only count a trailer."""
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            self._fail(_too_large(f"the request has more than {MAX_HEADERS} headers"))
        # Trailers are dropped: the application may have read the headers by now.
        if self._in_head:
            super().on_header(name, value)
        elif self._deadline is None:
            self._expect(self.header_timeout_s)

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind the one that is being answered."""
        self._forget()
        super().on_headers_complete()
        self._in_head, self._head_bytes, self._framing_bytes = False, self._framing_bytes, 0

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body."""
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """Add the allowance for a chunk's lines."""
        self._framing_bytes -= _CHUNK_BYTES

    def on_message_complete(self) -> None:
        """Wait for the next head if the answer is already complete."""
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
            except httptools.HttpParserUpgrade:  # what follows is another protocol, or a body that the parser skipped
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
        """Refuse this request if connections still hold too much after an update of their counts."""
        for other in self.connections:
            if isinstance(other, LimitedProtocol):
                other._weigh()  # the application may have read its body meanwhile
        if HELD.bytes > MAX_HELD_BYTES:
            message = "connections hold too many unread bytes: try again"
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
        """Answer with an error once earlier requests are answered, then close."""
        if self._is_over:
            return
        in_body, cycle = self._in_message and not self._in_head, self.cycle
        if in_body and self.pipeline:
            self.pipeline.popleft()  # the newest
        elif in_body:
            if cycle.response_started:  # the answer has started and cannot be replaced
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
        # Not closed at once: a client that is still sending would get a reset and lose the answer.
        self.transport.write_eof()
        self._expect(_LINGER_S)

    def _end_after_answers(self) -> None:
        """Ignore further input, and close once all requests are answered."""
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
    return ApiError(431, f"{fault}: send fewer or shorter headers", code="headers_too_large")
