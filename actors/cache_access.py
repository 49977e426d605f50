"""Settings with which a replica connects to the shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_service.namespace import Identity
from configs.slices import CacheOptions
from engine.loading.model import ModelInfo


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """Where the cluster's memory is, and whose part of it a replica keeps a copy of."""

    options: CacheOptions
    url: str = field(repr=False)  # may hold a password
    secret: bytes = field(repr=False)  # names of tenants in Redis are derived with it
    tenants: tuple[str, ...]


def identity_of(info: ModelInfo) -> Identity:
    """What the names of its tenants in Redis depend on."""
    return Identity(info.model_revision, info.tokenizer_revision, info.vocab_size)
