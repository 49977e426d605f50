"""Actor that maintains the shared cache in Redis and runs the operator's cache commands."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from outrider.cache_service.access import CacheAccess
from outrider.cache_service.namespace import Identity
from outrider.cache_service.server.admin import CacheAdmin
from outrider.cache_service.server.cache_server import CacheServer

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.2


class CacheNotReadyError(RuntimeError):
    """Error raised while no replica has reported the model, from which the Redis namespaces of tenants are derived."""


class CacheServerActor:
    """``CacheServer`` and ``CacheAdmin`` for the model that the replicas have loaded."""

    def __init__(self, access: CacheAccess, quotas: Mapping[str, int], identity: Callable[[], Identity | None]) -> None:
        """Start a thread that polls ``identity`` until known, then opens server and admin. ``quotas`` are bytes by tenant."""
        self._access, self._quotas, self._identity = access, quotas, identity
        self._server: CacheServer | None = None
        self._admin: CacheAdmin | None = None
        self._fault: str | None = None  # reason why start-up failed for good
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._begin, name="cache-server", daemon=True)
        self._thread.start()

    @property
    def admin(self) -> CacheAdmin:
        """Return the operator's commands. Raises ``CacheNotReadyError`` until the model is known."""
        if self._admin is None:
            why = self._fault or "no engine replica has loaded the model yet; try again"
            raise CacheNotReadyError(f"the shared cache is not ready: {why}")
        return self._admin

    def check_health(self) -> None:
        """Raise ``CacheNotReadyError`` if this actor has to be replaced."""
        if self._fault is not None:
            raise CacheNotReadyError(self._fault)

    def stop(self) -> None:
        """Release the lease and stop the threads. Idempotent."""
        self._stopped.set()
        self._thread.join()
        if self._server is not None:
            self._server.stop()
        if self._admin is not None:
            self._admin.close()

    def _begin(self) -> None:
        try:
            while not self._stopped.is_set():
                identity = self._identity()
                if identity is not None:
                    self._open(identity)
                    return
                self._stopped.wait(_ASK_AGAIN_S)
        except Exception as error:  # the thread has no caller: report the error at the next call
            logger.exception("the shared cache service failed to start")
            self._fault = f"{type(error).__name__}: {error}"

    def _open(self, identity: Identity) -> None:
        self._server = CacheServer(self._access, identity, self._quotas)
        self._server.start()
        self._admin = CacheAdmin(self._access, identity)
        logger.info("the shared cache serves %d tenants", len(self._access.tenants))
