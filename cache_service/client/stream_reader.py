"""Reader of the tenants' streams: position, admission of batches, and restarts from a snapshot."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.cache_service.client.inbox import Inbox
from outrider.cache_service.client.outbox import Outbox
from outrider.cache_service.namespace import Identity
from outrider.cache_service.records import CorruptRecordError, TextBatch, decode_batch
from outrider.cache_service.server.snapshot import CorruptSnapshotError, read_snapshot
from outrider.cache_service.store.redis_store import Head, RedisStore
from outrider.cache_service.store.stream_ids import START, compare_ids, written_s
from outrider.cache_service.texts import AdmittedBatch, Ledger

logger = logging.getLogger(__name__)

READ_ENTRIES = 128  # per tenant and read
MAX_WAITING_TOKENS = 1 << 20  # per tenant in the inbox; beyond it nothing more is read
_MAX_ORIGINS = 1024  # writers of a tenant whose batch numbers are tracked
_COUNT = 1 << 32  # modulus of batch numbers


@dataclass(slots=True)
class StreamPosition:
    """Position in a tenant's stream."""

    namespace: str
    ledger: Ledger = field(default_factory=Ledger)
    cursor: str = START  # last entry read
    counts: dict[int, tuple[int, str]] = field(default_factory=dict)  # by origin: (number of its last batch, entry id)
    lost_after: str | None = None  # batches are missing somewhere after this entry
    useless: str = START  # id of a snapshot that cannot be used
    warned: bool = False  # a corrupt record was logged since the last look
    lag_s: float = 0.0  # age of the last entry read; 0 when all are read

    def follow(self, batch: TextBatch, id: str) -> int:
        """Record a batch's number. Return the number of missing batches before it. Duplicates change nothing."""
        known = self.counts.pop(batch.origin, None)
        if known is None:
            if len(self.counts) >= _MAX_ORIGINS:
                del self.counts[next(iter(self.counts))]
            self.counts[batch.origin] = batch.sequence, id
            return 0
        ahead = (batch.sequence - known[0]) % _COUNT
        if ahead == 0 or ahead >= _COUNT // 2:
            self.counts[batch.origin] = known
            return 0
        self.counts[batch.origin] = batch.sequence, id
        if ahead > 1 and self.lost_after is None:
            self.lost_after = known[1]
        return ahead - 1

    def restart(self, cursor: str) -> None:
        """Continue reading after ``cursor``."""
        self.cursor, self.counts, self.lost_after = cursor, {}, None

    def wants_snapshot(self, head: Head) -> bool:
        """Return whether the newest snapshot has entries that the stream no longer has."""
        # The stream is trimmed up to a snapshot at most. So entries after the cursor are gone only if both the snapshot and the
        # oldest entry are ahead of it; otherwise they can still be read.
        if head.snapshot_id in (START, self.useless):
            return False
        if self.lost_after is not None and compare_ids(head.snapshot_id, self.lost_after) > 0:
            return True
        behind = compare_ids(head.snapshot_id, self.cursor) > 0
        return behind and (head.first_id == START or compare_ids(head.first_id, self.cursor) > 0)


