"""Requests whose heads, bodies, routes or connections are unusual, drawn at random."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from experiments.service.attacks.shots import CHAT, COMPLETIONS, DOCUMENTS, RESPONSES, head
from experiments.service.attacks.texts import nested_html, pdf
from experiments.service.fuzzing.bodies import BODIES
from experiments.service.fuzzing.case import LEAVINGS, Case, Server
from experiments.service.fuzzing.values import text, value

RESUMED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "When does the library open?"}], "max_tokens": 16, "stream": True, "temperature": 0,
}  # fmt: skip
_NO_ID = f"chatcmpl-{'0' * 32}.1.{'0' * 16}.{'0' * 8}.0.2f-5ab1c3d4-0-0-1"
_ID_PARTS = ("", "0", "f" * 8, "9" * 13, "0-0-0-0-0", "-".join(["ffffffff"] * 5), "cmpl-" + "0" * 32, "-1", "f" * 40)
_OTHER_STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (  # than that of the id
    (COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 2}), (RESPONSES, {"input": "a", "stream": True}),
    (CHAT, RESUMED | {"n": 2}), (CHAT, RESUMED | {"stream": False}), (CHAT, RESUMED | {"max_tokens": 2}),
)  # fmt: skip
_PATHS = (
    "/", "/health", "/ready", "/ping", "/version", "/openapi.json", "/metrics", "/v1/models", "/v1/models/", "/v1/cache",
    "/v1/compare", "/v1/chat/completions", "/v1/documents/text", "/tokenize", "/admin/cache/stats", "/admin/cache/export",
    "/admin/cache/import", "/admin/cache/verify", "/admin/audit", "/admin/baseline", "/playground/app.js", "/favicon.ico",
    "/v1/embeddings", "/nothing",
)  # fmt: skip
_ADMIN = (
    ("GET", "/admin/cache/stats"), ("GET", "/admin/cache/export"), ("POST", "/admin/cache/import"),
    ("POST", "/admin/cache/preload"),
    ("DELETE", "/admin/cache/tenants/{}"), ("DELETE", "/admin/cache/tenants/{}/requests/{}"), ("GET", "/admin/cache/verify"),
    ("POST", "/admin/cache/tenants/{}/documents/delete"), ("GET", "/admin/audit"), ("POST", "/admin/audit"),
    ("GET", "/admin/baseline"), ("GET", "/metrics"),
)  # fmt: skip
_NAMES = ("", "*", "nobody", "a:b", "%00", "%2e%2e", "%ff", "a" * 300, "%F0%9F%A6%99", "..", "a%0d%0ab", "hostile%20")
_HOSTS = (
    "localhost", "127.0.0.1:1", "[::1]", "[::1]evil", "[::1", "localhost:80@evil", "evil.example", "", "localhost:99999999",
    "a" * 5000, "\xe9", "localhost\t", "::1", "[fe80::1%25eth0]", "localhost,evil", "127.1",
)  # fmt: skip
_ORIGINS = (
    "null", "http://localhost", "https://evil.example", "", "http://[", "http://localhost:99999999", "file://", "\xff",
)  # fmt: skip
_METHODS = ("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT", "PATCH", "TRACE")
_ODD_HEADERS = (
    "Content-Length: 2", "Content-Length: +2", "Content-Length: 2, 2", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked", "Expect: 100-continue", "Connection: upgrade", "Upgrade: websocket", "Upgrade: h2c",
    "Content-Encoding: gzip", "Accept: \xff", "X : y", " folded", "Cookie: " + "a" * 9000, "Range: bytes=0-1", "If-None-Match: *",
    "Accept-Encoding: br", "X-Session-ID: " + "s" * 600, "Trailer: x",
)  # fmt: skip
_CHUNKS = (
    b"", b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\nx: y\r\n\r\n", b"zz\r\n", b"1;a=b\r\n{\r\n", b"ffffffffffffffff\r\n",
)  # fmt: skip
_DEEP = 5000


def _documents(rng: random.Random, server: Server) -> Case:
    kind = rng.random()
    if kind < 0.02:  # these take a process each
        content = _noisy(rng, rng.choice((nested_html(5, 500), pdf(2, 3), pdf(1, 2, nested=3), b"<html>" + rng.randbytes(99))))
    elif kind < 0.5:
        content = text(rng).encode("utf-8", "surrogatepass")
    else:
        content = rng.choice((b"", rng.randbytes(rng.randrange(300)), "é".encode("utf-16"), b"\x00" * 50, b"PK\x03\x04", b"{}"))
    odd = text(rng, 5).encode("ascii", "ignore").decode()
    kinds = ("text/plain", "text/html", "application/pdf", "multipart/form-data; boundary=x", "", odd)
    return Case("documents", DOCUMENTS, content, headers={"Content-Type": rng.choice(kinds).replace("\n", "").replace("\r", "")})


def _noisy(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(changed))
        changed[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    return bytes(changed)


def _event_ids(rng: random.Random, server: Server) -> Case:
    event_id = rng.choice(server.event_ids) if server.event_ids else _NO_ID
    parts, how = event_id.split("."), rng.randrange(4)
    if how == 0:
        at = rng.randrange(len(event_id))
        event_id = event_id[:at] + rng.choice("0f-.g ~") + event_id[at + rng.randrange(2) :]
    elif how == 1:
        parts[rng.randrange(len(parts))] = rng.choice(_ID_PARTS)
        event_id = ".".join(parts)
    elif how == 2:
        event_id = rng.choice(("", "0", "a" * 9000, event_id * 2, ".".join([event_id] * 9), event_id[::-1], "\xff"))
    path, body = rng.choice(_OTHER_STREAMS) if rng.random() < 0.3 else (CHAT, RESUMED)
    headers = {"Accept": "text/event-stream", "Last-Event-ID": event_id}
    return Case("event ids", path, {"model": server.model, **body}, headers=headers)


def _hosts(rng: random.Random, server: Server) -> Case:
    headers = {"Host": rng.choice(_HOSTS)}
    if rng.random() < 0.6:
        headers["Origin"] = rng.choice(_ORIGINS)
        headers["Sec-Fetch-Site"] = rng.choice(("cross-site", "same-origin", "none", "?"))
    method = rng.choice(_METHODS)
    body = rng.choice((b"", b"{}", b"a=b")) if method in ("POST", "PUT", "PATCH") else None
    path = rng.choice(_PATHS)
    headers["Content-Type"] = rng.choice(("text/plain", "application/json", "", "a/b;"))
    return Case("hosts", path, body, method, headers)


def _routes(rng: random.Random, server: Server) -> Case:
    if rng.random() < 0.5:
        keys = ("", None, "wrong", "\xe9", "a" * 5000, server.operator, "")
        path = rng.choice(("/v1/cache", "/v1/cache/", "/v1/cache?tenant=calm", "/v1/cache/calm"))
        return Case("memory routes", path, None, rng.choice(("GET", "DELETE", "HEAD", "OPTIONS")), key=rng.choice(keys))
    method, path = rng.choice(_ADMIN)
    path = path.format(rng.choice(_NAMES), rng.choice(_NAMES)) + rng.choice(("", "", "?limit=-1", "?tenant=%00", "?x=%ff"))
    bodies = (
        b"", rng.randbytes(200), b"{}", json.dumps(value(rng)).encode(), json.dumps({"documents": [text(rng)]}).encode(),
        json.dumps({"documents": value(rng)}).encode(),
    )  # fmt: skip
    body = rng.choice(bodies) if method == "POST" else None
    key = rng.choice((server.operator, server.operator, "", None))
    return Case("operator routes", path, body, method, key=key, on_admin_port=server.admin_port is not None)


def _heads(rng: random.Random, server: Server) -> Case:
    size = rng.choice((0, 1, 9, 255, 256, 257, 5000))
    long = "/" + "a" * rng.choice((10, 16_000, 17_000, 70_000))
    target = rng.choice((*_PATHS, long, "*", "http://there/v1/models", "/?%", "/%zz", "/a b", "\\", "/\x7f"))
    method = rng.choice(("GET", "POST", "OPTIONS", "CONNECT", "PRI", "get", ""))
    lines = [f"{method} {target} {rng.choice(('HTTP/1.1', 'HTTP/1.0', 'HTTP/2.0', 'HTTP/1.1 x', ''))}"]
    lines += [rng.choice(("Host: localhost", "Host: localhost", "", "Host:localhost\r\nHost: b"))]
    lines += [f"Authorization: Bearer {server.key}"]
    lines += [rng.choice(_ODD_HEADERS) for _ in range(rng.randrange(4))] + [f"x{at}: y" for at in range(size)]
    one = "\r\n".join((*filter(None, lines), "", "")).encode("latin-1", "replace") + rng.choice(_CHUNKS)
    on_admin_port = server.admin_port is not None
    return Case("heads", raw=one * rng.choice((1, 1, 1, 2, 40)), on_admin_port=on_admin_port and rng.random() < 0.2)


def _post(server: Server, body: bytes, path: str = CHAT, **headers: object) -> bytes:
    """Return a request, whose headers are those named here with ``_`` for ``-``."""
    own = {"Content-Type": "application/json", "Content-Length": len(body)}
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    return head("POST", path, server.key, {name: str(value) for name, value in own.items()}) + b"\r\n" + body


def _chat(server: Server, **fields: object) -> bytes:
    body = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **fields}
    return json.dumps(body).encode()


def _noise(rng: random.Random, body: bytes) -> bytes:
    """Return a body with some bytes changed, removed or repeated."""
    changed = bytearray(body)
    for _ in range(rng.randrange(1, 8)):
        at, kind = rng.randrange(len(changed)), rng.randrange(3)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 6)]
        else:
            changed[at:at] = changed[at : at + rng.randrange(1, 40)]
    return bytes(changed)


def _said(server: Server, content: bytes) -> bytes:
    return _post(server, _chat(server).replace(b'"hello"', content))


_CONNECTIONS: dict[str, Callable[[random.Random, Server], bytes]] = {  # that no client library would make
    "changed bytes": lambda rng, to: _post(to, _noise(rng, _chat(to, stream=rng.random() < 0.5, stop=["é", "\ud83d\ude00"]))),
    "random bytes": lambda rng, to: _post(to, rng.randbytes(rng.randrange(2000))),
    "no HTTP": lambda rng, to: rng.randbytes(rng.randrange(1, 500)) + b"\r\n\r\n",
    "half a surrogate": lambda rng, to: _said(to, b'"\\ud800 \\udfff"'),
    "no UTF-8": lambda rng, to: _said(to, b'"\xff\xfe\x00"'),
    "NUL": lambda rng, to: _said(to, b'"\\u0000\x00"'),
    "deep lists": lambda rng, to: _said(to, b"[" * _DEEP + b"]" * _DEEP),
    "deep objects": lambda rng, to: _said(to, b'{"a":' * _DEEP + b"1" + b"}" * _DEEP),
    "long number": lambda rng, to: _said(to, b"9" * rng.choice((50, 5000, 100_000))),
    "two of a name": lambda rng, to: _post(to, b'{"model":5,' + _chat(to)[1:]),
    "many names": lambda rng, to: _post(to, _chat(to, **{f"n{at}": at for at in range(20_000)})),
    "length too long": lambda rng, to: _post(to, _chat(to), Content_Length=10**6),
    "length too short": lambda rng, to: _post(to, _chat(to), Content_Length=rng.randrange(60)),
    "length negative": lambda rng, to: _post(to, _chat(to), Content_Length=-1),
    "length no number": lambda rng, to: _post(to, _chat(to), Content_Length="many"),
    "length enormous": lambda rng, to: _post(to, _chat(to), Content_Length=10**18),
    "two lengths": lambda rng, to: _post(to, _chat(to), X="y\r\nContent-Length: 3"),
    "length and chunks": lambda rng, to: _post(to, _chat(to), Transfer_Encoding="chunked"),
    "broken chunks": lambda rng, to: _post(to, b"zz\r\n" + _chat(to), Transfer_Encoding="chunked", Content_Length=0),
    "long header": lambda rng, to: _post(to, _chat(to), X_Long="x" * 100_000),
    "many headers": lambda rng, to: _post(to, _chat(to), **{f"X_{at}": 1 for at in range(5000)}),
    "odd method": lambda rng, to: _post(to, _chat(to)).replace(b"POST", rng.choice((b"BREW", b"TRACE", b"post", b"P\x00T")), 1),
    "odd path": lambda rng, to: _post(to, _chat(to), rng.choice(("/v1/" + "a" * 60_000, "/%00", "/../../a", "//"))),
    "odd version": lambda rng, to: _post(to, _chat(to)).replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/9.9", b"ICY")), 1),
    "not JSON": lambda rng, to: _post(to, rng.choice((b"", b"null", b"[]", b"1e999", b'"x"', b"NaN", b"{}", b"true"))),
    "gzip": lambda rng, to: _post(to, b"\x1f\x8b" + rng.randbytes(50), Content_Encoding="gzip"),
    "pipelined": lambda rng, to: _post(to, _chat(to), Connection="keep-alive") * 5,
    "expectation": lambda rng, to: _post(to, _chat(to), Expect="200-ok"),
}  # fmt: skip


def _connections(rng: random.Random, server: Server) -> Case:
    kind = rng.choice(list(_CONNECTIONS))
    return Case(f"connection, {kind}", raw=_CONNECTIONS[kind](rng, server), leaving=rng.choice([*LEAVINGS]))


def _json(kind: str, make: Callable[[random.Random], tuple[str, Any]]) -> Callable[[random.Random, Server], Case]:
    def case(rng: random.Random, server: Server) -> Case:
        path, body = make(rng)
        return Case(kind, path, {"model": server.model, **body} if path != "/detokenize" else body)

    return case


KINDS: tuple[tuple[int, Callable[[random.Random, Server], Case]], ...] = (  # with their weights
    *((weight, _json(kind, make)) for weight, kind, make in BODIES),
    (2, _documents), (2, _event_ids), (2, _hosts), (2, _routes), (3, _heads), (5, _connections),
)  # fmt: skip


def make_case(seed: int, number: int, server: Server) -> Case:
    """Return the case of a seed with a number, which is reproducible except for event ids, which a server signs."""
    rng = random.Random(f"{seed}/{number}")
    (make,) = rng.choices([make for _, make in KINDS], [weight for weight, _ in KINDS])
    return make(rng, server)
