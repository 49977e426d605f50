"""``/health`` and ``/ready``: how the replicas, their ranks and the shared memory are."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
from fastapi.responses import JSONResponse, Response

from actors.description import Description, GroupState
from cluster.http.errors import ApiError
from cluster.serving.cache_port import CacheAdminPort
from engine.loading.model_info import ModelInfo

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HealthService:
    """What the routes do.

    To be ready, everything has to have been there once. What is lost later, and started anew, does not make the server unready:
    it is enough then that one engine replica answers; where there may be none while nobody asks, not even that.
    """

    describe: Callable[[], Awaitable[Sequence[Description]]]  # what the engine replicas that answer say of themselves
    configured: int  # how many there should be
    cache: CacheAdminPort | None = None  # the shared memory; None where there is none
    others: Callable[[], Awaitable[Sequence[Description]]] | None = None  # replicas of the baseline, of which one has to answer
    wake: Callable[[], None] | None = None  # has an engine start, where there may be none (server.replicas=0)
    _complete: bool = field(default=False, init=False)
    _info: ModelInfo | None = field(default=None, init=False)  # see ``_agreed``

    async def health(self) -> Response:
        """200 with the load of all replicas, ``degraded`` where ranks or replicas are missing; 503 while none answers, or
        ``idle`` where none has to."""
        if not await self._described() and self.wake is not None and self._info is not None:
            idle = {"status": "idle", "model": self._info.served_name, "replicas": 0, "running": 0, "waiting": 0, "free_slots": 0}
            return JSONResponse(idle)
        return JSONResponse(_state(await self._answering(), self.configured))

    async def ready(self) -> Response:
        """200 once every replica has loaded its model and warmed up, and all else is there, as long as one answers; else 503."""
        return JSONResponse({"status": "ready", "replicas": await self.replicas(), "of": self.configured})

    async def info(self) -> ModelInfo:
        """The model that is served, see ``_agreed``. Raises ``ApiError`` (503) while no replica has answered."""
        return self._info or self._agreed(await self._answering())

    async def replicas(self) -> int:
        """How many engine replicas answer. Raises ``ApiError`` (503 ``not_ready``) while something is missing."""
        answering = len(await self._described())
        if not self._complete:
            missing = await self._missing(answering)
            if missing:
                if not answering and self.wake is not None:
                    self.wake()
                raise _not_ready(", ".join(missing))
            self._complete = True
        if not answering and self.wake is None:
            raise _not_ready(self._engines(0))
        return answering

    async def _described(self) -> Sequence[Description]:
        replicas = await self.describe()
        if replicas:
            self._info = self._agreed(replicas)
        return replicas

    def _agreed(self, replicas: Sequence[Description]) -> ModelInfo:
        """Return the model that replicas have, with the shortest context that any of them has had.

        What one of them takes fits the others, to which it goes when that one is lost.
        """
        lengths = {replica.info.max_model_len for replica in replicas}
        before = max(lengths) if self._info is None else self._info.max_model_len
        shortest = min(before, *lengths)
        if shortest < before:
            message = "an engine replica has memory for requests of %d tokens and another for %d: %d are served by all"
            logger.warning(message, shortest, before, shortest)
        return dataclasses.replace(replicas[0].info, max_model_len=shortest)

    async def _answering(self) -> Sequence[Description]:
        """At least one."""
        replicas = await self._described()
        if not replicas:
            raise ApiError(503, "no engine replica is answering; it may be starting", code="engine_unavailable")
        return replicas

    async def _missing(self, answering: int) -> list[str]:
        """What has not been there yet, in words."""
        been_there = answering >= max(1, self.configured) or (not self.configured and self._info is not None)
        missing = [] if been_there else [self._engines(answering)]
        if self.others is not None and not await self.others():
            missing.append("no baseline replica is there")
        if self.cache is not None and not await _serves(self.cache):
            missing.append("the cache service is not there")
        return missing

    def _engines(self, answering: int) -> str:
        return f"{answering} of {max(1, self.configured)} engine replicas are there"


def _not_ready(missing: str) -> ApiError:
    return ApiError(503, f"{missing}: try again later", code="not_ready", headers={"Retry-After": "1"})


async def _serves(cache: CacheAdminPort) -> bool:
    """Whether the service is there. While Redis is away it is, too: that makes drafts fewer and no request fail."""
    try:
        await cache.stats()
    except ApiError:
        return False
    except (redis.RedisError, OSError):
        return True
    return True


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
