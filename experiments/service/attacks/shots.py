"""Connections of hostile clients: the bytes that each sends, its behaviour, and the answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS, RESPONSES, DOCUMENTS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/documents/text"
STAY_S = 60.0  # for which a client waits for the end of an answer
_KEPT_BYTES = 8192  # of an answer, its beginning and its end
_SMALL_BUFFER = 4096  # of the kernel, for clients that never read
_AGAIN_S = 0.3  # after an answer that says that the server is busy
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_FAULT = re.compile(rb'"type": ?"server_error"')
_TAKEN = b"stream_taken"  # by a newer client: no fault
_EVENT_ID = re.compile(rb"^id: (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is attacked."""

    host: str
    port: int
    model: str  # its name
    keys: tuple[str | None, ...] = (None, None)  # of the attackers; None: requests have no key
    admin_port: int | None = None  # None: no form attacks it
    context: int = 2048  # tokens of the model
    vocabulary: int = 4096  # token ids below it are valid
    size: float = 1.0  # of large bodies and numbers of connections, relative to the measured attack

    def scaled(self, count: int) -> int:
        """Return a count times the size, at least 1."""
        return max(1, int(count * self.size))


@dataclass(frozen=True, slots=True)
class Shot:
    """One connection."""

    pieces: tuple[bytes, ...]
    pause_s: float = 0.0  # between two pieces
    reads: bool = True  # false: the client reads nothing of the answer
    stay_s: float = STAY_S  # after the last piece, then the client leaves
    on_admin_port: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to a shot."""

    statuses: tuple[int, ...] = ()  # of all answers on the connection; empty if none came
    has_fault: bool = False  # a body reports a fault of the server
    has_ended: bool = False  # the server closed the connection
    text: bytes = b""  # the beginning and the end

    @property
    def status(self) -> int:
        """The first status; 0 if none came."""
        return self.statuses[0] if self.statuses else 0

    @property
    def label(self) -> str:
        """The highest status, with a mark if a stream reported a fault."""
        fault = "+error" if self.has_fault and self.status < 500 else ""
        return f"{max(self.statuses, default=0)}{fault}"


def is_fault(label: str) -> bool:
    """Return whether a label of ``Reply`` is a fault of the server; 503 means busy and 504 out of the client's time."""
    return label.endswith("+error") or (label.startswith("5") and label not in ("503", "504"))


def head(method: str, path: str, key: str | None, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a request's head without its last line end; the connection closes after the answer unless ``headers`` differ."""
    own = {"Host": "localhost", "Connection": "close"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (own | dict(headers or {})).items())]
    return "\r\n".join((*lines, "")).encode()


def get(path: str, key: str | None = None, method: str = "GET", headers: Mapping[str, str] | None = None, **how: Any) -> Shot:
    """Return a request without a body; ``how`` are fields of the shot."""
    return Shot((head(method, path, key, headers) + b"\r\n",), **how)


def post(
    path: str, body: Mapping[str, Any] | bytes, key: str | None, headers: Mapping[str, str] | None = None, **how: Any
) -> Shot:
    """Return a request with a body, JSON unless it is bytes; ``how`` are fields of the shot."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {} if isinstance(body, bytes) else {"Content-Type": "application/json"}
    begun = head("POST", path, key, {**kind, "Content-Length": str(len(data)), **(headers or {})})
    return Shot((begun + b"\r\n" + data,), **how)


def event_ids(target: Target, body: dict[str, Any]) -> list[str]:
    """Stream a chat and return the ids of its events; empty if the server gives none."""
    shot = post(CHAT, body, target.keys[0], {"Accept": "text/event-stream"})
    with socket.create_connection((target.host, target.port), timeout=30) as connection:
        connection.sendall(shot.pieces[0])
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return [found.decode() for found in _EVENT_ID.findall(answer)]


async def fire(shot: Shot, target: Target) -> Reply:
    """Make a connection, send a shot and return what came back until the server or the client closed it."""
    port = target.admin_port if shot.on_admin_port else target.port
    if port is None:
        raise ValueError("the target has no admin port")
    raw = socket.socket()
    raw.setblocking(False)
    if not shot.reads:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    try:
        await asyncio.get_running_loop().sock_connect(raw, (target.host, port))
        reader, writer = await asyncio.open_connection(sock=raw)
    except OSError:
        raw.close()
        return Reply()
    hearing = asyncio.create_task(_hear(reader, shot))
    try:
        await _send(writer, shot)
        return await hearing
    finally:
        hearing.cancel()
        writer.transport.abort()


async def answered(shot: Shot, target: Target, within_s: float, tries: int = 5) -> Reply:
    """Return the answer to a shot, fired again while the server is busy."""
    reply = Reply()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            for _ in range(tries):
                reply = await fire(shot, target)
                if reply.status not in (429, 503):
                    break
                await asyncio.sleep(_AGAIN_S)
    return reply


async def _send(writer: asyncio.StreamWriter, shot: Shot) -> None:
    with contextlib.suppress(OSError):  # closed by the server, whose answer is read elsewhere
        for number, piece in enumerate(shot.pieces):
            if number and shot.pause_s:
                await asyncio.sleep(shot.pause_s)
            writer.write(piece)
            async with asyncio.timeout(shot.stay_s):
                await writer.drain()


async def _hear(reader: asyncio.StreamReader, shot: Shot) -> Reply:
    statuses: list[int] = []
    first, last, has_fault, has_ended = b"", b"", False, False
    stay_s = shot.stay_s + shot.pause_s * len(shot.pieces)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(stay_s):
            if not shot.reads:
                await asyncio.sleep(stay_s)
            while part := await reader.read(1 << 16):
                statuses += map(int, _STATUS.findall(part))
                has_fault = has_fault or (_FAULT.search(part) is not None and _TAKEN not in part)
                first, last = (first + part)[:_KEPT_BYTES], (last + part)[-_KEPT_BYTES:]
            has_ended = True
    return Reply(tuple(statuses), has_fault, has_ended, first if first == last else first + last)
