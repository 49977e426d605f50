"""Operator's commands on the shared cache: statistics, export, import, deletion, verification."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.cache_service.access import CacheAccess
from outrider.cache_service.namespace import Identity
from outrider.cache_service.records import MAX_ITEMS, CacheDelta, TextBatch, encode_batch, split_deltas
from outrider.cache_service.server.compaction import StreamCompactor, unreadable
from outrider.cache_service.server.snapshot import CorruptSnapshotError, SnapshotText, decode_snapshot, encode_snapshot
from outrider.cache_service.store.redis_store import Counts
from outrider.cache_service.store.stream_ids import compare_ids
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import PUBLIC, tenant_of
from outrider.decoding.sources.text_keys import MAX_CHOICES, document_hash, is_note, passages_of, request_of, text_key

DOCUMENT_TOKENS = 4096  # longer documents are split, because texts are evicted as a whole
_ENTRIES = 4  # entries of up to 1 MiB per round trip
_LEAST_TIMEOUT_S = 10.0  # per operation: an operator prefers to wait through a pause of Redis


class UnknownTenantError(LookupError):
    """Error of a tenant that is not in the configuration."""


class ForeignSnapshotError(ValueError):
    """Error of a snapshot of another tokenizer, whose token ids have another meaning."""


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Size of a tenant's cache, and its use of Redis."""

    tenant: str  # memory name: the tenant's, or ``TENANT:ADAPTER``
    namespace: str
    texts: int
    tokens: int
    epoch: int  # number of deletions of the tenant
    stream_entries: int
    stream_bytes: int  # as Redis estimates it
    snapshot_bytes: int
    snapshot_age_s: float | None  # None: no snapshot exists


@dataclass(frozen=True, slots=True)
class Problem:
    """Item in Redis that cannot be read and is ignored."""

    tenant: str
    place: str  # "snapshot ID" or "entry ID"
    what: str


