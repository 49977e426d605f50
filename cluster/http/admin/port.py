"""Separate port for the operator's routes /admin and /metrics, on loopback by default."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

from outrider.cluster.admission.http_limits import LimitedProtocol
from outrider.cluster.admission.middleware import HostMiddleware
from outrider.cluster.http import error_handlers
from outrider.cluster.http.api import Service, add_operator_routes
from outrider.configs.schema import ConfigError

logger = logging.getLogger(__name__)

_CLOSE_S = 1  # seconds that running requests get to finish when the port closes
_ASKS_S = 0.2  # seconds that a new connection gets to send its request before shutdown
_POLL_S = 0.01


class AdminPort:
    """Admin port, and the server on it during the application's lifetime."""

    # During a redeploy, the new and the old ingress listen on the port together (SO_REUSEPORT), so that it always answers; each
    # queries all engines. A port held by another program is an error.

    def __init__(self, host: str, port: int, names: frozenset[str] | None = None) -> None:
        """Bind the port; ``serving`` answers. ``names`` are the allowed host names, None for any. Raises ``ConfigError``."""
        self._socket, self._names = _bound(host, port), names

    @contextlib.asynccontextmanager
    async def serving(self, service: Service) -> AsyncIterator[None]:
        """Serve the operator's routes in the running event loop, and close the socket at the end."""
        app = create_admin_api(service, self._names)
        config = uvicorn.Config(
            app, http=LimitedProtocol, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=_CLOSE_S
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[self._socket]))
        try:
            # The task ends before the start if the server cannot start: then waiting would last forever.
            while not server.started and not task.done():
                await asyncio.sleep(_POLL_S)
            yield
        finally:
            server.should_exit = True
            await task
            self._socket.close()


class _Server(uvicorn.Server):
    """Uvicorn server inside another process, which handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down like uvicorn, after ``_ASKS_S``."""
        # Uvicorn closes connections that have sent no request; new connections get time to send theirs.
        for server in self.servers:
            server.close()
        await asyncio.sleep(_ASKS_S)
        await super().shutdown(sockets)


def create_admin_api(service: Service, names: frozenset[str] | None = None) -> FastAPI:
    """Build the application of the admin port; ``names`` are the allowed host names."""
    app = FastAPI(title="Outrider's admin port", docs_url=None, redoc_url=None, openapi_url=None)
    error_handlers.install(app)
    add_operator_routes(app, service)
    app.add_middleware(HostMiddleware, names=names, refuse=service.admission.refuse)
    return app


def _bound(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.admin_port: cannot listen on {host}:{port} ({error.strerror or error}); stop the process that listens "
            "there, or choose another with server.admin_port or server.admin_host"
        ) from error
    listener.setblocking(False)
    return listener
