"""``/health`` and ``/ready``: how the replicas, their ranks and the shared memory are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from actors.lookahead.executor import GroupState
from actors.replica import Description
from cluster.http.documents import STATES
from cluster.serving.readiness import Readiness


class HealthService:
    """What the routes do."""

    def __init__(self, replicas: Callable[[], Awaitable[Sequence[Description]]], configured: int, readiness: Readiness) -> None:
        """
        Args:
            replicas: what those that answer say of themselves; raises ``ApiError`` (503) while none does.
            configured: how many there should be.
            readiness: whether all has been there.
        """
        self._replicas, self._configured, self._readiness = replicas, configured, readiness

    async def health(self) -> Response:
        """200 with the load of all replicas, ``degraded`` where ranks or replicas are missing; 503 while none answers."""
        return JSONResponse(_state(await self._replicas(), self._configured))

    async def ready(self) -> Response:
        """200 once every replica has loaded its model and warmed up, and all else is there, as long as one answers; else 503.

        A replica that is lost later, and started anew, does not make the server unready: the others answer.
        """
        replicas = await self._readiness.replicas()
        return JSONResponse({"status": "ready", "replicas": replicas, "of": self._configured})


def add_health_routes(app: FastAPI, service: HealthService) -> None:
    """Gives an application the routes."""

    @app.get("/health", responses=STATES, response_model=None)
    @app.get("/ping", responses=STATES, response_model=None)
    @app.post("/ping", responses=STATES, response_model=None)
    async def health() -> Response:
        return await service.health()

    @app.get("/ready", responses=STATES, response_model=None)
    async def ready() -> Response:
        return await service.ready()


def _state(replicas: Sequence[Description], configured: int) -> dict[str, Any]:
    """The load of all replicas, at least one, of ``configured`` that should be; ``degraded`` where ranks or replicas are
    missing."""
    groups = [replica.group for replica in replicas if replica.group is not None]
    whole = len(replicas) >= configured and not any(group.degraded for group in groups)
    return {
        "status": "ok" if whole else "degraded",
        "model": replicas[0].info.served_name,
        "replicas": len(replicas),
        "running": sum(replica.counts.running for replica in replicas),
        "waiting": sum(replica.counts.waiting for replica in replicas),
        "free_slots": sum(replica.counts.free_slots for replica in replicas),
        "shared_cache": _cache_state(replicas),
        **({"ranks": _ranks_state(groups, configured)} if groups else {}),
    }


def _cache_state(replicas: Sequence[Description]) -> str:
    """``off``, ``connected``, or ``degraded``: a replica drafts from what it has, and what it says waits."""
    mirrors = [replica.cache for replica in replicas if replica.cache is not None]
    if not mirrors:
        return "off"
    return "connected" if all(mirror.connected for mirror in mirrors) else "degraded"


def _ranks_state(groups: Sequence[GroupState], configured: int) -> dict[str, Any]:
    """The ranks of all groups together. ``of`` counts those of groups that do not answer, too.

    Elastic groups are made up of the replicas themselves: each replica is one rank. ``width`` is that of the widest group.
    """
    ready = [len(group.ready) if group.width is None else 1 for group in groups]
    of = [group.world_size if group.width is None else 1 for group in groups]
    return {
        "ready": sum(ready),
        "of": sum(of) + max(0, configured - len(groups)) * max(of),
        "width": max(group.width or len(group.ready) for group in groups),
        "refilling": sum(len(group.refilling) for group in groups),
        "losses": sum(group.losses for group in groups),
        "last_loss": next((group.last_loss for group in groups if group.last_loss is not None), None),
        "divergences": sum(group.divergences for group in groups),
        "disagreements": sum(group.disagreements for group in groups),
    }
