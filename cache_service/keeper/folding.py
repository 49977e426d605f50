"""State of one tenant in the keeper: its snapshot, what its stream added since, and its position in the stream."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator

from cache_service.keeper.snapshot import CorruptSnapshotError, Snapshot, read_snapshot
from cache_service.namespace import Identity
from cache_service.records import CorruptRecordError, TextBatch, decode_batch
from cache_service.store.redis_store import RedisStore
from cache_service.store.stream_ids import START, compare_ids
from cache_service.texts import TenantTexts

READ_ENTRIES = 32  # of one tenant in one read: each has its turn, and one read is at most 32 MiB a tenant
_GROWN_BYTES = 1 << 20  # a stream that grew by less is no reason for a snapshot
_PURGE_PAUSE_S = 1.0  # between snapshots that late pieces of a deleted text ask for
_RESIDUE_ENTRIES = 128  # more than Redis puts into one node of a stream (stream-node-max-entries, 100)

logger = logging.getLogger(__name__)


class Fold:
    """The texts of one namespace as of ``cursor``, and when they are to be written down again."""

    def __init__(self, namespace: str, identity: Identity, texts: TenantTexts, cursor: str = START) -> None:
        self.namespace = namespace
        self.texts = texts
        self.cursor = cursor  # last entry that was applied
        self.damaged = False  # the stored snapshot could not be read
        self.origin = secrets.randbits(64)
        self.sequence = 0  # of the next batch that this fold's owner writes
        self.unsaid: list[int] = []  # evicted text keys that are not in the stream yet
        self.snapshot_id = cursor  # up to where the newest snapshot goes
        self._identity = identity
        self._snapshot_bytes = 0
        self._grown_bytes = 0  # of the stream since that snapshot
        self._dirty_since: float | None = None  # monotonic seconds; of the first change since that snapshot
        self._purge_at: float | None = None  # monotonic seconds; when what was deleted has to leave Redis
        self._saved_at = 0.0  # monotonic seconds
        self._residue = 0  # entries to read before bytes of trimmed ones are gone for sure; 0: they are
        self.has_deleted = False  # Redis' memory is rid of something deleted since this was set back, its files may not be

    @classmethod
    def load(cls, store: RedisStore, namespace: str, identity: Identity) -> Fold:
        """Starts from the stored snapshot, if there is one; from one that cannot be read (``damaged``) its place only."""
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
        fold.has_deleted = bool(fold.epoch or fold.texts.ledger.removed)  # who kept it before may have died before it saw to that
        return fold

    @property
    def epoch(self) -> int:
        """Deletions of the tenant that were seen."""
        return self.texts.ledger.epoch

    def catch_up(self, store: RedisStore, last_id: str) -> None:
        """Applies the stream up to an entry."""
        while compare_ids(self.cursor, last_id) < 0:
            entries = store.read({self.namespace: self.cursor}, 0.0, READ_ENTRIES).get(self.namespace)
            if not entries:
                return
            for entry_id, data in entries:
                self.add(entry_id, data)

    def add(self, entry_id: str, data: bytes | None) -> bool:
        """Applies an entry of the stream; False: it is no batch, and dropped.

        The time of a text is that of its entry by Redis' clock, so whoever reads the stream sees the same ages.
        """
        self.cursor = entry_id
        self._residue = max(1, self._residue - 1) if self._residue else 0
        try:
            batch = decode_batch(data, self._identity.vocab_size)
        except CorruptRecordError as error:
            logger.warning("cache: record %s of namespace %s dropped: %s", entry_id, self.namespace, error)
            return False
        self._grown_bytes += len(data or b"")
        self.apply(batch, int(entry_id.partition("-")[0]) / 1000)
        return True

    def apply(self, batch: TextBatch, at_s: float) -> None:
        """Applies a batch of that time, and notes what has to be written down because of it."""
        ledger = self.texts.ledger
        admitted = self.texts.apply(batch, at_s)
        late = batch.epoch < ledger.epoch or any(ledger.deleted(delta.text, delta.tokens) for delta in batch.deltas)
        now = time.monotonic()
        if admitted.cleared or admitted.removed:
            self._purge_at = now
        elif batch.deltas and late:
            # Written by one who had not heard of the deletion yet. Its tokens go too, but at most once a second: it may write on.
            self._purge_at = self._purge_at or max(now, self._saved_at + _PURGE_PAUSE_S)
        if batch.deltas or batch.removed or batch.evicted or admitted.cleared:
            self._dirty_since = self._dirty_since or now

    def let_go(self, keys: Iterable[int]) -> None:
        """Notes texts that were evicted, for the stream."""
        self.unsaid.extend(keys)

    def write_again(self, place: str) -> None:
        """What Redis held was lost, but for a snapshot at ``place`` ("0-0": none): all that is known is to be written down again.

        Reading goes on after ``place``: what came before it is in memory, and comes twice at worst.
        """
        self.cursor = self.snapshot_id = place
        self.demand()

    def demand(self) -> None:
        """Asks for a snapshot at once."""
        self._dirty_since = -float("inf")

    def due(self, snapshot_s: float) -> bool:
        """Whether a snapshot is to be written: something was deleted, changes are old, or the stream grew by a quarter of it."""
        if compare_ids(self.cursor, self.snapshot_id) <= 0:
            return False
        now = time.monotonic()
        if self._purge_at is not None and now >= self._purge_at:
            return True
        if self._dirty_since is not None and now - self._dirty_since >= snapshot_s:
            return True
        return self._grown_bytes > max(_GROWN_BYTES, self._snapshot_bytes // 4)

    def snapshot(self, now_s: float) -> Snapshot:
        """All of it, as of the cursor."""
        return self.texts.snapshot(self.cursor, self._identity.vocab_size, self._identity.tokenizer_revision, now_s)

    def saved(self, num_bytes: int, store: RedisStore) -> None:
        """The snapshot as of the cursor is stored: the stream is trimmed to the one before it, for readers that are a bit behind.

        After a deletion it is trimmed up to the new snapshot, and again with later ones until it was empty once, or a node of
        the stream has passed: Redis only marks an entry as deleted while its node holds others, and the bytes stay.
        """
        # State changes last: if Redis fails before, the snapshot is written once more and the rest is tried again.
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
    """Reads all that is stored of a namespace; (place, what is wrong) of what cannot be read."""
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