class StreamReader:
    """Reader from Redis into the inbox. Use it from one thread at a time; it raises the errors of ``RedisStore``."""

    def __init__(
        self, store: RedisStore, identity: Identity, namespaces: Mapping[str, str], inbox: Inbox, outbox: Outbox, ttl_s: float
    ) -> None:
        """Start at the beginning of all streams; ``namespaces`` are by tenant. Deletions are remembered for ``ttl_s``."""
        self._store, self._identity, self._inbox, self._outbox, self._ttl_s = store, identity, inbox, outbox, ttl_s
        self.places = {tenant: StreamPosition(namespace) for tenant, namespace in namespaces.items()}
        self._tenants = {namespace: tenant for tenant, namespace in namespaces.items()}
        # Keeps a tenant's epoch and the outbox consistent: old texts are never sent under a new epoch.
        self.deleting = threading.Lock()
        self.corrupt_records = self.corrupt_snapshots = self.lost_records = self.reloads = 0

    def look(self) -> bool:
        """Handle deletions, a Redis that restarted empty, and trimmed entries. Return whether the inbox got an update."""
        heads = self._store.heads([place.namespace for place in self.places.values()])
        found, num_emptied = False, 0
        for tenant, place in self.places.items():
            head = heads[place.namespace]
            place.warned = False
            if compare_ids(place.cursor, head.last_id) >= 0:
                place.lag_s = 0.0
            place.ledger.forget(time.monotonic() - self._ttl_s)
            if head.epoch > place.ledger.epoch:
                found |= self._deliver(tenant, TextBatch(0, 0, head.epoch))
            elif head.epoch < place.ledger.epoch:
                self._store.raise_epoch(place.namespace, place.ledger.epoch)
            # The service may have rewritten the last snapshot: then the cursor is ahead of an empty stream but not of it.
            emptied = compare_ids(head.last_id, place.cursor) < 0 and compare_ids(head.snapshot_id, place.cursor) < 0
            if emptied:
                num_emptied += 1
                place.restart(START)
            if place.wants_snapshot(head):
                found |= self._reload(tenant, head.snapshot_id, afresh=not emptied)
        if num_emptied:
            logger.info("Redis has lost the texts of %d tenants; reading their streams from the beginning", num_emptied)
        return found

    def read(self, block_s: float) -> bool:
        """Read new entries, waiting up to ``block_s``. Return whether the inbox got an update."""
        cursors = {
            place.namespace: place.cursor
            for tenant, place in self.places.items()
            if self._inbox.weight(tenant) < MAX_WAITING_TOKENS
        }
        found = False
        for namespace, entries in self._store.read(cursors, block_s, READ_ENTRIES).items():
            tenant = self._tenants[namespace]
            for id, data in entries:
                found |= self._take(tenant, id, data)
            self.places[tenant].lag_s = max(0.0, time.time() - written_s(entries[-1][0]))
        return found

    def catch_up(self, deadline_s: float) -> bool:
        """Read all present entries. Return False at the deadline (monotonic clock) or if the inbox must be emptied first."""
        self.look()
        # The ends are those of now: entries that others add meanwhile are left to the reading thread.
        heads = self._store.heads([place.namespace for place in self.places.values()])
        behind = True
        while behind:
            if time.monotonic() > deadline_s:
                return False
            cursors = [place.cursor for place in self.places.values()]
            self.read(0.0)
            behind = any(compare_ids(place.cursor, heads[place.namespace].last_id) < 0 for place in self.places.values())
            if cursors == [place.cursor for place in self.places.values()]:  # the last entries may have been trimmed
                return not any(self._inbox.weight(tenant) >= MAX_WAITING_TOKENS for tenant in self.places)
        return True

    @property
    def crowded(self) -> bool:
        """Return whether every tenant's inbox is full, so that reading pauses."""
        return all(self._inbox.weight(tenant) >= MAX_WAITING_TOKENS for tenant in self.places)

    def _take(self, tenant: str, id: str, data: bytes | None) -> bool:
        place = self.places[tenant]
        place.cursor = id
        try:
            batch = decode_batch(data, self._identity.vocab_size)
        except CorruptRecordError as error:
            self.corrupt_records += 1
            if not place.warned:  # one warning per look
                logger.warning("tenant %s: record %s is dropped: %s", tenant, id, error)
                place.warned = True
            return False
        self.lost_records += place.follow(batch, id)
        return self._deliver(tenant, batch)

    def _deliver(self, tenant: str, batch: TextBatch) -> bool:
        with self.deleting:
            admitted = self.places[tenant].ledger.admit(batch, time.monotonic())
            self._delete(tenant, admitted)
        if not (admitted.cleared or admitted.removed or admitted.evicted or admitted.deltas):
            return False
        self._inbox.put(tenant, admitted)
        return True

    def _delete(self, tenant: str, admitted: AdmittedBatch) -> None:
        if admitted.cleared:
            self._outbox.discard(tenant)
        for request in admitted.removed:
            self._outbox.discard(tenant, request)

    def _reload(self, tenant: str, snapshot_id: str, afresh: bool) -> bool:
        """Restart from the newest snapshot, clearing the history if ``afresh``. Return whether that was possible."""
        place = self.places[tenant]
        loaded = self._store.load_snapshot(place.namespace)
        if loaded is None:
            return False
        id, data = loaded
        try:
            snapshot = read_snapshot(data, self._identity)
        except CorruptSnapshotError as error:
            self.corrupt_snapshots += 1
            # Otherwise every look would load it again.
            place.useless = snapshot_id
            logger.warning(
                "tenant %s: snapshot %s is dropped: %s; reading the remaining entries of the stream", tenant, id, error
            )
            return False
        with self.deleting:
            admitted = place.ledger.admit_snapshot(snapshot)
            if admitted is None:  # older than a deletion
                place.useless = snapshot_id
                return False
            place.ledger.removed |= dict.fromkeys(admitted.removed, time.monotonic())  # local monotonic time, not the snapshot's
            self._delete(tenant, admitted)
        # The cleared history has no evicted texts, and the ledger refuses their later pieces.
        self._inbox.put(tenant, AdmittedBatch(admitted.cleared, admitted.removed, (), admitted.deltas), reload=afresh)
        self.reloads += place.cursor != START
        place.restart(id)
        return True
