"""Interface of the shared cache for the routes, and their errors when it fails."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from outrider.cache_service.server.admin import Problem, TenantStats, UnknownTenantError
from outrider.cluster.http.errors import ApiError
from outrider.engine.errors import one_line

logger = logging.getLogger(__name__)


class CacheAdminPort(ABC):
    """Shared cache as the operator sees it. ``tenant`` is a name, or ``*`` for the public corpus.

    Each method may raise ``UnknownTenantError``, ``ApiError``, or, if Redis fails, ``redis.RedisError`` or ``OSError``.
    """

    @abstractmethod
    async def call(self, verb: str, *arguments: object) -> Any:
        """Call a method of ``cache_service.server.admin.CacheAdmin``; return its result or raise its exception."""

    async def stats(self, tenant: str | None = None, vouched: bool = False) -> Sequence[TenantStats]:
        """Return the statistics of all tenants or of one; ``vouched``: the tenant exists, though it did not at the start."""
        return await self.call("stats", tenant, vouched)

    async def export(self, tenant: str) -> bytes:
        """Return a current snapshot. Raise ``ValueError`` if the stored one cannot be read."""
        return await self.call("export", tenant)

    async def import_(self, tenant: str, data: bytes) -> int:
        """Add a snapshot's texts; return their number. Raise ``ValueError`` if it is damaged or of another tokenizer."""
        return await self.call("import_", tenant, data)

    async def preload(self, documents: Sequence[Sequence[int]]) -> int:
        """Add documents (token ids) to the public corpus; return the number of new texts. Raise ``ValueError`` for a bad id."""
        return await self.call("preload", documents)

    async def delete_tenant(self, tenant: str, vouched: bool = False) -> None:
        """Delete all texts of a tenant, on all replicas. ``vouched`` as in ``stats``."""
        await self.call("delete_tenant", tenant, vouched)

    async def delete_request(self, tenant: str, request_id: str) -> None:
        """Delete the texts of one answer, on all replicas. ``request_id`` is the ``id`` of the response."""
        await self.call("delete_request", tenant, request_id)

    async def delete_documents(self, tenant: str, documents: Sequence[Sequence[int]]) -> None:
        """Delete documents (token ids) that requests of a tenant sent."""
        await self.call("delete_documents", tenant, documents)

    async def verify(self) -> Sequence[Problem]:
        """Read and check all that is stored; return the problems."""
        return await self.call("verify")


@contextlib.contextmanager
def answered(status: int = 500, code: str = "internal_error", prefix: str = "") -> Iterator[None]:
    """Convert exceptions of the shared cache to ``ApiError``. The arguments are for a ``ValueError``."""
    try:
        yield
    except UnknownTenantError as error:
        raise ApiError(404, str(error), param="tenant", code="tenant_not_found") from None
    except ValueError as error:
        raise ApiError(status, f"{prefix}{error}", code=code) from error
    except (redis.RedisError, OSError) as error:  # its message contains Redis' address
        logger.error("the shared cache did not answer: %s", one_line(error))
        message = "Redis, which holds the shared cache, does not answer (see the server's log); try again"
        raise ApiError(503, message, code="cache_unavailable") from error
