"""Interface of the shared memory for routes, and their answers when it fails."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from cache_service.keeper.admin import Problem, TenantStats, UnknownTenantError
from cluster.http.errors import ApiError
from engine.errors import one_line

logger = logging.getLogger(__name__)


class CacheAdminPort(ABC):
    """The shared memory as the operator sees it. ``tenant`` is a name, ``*`` the public corpus.

    Each method raises ``cache_service.keeper.admin.UnknownTenantError``, ``redis.RedisError`` or ``OSError`` where Redis does not
    do what it should, or an ``ApiError``.
    """

    @abstractmethod
    async def call(self, verb: str, *arguments: object) -> Any:
        """What a method of ``cache_service.keeper.admin.CacheAdmin`` gives, or raises."""

    async def stats(self, tenant: str | None = None, vouched: bool = False) -> Sequence[TenantStats]:
        """What is kept: an entry a tenant, or that of one alone. ``vouched``: it is a tenant, though it was none at the start."""
        return await self.call("stats", tenant, vouched)

    async def export(self, tenant: str) -> bytes:
        """A snapshot of now. Raises ``ValueError`` where the stored one cannot be read."""
        return await self.call("export", tenant)

    async def import_(self, tenant: str, data: bytes) -> int:
        """Adds a snapshot's texts and says how many. Raises ``ValueError``: no sound snapshot, or one of another tokenizer."""
        return await self.call("import_", tenant, data)

    async def preload(self, documents: Sequence[Sequence[int]]) -> int:
        """Adds documents, as token ids, to the public corpus; how many texts were new. Raises ``ValueError`` for a bad id."""
        return await self.call("preload", documents)

    async def delete_tenant(self, tenant: str, vouched: bool = False) -> None:
        """Forgets all texts of a tenant, everywhere. ``vouched`` as of ``stats``."""
        await self.call("delete_tenant", tenant, vouched)

    async def delete_request(self, tenant: str, request_id: str) -> None:
        """Forgets the texts of one answer, everywhere. ``request_id`` is the ``id`` of the response."""
        await self.call("delete_request", tenant, request_id)

    async def delete_documents(self, tenant: str, documents: Sequence[Sequence[int]]) -> None:
        """Forgets documents, as token ids, that requests of a tenant brought along."""
        await self.call("delete_documents", tenant, documents)

    async def verify(self) -> Sequence[Problem]:
        """Reads and checks all that is stored, and says what is wrong with it."""
        return await self.call("verify")


@contextlib.contextmanager
def answered(status: int = 500, code: str = "internal_error", prefix: str = "") -> Iterator[None]:
    """What the shared memory raises, as what the operator is told. The arguments are for a ``ValueError``."""
    try:
        yield
    except UnknownTenantError as error:
        raise ApiError(404, str(error), param="tenant", code="tenant_not_found") from None
    except ValueError as error:
        raise ApiError(status, f"{prefix}{error}", code=code) from error
    except (redis.RedisError, OSError) as error:  # its message has Redis' address
        logger.error("the shared cache could not be asked: %s", one_line(error))
        message = "Redis, which keeps the shared cache, does not answer (the server's log says why); try again"
        raise ApiError(503, message, code="cache_unavailable") from error
