"""``/health`` and ``/ready``: state of the replicas, their ranks and the shared cache."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from outrider.actors.description import Description, GroupState
from outrider.cluster.http.errors import ApiError
from outrider.cluster.serving.cache_port import CacheAdminPort
from outrider.cluster.serving.shared_answer import SharedAnswer
from outrider.engine.loading.model_info import ModelInfo

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HealthService:
    """Implementation of the routes."""

    # The server becomes ready once all parts have been available. Later losses do not make it unready as long as one engine
    # replica answers, or none is needed (scaled to zero). Engines and cache are asked at most once in half a second.

    describe: Callable[[], Awaitable[Sequence[Description]]]  # returns the descriptions of the engine replicas that answer
    configured: int  # number of replicas that should exist
    cache: CacheAdminPort | None = None  # None without a shared cache
    others: Callable[[], Awaitable[Sequence[Description]]] | None = None  # replicas of the baseline, of which one has to answer
    wake: Callable[[], None] | None = None  # starts an engine if there may be none (server.replicas=0)
    reports_load: Callable[[str | None], bool] = lambda authorization: True  # whether the sender of this header may see the load
    clock: Callable[[], float] = time.monotonic
    described: SharedAnswer[Sequence[Description]] = field(init=False)  # ``describe``, shared by simultaneous callers
    _gaps: SharedAnswer[list[str]] = field(init=False)
    _complete: bool = field(default=False, init=False)
    _info: ModelInfo | None = field(default=None, init=False)  # the served model, see ``_agreed``

    def __post_init__(self) -> None:
        self.described = SharedAnswer(self.describe, self.clock)
        self._gaps = SharedAnswer(self._missing_parts, self.clock)

    async def health(self, request: Request) -> Response:
        """Return 200 with the state of all replicas, ``ok``, ``degraded`` or ``idle``; 503 if none answers and one should."""
        replicas = await self._described()
        if not replicas and self.wake is not None and self._info is not None:
            state = {"status": "idle", "model": self._info.served_name, "replicas": 0}
        else:
            state = _state(_some(replicas), self.configured)
        if self.reports_load(request.headers.get("authorization")):
            state |= _load(replicas)
        return JSONResponse(state)

    async def ready(self) -> Response:
        """Return 200 once every replica has warmed up and all other parts exist, as long as a replica answers; else 503."""
        return JSONResponse({"status": "ready", "replicas": await self.replicas(), "of": self.configured})

    async def info(self) -> ModelInfo:
        """Return the served model, see ``_agreed``. Raise ``ApiError`` (503) while no replica has answered."""
        return self._info or self._agreed(_some(await self._described()))

    async def replicas(self) -> int:
        """Return the number of replicas that answer. Raise ``ApiError`` (503 ``not_ready``) while something is missing."""
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
        replicas = await self.described()
        if replicas:
            self._info = self._agreed(replicas)
        return replicas

    def _agreed(self, replicas: Sequence[Description]) -> ModelInfo:
        """Return the served model with the shortest context that any replica has had."""
        # A request that one replica takes must fit the others, because it may move there.
        lengths = {replica.info.max_model_len for replica in replicas}
        before = max(lengths) if self._info is None else self._info.max_model_len
        shortest = min(before, *lengths)
        if shortest < before:
            message = "an engine replica has memory for requests of %d tokens, another for %d: the limit is %d tokens"
            logger.warning(message, shortest, before, shortest)
        return dataclasses.replace(replicas[0].info, max_model_len=shortest)

    async def _missing(self, answering: int) -> list[str]:
        been_there = answering >= max(1, self.configured) or (not self.configured and self._info is not None)
        return [*([] if been_there else [self._engines(answering)]), *await self._gaps()]

    async def _missing_parts(self) -> list[str]:
        missing = []
        if self.others is not None and not await self.others():
            missing.append("no baseline replica is answering")
        if self.cache is not None and not await _serves(self.cache):
            missing.append("the cache service is not answering")
        return missing

    def _engines(self, answering: int) -> str:
        return f"{answering} of {max(1, self.configured)} engine replicas are answering"


def _some(replicas: Sequence[Description]) -> Sequence[Description]:
    """Return the replicas. Raise ``ApiError`` (503) if there are none."""
    if not replicas:
        raise ApiError(503, "no engine replica is answering; it may be starting", code="engine_unavailable")
    return replicas


def _not_ready(missing: str) -> ApiError:
    return ApiError(503, f"{missing}: try again later", code="not_ready", headers={"Retry-After": "1"})


async def _serves(cache: CacheAdminPort) -> bool:
    try:
        await cache.stats()
    except ApiError:
        return False
    except (redis.RedisError, OSError):
        # Without Redis there are fewer drafts, but no request fails.
        return True
    return True


def _state(replicas: Sequence[Description], configured: int) -> dict[str, Any]:
    """Return the state of at least one replica of ``configured``; ``degraded`` if ranks or replicas are missing."""
    groups = [replica.group for replica in replicas if replica.group is not None]
    whole = len(replicas) >= configured and not any(group.degraded for group in groups)
    return {
        "status": "ok" if whole else "degraded",
        "model": replicas[0].info.served_name,
        "replicas": len(replicas),
        "shared_cache": _cache_state(replicas),
        **({"ranks": _ranks_state(groups, configured)} if groups else {}),
    }


def _load(replicas: Sequence[Description]) -> dict[str, int]:
    counts = [replica.counts for replica in replicas]
    return {
        "running": sum(one.running for one in counts),
        "waiting": sum(one.waiting for one in counts),
        "free_slots": sum(one.free_slots for one in counts),
    }


def _cache_state(replicas: Sequence[Description]) -> str:
    """Return ``off``, ``connected``, or ``degraded`` if a replica is disconnected and drafts from what it has."""
    cache_clients = [replica.cache for replica in replicas if replica.cache is not None]
    if not cache_clients:
        return "off"
    return "connected" if all(counts.connected for counts in cache_clients) else "degraded"


def _ranks_state(groups: Sequence[GroupState], configured: int) -> dict[str, Any]:
    """Return the state of the ranks of all groups. ``of`` includes the ranks of groups that do not answer."""
    # In elastic groups each replica is one rank. `width` is that of the widest group.
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
