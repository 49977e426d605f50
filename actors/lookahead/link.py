"""Connection between the leader of a group and a rank: framed bytes over TCP, authenticated by a shared secret."""

# Plain TCP: a Unix socket saves some hundredths of a millisecond per step (experiments/LOG.md), but TCP also serves ranks on
# other hosts, detects a dead peer at once, and needs no busy waiting.

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

from outrider.actors.wire import MAX_MESSAGE_BYTES, Message, WireError, decode, encode

Address = tuple[str, int]

# Errors of a connection whose peer is gone, stopped, or speaks another protocol.
LINK_ERRORS = (OSError, EOFError, AuthenticationError, WireError)

_RECORD_HEADER_BYTES = 5  # TLS record header: type, version, length of the payload
_RECORD_KINDS = range(20, 24)


class Link:
    """Message channel over an authenticated connection. Several threads may send; one receives at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self.heard_s = time.monotonic()  # when the peer last gave a sign
        self.sent = self.received = 0  # bytes of messages

    def send(self, message: Message) -> None:
        """Send a message. Raises one of ``LINK_ERRORS`` if the peer is gone or does not accept it in time."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message; used to send one to several peers. Raises the errors of ``send``."""
        with self._sending:
            self._connection.send_bytes(data)
            self.sent += len(data)

    def receive(self, timeout_s: float | None) -> Message | None:
        """Return the next message, or None after ``timeout_s`` (None: no limit). Raises one of ``LINK_ERRORS`` on failure."""
        if not readable([self], timeout_s):
            return None
        return self.take()

    def take(self) -> Message:
        """Return the next message, blocking until it is complete. Raises the errors of ``receive``."""
        data = self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        self.received += len(data)
        message = decode(data)
        self.heard_s = time.monotonic()
        return message

    def fileno(self) -> int:
        """Return the descriptor, for ``readable``."""
        return self._connection.fileno()

    def end(self) -> None:
        """End the connection from any thread. Threads that send or receive notice; the receiver closes the link."""
        # Without `_sending`: a sender may be blocked while it holds that lock, and the shutdown is what ends its wait.
        with self._ending:
            if not self._connection.closed:
                with _socket_of(self._connection) as raw:
                    shutdown(raw)

    def close(self) -> None:
        """End the connection and release its descriptor. For the receiver, or if no thread receives. Idempotent."""
        self.end()
        # Only when no thread sends: the descriptor's number may be reused, and its bytes would reach another connection.
        with self._sending, self._ending:
            self._connection.close()


def readable(links: Sequence[Link], timeout_s: float | None) -> list[Link]:
    """Return links that have a message or have ended (also by this process), waiting at most ``timeout_s`` seconds."""
    # The selectors of multiprocessing.connection.wait take longer than a message does.
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
    """Connect to a rank's server. Raises OSError or EOFError without an answer, AuthenticationError for another secret."""
    raw = socket.create_connection(address, timeout_s)
    raw.settimeout(None)  # set_timeouts replaces it
    try:
        return _authenticated(raw, address[0], secret, timeout_s)
    except AssertionError as error:  # raised by Python 3.11 if the peer speaks another protocol
        raise AuthenticationError(f"no rank answers at {address[0]}:{address[1]}: {error}") from None


def accept(raw: socket.socket, secret: bytes, timeout_s: float) -> Link:
    """Return the accepting side's link over a socket. Raises the errors of ``connect``, after closing the socket."""
    return _authenticated(raw, None, secret, timeout_s)


def _authenticated(raw: socket.socket, dialled: str | None, secret: bytes, timeout_s: float) -> Link:
    """Encrypt the connection if required, then prove knowledge of the secret in both directions."""
    with raw:  # until the connection owns its descriptor
        connection = _TlsConnection(raw, dialled) if _needs_tls(raw) else Connection(raw.detach())
    try:
        set_timeouts(connection, timeout_s)
        if isinstance(connection, _TlsConnection):
            connection.shake_hands()
        # The two sides challenge in opposite order: in the same one, both would wait for the other's challenge.
        for challenge in (deliver_challenge, answer_challenge) if dialled is None else (answer_challenge, deliver_challenge):
            challenge(connection, secret)
    except BaseException:
        connection.close()
        raise
    return Link(connection)


def _needs_tls(raw: socket.socket) -> bool:
    """Return whether to encrypt: Ray uses TLS, and the two addresses differ. Both sides get the same result."""
    # Equal addresses at both ends mean traffic within a pod, where encryption would only cost time.
    on = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    return on and raw.getsockname()[0] != raw.getpeername()[0]


class _TlsConnection(Connection):
    """``Connection`` with TLS; one thread may receive while another sends."""

    # Each message starts a new TLS record, and reading stops at the last record of a message. So the socket is readable exactly
    # when a message begins, as without encryption.

    def __init__(self, raw: socket.socket, dialled: str | None) -> None:
        """Take over a connected socket; ``dialled`` must be in the peer's certificate. Raises OSError for a bad file."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(dialled is None).wrap_bio(self._incoming, self._outgoing, dialled is None, dialled)
        self._turn = threading.Lock()  # guards the three objects above, which are not thread-safe
        super().__init__(raw.detach())

    def shake_hands(self) -> None:
        """Do the TLS handshake. Raises OSError or EOFError without TLS, AuthenticationError for another authority or address."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._write_all(self._outgoing.read())
                self._incoming.write(self._record())
            except ssl.SSLCertVerificationError as error:
                self._write_all(self._outgoing.read())  # send the alert with the reason
                reason = f"by {os.environ['RAY_TLS_CA_CERT']}: {error.verify_message}"
                raise AuthenticationError(f"the certificate of the peer is refused, {reason}") from None
            else:
                self._write_all(self._outgoing.read())
                return

    # ---- below: overridden I/O primitives of Connection ---------------------------------------------------------------------

    def _send(self, data: bytes | memoryview) -> None:
        with self._turn:
            rest = memoryview(data)
            while rest:
                rest = rest[self._tls.write(rest) :]
            encrypted = self._outgoing.read()
        # Without the lock: the receiver needs it, and must not wait for a peer that reads slowly.
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
            raise ssl.SSLError("the peer does not use TLS, but RAY_USE_TLS is set here: set it in all pods, or in none")
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
                raise EOFError("the peer has closed the connection")
            found += chunk
        return found


def _context(accepts: bool) -> ssl.SSLContext:
    """Return a TLS context with freshly read files, so that a renewed certificate is used."""
    # The files are those of Ray's connections. Both sides present a certificate of the configured authority, and the dialled
    # side's certificate must contain its address.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if accepts:
        context.num_tickets = 0  # no session resumption: only messages may arrive
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    return context


def set_timeouts(connection: Connection, timeout_s: float) -> None:
    """Disable Nagle's algorithm; make reads and writes without progress for ``timeout_s`` raise BlockingIOError."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    with _socket_of(connection) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def shutdown(raw: socket.socket) -> None:
    """Shut down both directions of a socket, which wakes threads blocked on it. Ignores unconnected sockets."""
    with contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """Lend the connection's socket for the block, without another descriptor (none may be left)."""
    raw = socket.socket(fileno=connection.fileno())
    try:
        yield raw
    finally:
        raw.detach()
