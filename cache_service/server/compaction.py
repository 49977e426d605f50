"""State of one tenant in the service: its snapshot with later stream entries applied, and the stream position."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator

from outrider.cache_service.namespace import Identity
from outrider.cache_service.records import CorruptRecordError, TextBatch, decode_batch
from outrider.cache_service.server.snapshot import CorruptSnapshotError, Snapshot, read_snapshot
from outrider.cache_service.store.redis_store import RedisStore
from outrider.cache_service.store.stream_ids import START, compare_ids
from outrider.cache_service.texts import TenantTexts

READ_ENTRIES = 32  # per tenant and read: fair, and at most 32 MiB per tenant
_GROWN_BYTES = 1 << 20  # stream growth below this triggers no snapshot
_PURGE_PAUSE_S = 1.0  # least time between snapshots triggered by late pieces of deleted texts
_RESIDUE_ENTRIES = 128  # more than Redis stores in one node of a stream (stream-node-max-entries, 100)

logger = logging.getLogger(__name__)


class StreamCompactor:
    """Texts of one namespace as of stream position ``cursor``, and the schedule of its snapshots."""

    def __init__(self, namespace: str, identity: Identity, texts: TenantTexts, cursor: str = START) -> None:
        self.namespace = namespace
        self.texts = texts
        self.cursor = cursor  # last applied entry
        self.damaged = False  # the stored snapshot could not be read
        self.origin = secrets.randbits(64)
        self.sequence = 0  # number of the next batch that this fold's owner writes
        self.unsaid: list[int] = []  # evicted text keys that are not yet in the stream
        self.snapshot_id = cursor  # stream position of the newest snapshot
        self._identity = identity
        self._snapshot_bytes = 0
        self._grown_bytes = 0  # stream growth since that snapshot
        self._dirty_since: float | None = None  # monotonic seconds; time of the first change since that snapshot
        self._purge_at: float | None = None  # monotonic seconds; time at which deleted texts have to be removed from Redis
        self._saved_at = 0.0  # monotonic seconds
        self._residue = 0  # entries to read until the bytes of trimmed ones are surely freed; 0: they are
        self.has_deleted = False  # deleted texts have left Redis' memory since the last file rewrite, but perhaps not its files

    @classmethod
    def load(cls, store: RedisStore, namespace: str, identity: Identity) -> StreamCompactor:
        """Start from the stored snapshot, if any. If it is unreadable (``damaged``), read the stream instead."""
        stored = store.load_snapshot(namespace)
        if stored is None:
            return cls(namespace, identity, TenantTexts())
        snapshot_id, data = stored
        try:
            fold = cls(namespace, identity, TenantTexts.restore(read_snapshot(data, identity)), snapshot_id)
        except CorruptSnapshotError as error:
            logger.warning("cache: snapshot of namespace %s dropped: %s", namespace, error)
            fold = cls(namespace, identity, TenantTexts())
            fold.damaged = True
            fold.catch_up(store, store.head(namespace).last_id)
            fold.snapshot_id = snapshot_id
            if compare_ids(fold.cursor, snapshot_id) < 0:
                fold.cursor = snapshot_id
        fold._snapshot_bytes = len(data)
        fold.has_deleted = bool(fold.epoch or fold.texts.ledger.removed)  # a previous leader may have died before the rewrite
        return fold

    @property
    def epoch(self) -> int:
        """Return the number of deletions of the tenant."""
        return self.texts.ledger.epoch

    def catch_up(self, store: RedisStore, last_id: str) -> None:
        """Apply the stream up to ``last_id``."""
        while compare_ids(self.cursor, last_id) < 0:
            entries = store.read({self.namespace: self.cursor}, 0.0, READ_ENTRIES).get(self.namespace)
            if not entries:
                return
            for entry_id, data in entries:
                self.add(entry_id, data)

    def add(self, entry_id: str, data: bytes | None) -> bool:
        """Apply a stream entry. Return False if it was not a batch and was dropped."""
        self.cursor = entry_id
        self._residue = max(1, self._residue - 1) if self._residue else 0
        try:
            batch = decode_batch(data, self._identity.vocab_size)
        except CorruptRecordError as error:
            logger.warning("cache: record %s of namespace %s dropped: %s", entry_id, self.namespace, error)
            return False
        self._grown_bytes += len(data or b"")
        # Texts are dated by the entry's id (the clock of Redis), so all readers of the stream see the same ages.
        self.apply(batch, int(entry_id.partition("-")[0]) / 1000)
        return True

    def apply(self, batch: TextBatch, at_s: float) -> None:
        """Apply a batch of time ``at_s`` and schedule the snapshot that it requires."""
        ledger = self.texts.ledger
        admitted = self.texts.apply(batch, at_s)
        late = batch.epoch < ledger.epoch or any(ledger.deleted(delta.text, delta.tokens) for delta in batch.deltas)
        now = time.monotonic()
        if admitted.cleared or admitted.removed:
            self._purge_at = now
        elif batch.deltas and late:
            # The writer did not know of the deletion yet. Its tokens are purged too, at most once per second: it may write more.
            self._purge_at = self._purge_at or max(now, self._saved_at + _PURGE_PAUSE_S)
        if batch.deltas or batch.removed or batch.evicted or admitted.cleared:
            self._dirty_since = self._dirty_since or now

    def let_go(self, keys: Iterable[int]) -> None:
        """Record evicted texts, to be written to the stream."""
        self.unsaid.extend(keys)

    def write_again(self, place: str) -> None:
        """Schedule rewriting of all texts after Redis lost everything but a snapshot at ``place`` ("0-0": none)."""
        # Reading continues there: earlier entries are in memory, and duplicates are harmless.
        self.cursor = self.snapshot_id = place
        self.demand()

    def demand(self) -> None:
        """Request a snapshot at once."""
        self._dirty_since = -float("inf")

    def due(self, snapshot_s: float) -> bool:
        """Return whether to write a snapshot: after a deletion, after old changes, or if the stream grew by a quarter of it."""
        if compare_ids(self.cursor, self.snapshot_id) <= 0:
            return False
        now = time.monotonic()
        if self._purge_at is not None and now >= self._purge_at:
            return True
        if self._dirty_since is not None and now - self._dirty_since >= snapshot_s:
            return True
        return self._grown_bytes > max(_GROWN_BYTES, self._snapshot_bytes // 4)

    def snapshot(self, now_s: float) -> Snapshot:
        """Return a snapshot as of the cursor."""
        return self.texts.snapshot(self.cursor, self._identity.vocab_size, self._identity.tokenizer_revision, now_s)

    def saved(self, num_bytes: int, store: RedisStore) -> None:
        """Record that the snapshot as of the cursor is stored, and trim the stream to the previous snapshot, for slow readers."""
        # After a deletion the stream is trimmed up to the new snapshot, and again with later ones until it was empty once or a
        # whole stream node has passed: Redis only marks an entry as deleted while its node has others, and keeps the bytes.
        # State changes last: if Redis fails before, the snapshot is written again and the rest is retried.
        purge = self._purge_at is not None
        cleans, residue = bool(self._residue), 0
        if purge or cleans:
            ms, _, sequence = self.cursor.partition("-")
            store.trim(self.namespace, f"{ms}-{int(sequence) + 1}", exact=True)
            emptied = store.head(self.namespace).first_id == START
            if not emptied and (purge or self._residue > 1):
                residue = _RESIDUE_ENTRIES if purge else self._residue
        else:
            store.trim(self.namespace, self.snapshot_id, exact=False)
        self.snapshot_id, self._snapshot_bytes, self._saved_at = self.cursor, num_bytes, time.monotonic()
        self._grown_bytes, self._purge_at, self._residue = 0, None, residue
        self._dirty_since = self._saved_at if residue else None
        self.has_deleted |= (purge or cleans) and not residue


def unreadable(store: RedisStore, namespace: str, identity: Identity) -> Iterator[tuple[str, str]]:
    """Read everything stored in a namespace. Yield (place, error) of each unreadable item."""
    last_id = store.head(namespace).last_id
    stored = store.load_snapshot(namespace)
    if stored is not None:
        try:
            read_snapshot(stored[1], identity)
        except CorruptSnapshotError as error:
            yield f"snapshot {stored[0]}", str(error)
    cursor = START
    while compare_ids(cursor, last_id) < 0:
        entries = store.read({namespace: cursor}, 0.0, READ_ENTRIES).get(namespace)
        if not entries:
            return
        for cursor, data in entries:
            try:
                decode_batch(data, identity.vocab_size)
            except CorruptRecordError as error:
                yield f"entry {cursor}", str(error)
