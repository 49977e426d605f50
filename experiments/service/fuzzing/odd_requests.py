"""Requests whose heads, bodies or routes are unusual, drawn at random."""

from __future__ import annotations

import random
from typing import Any

from experiments.service.attacks.form import CHAT, COMPLETIONS, RESPONSES
from experiments.service.attacks.text_forms import DOCUMENTS
from experiments.service.attacks.texts import nested_html, pdf
from experiments.service.fuzzing.case import Case, Server, encoded
from experiments.service.fuzzing.values import text, value

RESUMED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "When does the library open?"}],
    "max_tokens": 16,
    "stream": True,
    "temperature": 0,
}


def _documents(rng: random.Random, server: Server) -> Case:
    kind = rng.random()
    if kind < 0.02:  # these take a process each
        content = _noisy(rng, rng.choice((nested_html(5, 500), pdf(2, 3), pdf(1, 2, nested=3), b"<html>" + rng.randbytes(99))))
    elif kind < 0.5:
        content = text(rng).encode("utf-8", "surrogatepass")
    else:
        content = rng.choice((b"", rng.randbytes(rng.randrange(300)), "é".encode("utf-16"), b"\x00" * 50, b"PK\x03\x04", b"{}"))
    kinds = (
        "text/plain",
        "text/html",
        "application/pdf",
        "multipart/form-data; boundary=x",
        "",
        text(rng, 5).encode("ascii", "ignore").decode(),
    )
    return Case("documents", DOCUMENTS, content, headers={"Content-Type": rng.choice(kinds).replace("\n", "").replace("\r", "")})


def _noisy(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(changed))
        changed[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    return bytes(changed)


def _event_ids(rng: random.Random, server: Server) -> Case:
    told = rng.choice(server.event_ids) if server.event_ids else f"chatcmpl-{'0' * 32}.1.{'0' * 16}.{'0' * 8}.0.2f-5ab1c3d4-0-0-1"
    parts, how = told.split("."), rng.randrange(4)
    if how == 0:
        at = rng.randrange(len(told))
        told = told[:at] + rng.choice("0f-.g ~") + told[at + rng.randrange(2) :]
    elif how == 1:
        parts[rng.randrange(len(parts))] = rng.choice(
            ("", "0", "f" * 8, "9" * 13, "0-0-0-0-0", "-".join(["ffffffff"] * 5), "cmpl-" + "0" * 32, "-1", "f" * 40)
        )
        told = ".".join(parts)
    elif how == 2:
        told = rng.choice(("", "0", "a" * 9000, told + told, ".".join([told] * 9), told[::-1], "\xff"))
    body, path = dict(RESUMED), CHAT
    if rng.random() < 0.3:
        path, body = rng.choice(
            (
                (COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 2}),
                (RESPONSES, {"input": "a", "stream": True}),
                (CHAT, body | {"n": 2}),
                (CHAT, body | {"stream": False}),
                (CHAT, body | {"max_tokens": 2}),
            )
        )
    return Case(
        "event ids", path, {"model": server.model, **body}, headers={"Accept": "text/event-stream", "Last-Event-ID": told}
    )


_PATHS = (
    "/",
    "/health",
    "/ready",
    "/ping",
    "/version",
    "/openapi.json",
    "/metrics",
    "/v1/models",
    "/v1/models/",
    "/v1/cache",
    "/v1/compare",
    "/v1/chat/completions",
    "/v1/documents/text",
    "/tokenize",
    "/admin/cache/stats",
    "/admin/cache/export",
    "/admin/cache/import",
    "/admin/cache/verify",
    "/admin/audit",
    "/admin/baseline",
    "/playground/app.js",
    "/favicon.ico",
    "/v1/embeddings",
    "/nothing",
)
_ADMIN = (
    ("GET", "/admin/cache/stats"),
    ("GET", "/admin/cache/export"),
    ("POST", "/admin/cache/import"),
    ("POST", "/admin/cache/preload"),
    ("DELETE", "/admin/cache/tenants/{}"),
    ("DELETE", "/admin/cache/tenants/{}/requests/{}"),
    ("GET", "/admin/cache/verify"),
    ("POST", "/admin/cache/tenants/{}/documents/delete"),
    ("GET", "/admin/audit"),
    ("POST", "/admin/audit"),
    ("GET", "/admin/baseline"),
    ("GET", "/metrics"),
)
_NAMES = ("", "*", "nobody", "a:b", "%00", "%2e%2e", "%ff", "a" * 300, "%F0%9F%A6%99", "..", "a%0d%0ab", "hostile%20")


