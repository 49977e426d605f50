"""Options of Serve handles: where the router runs, and what requests travel over; and the replicas of the API.

By default Serve gives each handle a thread with an event loop of its own, and every request and every item of a stream crosses
from one to the other. In the caller's own loop they do not, which saves milliseconds until a first token; but such a handle
serves that loop alone. Streams save some more over gRPC, which all replicas speak and which is encrypted where Ray's calls are,
than as calls of Ray's. Serve's ``RAY_SERVE_THROUGHPUT_OPTIMIZED`` turns both defaults round. So each handle says what it needs.
"""

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

from cluster.http.errors import ApiError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_WAITING = ThreadPoolExecutor(8, "broadcasts")


def for_threads(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """A handle of the same deployment that any thread may use and wait for."""
    return _with_router(handle, in_own_loop=True)


def for_this_loop(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """A handle of the same deployment for streams within the running event loop, and for no other.

    Its streams may raise ``grpc.RpcError``, too.

    Raises:
        RuntimeError: no event loop runs.
    """
    return _with_router(handle, in_own_loop=False).options(stream=True, _by_reference=False)


def _with_router(handle: DeploymentHandle[Any], in_own_loop: bool) -> DeploymentHandle[Any]:
    routed = copy.copy(handle)  # as it comes to another actor: without a router
    routed._init(_run_router_in_separate_loop=in_own_loop)
    return routed.options(_by_reference=True)


async def all_results(response: Any, timeout_s: float) -> list[Any]:
    """Return what each replica answers to a broadcast, or why it does not within the time.

    In a thread: ``results_async`` gives up all answers when a single one does not come in time. Not in the default pool, whose
    threads others wait for: a replica may hang.
    """
    wait = functools.partial(response.results, timeout_s=timeout_s, return_exceptions=True)
    return list(await asyncio.get_running_loop().run_in_executor(_WAITING, wait))


class ApiReplicas:
    """The replicas of the API as one of them sees them, itself among them. For the constructor of a deployment and later."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self._name = context.replica_tag
        self._handle = for_threads(serve.get_deployment_handle(context.deployment, context.app_name))

    async def forget(self, tenant: str, request_id: str | None) -> None:
        """Has all of them let go of answers; see ``cluster.observe.audit.Forget``. One that has ended keeps nothing.

        Raises:
            ApiError: 503, one does not answer.
        """
        for answer in await self._ask("forget", tenant, request_id):
            if isinstance(answer, Exception) and not isinstance(answer, RayActorError):
                logger.error("a replica of the API did not delete: %s", answer)
                message = "a replica of the API does not answer, and may keep answers for audits: delete again"
                raise ApiError(503, message, code="api_unavailable", headers={"Retry-After": "5"}) from answer

    async def leads(self) -> bool:
        """Whether this one speaks for all: one of those that answer does, and all that nobody hears."""
        names = [answer for answer in await self._ask("name") if isinstance(answer, str)]
        return self._name <= min(names, default=self._name)

    async def _ask(self, method: str, *arguments: str | None) -> list[Any]:
        """What each answers, or why it does not."""
        try:
            response = self._handle.broadcast(method, *arguments)
            return await all_results(response, _TIMEOUT_S)
        except (RayError, RayServeException, TimeoutError) as error:
            return [error]
