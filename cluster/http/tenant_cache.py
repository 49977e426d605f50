"""``/v1/cache``: what is remembered of the caller's own tenant, for the caller to see and to delete."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI
from pydantic import BaseModel

from cache_service.records import token_width
from cluster.admission.tenancy import Tenancy
from cluster.http.documents import ERRORS, Authorization
from cluster.http.errors import ApiError
from cluster.observe.audit import Forget, keeps_nothing
from cluster.serving.cache_port import CacheAdminPort, TenantStats, answered
from cluster.serving.shared_answer import SharedAnswer
from configs.slices import CacheOptions
from engine.loading.model_info import ModelInfo

logger = logging.getLogger(__name__)

_MIB = 2**20


class TenantCache(BaseModel):
    """What is kept of the caller's tenant, for the model and its adapters together. All null for nobody, and all but the name
    where replicas share nothing."""

    tenant: str | None
    texts: int | None = None
    tokens: int | None = None
    bytes: int | None = None  # of the tokens, as the quota counts them
    quota_bytes: int | None = None  # beyond it what is old and rare is forgotten
    ttl_s: float | None = None  # older texts are forgotten


class Deleted(BaseModel):
    """Whose texts were deleted."""

    tenant: str
    deleted: bool


@dataclass(frozen=True, slots=True)
class TenantCacheService:
    """What the routes do. The tenant is that of the key alone: there is no way to name another one."""

    tenancy: Tenancy  # knows the keys
    port: CacheAdminPort | None  # the shared memory; None where there is none
    model: Callable[[], Awaitable[ModelInfo]]  # what is served
    options: CacheOptions
    forget: Forget = keeps_nothing  # of what is kept for audits
    _stats: dict[str, SharedAnswer[Sequence[TenantStats]]] = field(default_factory=dict)  # by tenant

    async def get(self, authorization: Authorization = None) -> TenantCache:
        """Return how much is kept. Redis is asked once in half a second for a tenant.

        Raises:
            ApiError: 401 for a wrong key, 503 where Redis does not answer.
        """
        caller = self.tenancy.caller_of(authorization)
        tenant, port, own = caller.tenant, self.port, caller.options.cache_mib
        if tenant is None or port is None:
            return TenantCache(tenant=tenant)
        width = token_width((await self.model()).vocab_size)
        if tenant not in self._stats:  # vouched: it may have come with the file of keys, since the start
            self._stats[tenant] = SharedAnswer(lambda: port.stats(tenant, vouched=True))
        with answered():
            stats = await self._stats[tenant]()
        return TenantCache(
            tenant=tenant,
            texts=sum(each.texts for each in stats),
            tokens=sum(each.tokens for each in stats),
            bytes=sum(each.tokens for each in stats) * width,
            quota_bytes=int((self.options.tenant_mib if own is None else own) * _MIB) * len(stats),  # of each adapter as well
            ttl_s=self.options.ttl_s,
        )

    async def delete(self, authorization: Authorization = None) -> Deleted:
        """Forgets all texts of the tenant, everywhere, and what is kept for audits, also where nothing is shared.

        Raises:
            ApiError: 400, the request is nobody's; 404, nothing is shared; 401 and 503 as ``get``.
        """
        tenant = self.tenancy.tenant_of(authorization)
        if tenant is None:
            message = "a request without a tenant's API key has no texts here: send Authorization: Bearer KEY"
            raise ApiError(400, message, code="no_tenant")
        await self.forget(tenant, None)
        if self.port is None:
            message = "the replicas of this server share nothing: cache.enabled is false, or there is no Redis"
            raise ApiError(404, message, code="cache_disabled")
        with answered():
            await self.port.delete_tenant(tenant, vouched=True)
        self._stats.pop(tenant, None)
        logger.info("tenant %s deleted all its texts", tenant)
        return Deleted(tenant=tenant, deleted=True)


def add_tenant_cache_routes(app: FastAPI, service: TenantCacheService) -> None:
    """Gives an application the routes."""
    app.get("/v1/cache", responses=ERRORS)(service.get)
    app.delete("/v1/cache", responses=ERRORS)(service.delete)
