"""One end of a connection between the leader of a group and a rank: framed bytes over TCP, authenticated by a shared secret.

TCP and nothing faster: a Unix socket saves some hundredths of a millisecond a step (``experiments/LOG.md``), but the same
code serves ranks on other hosts, a peer that dies is noticed at once, and nobody spins while waiting.

Where Ray's connections are encrypted (``RAY_USE_TLS``), so are these, with the same files, from one address to another: both
sides show a certificate of the one authority, and the one that was dialled has to be named in its own.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from actors.wire import MAX_MESSAGE_BYTES, Message, WireError, decode, encode

Address = tuple[str, int]

# What a connection may raise when the other side is gone, stopped, or speaks something else.
LINK_ERRORS = (OSError, EOFError, AuthenticationError, WireError)

_RECORD_HEADER_BYTES = 5  # of TLS: a kind, a version, the length of the rest
_RECORD_KINDS = range(20, 24)


class Link:
    """Sends and receives messages over an authenticated connection. Several threads may send; one receives at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self.heard_s = time.monotonic()  # when the peer last gave a sign
        self.sent = self.received = 0  # bytes of messages

    def send(self, message: Message) -> None:
        """Raises one of ``LINK_ERRORS`` when the peer is gone or does not take it in time."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """As ``send``, of a message that is encoded already, for who sends it to several."""
        with self._sending:
            self._connection.send_bytes(data)
            self.sent += len(data)

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None when none begins within ``timeout_s`` seconds (None: however long it takes).

        Raises one of ``LINK_ERRORS`` when the peer is gone or sends something that is no message.
        """
        if not readable([self], timeout_s):
            return None
        return self.take()

    def take(self) -> Message:
        """The message that begins or is about to; where ``readable`` said so it is there. Raises as ``receive`` does."""
        data = self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        self.received += len(data)
        message = decode(data)
        self.heard_s = time.monotonic()
        return message

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
    try:
        return _authenticated(raw, address[0], secret, timeout_s)
    except AssertionError as error:  # Python 3.11 says so when the other side is something else
        raise AuthenticationError(f"no rank answers at {address[0]}:{address[1]}: {error}") from None


def accepted(raw: socket.socket, secret: bytes, timeout_s: float) -> Link:
    """The other side of ``connect``, over a socket that was accepted. Raises as it does; the socket is closed then."""
    return _authenticated(raw, None, secret, timeout_s)


def _authenticated(raw: socket.socket, dialled: str | None, secret: bytes, timeout_s: float) -> Link:
    """Of either side: encrypts where that is needed, and lets each show the other that it knows the secret."""
    with raw:  # until the connection has taken it over
        connection = _TlsConnection(raw, dialled) if _needs_tls(raw) else Connection(raw.detach())
    try:
        set_timeouts(connection, timeout_s)
        if isinstance(connection, _TlsConnection):
            connection.shake_hands()
        for challenge in (deliver_challenge, answer_challenge) if dialled is None else (answer_challenge, deliver_challenge):
            challenge(connection, secret)
    except BaseException:
        connection.close()
        raise
    return Link(connection)


def _needs_tls(raw: socket.socket) -> bool:
    """Whether a connection has to be encrypted: Ray's are, and this one goes to another address than it comes from.

    Both sides find the same. What has one address at both ends stays in its pod, and would be slower for nothing.
    """
    on = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    return on and raw.getsockname()[0] != raw.getpeername()[0]


class _TlsConnection(Connection):
    """A ``Connection`` whose bytes are encrypted; one thread may receive while another sends.

    Each message begins a record of its own, and no more is read than the records of one message: as without encryption, the
    socket is readable when a message begins, and has nothing to read between two.
    """

    def __init__(self, raw: socket.socket, dialled: str | None) -> None:
        """
        Args:
            raw: connected; the connection takes it over.
            dialled: the address of the other side, which its certificate has to name; None where the other side dialled.

        Raises:
            OSError: a file cannot be read, or is none of TLS.
        """
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(dialled is None).wrap_bio(self._incoming, self._outgoing, dialled is None, dialled)
        self._turn = threading.Lock()  # of the three above, which are not for several threads
        super().__init__(raw.detach())

    def shake_hands(self) -> None:
        """Comes before the first message, on both sides.

        Raises:
            multiprocessing.AuthenticationError: the other side has another authority, or another address.
            OSError, EOFError: it does not speak TLS, refuses this side, or is gone.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._write_all(self._outgoing.read())
                self._incoming.write(self._record())
            except ssl.SSLCertVerificationError as error:
                self._write_all(self._outgoing.read())  # the other side hears why
                reason = f"by {os.environ['RAY_TLS_CA_CERT']}: {error.verify_message}"
                raise AuthenticationError(f"the certificate of the other side is refused, {reason}") from None
            else:
                self._write_all(self._outgoing.read())
                return

    # ---- below: what a Connection sends and receives its frames with ----------------------------------------------------------

    def _send(self, data: bytes | memoryview) -> None:
        with self._turn:
            rest = memoryview(data)
            while rest:
                rest = rest[self._tls.write(rest) :]
            encrypted = self._outgoing.read()
        self._write_all(encrypted)

    def _recv(self, size: int) -> io.BytesIO:
        found = io.BytesIO()
        while found.tell() < size:
            try:
                with self._turn:
                    found.write(self._tls.read(size - found.tell()))
            except ssl.SSLWantReadError:
                record = self._record()
                with self._turn:
                    self._incoming.write(record)
        return found

    def _record(self) -> bytes:
        header = self._read_exactly(_RECORD_HEADER_BYTES)
        if header[0] not in _RECORD_KINDS:
            raise ssl.SSLError("the other side does not speak TLS, and RAY_USE_TLS is set here: set it in all pods, or in none")
        return header + self._read_exactly(int.from_bytes(header[3:], "big"))

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.fileno(), rest) :]

    def _read_exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            chunk = os.read(self.fileno(), size - len(found))
            if not chunk:
                raise EOFError("the other side has closed the connection")
            found += chunk
        return found


def _context(accepts: bool) -> ssl.SSLContext:
    """Read anew for each connection, of which there are few: a certificate that was replaced is used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if accepts:
        context.num_tickets = 0  # nobody resumes, and nothing is to come but messages
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    return context


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
