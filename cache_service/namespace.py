"""Namespaces: the keys in Redis of each tenant's texts, and hashes of API keys."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from cache_service.records import SCHEMA


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal for tokens to mean the same: who generated them, and how they are numbered."""

    model_revision: str  # hexadecimal digest of the model's contents
    tokenizer_revision: str  # of the tokenizer's
    vocab_size: int  # token ids are below it
    adapters: tuple[tuple[str, str], ...] = ()  # of the model: their names, and hexadecimal digests of their contents


def namespace(secret: bytes, tenant: str, model_revision: str, tokenizer_revision: str) -> str:
    """The name under which a tenant's texts are kept: 32 hexadecimal characters.

    HMAC-SHA-256 (RFC 2104) with the cluster's secret over the tenant, the two revisions and the schema version, cut to 16 bytes.
    Each field goes in as its length in bytes (4 bytes, big endian), then its bytes (UTF-8), so that no two different sets of
    fields are the same message: tenant ``ab`` of model ``c`` is ``00000002 6162 00000001 63 ...``, tenant ``a`` of model ``bc``
    is ``00000001 61 00000002 6263 ...``. Without the secret nobody can tell from a name whose it is, or guess a tenant's.

    Raises:
        ValueError: an empty secret, with which anybody could compute the names.
    """
    if not secret:
        raise ValueError("secret must not be empty: set OUTRIDER_CACHE_SECRET, for example to what `openssl rand -hex 32` prints")
    message = b""
    for name in (tenant, model_revision, tokenizer_revision, str(SCHEMA)):
        field = name.encode()
        message += len(field).to_bytes(4, "big") + field
    return hmac.new(secret, message, hashlib.sha256).hexdigest()[:32]


def hash_key(api_key: str) -> str:
    """How an API key stands in the configuration: ``sha256:`` and 64 hexadecimal characters.

    A fast hash is enough for keys of ``outrider new-key``, which are random and too long to be tried out.
    """
    return "sha256:" + hashlib.sha256(api_key.encode()).hexdigest()
