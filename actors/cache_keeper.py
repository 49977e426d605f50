"""The service behind the shared memory as one actor: it keeps Redis in order, and does what operators ask for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from cache_service.access import CacheAccess
from cache_service.keeper.admin import CacheAdmin
from cache_service.keeper.server import CacheServer
from cache_service.namespace import Identity

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.2


class CacheNotReadyError(RuntimeError):
    """No replica has told yet which model is served, and the names of tenants depend on it."""


class CacheKeeper:
    """A ``CacheServer`` and a ``CacheAdmin`` for the model that the replicas have loaded."""

    def __init__(self, access: CacheAccess, quotas: Mapping[str, int], identity: Callable[[], Identity | None]) -> None:
        """
        Args:
            access: where the memory is, and whose.
            quotas: bytes of tokens to keep of tenants for whom it is not what the options say.
            identity: of the model, None while it is not known; asked from a thread until it is.
        """
        self._access, self._quotas, self._identity = access, quotas, identity
        self._server: CacheServer | None = None
        self._admin: CacheAdmin | None = None
        self._fault: str | None = None  # why it will never be ready
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._begin, name="cache-keeper", daemon=True)
        self._thread.start()

    @property
    def admin(self) -> CacheAdmin:
        """The operator's verbs. Raises ``CacheNotReadyError`` before the model is known."""
        if self._admin is None:
            why = self._fault or "no engine replica has loaded the model yet; try again"
            raise CacheNotReadyError(f"the shared memory is not ready: {why}")
        return self._admin

    def check_health(self) -> None:
        """Raises ``CacheNotReadyError`` when it has to be replaced."""
        if self._fault is not None:
            raise CacheNotReadyError(self._fault)

    def stop(self) -> None:
        """Gives the lease back and ends the threads. Harmless when repeated."""
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
        except Exception as error:  # of a thread that nobody waits for: whoever asks next is told
            logger.exception("the keeper of the shared memory could not begin")
            self._fault = f"{type(error).__name__}: {error}"

    def _open(self, identity: Identity) -> None:
        self._server = CacheServer(self._access, identity, self._quotas)
        self._server.start()
        self._admin = CacheAdmin(self._access, identity)
        logger.info("the shared memory is kept for %d tenants", len(self._access.tenants))
