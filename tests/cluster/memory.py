"""The cluster's memory in a Redis, as operators see it and as a cache client fills it."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.cache_service.access import CacheAccess
from outrider.cache_service.namespace import Identity, namespace
from outrider.cache_service.records import CacheDelta, TextBatch, encode_batch
from outrider.cache_service.server.admin import CacheAdmin
from outrider.cache_service.server.snapshot import decode_snapshot
from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cache_service.store.redis_store import RedisStore
from outrider.cluster.serving.cache_port import CacheAdminPort
from outrider.configs.slices import CacheOptions
from outrider.decoding.sources.text_keys import text_key

MEMORY_SECRET = b"of the tests"
MEMORY_IDENTITY = Identity("aa", "bb", vocab_size=258)


class LocalCacheAdmin(CacheAdminPort):
    """The memory of a ``CacheAdmin`` in this process, for the tenants acme and umbrella."""

    def __init__(self, redis_url: str) -> None:
        access = CacheAccess(CacheOptions(timeout_s=5.0), redis_url, MEMORY_SECRET, ("acme", "umbrella"))
        self.admin = CacheAdmin(access, MEMORY_IDENTITY)

    async def call(self, verb: str, *arguments: object) -> Any:
        return await asyncio.to_thread(getattr(self.admin, verb), *arguments)


@dataclass(frozen=True)
class MemoryServer:
    """Admin routes over a Redis of their own; what a cache client would write there is written by ``add``."""

    url: str
    redis: EmbeddedRedis
    store: RedisStore
    admin: CacheAdmin
    admin_key: str = "outrider-admin"
    tenant_key: str = "outrider-acme"

    def add(self, tenant: str, answer_id: str, tokens: list[int], choice: int = 0, key: int | None = None) -> None:
        """A whole text of a request: what it wrote as one of its choices, or what has another key."""
        delta = CacheDelta(key or text_key(f"{answer_id}/{choice}"), 0, np.asarray(tokens, np.int32), True)
        self.append_raw(tenant, encode_batch(TextBatch(secrets.randbits(64), 0, 0, (delta,)), MEMORY_IDENTITY.vocab_size))

    def append_raw(self, tenant: str, data: bytes) -> None:
        """An entry of the tenant's stream, sound or not."""
        identity = MEMORY_IDENTITY
        self.store.append([(namespace(MEMORY_SECRET, tenant, identity.model_revision, identity.tokenizer_revision), data)])

    def num_texts(self, tenant: str) -> int:
        """Of a tenant."""
        return len(decode_snapshot(self.admin.export(tenant)).texts)

    def texts(self, tenant: str) -> set[tuple[int, ...]]:
        """The tokens of all texts of a tenant."""
        return {tuple(text.tokens.tolist()) for text in decode_snapshot(self.admin.export(tenant)).texts}
