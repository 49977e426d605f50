"""The cache server as a Serve deployment, and its client for the admin routes."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import redis
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.actors.description import Description, identity_of
from outrider.cache_service.access import CacheAccess
from outrider.cache_service.namespace import Identity
from outrider.cache_service.server.admin import CacheAdmin, UnknownTenantError
from outrider.cache_service.server.cache_server import CacheServer
from outrider.cluster.cli.launch.preflight import SECRET_ADVICE, SECRET_VARIABLE, redis_address
from outrider.cluster.http.errors import ApiError
from outrider.cluster.serving.cache_port import CacheAdminPort
from outrider.cluster.serving.handles import for_threads
from outrider.configs.schema import ConfigError
from outrider.configs.slices import CacheOptions

logger = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Location and options of the shared cache, without secrets, because Serve writes down the arguments of deployments."""

    options: CacheOptions
    url: str | None  # without passwords; None if the environment has it
    tenants: tuple[str, ...]
    version: str  # version of the served model, see ``cluster.app.version_of``

    def access(self) -> CacheAccess:
        """Return how this process connects. Raise ``ConfigError`` if the environment lacks the secret or the address."""
        url, secret = redis_address(self.url), os.environ.get(SECRET_VARIABLE, "")
        if url is None or not secret:
            raise ConfigError(f"{SECRET_VARIABLE} is not set where this actor runs, {SECRET_ADVICE}")
        return CacheAccess(self.options, url, secret.encode(), self.tenants)


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


class CacheActor:
    """``CacheServerActor`` as an actor. It returns errors as values, like the engine replicas."""

    def __init__(self, engine: DeploymentHandle[Any], place: CacheSettings, quotas: dict[str, int]) -> None:
        threaded = for_threads(engine)
        self._cache_server = CacheServerActor(place.access(), quotas, lambda: _identity(threaded, place.version))

    async def call(self, verb: str, *arguments: object) -> object:
        """Return the result of a method of ``CacheAdmin``, or the exception that it raises."""
        try:
            return await asyncio.to_thread(getattr(self._cache_server.admin, verb), *arguments)
        except (CacheNotReadyError, UnknownTenantError, ValueError, redis.RedisError, OSError) as refusal:
            return refusal

    def check_health(self) -> None:
        """Raise ``CacheNotReadyError`` if Serve has to replace this actor."""
        self._cache_server.check_health()

    def __del__(self) -> None:
        # Serve calls `__del__` when it stops a replica, and Python also after a constructor that failed.
        if hasattr(self, "_cache_server"):
            self._cache_server.stop()


def _identity(engine: DeploymentHandle[Any], version: str) -> Identity | None:
    """Return the identity of the model that an engine replica of this version has loaded; None while none answers."""
    try:
        description: Description = engine.describe.remote().result(timeout_s=_DESCRIBE_TIMEOUT_S)
    except (RayError, RayServeException, TimeoutError):
        return None
    # During a redeploy, replicas of the former model answer, too; its namespaces are others.
    return identity_of(description.info) if description.version == version else None


class HandleCacheAdmin(CacheAdminPort):
    """Shared cache behind a deployment of ``CacheActor``."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def call(self, verb: str, *arguments: object) -> Any:
        """See ``CacheAdminPort.call``."""
        try:
            answer = await self._handle.call.remote(verb, *arguments)
        except (RayError, RayServeException) as error:
            logger.exception("the cache service failed")
            message = f"the cache service is not answering ({type(error).__name__}); try again"
            raise ApiError(503, message, code="cache_unavailable") from error
        if isinstance(answer, CacheNotReadyError):
            raise ApiError(503, str(answer), code="cache_unavailable")
        if isinstance(answer, Exception):
            raise answer
        return answer
