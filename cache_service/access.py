"""Settings with which a process connects to the shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_service.namespace import Identity, namespace
from cache_service.store.redis_store import RedisStore
from configs.slices import CacheOptions
from decoding.request import PUBLIC, memory_name


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

    def of_tenant(self, tenant: str, identity: Identity) -> dict[str, str]:
        """The names under which a tenant's texts of a model are kept, by that of the memory, the model's own first.

        An adapter has memories of its own (``decoding.request.memory_name``), which go with its contents; the public corpus is
        of no model. Raises ``ValueError`` for an empty secret.
        """
        revision, tokenizer = identity.model_revision, identity.tokenizer_revision
        found = {tenant: namespace(self.secret, tenant, revision, tokenizer)}
        for name, digest in identity.adapters if tenant != PUBLIC else ():
            memory = memory_name(tenant, name)
            assert memory is not None, tenant
            found[memory] = namespace(self.secret, memory, f"{revision}+{digest}", tokenizer)
        return found

    def namespaces(self, identity: Identity) -> dict[str, str]:
        """Those of all tenants, and of the public corpus, by the memory's name."""
        found: dict[str, str] = {}
        for tenant in (*self.tenants, PUBLIC):
            found |= self.of_tenant(tenant, identity)
        return found
