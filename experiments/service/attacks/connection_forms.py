"""Forms of attack that need no key, or no answer: heads, pipelines, uploads, probes and idle connections."""

from __future__ import annotations

import random
from typing import Any

from experiments.service.attacks.form import CHAT, Form, Shots, chats, completions, gets, same
from experiments.service.attacks.shots import Shot, Target, every, get, head, post

_PIECE = 1 << 16
_MIB = 1 << 20
_FIRST_TOKENS = 60  # of the answer to the first request of a pipeline


def _headers(target: Target, size: int, **how: Any) -> Shot:
    """Return a head of very many short headers, which never ends."""
    lines = b"".join(b"x%d: y\r\n" % at for at in range(1000))
    return Shot((head("GET", "/version", None), *every([lines], target.scaled(size) // len(lines) + 1)), stay_s=4.0, **how)


def _long_head(target: Target, begin: bytes, size: int) -> Shot:
    """Return a head with one value of so many bytes."""
    return Shot((begin, *every([b"x" * _PIECE], target.scaled(size) // _PIECE + 1)), stay_s=4.0)


def _chunked(target: Target, size: int, line: bytes, end: bytes = b"") -> Shot:
    """Return a chunked request, so many bytes of one line, and an end."""
    begin = head("POST", CHAT, target.keys[0], {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}) + b"\r\n"
    block = line * (_PIECE // len(line))
    return Shot((begin + end, *every([block], target.scaled(size) // len(block) + 1)), stay_s=4.0)


def _pipeline(path: str, size: int, key: bool = False) -> Shots:
    def shots(target: Target) -> list[Shot]:
        one = head("GET", path, target.keys[0] if key else None, {"Connection": "keep-alive"}) + b"\r\n"
        slow = post(CHAT, {"model": target.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": _FIRST_TOKENS},
                    target.keys[0], {"Connection": "keep-alive"})  # fmt: skip
        return [Shot((slow.pieces[0], one * (target.scaled(size) // len(one) + 1)), stay_s=4.0)]

    return shots


def heads() -> list[Form]:
    """Return attacks by heads of requests, and by what is sent in their place."""
    kind, polite = "heads", gets("/version", "/v1/models")
    first = chats(max_tokens=_FIRST_TOKENS)  # as the first request of a pipeline
    url, extension = b"GET /", b"1;" + b"e" * 500 + b"\r\n{\r\n"
    value = head("GET", "/version", None) + b"X-Long: "
    drops = [head("GET", "/version", None)[at : at + 1] for at in range(60)]
    return [
        Form(kind, "many short headers", same(lambda target: _headers(target, 20 * _MIB)), polite, 2),
        Form(kind, "one header of 40 MiB", same(lambda target: _long_head(target, value, 40 * _MIB)), polite, 2),
        Form(kind, "a URL of 40 MiB", same(lambda target: _long_head(target, url, 40 * _MIB)), polite, 2),
        Form(kind, "trailers", same(lambda target: _chunked(target, 8 * _MIB, b"x: y\r\n", b"2\r\n{}\r\n0\r\n")), polite, 2),
        Form(
            kind,
            "chunk extensions",
            same(lambda target: _chunked(target, 8 * _MIB, extension)),
            polite,
            2,
        ),
        Form(kind, "chunks of one byte", same(lambda target: _chunked(target, 2 * _MIB, b"1\r\n \r\n")), polite, 2),
        Form(kind, "pipelines of 540 kB", _pipeline("/version", 540_000), first, 5, emits=True),
        Form(kind, "pipelines with a key", _pipeline("/v1/models", 540_000, key=True), first, 5, emits=True),
        Form(kind, "a byte every 100 ms", same(lambda target: Shot(tuple(drops), 0.1, stay_s=3.0)), polite, 100),
    ]


def _wrong_keys(path: str, method: str = "GET") -> Shots:
    return lambda target: [get(path, f"wrong-{at}", method) for at in range(64)]


def probes() -> list[Form]:
    """Return attacks by many cheap requests without a key, or with a wrong one."""
    kind, polite, pause_s = "probes", gets("/version"), 0.0
    body = b'{"model": "' + b"x" * 200_000 + b'"}'
    return [
        Form(kind, "/health", gets("/health"), polite, 32, pause_s),
        Form(kind, "/metrics", gets("/metrics"), polite, 32, pause_s),
        Form(kind, "/ready and /ping", gets("/ready", "/ping"), polite, 32, pause_s),
        Form(kind, "wrong keys", _wrong_keys("/v1/models"), polite, 32, pause_s),
        Form(kind, "wrong keys with bodies", same(lambda target: post(CHAT, body, "wrong")), polite, 32, pause_s),
        Form(kind, "the page and the document", gets("/", "/openapi.json", "/playground/app.js"), polite, 32, pause_s),
        Form(kind, "paths that are not there", gets("/nothing", "/v1/nothing", "/admin/nothing"), polite, 32, pause_s),
    ]


def _wrong_operators(target: Target) -> list[Shot]:
    return [get(path, "wrong", on_admin_port=True) for path in ("/metrics", "/admin/cache/stats", "/admin/audit")]


def admin_port() -> list[Form]:
    """Return attacks on the port of the operator."""
    kind, polite = "admin port", gets("/version")
    half = Shot((b"GET /metrics HTTP/1.1\r\nX",), stay_s=4.0, on_admin_port=True)
    return [
        Form(kind, "half a head", same(lambda target: half), polite, 100, on_admin_port=True),
        Form(
            kind, "many short headers", same(lambda target: _headers(target, 15 * _MIB, on_admin_port=True)), polite, 2,
            on_admin_port=True,
        ),
        Form(kind, "wrong keys", _wrong_operators, polite, 32, 0.0, on_admin_port=True),
    ]  # fmt: skip


def _stalled(path: str, sent: bytes, length: int, keyed: bool = True, pieces: int = 1, pause_s: float = 0.0) -> Shots:
    """Return uploads that are announced, and never sent to their end."""

    def shots(target: Target) -> list[Shot]:
        key = target.keys[0] if keyed else None
        begin = head("POST", path, key, {"Content-Type": "application/json", "Content-Length": str(length)}) + b"\r\n"
        return [Shot((begin, *every([sent], pieces)), pause_s, stay_s=4.0)]

    return shots


def connections() -> list[Form]:
    """Return attacks by connections that do nothing, uploads that stall, and the routes of the tenant's memory."""
    idle = same(lambda target: Shot((b"",), stay_s=8.0))
    polite, large = gets("/version"), b" " * _MIB
    delete = same(lambda target: get("/v1/cache", target.keys[0], "DELETE"))
    noise = random.Random(0).randbytes(2000) + b"\r\n\r\n"
    return [
        Form("connections", "1,500 idle ones", idle, idle, 1500),
        Form("connections", "no HTTP", same(lambda target: Shot((noise,), stay_s=2.0)), polite, 32),
        Form("uploads", "stall", _stalled(CHAT, b"{", 8 * _MIB), chats(max_tokens=1), 64),
        Form("uploads", "stall near their end", _stalled(CHAT, large, 8 * _MIB, pieces=7), chats(max_tokens=1), 16),
        Form("uploads", "a byte at a time", _stalled(CHAT, b" ", 8 * _MIB, pieces=40, pause_s=0.1), chats(max_tokens=1), 64),
        Form("uploads", "without a key", _stalled("/v1/nothing", large, 64 * _MIB, False, 16), polite, 8),
        Form("memory", "DELETE /v1/cache", delete, completions(max_tokens=1), 16, 0.0),
        Form("memory", "GET /v1/cache", gets("/v1/cache", keyed=True), gets("/v1/models", keyed=True), 32, 0.0),
    ]
