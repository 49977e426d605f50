"""A case of the fuzzer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.service.attacks.shots import Shot, head

_STAY_S, _RAW_STAY_S = 60.0, 3.0


@dataclass(frozen=True, slots=True)
class Server:
    """Of whom cases ask."""

    model: str
    key: str
    operator: str
    admin_port: int | None
    event_ids: tuple[str, ...] = ()  # of a stream of ``RESUMED``


@dataclass(frozen=True, slots=True)
class Case:
    """A request, or bytes that are none."""

    kind: str
    path: str = ""
    body: Any = None  # bytes, or a JSON value
    method: str = "POST"
    headers: Mapping[str, str] | None = None
    raw: bytes | None = None  # all that is sent
    key: str | None = ""  # "": that of the server
    on_admin_port: bool = False

    def shot(self, server: Server) -> Shot:
        """Return the connection that sends it."""
        if self.raw is not None:
            return Shot((self.raw,), stay_s=_RAW_STAY_S, on_admin_port=self.on_admin_port)
        data = b"" if self.body is None else self.body if isinstance(self.body, bytes) else encoded(self.body)
        told = {} if self.body is None else {"Content-Type": "application/json", "Content-Length": str(len(data))}
        key = server.key if self.key == "" else self.key
        begun = head(self.method, self.path, key, told | dict(self.headers or {}))
        return Shot((begun + b"\r\n" + data,), stay_s=_STAY_S, on_admin_port=self.on_admin_port)

    def shown(self) -> str:
        """Return it for a reader."""
        if self.raw is not None:
            return repr(self.raw)
        headers = f" {dict(self.headers)}" if self.headers else ""
        body = "" if self.body is None else repr(self.body) if isinstance(self.body, bytes) else json.dumps(self.body)
        return f"{self.method} {self.path}{headers} {body}"


def encoded(body: Any) -> bytes:
    """Return JSON, half surrogates escaped."""
    return json.dumps(body).encode()
