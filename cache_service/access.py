"""Settings with which a process connects to the shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_service.namespace import Identity, namespace
from cache_service.store.redis_store import RedisStore
from configs.slices import CacheOptions
from decoding.request import PUBLIC


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """Where the cluster's memory is, and whose part of it is used."""

    options: CacheOptions
    url: str = field(repr=False)  # of Redis, see ``cache_service/store/addresses.py``; may hold a password
    secret: bytes = field(repr=False)  # names of tenants in Redis are derived with it
    tenants: tuple[str, ...]

    def store(self, least_timeout_s: float = 0.0) -> RedisStore:
        """Connections, whose operations may take ``cache.timeout_s`` or longer. Raises ``ValueError`` for a bad address."""
        return RedisStore(self.url, self.options.prefix, max(self.options.timeout_s, least_timeout_s))

    def namespace(self, tenant: str, identity: Identity) -> str:
        """The name under which a tenant's texts of a model are kept. Raises ``ValueError`` for an empty secret."""
        return namespace(self.secret, tenant, identity.model_revision, identity.tokenizer_revision)

    def namespaces(self, identity: Identity) -> dict[str, str]:
        """Those of all tenants, and of the public corpus."""
        return {tenant: self.namespace(tenant, identity) for tenant in dict.fromkeys((*self.tenants, PUBLIC))}
