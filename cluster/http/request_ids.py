"""Request ids: the name of an HTTP request in its response's headers and in log lines."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
REQUEST_ID = r"^[A-Za-z0-9_.:\-]{1,128}$"  # names of requests: fit for headers and log lines
_VALID = re.compile(REQUEST_ID)
_CURRENT: ContextVar[list[str] | None] = ContextVar("the id of the request that is being answered", default=None)


def request_id() -> str | None:
    """Return the id of the request that is being answered; None outside of one."""
    current = _CURRENT.get()
    return None if current is None else current[0]


def rename_request(name: str | None) -> None:
    """Use the id in a request's body, if it has one, in log lines instead of the header's."""
    current = _CURRENT.get()
    if name is not None and current is not None:
        current[0] = name


class RequestIdMiddleware:
    """Middleware that takes a request's id from its header, or makes one, and sends it back unless Ray Serve does."""

    def __init__(self, app: ASGIApp, sends: bool = True) -> None:
        self._app, self._sends = app, sends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(HEADER, "")
        name = asked if _VALID.match(asked) else uuid.uuid4().hex

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and self._sends:
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        token = _CURRENT.set([name])
        try:
            await self._app(scope, receive, sending)
        finally:
            _CURRENT.reset(token)


def log_request_ids() -> None:
    """Begin each log line of this package with the id of the request that is being answered, from now on."""
    make = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if (name := request_id()) is not None and record.name.startswith("outrider."):
            record.msg = f"[{name}] {record.msg}"
        return record

    logging.setLogRecordFactory(factory)