class CacheAdmin:
    """Operator's commands. Thread-safe. They need only Redis, and raise ``redis.RedisError`` or ``OSError`` if it fails."""

    def __init__(self, access: CacheAccess, identity: Identity) -> None:
        """Parse the address. Timeouts are at least ten seconds. Raises ``ValueError`` for a bad address or an empty secret."""
        self._access, self._identity = access, identity
        self._store = access.store(_LEAST_TIMEOUT_S)
        self._namespaces = access.namespaces(identity)

    def stats(self, tenant: str | None = None, vouched: bool = False) -> list[TenantStats]:
        """Return the statistics of each memory, as last counted by the service, or read in full if never counted.

        ``tenant``: a tenant or the cache namespace of one of its adapters; None: all. ``vouched`` accepts a tenant that the
        configuration did not have at start; otherwise raises ``UnknownTenantError``.
        """
        names = self._namespaces if tenant is None else self._of_tenant(tenant, vouched)
        return [self._stats(one, name) for one, name in names.items()]

    def export(self, tenant: str) -> bytes:
        """Return a current snapshot: stored one plus later entries. Raises UnknownTenantError, CorruptSnapshotError."""
        fold = self._fold(tenant)
        if fold.damaged:
            raise CorruptSnapshotError(f"the stored snapshot of tenant {tenant!r} cannot be read; see outrider cache verify")
        return encode_snapshot(fold.snapshot(time.time()))

    def import_(self, tenant: str, data: bytes) -> int:
        """Add the texts of an exported snapshot; return their number. Raises as ``export``, or ``ForeignSnapshotError``."""
        fold = self._fold(tenant)
        snapshot = decode_snapshot(data)
        ours = self._identity
        if (snapshot.vocab_size, snapshot.tokenizer_revision) != (ours.vocab_size, ours.tokenizer_revision):
            raise ForeignSnapshotError(
                f"the snapshot is of tokenizer revision {snapshot.tokenizer_revision} with {snapshot.vocab_size} tokens, this "
                f"model has {ours.tokenizer_revision} with {ours.vocab_size}: export it from a cluster with the same tokenizer"
            )
        # Written like new outputs, so dated now. Texts of requests that were deleted here are left out.
        deltas = _deltas(fold, snapshot.texts)
        self._write(fold, deltas)
        return len({delta.text for delta in deltas})

    def preload(self, documents: Sequence[Sequence[int] | Int32Array]) -> int:
        """Add tokenized documents to the public corpus. Return the number of new texts. Raises ``ValueError`` for invalid ids."""
        # Text keys are content hashes, so a document loaded twice is kept once.
        texts: dict[int, SnapshotText] = {}
        for index, document in enumerate(documents):
            tokens = np.asarray(document, np.int64)
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._identity.vocab_size:
                raise ValueError(
                    f"documents[{index}] must hold token ids from 0 to {self._identity.vocab_size - 1}, "
                    f"got {tokens.min()} to {tokens.max()}"
                )
            for at in range(0, len(tokens), DOCUMENT_TOKENS):
                part = tokens[at : at + DOCUMENT_TOKENS].astype("<i4")
                key = int.from_bytes(hashlib.blake2b(part.tobytes(), digest_size=8).digest()) << 16
                texts[key] = SnapshotText(key, part, True, 0.0)
        fold = self._fold(PUBLIC)
        deltas = [delta for delta in _deltas(fold, texts.values()) if delta.text not in fold.texts.texts]
        self._write(fold, deltas)
        return len(deltas)

    def delete_tenant(self, tenant: str, vouched: bool = False) -> int:
        """Delete all texts of a tenant everywhere. Return its new epoch. Arguments and errors as in ``stats``."""
        epochs = []
        for name in self._of_tenant(tenant, vouched).values():
            # Delete first, then announce it: if this process ends in between, the service notices the epoch and writes the batch.
            epochs.append(self._store.delete(name))
            self._append(name, [TextBatch(secrets.randbits(64), 0, epochs[-1])])
        return epochs[0]

    def delete_request(self, tenant: str, request: str) -> None:
        """Delete all outputs of a request (``ID`` or ``ID/CHOICE``) everywhere and permanently. Raises ``UnknownTenantError``."""
        for name in self._of_tenant(tenant).values():  # the adapter of the request is not known
            epoch = self._store.head(name).epoch
            self._append(name, [TextBatch(secrets.randbits(64), 0, epoch, removed=(request_of(text_key(request)),))])

    def delete_documents(self, tenant: str, documents: Sequence[Sequence[int] | Int32Array]) -> None:
        """Delete tokenized reference documents of requests everywhere and permanently. Raises ``UnknownTenantError``."""
        # Passages of prompts that share 39 tokens or more with a document are deleted too. Outputs that repeat them stay until
        # their requests are deleted.
        from outrider.decoding.sources.passages import marks_of  # loads the compiler: import only when needed

        hashes: dict[int, None] = {}
        for document in (np.asarray(each, np.int32) for each in documents):
            hashes |= dict.fromkeys([*map(document_hash, passages_of(document)), *marks_of(document)])
        removed = tuple(hashes)
        for name in self._of_tenant(tenant).values():
            epoch = self._store.head(name).epoch
            for at in range(0, len(removed), MAX_ITEMS):
                self._append(name, [TextBatch(secrets.randbits(64), 0, epoch, removed=removed[at : at + MAX_ITEMS])])

    def verify(self) -> list[Problem]:
        """Read every snapshot and stream entry. Return the unreadable ones."""
        return [
            Problem(tenant, place, what)
            for tenant, name in self._namespaces.items()
            for place, what in unreadable(self._store, name, self._identity)
        ]

    def close(self) -> None:
        """Close the connections."""
        self._store.close()

    # -- parts -----------------------------------------------------------------------------------------------------------------

    def _of_tenant(self, tenant: str, vouched: bool = False) -> dict[str, str]:
        if vouched:
            return self._access.of_tenant(tenant, self._identity)
        name = self._namespace(tenant)
        return {tenant: name} if tenant_of(tenant) != tenant else self._access.of_tenant(tenant, self._identity)

    def _namespace(self, tenant: str) -> str:
        if tenant not in self._namespaces:
            raise UnknownTenantError(
                f"no tenant {tenant!r}: the configuration has {len(self._access.tenants)} and the public corpus {PUBLIC!r}"
            )
        return self._namespaces[tenant]

    def _fold(self, tenant: str) -> StreamCompactor:
        return self._folded(self._namespace(tenant))

    def _folded(self, name: str) -> StreamCompactor:
        while True:
            fold = StreamCompactor.load(self._store, name, self._identity)
            fold.catch_up(self._store, self._store.head(name).last_id)
            head = self._store.head(name)
            # With a newer snapshot, entries of before it may have been trimmed unread, even if later ones were read.
            if compare_ids(head.snapshot_id, fold.snapshot_id) > 0:
                continue
            if head.epoch > fold.epoch:  # deleted, but the stream does not have the batch yet
                fold.apply(TextBatch(0, 0, head.epoch), time.time())
            return fold

    def _stats(self, tenant: str, name: str) -> TenantStats:
        counts, usage, head = self._store.load_counts(name), self._store.usage(name), self._store.head(name)
        if counts is None:
            fold = self._folded(name)
            counts = Counts(len(fold.texts.texts), fold.texts.num_tokens, fold.epoch)
        elif counts.epoch < head.epoch:  # deleted since
            counts = Counts(0, 0, head.epoch)
        saved_s = int(head.snapshot_id.partition("-")[0]) / 1000
        return TenantStats(
            tenant, name, counts.texts, counts.tokens, counts.epoch,
            usage.stream_entries, usage.stream_bytes, usage.snapshot_bytes, max(0.0, time.time() - saved_s) if saved_s else None,
        )  # fmt: skip

    def _write(self, fold: StreamCompactor, deltas: Iterable[CacheDelta]) -> None:
        origin = secrets.randbits(64)
        batches = [
            TextBatch(origin, sequence, fold.epoch, group)
            for sequence, group in enumerate(split_deltas(deltas, self._identity.vocab_size))
        ]
        for at in range(0, len(batches), _ENTRIES):
            self._append(fold.namespace, batches[at : at + _ENTRIES])

    def _append(self, name: str, batches: Sequence[TextBatch]) -> None:
        self._store.append([(name, encode_batch(batch, self._identity.vocab_size)) for batch in batches])