def _hosts(rng: random.Random, server: Server) -> Case:
    hosts = (
        "localhost",
        "127.0.0.1:1",
        "[::1]",
        "[::1]evil",
        "[::1",
        "localhost:80@evil",
        "evil.example",
        "",
        "localhost:99999999",
        "a" * 5000,
        "\xe9",
        "localhost\t",
        "::1",
        "[fe80::1%25eth0]",
        "localhost,evil",
        "127.1",
    )
    headers = {"Host": rng.choice(hosts)}
    if rng.random() < 0.6:
        headers["Origin"] = rng.choice(
            ("null", "http://localhost", "https://evil.example", "", "http://[", "http://localhost:99999999", "file://", "\xff")
        )
        headers["Sec-Fetch-Site"] = rng.choice(("cross-site", "same-origin", "none", "?"))
    method = rng.choice(("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT", "PATCH", "TRACE"))
    body = rng.choice((b"", b"{}", b"a=b")) if method in ("POST", "PUT", "PATCH") else None
    return Case(
        "hosts",
        rng.choice(_PATHS),
        body,
        method,
        headers | {"Content-Type": rng.choice(("text/plain", "application/json", "", "a/b;"))},
    )


def _routes(rng: random.Random, server: Server) -> Case:
    if rng.random() < 0.5:
        keys = ("", None, "wrong", "\xe9", "a" * 5000, server.operator, "")
        return Case(
            "memory routes",
            rng.choice(("/v1/cache", "/v1/cache/", "/v1/cache?tenant=calm", "/v1/cache/calm")),
            None,
            rng.choice(("GET", "DELETE", "HEAD", "OPTIONS")),
            key=rng.choice(keys),
        )
    method, path = rng.choice(_ADMIN)
    path = path.format(rng.choice(_NAMES), rng.choice(_NAMES)) + rng.choice(("", "", "?limit=-1", "?tenant=%00", "?x=%ff"))
    bodies = (
        b"",
        rng.randbytes(200),
        b"{}",
        encoded(value(rng)),
        encoded({"documents": [text(rng)]}),
        encoded({"documents": value(rng)}),
    )
    return Case(
        "operator routes",
        path,
        rng.choice(bodies) if method == "POST" else None,
        method,
        key=rng.choice((server.operator, server.operator, "", None)),
        on_admin_port=server.admin_port is not None,
    )


def _heads(rng: random.Random, server: Server) -> Case:
    size = rng.choice((0, 1, 9, 255, 256, 257, 5000))
    target = rng.choice(
        (
            *_PATHS,
            "/" + "a" * rng.choice((10, 16_000, 17_000, 70_000)),
            "*",
            "http://there/v1/models",
            "/?%",
            "/%zz",
            "/a b",
            "\\",
            "/\x7f",
        )
    )
    method = rng.choice(("GET", "POST", "OPTIONS", "CONNECT", "PRI", "get", ""))
    lines = [f"{method} {target} {rng.choice(('HTTP/1.1', 'HTTP/1.0', 'HTTP/2.0', 'HTTP/1.1 x', ''))}"]
    lines += (
        rng.choice(("Host: localhost", "Host: localhost", "", "Host:localhost\r\nHost: b")),
        f"Authorization: Bearer {server.key}",
    )
    odd = (
        "Content-Length: 2",
        "Content-Length: +2",
        "Content-Length: 2, 2",
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Expect: 100-continue",
        "Connection: upgrade",
        "Upgrade: websocket",
        "Upgrade: h2c",
        "Content-Encoding: gzip",
        "Accept: \xff",
        "X : y",
        " folded",
        "Cookie: " + "a" * 9000,
        "Range: bytes=0-1",
        "If-None-Match: *",
        "Accept-Encoding: br",
        "X-Session-ID: " + "s" * 600,
        "Trailer: x",
    )
    lines += [rng.choice(odd) for _ in range(rng.randrange(4))] + [f"x{at}: y" for at in range(size)]
    body = rng.choice(
        (
            b"",
            b"{}",
            b"2\r\n{}\r\n0\r\n\r\n",
            b"2\r\n{}\r\n0\r\nx: y\r\n\r\n",
            b"zz\r\n",
            b"1;a=b\r\n{\r\n",
            b"ffffffffffffffff\r\n",
        )
    )
    one = "\r\n".join((*filter(None, lines), "", "")).encode("latin-1", "replace") + body
    return Case(
        "heads", raw=one * rng.choice((1, 1, 1, 2, 40)), on_admin_port=server.admin_port is not None and rng.random() < 0.2
    )


# How often, and what makes a case. A file that is no text costs the server a process.
REQUESTS = ((2, _documents), (2, _event_ids), (2, _hosts), (2, _routes), (3, _heads))
