"""``/v1/cache``: inspection and deletion of the caller's own texts in the shared cache."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI
from pydantic import BaseModel

from outrider.cache_service.records import token_width
from outrider.cluster.admission.tenancy import Tenancy
from outrider.cluster.http.documents import ERRORS, Authorization
from outrider.cluster.http.errors import ApiError
from outrider.cluster.observe.audit import Forget, keeps_nothing
from outrider.cluster.serving.cache_port import CacheAdminPort, TenantStats, answered
from outrider.cluster.serving.shared_answer import SharedAnswer
from outrider.configs.slices import CacheOptions
from outrider.engine.loading.model_info import ModelInfo

logger = logging.getLogger(__name__)

_MIB = 2**20


class TenantCache(BaseModel):
    """Contents of the shared cache for the caller's tenant; null fields without a tenant or without a shared cache."""

    tenant: str | None
    texts: int | None = None
    tokens: int | None = None
    bytes: int | None = None  # size of the tokens, as counted by the quota
    quota_bytes: int | None = None  # above it, old and rarely used texts are evicted
    ttl_s: float | None = None  # age at which texts expire


class Deleted(BaseModel):
    """Confirmation that a tenant's texts were deleted."""

    tenant: str
    deleted: bool


@dataclass(frozen=True, slots=True)
class TenantCacheService:
    """Service behind ``/v1/cache``. The API key alone determines the tenant."""

    tenancy: Tenancy
    port: CacheAdminPort | None  # shared cache; None if the server has none
    model: Callable[[], Awaitable[ModelInfo]]
    options: CacheOptions
    forget: Forget = keeps_nothing  # deletes the tenant's audit records
    _stats: dict[str, SharedAnswer[Sequence[TenantStats]]] = field(default_factory=dict)  # by tenant

    async def get(self, authorization: Authorization = None) -> TenantCache:
        """Return the contents for the caller's tenant, at most 0.5 s old. Raises ApiError: 401, wrong key; 503, no Redis."""
        caller = self.tenancy.caller_of(authorization)
        tenant, port, own = caller.tenant, self.port, caller.options.cache_mib
        if tenant is None or port is None:
            return TenantCache(tenant=tenant)
        width = token_width((await self.model()).vocab_size)
        if tenant not in self._stats:  # vouched: the tenant may come from the keys file, after the start
            self._stats[tenant] = SharedAnswer(lambda: port.stats(tenant, vouched=True))
        with answered():
            stats = await self._stats[tenant]()
        return TenantCache(
            tenant=tenant,
            texts=sum(each.texts for each in stats),
            tokens=sum(each.tokens for each in stats),
            bytes=sum(each.tokens for each in stats) * width,
            quota_bytes=int((self.options.tenant_mib if own is None else own) * _MIB) * len(stats),  # one quota per adapter too
            ttl_s=self.options.ttl_s,
        )

    async def delete(self, authorization: Authorization = None) -> Deleted:
        """Delete all texts of the tenant from the shared cache and all replicas, and its audit records.

        Raises ApiError: 400 without a tenant; 404 without a shared cache (audit records are deleted); 401 and 503 as ``get``.
        """
        tenant = self.tenancy.tenant_of(authorization)
        if tenant is None:
            message = "a request without a tenant's API key has no texts here: send Authorization: Bearer KEY"
            raise ApiError(400, message, code="no_tenant")
        # First: audit records exist without a shared cache, too.
        await self.forget(tenant, None)
        if self.port is None:
            message = "this server has no shared cache: cache.enabled is false, or there is no Redis"
            raise ApiError(404, message, code="cache_disabled")
        with answered():
            await self.port.delete_tenant(tenant, vouched=True)
        self._stats.pop(tenant, None)
        logger.info("tenant %s deleted all its texts", tenant)
        return Deleted(tenant=tenant, deleted=True)


def add_tenant_cache_routes(app: FastAPI, service: TenantCacheService) -> None:
    """Add the routes to an application."""
    app.get("/v1/cache", responses=ERRORS)(service.get)
    app.delete("/v1/cache", responses=ERRORS)(service.delete)
