"""Settings with which a process connects to the shared cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.cache_service.namespace import Identity, namespace
from outrider.cache_service.store.redis_store import RedisStore
from outrider.configs.slices import CacheOptions
from outrider.decoding.request import PUBLIC, cache_namespace_of


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """Address of the shared cache, and the tenants to use."""

    options: CacheOptions
    url: str = field(repr=False)  # Redis address, see ``cache_service/store/addresses.py``; may contain a password
    secret: bytes = field(repr=False)  # key from which namespaces in Redis are derived
    tenants: tuple[str, ...]

    def store(self, least_timeout_s: float = 0.0) -> RedisStore:
        """Return a Redis store; its timeout is at least ``cache.timeout_s``. Raises ``ValueError`` for a bad address."""
        return RedisStore(self.url, self.options.prefix, max(self.options.timeout_s, least_timeout_s))

    def of_tenant(self, tenant: str, identity: Identity) -> dict[str, str]:
        """Return the namespaces of a tenant by memory name, the base model's first. Raises ``ValueError`` for an empty secret."""
        revision, tokenizer = identity.model_revision, identity.tokenizer_revision
        found = {tenant: namespace(self.secret, tenant, revision, tokenizer)}
        # Each adapter has a namespace of its own (``decoding.request.cache_namespace_of``), bound to its weights.
        for name, digest in identity.adapters if tenant != PUBLIC else ():
            memory = cache_namespace_of(tenant, name)
            assert memory is not None, tenant
            found[memory] = namespace(self.secret, memory, f"{revision}+{digest}", tokenizer)
        return found

    def namespaces(self, identity: Identity) -> dict[str, str]:
        """Return the namespaces of all tenants and of the public corpus, by memory name."""
        found: dict[str, str] = {}
        # The public corpus has a namespace in every model, too: its texts are tokens of that model's tokenizer.
        for tenant in (*self.tenants, PUBLIC):
            found |= self.of_tenant(tenant, identity)
        return found