def _deltas(fold: StreamCompactor, texts: Iterable[SnapshotText]) -> list[CacheDelta]:
    """Return deltas that add texts to the fold's tenant, except for texts of requests deleted there."""
    deltas = []
    keys: dict[int, int] = {}  # new key by key in the snapshot
    taken: set[int] = set()
    for text in texts:
        if request_of(text.text) in fold.texts.ledger.removed:
            continue
        if text.text not in keys:
            if is_note(text.text) and not _is_free(fold, text.text, text):
                continue
            # An evicted key is never accepted again, so its text gets another choice number. Deletion by request still finds it.
            keys[text.text] = next(key for key in _candidates(text.text) if key not in taken and _is_free(fold, key, text))
            taken.add(keys[text.text])
        deltas.append(CacheDelta(keys[text.text], text.offset, text.tokens, text.final))
    return deltas


def _candidates(key: int) -> Iterator[int]:
    """Yield the key, then other choice numbers of its request from the highest down, since clients use the low ones."""
    yield key
    first = key >> 16 << 16
    yield from range(first + MAX_CHOICES - 1, first - 1, -1)


def _is_free(fold: StreamCompactor, key: int, text: SnapshotText) -> bool:
    if not fold.texts.ledger.allows(key):
        return False
    there = fold.texts.texts.get(key)
    return key == text.text or there is None or np.array_equal(there.tokens, text.tokens)
