"""Options of Serve handles, and the API replicas."""

# By default Serve gives each handle a thread with an event loop, and every request and every item of a stream crosses between it
# and the caller's loop. A router in the caller's loop saves milliseconds until the first token, but the handle then serves only
# that loop. Streams are faster over gRPC than as Ray calls; all replicas support it, and it is encrypted where Ray's calls are.
# RAY_SERVE_THROUGHPUT_OPTIMIZED inverts both defaults, so each handle sets them explicitly.

from __future__ import annotations

import asyncio
import copy
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.cluster.http.errors import ApiError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_WAITING = ThreadPoolExecutor(8, "broadcasts")


def for_threads(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """Return a handle of the same deployment that any thread may use and wait for."""
    return _with_router(handle, in_own_loop=True)


def for_this_loop(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """Return a handle for streams in the running event loop (RuntimeError without one), which may raise ``grpc.RpcError``."""
    return _with_router(handle, in_own_loop=False).options(stream=True, _by_reference=False)


def _with_router(handle: DeploymentHandle[Any], in_own_loop: bool) -> DeploymentHandle[Any]:
    routed = copy.copy(handle)  # without a router, as it arrives in another actor
    routed._init(_run_router_in_separate_loop=in_own_loop)
    return routed.options(_by_reference=True)


async def all_results(response: Any, timeout_s: float) -> list[Any]:
    """Return each replica's answer to a broadcast, or the exception if it does not answer in time."""
    # In a thread: ``results_async`` drops all answers if one is late. Not in the default pool: a replica may hang.
    wait = functools.partial(response.results, timeout_s=timeout_s, return_exceptions=True)
    return list(await asyncio.get_running_loop().run_in_executor(_WAITING, wait))


class ApiReplicas:
    """Client of all API replicas, including this one. Create it in a deployment's constructor or later."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._name = context.replica_tag
        self._handle = for_threads(serve.get_deployment_handle(context.deployment, context.app_name))

    async def forget(self, tenant: str, request_id: str | None) -> None:
        """Make all API replicas delete answers (``observe.audit.Forget``). Raises ``ApiError`` (503) if one does not answer."""
        for answer in await self._ask("forget", tenant, request_id):
            if isinstance(answer, Exception) and not isinstance(answer, RayActorError):
                logger.error("an API replica failed to delete: %s", answer)
                message = "an API replica does not answer and may still keep answers for audits: delete again"
                raise ApiError(503, message, code="api_unavailable", headers={"Retry-After": "5"}) from answer

    async def leads(self) -> bool:
        """Return whether this replica reports for all: it has the lowest name of those that answer, or none answers."""
        names = [answer for answer in await self._ask("name") if isinstance(answer, str)]
        return self._name <= min(names, default=self._name)

    async def _ask(self, method: str, *arguments: str | None) -> list[Any]:
        try:
            response = self._handle.broadcast(method, *arguments)
            return await all_results(response, _TIMEOUT_S)
        except (RayError, RayServeException, TimeoutError) as error:
            return [error]
