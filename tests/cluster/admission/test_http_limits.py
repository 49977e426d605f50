"""Limits of HTTP/1.1 without a key, over real sockets: heads, trailers, chunks, pipelines, and what connections hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from outrider.cluster.admission import http_limits
from outrider.cluster.admission.http_limits import HELD, MAX_HEADERS, SMALL_BYTES, LimitedProtocol
from tests.cluster.circle import served
from tests.helpers.waiting import eventually

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
READ_BYTES = 256 * 1024  # the most that an event loop reads at once
ANSWER = b"HTTP/1.1 200 OK"


class App:
    """An application that counts its requests, keeps what they sent, and answers when it may."""

    def __init__(self, loop: str) -> None:
        self.loop = loop
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []
        self.left = 0  # clients that left before they were answered
        self.reads, self.may_answer = True, True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body = b""
        more = self.reads
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if message["type"] == "http.disconnect":
                self.left += 1
                return
        self.bodies.append(body)
        gone = asyncio.create_task(receive()) if self.reads else None
        while not self.may_answer and (gone is None or not gone.done()):
            await asyncio.sleep(0.01)
        self.left += gone is not None and gone.done()
        await PlainTextResponse("answer")(scope, receive, send)


class Spy(LimitedProtocol):
    """The protocol, of which the test sees the connections."""

    made: list[Spy]

    def connection_made(self, transport: Any) -> None:
        self.made.append(self)
        super().connection_made(transport)


Connect = Callable[[], socket.socket]


@pytest.fixture(params=["asyncio", "uvloop"])
def app(request: pytest.FixtureRequest) -> App:
    return App(request.param)


@pytest.fixture
def connect(app: App) -> Iterator[Connect]:
    """Opens connections to the application; in the end nothing is held."""
    Spy.made = []
    with contextlib.ExitStack() as closing:
        url = closing.enter_context(served(app, http=Spy, loop=app.loop))  # type: ignore[arg-type]  # an ASGI application
        port = int(url.rpartition(":")[2])
        yield lambda: closing.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        app.may_answer = True
    assert HELD.bytes == 0


def everything(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):  # a server that closes with unread bytes resets the connection
        while piece := client.recv(65536):
            received += piece
    return received


def is_answered(client: socket.socket) -> bool:
    """Whether one answer comes whole."""
    received = b""
    while not received.endswith(b"answer") and (piece := client.recv(65536)):
        received += piece
    return received.startswith(ANSWER)


def refused(client: socket.socket) -> tuple[int, str]:
    """Status and code of the error that comes before the server closes."""
    head, _, body = everything(client).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def lines(count: int, value: bytes = b"1") -> bytes:
    return b"".join(b"x%d: %s\r\n" % (number, value) for number in range(count))


TOO_LARGE = (431, "headers_too_large")
HEADS = {
    "many headers": (b"GET / HTTP/1.1\r\n" + lines(MAX_HEADERS + 1) + b"\r\n", TOO_LARGE),
    "endless headers": (b"GET / HTTP/1.1\r\n" + lines(2**17), TOO_LARGE),
    "long headers": (b"GET / HTTP/1.1\r\n" + lines(100, b"v" * 1000) + b"\r\n", TOO_LARGE),
    "one value": (b"GET / HTTP/1.1\r\nx: " + b"v" * 2**21, TOO_LARGE),
    "one name": (b"GET / HTTP/1.1\r\n" + b"n" * 2**21, TOO_LARGE),
    "blank lines": (b"\r\n" * 2**17, TOO_LARGE),
    "URL": (b"GET /" + b"u" * 2**21, (414, "url_too_long")),
    "URL with a query": (b"GET /?" + b"q" * 20000 + b" HTTP/1.1\r\n\r\n", (414, "url_too_long")),
    "HTTP/1.0": (b"GET / HTTP/1.0\r\n" + lines(MAX_HEADERS + 1) + b"\r\n", TOO_LARGE),
    "folded": (b"GET / HTTP/1.1\r\nx: 1\r\n" + b" 2\r\n" * 2**17, (400, "invalid_http")),
    "chunk's extension": (CHUNKED + b"1;" + b"e" * 2**20, TOO_LARGE),
    "chunk's length": (CHUNKED + b"0" * 2**20, TOO_LARGE),
    "trailers": (CHUNKED + b"0\r\n" + lines(MAX_HEADERS + 1) + b"\r\n", TOO_LARGE),
    "long trailers": (CHUNKED + b"0\r\n" + lines(2, b"v" * 2**20), TOO_LARGE),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", (400, "invalid_http")),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_is_too_large_is_refused_and_the_connection_closed(app: App, connect: Connect, name: str) -> None:
    sent, error = HEADS[name]
    is_started = sent.startswith(b"POST")
    for before in (0, 1):  # requests on the same connection
        Spy.made, app.left, app.bodies = [], 0, []
        client = connect()
        for _ in range(before):
            client.sendall(GET)
            assert is_answered(client)
        client.sendall(sent)
        assert refused(client) == error
        eventually(lambda: app.left == is_started)  # the application is told that the body does not come
        assert len(app.bodies) == before
        (connection,) = Spy.made
        assert connection._header_count <= MAX_HEADERS + 1, "nothing more was parsed"


def test_large_heads_of_honest_clients_are_taken(app: App, connect: Connect) -> None:
    headers = b"Authorization: Bearer %s\r\nCookie: %s\r\n" % (b"k" * 8000, b"c" * 8000) + lines(100, b"v" * 100)
    client = connect()
    for _ in range(3):
        client.sendall(b"GET /%s?q=%s HTTP/1.1\r\nHost: a\r\n%s\r\n" % (b"p" * 4000, b"q" * 4000, headers))
        assert is_answered(client)
    for byte in GET:
        client.sendall(bytes([byte]))
    assert is_answered(client)
    assert len(app.scopes) == 4


def test_chunks_may_be_tiny_and_trailers_become_no_headers(app: App, connect: Connect) -> None:
    client = connect()
    for _ in range(2):
        client.sendall(CHUNKED + b"1\r\na\r\n" * 30000 + b"0\r\nAuthorization: Bearer late\r\n\r\n")
        assert is_answered(client)
    assert app.bodies == [b"a" * 30000] * 2
    assert all(dict(scope["headers"]).keys() == {b"host", b"transfer-encoding"} for scope in app.scopes)


def test_trailers_and_what_is_left_of_a_body_have_a_deadline(app: App, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spy, "header_timeout_s", 0.2)
    client = connect()
    client.sendall(CHUNKED + b"0\r\nx: 1\r\ny: ")
    assert everything(client) == b""
    eventually(lambda: app.left == 1)
    app.reads = False
    client = connect()
    client.sendall(CHUNKED + b"5\r\nab")
    assert everything(client).endswith(b"answer")


@pytest.mark.parametrize("body", [b"", b"Content-Length: 3000\r\n\r\n" + b"b" * 3000], ids=["GET", "POST"])
def test_a_pipeline_waits_unread_and_is_answered_in_order(app: App, connect: Connect, body: bytes) -> None:
    request = GET if not body else b"POST / HTTP/1.1\r\nHost: a\r\n" + body
    app.may_answer, count = False, 2**20 // len(request)
    client = connect()
    client.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        client.sendall(request * count)  # more than the kernel holds may be kept back
    eventually(lambda: bool(app.bodies))
    (connection,) = Spy.made
    eventually(lambda: connection.flow.read_paused)
    assert len(app.scopes) == 1 and len(connection.pipeline) <= 512 // len(GET)
    assert len(connection._rest) <= SMALL_BYTES + READ_BYTES and connection._held_bytes == HELD.bytes < 2 * READ_BYTES
    assert app.left == 0


def test_all_of_a_pipeline_is_answered(app: App, connect: Connect) -> None:
    app.may_answer = False
    client = connect()
    client.sendall(GET * 2000)
    eventually(lambda: bool(Spy.made) and Spy.made[0].flow.read_paused)
    app.may_answer = True
    received = b""
    while received.count(ANSWER) < 2000:
        received += client.recv(65536)
    assert len(app.scopes) == 2000 and app.left == 0


def test_requests_behind_the_end_of_a_body_are_few(app: App, connect: Connect) -> None:
    app.may_answer = False
    client = connect()
    client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 600\r\n\r\n" + b"b" * 600 + GET * 100)
    eventually(lambda: bool(app.bodies))
    assert len(Spy.made[0].pipeline) <= 32
    app.may_answer = True
    assert 1 <= everything(client).count(ANSWER) <= 33


def test_who_pipelines_and_leaves_is_noticed(app: App, connect: Connect) -> None:
    app.may_answer = False
    client = connect()
    client.sendall(GET * 3)
    eventually(lambda: len(app.bodies) == 1)
    client.close()
    eventually(lambda: app.left == 1)


def test_what_was_asked_before_a_fault_is_answered(app: App, connect: Connect) -> None:
    app.may_answer = False
    client = connect()
    client.sendall(GET)
    eventually(lambda: len(app.bodies) == 1)
    client.sendall(HEADS["many headers"][0])
    app.may_answer = True
    received = everything(client)
    assert received.startswith(ANSWER) and b"answer" in received


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_nothing_is_upgraded_and_a_body_becomes_no_request(app: App, connect: Connect, protocol: bytes) -> None:
    client = connect()
    upgrade = b"Connection: Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==\r\n" % protocol
    client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n%sContent-Length: %d\r\n\r\n" % (upgrade, len(GET)))
    client.sendall(GET)
    answer = everything(client)
    assert answer.startswith(ANSWER) and answer.count(ANSWER) == 1 == len(app.scopes)


def test_a_body_that_nobody_reads_stops_its_client(app: App, connect: Connect) -> None:
    app.reads = app.may_answer = False
    client = connect()
    client.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n" + b"b" * 2**24)
    eventually(lambda: bool(app.scopes) and Spy.made[0].flow.read_paused)
    (connection,) = Spy.made
    assert len(connection.cycle.body) <= http_limits.MAX_HEAD_BYTES + READ_BYTES


def test_what_all_connections_hold_is_bounded(app: App, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "MAX_HELD_BYTES", 100_000)
    head = b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"v" * 40_000
    first, second = connect(), connect()
    for client in (first, second):
        client.sendall(head)
    eventually(lambda: HELD.bytes > 70_000)
    third = connect()
    third.sendall(head)
    assert refused(third) == (503, "connections_full")
    fourth = connect()
    fourth.sendall(GET)
    assert is_answered(fourth), "who holds little is answered"
    first.sendall(b"\r\n\r\n")
    assert is_answered(first)
    eventually(lambda: HELD.bytes < 50_000)
