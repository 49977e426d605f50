"""A deadline for the headers of a request: a connection that says nothing, or says it too slowly, is closed.

Neither Ray Serve nor uvicorn has one. Before Serve's proxy makes its server it calls what the environment's
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names; there uvicorn gets to know another protocol. A body's deadline is the
application's (``middleware``).
"""

from __future__ import annotations

from asyncio import TimerHandle, Transport

from starlette.middleware import Middleware
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_TIMEOUT_S = 20.0


class HeaderDeadlineProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, whose headers come in time: from the connection's first moment, later from a request's first byte."""

    header_timeout_s = HEADER_TIMEOUT_S
    _deadline: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's does
        """Waits for the first request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Waits for the headers of a further request where one begins."""
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """They are there."""
        self._forget()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """There is nothing to close any more."""
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def use_header_deadline() -> list[Middleware]:
    """Makes it the protocol of the servers that this process will start; Serve expects middlewares, and there are none."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{HeaderDeadlineProtocol.__name__}"
    return []
