"""One end of a connection between the leader of a group and a rank: framed bytes over TCP, authenticated by a shared secret.

TCP and nothing faster: a Unix socket saves some hundredths of a millisecond a step (``experiments/exchange.py``), but the same
code serves ranks on other hosts, a peer that dies is noticed at once, and nobody spins while waiting.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from actors.lookahead.wire import MAX_MESSAGE_BYTES, Message, WireError, decode, encode

Address = tuple[str, int]

# What a connection may raise when the other side is gone, stopped, or speaks something else.
LINK_ERRORS = (OSError, EOFError, AuthenticationError, WireError)


class Link:
    """Sends and receives messages. Several threads may send; one receives at a time."""

    def __init__(self, connection: Connection) -> None:
        """
        Args:
            connection: authenticated, with timeouts set.
        """
        self._connection = connection
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self.heard_s = time.monotonic()  # when the peer last gave a sign

    def send(self, message: Message) -> None:
        """Raises one of ``LINK_ERRORS`` when the peer is gone or does not take it in time."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """As ``send``, of a message in a form of the caller's own."""
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None when none begins within ``timeout_s`` seconds (None: however long it takes).

        Raises one of ``LINK_ERRORS`` when the peer is gone or sends something that is no message.
        """
        if not readable([self], timeout_s):
            return None
        return self.take()

    def take(self) -> Message:
        """The message that begins or is about to; where ``readable`` said so it is there. Raises as ``receive`` does."""
        message = decode(self.take_bytes())
        self.heard_s = time.monotonic()
        return message

    def take_bytes(self) -> bytes:
        """As ``take``, of a message that was sent by ``send_bytes``."""
        return self._connection.recv_bytes(MAX_MESSAGE_BYTES)

    def fileno(self) -> int:
        """For ``readable``."""
        return self._connection.fileno()

    def end(self) -> None:
        """Ends the connection from any thread: whoever receives or sends sees it, and the receiver closes the link."""
        with self._ending:
            if not self._connection.closed:
                with _socket_of(self._connection) as raw:
                    shutdown(raw)

    def close(self) -> None:
        """Ends the connection and gives its descriptor back; for who receives, or when nobody does. Harmless when repeated."""
        self.end()
        with self._sending, self._ending:
            self._connection.close()


def readable(links: Sequence[Link], timeout_s: float | None) -> list[Link]:
    """The links on which a message begins, or which have ended, as soon as there is one; none after ``timeout_s`` seconds.

    A poll object, not ``multiprocessing.connection.wait``, whose selectors take longer than a message does.

    A link that was closed here has ended as well: to take its message raises what ``LINK_ERRORS`` holds.
    """
    poller = select.poll()
    by_descriptor: dict[int, Link] = {}
    for link in links:
        try:
            descriptor = link.fileno()
        except OSError:  # closed
            return [link]
        by_descriptor[descriptor] = link
        poller.register(descriptor, select.POLLIN)
    ready = poller.poll(None if timeout_s is None else math.ceil(1e3 * timeout_s))
    return [by_descriptor[descriptor] for descriptor, _ in ready]


def connect(address: Address, secret: bytes, timeout_s: float) -> Link:
    """A link to a rank's server.

    Raises:
        OSError, EOFError: nobody answers there within ``timeout_s``, or it does not take the connection.
        multiprocessing.AuthenticationError: another secret, or something else than a rank.
    """
    raw = socket.create_connection(address, timeout_s)
    raw.settimeout(None)  # the connection's own timeouts take over
    connection = Connection(raw.detach())
    try:
        set_timeouts(connection, timeout_s)
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
    except AssertionError as error:  # Python 3.11 says so when the other side is something else
        connection.close()
        raise AuthenticationError(f"no rank answers at {address[0]}:{address[1]}: {error}") from None
    except BaseException:
        connection.close()
        raise
    return Link(connection)


def accepted(raw: socket.socket, secret: bytes, timeout_s: float) -> Link:
    """The other side of ``connect``, over a socket that was accepted. Raises as it does; the socket is closed then."""
    connection = Connection(raw.detach())
    try:
        set_timeouts(connection, timeout_s)
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
    except BaseException:
        connection.close()
        raise
    return Link(connection)


def set_timeouts(connection: Connection, timeout_s: float) -> None:
    """Small messages leave at once; reads and writes that make no progress for ``timeout_s`` seconds raise BlockingIOError."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    with _socket_of(connection) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def shutdown(raw: socket.socket) -> None:
    """Ends both directions of a socket, which wakes who waits for it; a socket that is not connected is left as it is."""
    with contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """The connection's socket, which stays the connection's: no further descriptor is needed to end one where none is left."""
    raw = socket.socket(fileno=connection.fileno())
    try:
        yield raw
    finally:
        raw.detach()
