"""Readiness: whether all that the configuration asks for has been there (``/ready``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import redis

from actors.replica import Description
from cluster.http.errors import ApiError
from cluster.serving.cache_port import CacheAdminPort


class Readiness:
    """Everything has to have been there once. What is lost later, and started anew, does not make the server unready: it is
    enough then that one engine replica answers."""

    def __init__(
        self,
        replicas: Callable[[], Awaitable[Sequence[Description]]],
        configured: int,
        cache: CacheAdminPort | None = None,
        others: Callable[[], Awaitable[Sequence[Description]]] | None = None,
    ) -> None:
        """
        Args:
            replicas: what the engine replicas that answer say of themselves.
            configured: how many there should be.
            cache: the shared memory; None where there is none.
            others: the replicas of the baseline that answer, of which one has to; None where there is none.
        """
        self._replicas, self._configured, self._cache, self._others = replicas, configured, cache, others
        self._complete = False

    async def replicas(self) -> int:
        """How many engine replicas answer. Raises ``ApiError`` (503 ``not_ready``) while something is missing."""
        answering = len(await self._replicas())
        if not self._complete:
            missing = await self._missing(answering)
            self._complete = not missing
            if missing:
                raise _not_ready(missing)
        if not answering:
            raise _not_ready(self._engines(0))
        return answering

    async def _missing(self, answering: int) -> str:
        """What has not been there yet, in words; empty when nothing."""
        missing = [] if answering >= self._configured else [self._engines(answering)]
        if self._others is not None and not await self._others():
            missing.append("no baseline replica is there")
        if self._cache is not None and not await _serves(self._cache):
            missing.append("the cache service is not there")
        return ", ".join(missing)

    def _engines(self, answering: int) -> str:
        return f"{answering} of {self._configured} engine replicas are there"


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
