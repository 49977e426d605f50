"""Redis namespaces of tenants' texts, and hashes of API keys."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from outrider.cache_service.records import SCHEMA


@dataclass(frozen=True, slots=True)
class Identity:
    """Model and tokenizer revisions, which must match for token ids to mean the same."""

    model_revision: str  # hex digest of the model's contents
    tokenizer_revision: str  # hex digest of the tokenizer's contents
    vocab_size: int  # token ids are below it
    adapters: tuple[tuple[str, str], ...] = ()  # (name, hex digest of contents) of each adapter


def namespace(secret: bytes, tenant: str, model_revision: str, tokenizer_revision: str) -> str:
    """Return the name under which a tenant's texts are stored: 32 hex characters. Raises ``ValueError`` for an empty secret.

    HMAC-SHA-256 (RFC 2104) over tenant, both revisions and schema version, each field after its length in bytes (4 bytes, big
    endian), cut to 16 bytes: of tenant ``ab`` and model ``c`` the message is ``00000002 6162 00000001 63 ...``.
    """
    if not secret:
        raise ValueError("secret must not be empty: set OUTRIDER_CACHE_SECRET, for example to what `openssl rand -hex 32` prints")
    # Without the secret, names cannot be linked to tenants. The lengths keep different fields from forming the same message:
    # tenant `a` of model `bc` is not `ab` of `c`.
    message = b""
    for name in (tenant, model_revision, tokenizer_revision, str(SCHEMA)):
        field = name.encode()
        message += len(field).to_bytes(4, "big") + field
    return hmac.new(secret, message, hashlib.sha256).hexdigest()[:32]


def hash_key(api_key: str) -> str:
    """Return an API key's hash for the configuration: ``sha256:`` and 64 hex characters."""
    # A fast hash is enough for keys of ``outrider new-key``: they are random and too long for brute force.
    return "sha256:" + hashlib.sha256(api_key.encode()).hexdigest()
