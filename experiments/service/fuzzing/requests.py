"""Cases of the fuzzer, drawn from the templates of ``cases.yaml``, and their reduction to the smallest that still fails.

Some are connections that no client library would make.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from outrider.experiments.service.attacks.shots import CHAT, Shot, head
from outrider.experiments.service.attacks.texts import nested_html, pdf
from outrider.experiments.service.fuzzing.values import count, grammar, number, pattern, schema, text, value

_STAY_S = 60.0
_BYTEWISE = 200  # bytes sent one by one
# Behaviour of a raw connection -> seconds until its client closes it; ``""`` is the default.
LEAVINGS = {"": 3.0, "stays": 10.0, "hangs up": 0.03, "half and hangs up": 0.03, "half and stalls": 5.0, "byte by byte": 10.0}


@dataclass(frozen=True, slots=True)
class Server:
    """The server that cases are made for."""

    model: str
    key: str
    operator: str
    admin_port: int | None
    event_ids: tuple[str, ...] = ()  # of a stream of ``RESUMED``


@dataclass(frozen=True, slots=True)
class Case:
    """A request, or the bytes of a connection."""

    kind: str
    path: str = ""
    body: Any = None  # bytes, or a JSON value
    method: str = "POST"
    headers: Mapping[str, str] | None = None
    raw: bytes | None = None  # everything that is sent
    key: str | None = ""  # "": that of the server
    on_admin_port: bool = False
    leaving: str = ""  # of ``LEAVINGS``

    def shot(self, server: Server) -> Shot:
        """Return the connection that sends it."""
        if self.raw is not None:
            data = self.raw[: len(self.raw) // 2] if self.leaving.startswith("half") else self.raw
            pieces: tuple[bytes, ...] = (data,)
            pause_s = 0.0
            if self.leaving == "byte by byte":
                pieces, pause_s = (*(bytes((byte,)) for byte in data[:_BYTEWISE]), data[_BYTEWISE:]), 0.002
            return Shot(pieces, pause_s, stay_s=LEAVINGS[self.leaving], on_admin_port=self.on_admin_port)
        data = b"" if self.body is None else self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        own = {} if self.body is None else {"Content-Type": "application/json", "Content-Length": str(len(data))}
        key = server.key if self.key == "" else self.key
        begun = head(self.method, self.path, key, own | dict(self.headers or {}))
        return Shot((begun + b"\r\n" + data,), stay_s=_STAY_S, on_admin_port=self.on_admin_port)

    def shown(self) -> str:
        """Return a readable form."""
        if self.raw is not None:
            return f"{self.leaving} {self.raw!r}".strip()
        headers = f" {dict(self.headers)}" if self.headers else ""
        body = "" if self.body is None else repr(self.body) if isinstance(self.body, bytes) else json.dumps(self.body)
        return f"{self.method} {self.path}{headers} {body}"


async def reduced(case: Case, fails: Callable[[Case], Awaitable[bool]], most: int = 80) -> Case:
    """Return the smallest case that still fails, found with so many tries at most."""
    tries, found = 0, True
    while found:
        found = False
        for smaller in _smaller_cases(case):
            if tries >= most:
                return case
            tries += 1
            if await fails(smaller):
                case, found = smaller, True
                break
    return case


def _smaller_cases(case: Case) -> Iterator[Case]:
    if case.raw is not None:
        yield from (dataclasses.replace(case, raw=smaller) for smaller in _halves(case.raw))
        return
    for name in case.headers or ():
        yield dataclasses.replace(case, headers={other: value for other, value in (case.headers or {}).items() if other != name})
    for body in smaller_values(case.body):
        yield dataclasses.replace(case, body=body)


def smaller_values(value: Any) -> Iterator[Any]:
    """Yield the value with a part of it left out, large parts first."""
    if isinstance(value, dict):
        for name in value:
            yield {other: each for other, each in value.items() if other != name}
        for name, each in value.items():
            yield from ({**value, name: smaller} for smaller in smaller_values(each))
    elif isinstance(value, list):
        yield from _halves(value)
        if len(value) <= 8:
            for at, item in enumerate(value):
                yield from ([*value[:at], smaller, *value[at + 1 :]] for smaller in smaller_values(item))
    elif isinstance(value, str | bytes):
        yield from _halves(value)


def _halves(value: Any) -> Iterator[Any]:
    """Yield a sequence without one of its halves, then quarters, down to single items."""
    size = len(value) // 2 if len(value) > 1 else len(value)
    while size:
        for at in range(0, len(value), size):
            yield value[:at] + value[at + size :]
        size //= 2


RESUMED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "When does the library open?"}], "max_tokens": 16, "stream": True, "temperature": 0,
}  # fmt: skip
_CONNECTIONS_WEIGHT = 5  # beside those of the templates
_NO_ID = f"chatcmpl-{'0' * 32}.1.{'0' * 16}.{'0' * 8}.0.2f-5ab1c3d4-0-0-1"
_ID_PARTS = ("", "0", "f" * 8, "9" * 13, "0-0-0-0-0", "-".join(["ffffffff"] * 5), "cmpl-" + "0" * 32, "-1", "f" * 40)
_NAMES = ("", "*", "nobody", "a:b", "%00", "%2e%2e", "%ff", "a" * 300, "%F0%9F%A6%99", "..", "a%0d%0ab", "hostile%20")
_QUERIES = ("", "", "?limit=-1", "?tenant=%00", "?x=%ff")
_OMITTED = object()
_DEEP = 5000


VALUES: Mapping[str, Callable[[random.Random, Any], Any]] = {
    "$text": text,
    "$value": value,
    "$schema": schema,
    "$number": lambda rng, _: number(rng),
    "$grammar": lambda rng, _: grammar(rng),
    "$pattern": lambda rng, _: pattern(rng),
    "$token": lambda rng, most: rng.randrange(most),
    "$bytes": lambda rng, most: rng.randbytes(rng.randrange(most)),
    "$long": lambda rng, begin: begin + begin[-1] * rng.choice((10, 600, 9000, 16_000, 17_000, 70_000)),
}


def make_case(seed: int, number: int, server: Server) -> Case:
    """Return the case of a seed with a number, which is reproducible except for event ids, which a server signs."""
    rng = random.Random(f"{seed}/{number}")
    kinds = {name: group for name, group in _templates().items() if not name.startswith(".")}
    weights = [*(group["weight"] for group in kinds.values()), _CONNECTIONS_WEIGHT]
    (kind,) = rng.choices([*kinds, "connections"], weights)
    if kind == "connections":
        name = rng.choice(list(CONNECTIONS))
        return Case(f"connection, {name}", raw=CONNECTIONS[name](rng, server), leaving=rng.choice(list(LEAVINGS)))
    drawn = Draw(rng, server).of(rng.choice(kinds[kind]["requests"]))
    if isinstance(drawn.get("body"), dict) and drawn["path"] != "/detokenize":
        drawn["body"] = {"model": server.model, **drawn["body"]}
    return Case(kind, **drawn)


@cache
def _templates() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
    return found


class Draw:
    """Values drawn from templates, in which ``{$NAME: argument, ...}`` is replaced by a value of ``VALUES`` or of a method."""

    def __init__(self, rng: random.Random, server: Server) -> None:
        self._rng, self._to = rng, server

    def of(self, template: Any) -> Any:
        """Return a value drawn from a template."""
        if isinstance(template, list):
            return [self.of(item) for item in template]
        if not isinstance(template, Mapping):
            return template
        name, *more = (*template, "")
        if name.startswith("$"):
            if name in VALUES:
                return VALUES[name](self._rng, template[name])
            arguments = {each: template[each] for each in more if each}
            return getattr(self, f"_{name[1:]}")(template[name], **arguments)
        drawn = {each: self.of(part) for each, part in template.items()}
        return {each: part for each, part in drawn.items() if part is not _OMITTED}

    def _one(self, options: Sequence[Any]) -> Any:
        return self.of(self._rng.choice(options))

    def _maybe(self, template: Any, chance: float = 0.5) -> Any:
        return self.of(template) if self._rng.random() < chance else _OMITTED

    def _some(self, fields: Mapping[str, Any], most: int) -> dict[str, Any]:
        return {name: self.of(fields[name]) for name in self._rng.sample(list(fields), self._rng.randrange(most + 1))}

    def _odd(self, names: Sequence[str], parts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return up to two fields with any value, or with any value of their parts."""
        drawn: dict[str, Any] = {}
        for name in self._rng.sample(names, self._rng.choice((0, 1, 1, 2))):
            if name in parts and self._rng.random() < 0.7:
                drawn[name] = {part: value(self._rng, 1) for part in parts[name] if self._rng.random() < 0.5}
            else:
                drawn[name] = value(self._rng)
        return drawn

    def _merge(self, templates: Sequence[Any]) -> dict[str, Any]:
        return {name: each for template in templates for name, each in self.of(template).items()}

    def _joined(self, templates: Sequence[Any]) -> list[Any]:
        return [item for template in templates for item in self.of(template)]

    def _list(self, template: Any, size: int | None = None) -> list[Any]:
        return [self.of(template) for _ in range(count(self._rng) if size is None else self._rng.randrange(size + 1))]

    def _copies(self, template: Any, size: Any = None) -> list[Any]:
        return [self.of(template)] * (count(self._rng) if size is None else self.of(size))

    def _sample(self, templates: Sequence[Any]) -> list[Any]:
        return [self.of(template) for template in self._rng.sample(templates, self._rng.randrange(1, len(templates) + 1))]

    def _named(self, template: Any) -> dict[str, Any]:
        return {text(self._rng, 5): self.of(template)}

    def _json(self, template: Any) -> str:
        return json.dumps(self.of(template))

    def _header(self, template: Any) -> str:
        return str(self.of(template)).encode("ascii", "ignore").decode().replace("\n", "").replace("\r", "")

    def _encoded(self, template: Any) -> bytes:
        return str(self.of(template)).encode("utf-8", "surrogatepass")

    def _file(self, template: Any) -> bytes:
        """Return a file without text, which costs the server a process, once in fifty times."""
        if self._rng.random() >= 0.02:
            content: bytes = self.of(template)
            return content
        changed = bytearray(self._rng.choice((nested_html(5, 500), pdf(2, 3), pdf(1, 2, nested=3), b"<html>" + b"\x00\xff" * 50)))
        for _ in range(self._rng.randrange(4)):
            at = self._rng.randrange(len(changed))
            changed[at : at + self._rng.randrange(3)] = self._rng.randbytes(self._rng.randrange(4))
        return bytes(changed)

    def _server(self, name: str) -> Any:
        return self._to.admin_port is not None if name == "has_admin_port" else getattr(self._to, name)

    def _admin(self, template: Any) -> str:
        return str(self.of(template)).format(self._rng.choice(_NAMES), self._rng.choice(_NAMES)) + self._rng.choice(_QUERIES)

    def _resumed(self, changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return RESUMED | dict(self._rng.choice(changes))

    def _event_id(self, _: None) -> str:
        rng, event_id = self._rng, self._rng.choice(self._to.event_ids or (_NO_ID,))
        parts, how = event_id.split("."), rng.randrange(4)
        if how == 0:
            at = rng.randrange(len(event_id))
            return event_id[:at] + rng.choice("0f-.g ~") + event_id[at + rng.randrange(2) :]
        if how == 1:
            parts[rng.randrange(len(parts))] = rng.choice(_ID_PARTS)
            return ".".join(parts)
        if how == 2:
            return rng.choice(("", "0", "a" * 9000, event_id * 2, ".".join([event_id] * 9), event_id[::-1], "\xff"))
        return event_id

    def _head(self, method: Any, **templates: Any) -> bytes:
        parts = {name: self.of(template) for name, template in templates.items()}
        lines = [f"{self.of(method)} {parts['target']} {parts['version']}", parts["host"]]
        lines += [f"Authorization: Bearer {self._to.key}", *parts["odd"], *(f"x{at}: y" for at in range(parts["short"]))]
        one = "\r\n".join((*filter(None, lines), "", "")).encode("latin-1", "replace") + parts["body"].encode()
        return one * int(parts["times"])


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


CONNECTIONS: dict[str, Callable[[random.Random, Server], bytes]] = {  # that no client library would make
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
    "many headers": lambda rng, to: _post(to, _chat(to), CHAT, **{f"X_{at}": 1 for at in range(5000)}),
    "odd method": lambda rng, to: _post(to, _chat(to)).replace(b"POST", rng.choice((b"BREW", b"TRACE", b"post", b"P\x00T")), 1),
    "odd path": lambda rng, to: _post(to, _chat(to), rng.choice(("/v1/" + "a" * 60_000, "/%00", "/../../a", "//"))),
    "odd version": lambda rng, to: _post(to, _chat(to)).replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/9.9", b"ICY")), 1),
    "not JSON": lambda rng, to: _post(to, rng.choice((b"", b"null", b"[]", b"1e999", b'"x"', b"NaN", b"{}", b"true"))),
    "gzip": lambda rng, to: _post(to, b"\x1f\x8b" + rng.randbytes(50), Content_Encoding="gzip"),
    "pipelined": lambda rng, to: _post(to, _chat(to), Connection="keep-alive") * 5,
    "expectation": lambda rng, to: _post(to, _chat(to), Expect="200-ok"),
}  # fmt: skip
