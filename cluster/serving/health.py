"""``/health`` and ``/ready``: how the replicas, their ranks and the shared memory are."""

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

from actors.description import Description, GroupState
from cluster.http.errors import ApiError
from cluster.serving.cache_port import CacheAdminPort
from cluster.serving.shared_answer import SharedAnswer
from engine.loading.model_info import ModelInfo

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HealthService:
    """What the routes do.

    To be ready, everything has to have been there once. What is lost later, and started anew, does not make the server unready:
    it is enough then that one engine replica answers; where there may be none while nobody asks, not even that. However many
    ask, engines and memory are asked once in half a second.
    """

    describe: Callable[[], Awaitable[Sequence[Description]]]  # what the engine replicas that answer say of themselves
    configured: int  # how many there should be
    cache: CacheAdminPort | None = None  # the shared memory; None where there is none
    others: Callable[[], Awaitable[Sequence[Description]]] | None = None  # replicas of the baseline, of which one has to answer
    wake: Callable[[], None] | None = None  # has an engine start, where there may be none (server.replicas=0)
    tells_load: Callable[[str | None], bool] = lambda authorization: True  # to whom, by the header with the key
    clock: Callable[[], float] = time.monotonic
    described: SharedAnswer[Sequence[Description]] = field(init=False)  # ``describe``, asked once for all
    _gaps: SharedAnswer[list[str]] = field(init=False)
    _complete: bool = field(default=False, init=False)
    _info: ModelInfo | None = field(default=None, init=False)  # see ``_agreed``

    def __post_init__(self) -> None:
        self.described = SharedAnswer(self.describe, self.clock)
        self._gaps = SharedAnswer(self._missing_parts, self.clock)

    async def health(self, request: Request) -> Response:
        """Return 200 with the state of all replicas, ``degraded`` where ranks or replicas are missing; 503 while none answers,
        or ``idle`` where none has to. Their load is told to whom it may be."""
        replicas = await self._described()
        if not replicas and self.wake is not None and self._info is not None:
            state = {"status": "idle", "model": self._info.served_name, "replicas": 0}
        else:
            state = _state(_some(replicas), self.configured)
        if self.tells_load(request.headers.get("authorization")):
            state |= _load(replicas)
        return JSONResponse(state)

    async def ready(self) -> Response:
        """200 once every replica has loaded its model and warmed up, and all else is there, as long as one answers; else 503."""
        return JSONResponse({"status": "ready", "replicas": await self.replicas(), "of": self.configured})

    async def info(self) -> ModelInfo:
        """The model that is served, see ``_agreed``. Raises ``ApiError`` (503) while no replica has answered."""
        return self._info or self._agreed(_some(await self._described()))

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
        replicas = await self.described()
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

    async def _missing(self, answering: int) -> list[str]:
        """What has not been there yet, in words."""
        been_there = answering >= max(1, self.configured) or (not self.configured and self._info is not None)
        return [*([] if been_there else [self._engines(answering)]), *await self._gaps()]

    async def _missing_parts(self) -> list[str]:
        missing = []
        if self.others is not None and not await self.others():
            missing.append("no baseline replica is there")
        if self.cache is not None and not await _serves(self.cache):
            missing.append("the cache service is not there")
        return missing

    def _engines(self, answering: int) -> str:
        return f"{answering} of {max(1, self.configured)} engine replicas are there"


def _some(replicas: Sequence[Description]) -> Sequence[Description]:
    """Return them where there is one at least. Raises ``ApiError`` (503)."""
    if not replicas:
        raise ApiError(503, "no engine replica is answering; it may be starting", code="engine_unavailable")
    return replicas


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
    """Return the state of all replicas, at least one, of ``configured`` that should be; ``degraded`` where ranks or replicas
    are missing."""
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
