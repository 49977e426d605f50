"""A case of the fuzzer, and its reduction to the smallest request that still fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.experiments.service.attacks.shots import Shot, head

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
