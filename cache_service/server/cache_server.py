"""Cache service: folds the tenants' streams into snapshots and enforces quotas and time to live, by one leader with a lease."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import redis

from outrider.cache_service.access import CacheAccess
from outrider.cache_service.namespace import Identity
from outrider.cache_service.records import TextBatch, encode_batch, token_width
from outrider.cache_service.server.compaction import READ_ENTRIES, StreamCompactor
from outrider.cache_service.server.snapshot import encode_snapshot
from outrider.cache_service.store.circuit_breaker import failure_kind
from outrider.cache_service.store.redis_store import Counts, Head, RedisStore
from outrider.cache_service.store.stream_ids import compare_ids, written_s
from outrider.decoding.request import PUBLIC, tenant_of

LEASE_S = 5.0  # a service that is silent for this long is replaced by one on standby
RETRY_S = 1.0  # pause after a failure of Redis
SNAPSHOT_S = 60.0  # delay until changes are in a snapshot
_HALF_LIFE_S = 7 * 86400.0  # age at which a text counts half in evictions
_BLOCK_S = 0.2  # duration of one blocking read, and so the delay of stop()
_CHECK_S = 1.0  # period of comparisons with the state of Redis
_KEEP_S = 3600.0  # period of renewing the expiry of keys in Redis
_EXPIRE_S = (1.0, 60.0)  # bounds of the expiry period, which is a hundredth of the time to live
_EXPIRE_SHARE = 0.1  # most texts of a tenant that expire at once: ten times as many as age in that time, or more
_ROOM = 0.9  # fraction of its quota to which a full tenant is reduced
_EVICTED_KEYS = 4096  # per batch
_REWRITE_S = 60.0  # least time between rewrites of Redis' files, each of which costs its size in disk space and a fork
_COUNTS_S = 0.1  # least time between two writes of the counts
_WORK_S_PER_TOKEN = 3e-6  # upper bound for an eviction, the longest operation
_STEP_S = (1.0, 60.0)  # bounds of the jump threshold, which is a tenth of the time to live; measured against the monotonic clock
_CONFIRM_S = 3600.0  # after a jump a clock must run evenly for this long, or a tenth of the time to live if shorter
_LOOKS = 3  # and for this many looks

logger = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """Error raised if another instance holds the lease."""


class Lease:
    """Lease from the view of one candidate. Use it from one thread, except for ``held``."""

    def __init__(self, store: RedisStore, name: str) -> None:
        self._store, self._name = store, name
        self._holder = secrets.token_hex(16)
        self._until = 0.0  # monotonic seconds; 0 if another instance holds the lease
        self._renew_at = 0.0

    @property
    def held(self) -> bool:
        """Return whether this instance surely holds the lease, without asking Redis."""
        return time.monotonic() < self._until

    def acquire_or_renew(self, work_s: float = 0.0) -> None:
        """Acquire or extend the lease before ``work_s`` seconds of work. Raises ``LeaseLostError`` if another one holds it."""
        # If Redis fails, the lease stays valid until it expires.
        # Read before the request: the lease then never seems longer here than it is in Redis.
        now = time.monotonic()
        if now < self._renew_at and now + work_s < self._until:
            return
        lease_s = LEASE_S + work_s
        had, has = self._until > 0.0, self._store.acquire(self._name, self._holder, lease_s)
        if had != has:
            logger.info("cache service: %s", "acquired leader lease" if has else "lost leader lease to another instance")
        self._until = now + lease_s if has else 0.0
        self._renew_at = now + LEASE_S / 3
        if not has:
            raise LeaseLostError

    def doubt(self) -> None:
        """Make the next ``hold`` ask Redis."""
        self._renew_at = 0.0

    def release(self) -> None:
        """Release the lease, if held."""
        if self._until:
            self._store.release(self._name, self._holder)
        self._until = 0.0


@dataclass(slots=True)
class _ClockState:
    name: str
    step_s: float  # see ``_STEP_S``
    confirm_s: float  # see ``_CONFIRM_S``
    ahead_s: float = 0.0
    since_s: float | None = None  # monotonic time of the first look after the last jump
    looks: int = 0
    believed_s: float | None = None  # offset when the clock was last trusted

    def look(self, now_s: float, at_s: float) -> bool:
        """Record the clock's time ``now_s`` at monotonic time ``at_s``. Return whether the clock is trusted."""
        ahead_s = now_s - at_s
        if self.since_s is None or abs(ahead_s - self.ahead_s) > self.step_s:
            if self.since_s is not None:
                logger.warning(
                    "the clock of %s jumped by %+.0f s: texts do not expire until it has run evenly for %.0f s",
                    self.name, ahead_s - self.ahead_s, self.confirm_s,
                )  # fmt: skip
            self.since_s, self.looks = at_s, 0
        self.ahead_s = ahead_s
        self.looks += 1
        back = self.believed_s is not None and abs(ahead_s - self.believed_s) <= self.step_s
        if not back and (self.looks < _LOOKS or at_s - self.since_s < self.confirm_s):
            return False
        self.believed_s = ahead_s
        return True


class AgeClock:
    """Earlier one of the clocks of Redis (which dates texts) and of this machine, if both run evenly."""

    # A clock that jumped is not trusted until it has run evenly for an hour or is back at its old offset; nor is a new clock. The
    # earlier clock counts, so that no text expires too early.

    def __init__(self, ttl_s: float, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        """Set the thresholds for a time to live. ``wall`` is this machine's clock, ``steady`` one that never jumps."""
        low, high = _STEP_S
        self._step_s, confirm_s = min(max(low, ttl_s / 10), high), min(_CONFIRM_S, ttl_s / 10)
        self._wall, self._steady = wall, steady
        self._redis, self._machine = (_ClockState(name, self._step_s, confirm_s) for name in ("Redis", "this machine"))
        self._apart = False

    def look(self, redis_s: float) -> float | None:
        """Return the time for expiry in seconds since 1970, or None if it is not trusted. ``redis_s`` is the time of Redis."""
        at_s, wall_s = self._steady(), self._wall()
        apart = abs(wall_s - redis_s) > self._step_s
        if apart and not self._apart:
            logger.warning(
                "the clocks of Redis and this machine differ by %.0f s: the earlier one is used", abs(wall_s - redis_s)
            )
        self._apart = apart
        believed = [self._redis.look(redis_s, at_s), self._machine.look(wall_s, at_s)]
        return min(redis_s, wall_s) if all(believed) else None


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Status and counters of a service."""

    leader: bool  # holds the lease; on standby the counts of texts are 0
    namespaces: int  # folded: tenants and the public corpus
    texts: int
    tokens: int
    snapshots: int  # number written
    evicted_texts: int  # by quota and time to live
    corrupt_records: int  # unreadable entries and snapshots, dropped
    failures: int  # times that Redis was away, slow, full or sent invalid data
    last_error: str | None


class CacheServer:
    """One of any number of cache services. The holder of the lease works, the others stand by."""

    # The lease only saves work. Correctness does not depend on it: applying is idempotent, a snapshot never replaces one of a
    # later entry, and a stream is trimmed only up to a stored snapshot. So a service that lost the lease unnoticed cannot do
    # harm.

    def __init__(self, access: CacheAccess, identity: Identity, quotas: Mapping[str, int]) -> None:
        """Prepare the service. ``quotas`` are bytes by tenant. Raises ``ValueError`` for a bad address or empty secret."""
        self._options, self._identity = access.options, identity
        self._store = access.store()
        self._tenants = {name: tenant for tenant, name in access.namespaces(identity).items()}  # by namespace
        self._quotas: dict[str, int] = {}  # tokens, by namespace
        for name, tenant in self._tenants.items():
            mib = self._options.public_mib if tenant == PUBLIC else self._options.tenant_mib
            self._quotas[name] = int(quotas.get(tenant_of(tenant), mib * 2**20)) // token_width(identity.vocab_size)
        # Services of the same namespaces compete for one lease; those of another model in the same Redis use another one.
        lease = hashlib.blake2b("".join(sorted(self._tenants)).encode(), digest_size=16).hexdigest()
        self._lease = Lease(self._store, lease)
        self._folds: dict[str, StreamCompactor] = {}  # by namespace; kept while this service holds the lease
        self._clock = AgeClock(self._options.ttl_s)
        self._check_at = self._expire_at = self._keep_at = self._rewrite_at = self._count_at = 0.0
        self._counted: dict[str, Counts] = {}  # by namespace; last counts written to Redis
        self._snapshots = self._evicted_texts = self._corrupt = self._failures = 0
        self._last_error: str | None = None
        self._kept = (0, 0, 0)  # namespaces, texts, tokens
        self._well = True
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Redis need not be available yet."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._run, name="outrider-cache-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and release the lease, so that another service takes over at once."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2 * self._options.timeout_s + 5.0)
        try:
            self._lease.release()
        except (redis.RedisError, OSError) as error:
            logger.info("cache service: could not release the lease, it will expire: %s", error)
        self._store.close()

    def status(self) -> ServerStatus:
        """Return the status, from any thread."""
        counters = self._snapshots, self._evicted_texts, self._corrupt, self._failures
        return ServerStatus(self._lease.held, *self._kept, *counters, self._last_error)

    # -- the thread ------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._lease.acquire_or_renew()
                self._turn()
            except LeaseLostError:
                self._stand_by()
            except (redis.RedisError, OSError) as error:
                self._failed(error)
            except Exception as error:  # a bug: keep the thread alive, or the streams would grow forever
                logger.exception("cache service: unexpected error, reloading the stored texts")
                self._folds.clear()
                self._failed(error)

    def _stand_by(self) -> None:
        self._folds.clear()
        self._counted.clear()
        self._kept = (0, 0, 0)
        self._check_at = 0.0
        self._worked()
        self._stopping.wait(LEASE_S / 3)

    def _turn(self) -> None:
        """Check the state of Redis if due, apply the next entries of all tenants, then write what is due."""
        if time.monotonic() >= self._check_at:
            self._check()
        found = self._store.read({name: fold.cursor for name, fold in self._folds.items()}, _BLOCK_S, READ_ENTRIES)
        for name, entries in found.items():
            # Renew for each tenant, because a turn over many of them may outlast the lease.
            self._lease.acquire_or_renew()
            for entry_id, data in entries:
                self._corrupt += not self._folds[name].add(entry_id, data)
        for fold in self._folds.values():
            self._lease.acquire_or_renew()
            self._keep(fold)
        self._rewrite()
        self._count()
        folds = self._folds.values()
        self._kept = len(folds), sum(len(fold.texts.texts) for fold in folds), sum(fold.texts.num_tokens for fold in folds)
        self._worked()

    def _rewrite(self) -> None:
        """Make Redis rewrite its files after deletions: they contain the deleted texts until then."""
        deleted = [fold for fold in self._folds.values() if fold.has_deleted]
        if not deleted or time.monotonic() < self._rewrite_at:
            return
        self._rewrite_at = time.monotonic() + _REWRITE_S
        try:
            done = self._store.rewrite_files()
        except redis.ResponseError as error:  # not permitted or not supported: do not retry
            done = True
            logger.warning("cache service: deleted texts stay in Redis' append-only file until it is rewritten: %s", error)
        for fold in deleted:
            fold.has_deleted = not done

    def _worked(self) -> None:
        if not self._well:
            self._well = True
            logger.info("cache service: Redis is available again")

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._last_error = f"{type(error).__name__}: {error}"[:200]
        if self._well:
            self._well = False
            logger.warning("cache service: %s; trying again every %.1f s", self._last_error, RETRY_S)
        self._lease.doubt()
        self._check_at = 0.0  # Redis may have lost its data when it is back
        if failure_kind(error) == "full":
            self._make_room()
        self._stopping.wait(RETRY_S)

    def _make_room(self) -> None:
        """Trim the streams of a full Redis up to the stored snapshots; slow readers load the snapshot."""
        try:
            for fold in self._folds.values():
                self._store.trim(fold.namespace, fold.snapshot_id, exact=True)
        except (redis.RedisError, OSError) as error:
            logger.info("cache service: could not free memory in Redis: %s", error)

    # -- what is kept ----------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Compare the folds with Redis, load missing ones, and expire old texts."""
        now = time.monotonic()
        if now >= self._keep_at:
            self._store.keep(list(self._tenants), max(self._options.ttl_s, 2 * _KEEP_S))
            self._keep_at = now + _KEEP_S
        heads = self._store.heads(list(self._tenants))
        for name, head in heads.items():
            fold = self._folds.get(name)
            if fold is None or compare_ids(head.snapshot_id, fold.cursor) > 0:  # another service was leader
                self._load(name)
            else:
                self._compare(fold, head)
        if now >= self._expire_at:
            low, high = _EXPIRE_S
            pause_s = min(max(low, self._options.ttl_s / 100), high)
            self._expire(max(_EXPIRE_SHARE, min(1.0, 10 * pause_s / self._options.ttl_s)))
            self._expire_at = now + pause_s
        self._check_at = now + _CHECK_S

    def _expire(self, share: float) -> None:
        """Drop expired texts, at most a fraction ``share`` per tenant, if the clocks are trusted."""
        now_s = self._clock.look(self._store.time_s())
        if now_s is None:
            return
        for name, fold in self._folds.items():
            # Texts of the public corpus do not expire: the operator loaded them.
            if self._tenants[name] != PUBLIC:
                self._let_go(fold, fold.texts.expire(self._options.ttl_s, now_s, share))

    def _load(self, name: str) -> None:
        self._lease.acquire_or_renew(self._store.usage(name).snapshot_bytes * _WORK_S_PER_TOKEN)
        fold = StreamCompactor.load(self._store, name, self._identity)
        if fold.damaged:
            self._corrupt += 1
            self._say(fold, fold.epoch)
            fold.demand()
        self._folds[name] = fold

    def _compare(self, fold: StreamCompactor, head: Head) -> None:
        lost = compare_ids(head.last_id, fold.cursor) < 0
        if head.epoch < fold.epoch:
            self._store.raise_epoch(fold.namespace, fold.epoch)
        if lost or head.epoch > fold.epoch:
            # Write first and change local state later, so that a failure of Redis repeats both. If the process that
            # deleted the tenant died before it wrote the batch, this writes it.
            self._say(fold, max(fold.epoch, head.epoch))
        if lost:
            logger.warning("cache service: Redis has lost namespace %s, writing it again from memory", fold.namespace)
            self._counted.pop(fold.namespace, None)
            fold.write_again(head.snapshot_id)
        elif compare_ids(head.snapshot_id, fold.snapshot_id) < 0:
            fold.snapshot_id = head.snapshot_id
            fold.demand()
        elif compare_ids(fold.snapshot_id, fold.cursor) < 0 and compare_ids(head.first_id, fold.cursor) > 0:
            fold.demand()  # entries between snapshot and cursor have left the stream: only memory has them
        if head.epoch > fold.epoch:
            fold.apply(TextBatch(fold.origin, fold.sequence, head.epoch), time.time())

    def _keep(self, fold: StreamCompactor) -> None:
        quota = self._quotas[fold.namespace]
        if fold.texts.num_tokens > quota:
            self._lease.acquire_or_renew(fold.texts.num_tokens * _WORK_S_PER_TOKEN)
            self._let_go(fold, fold.texts.evict(int(quota * _ROOM), _HALF_LIFE_S, written_s(fold.cursor)))
        while fold.unsaid:
            keys = tuple(fold.unsaid[:_EVICTED_KEYS])
            self._say(fold, fold.epoch, keys)
            # Only once they are in the stream: if Redis fails, they are written again.
            del fold.unsaid[: len(keys)]
        if fold.due(SNAPSHOT_S):
            self._lease.acquire_or_renew(fold.texts.num_tokens * _WORK_S_PER_TOKEN)
            data = encode_snapshot(fold.snapshot(time.time()))
            if self._store.save_snapshot(fold.namespace, fold.cursor, data, fold.epoch):
                self._snapshots += 1
                self._keep_at = 0.0  # its keys are new and need an expiry
                fold.saved(len(data), self._store)
            else:  # a newer snapshot exists, or the tenant was deleted
                self._check_at = 0.0

    def _count(self) -> None:
        """Write changed counts to Redis, so that admins do not have to read all texts to count them."""
        now = time.monotonic()
        if now < self._count_at:
            return
        counts = {name: Counts(len(fold.texts.texts), fold.texts.num_tokens, fold.epoch) for name, fold in self._folds.items()}
        changed = {name: kept for name, kept in counts.items() if self._counted.get(name) != kept}
        if changed:
            self._store.save_counts(changed)
            self._counted |= changed
            self._count_at = now + _COUNTS_S

    def _let_go(self, fold: StreamCompactor, keys: Sequence[int]) -> None:
        self._evicted_texts += len(keys)
        fold.let_go(keys)

    def _say(self, fold: StreamCompactor, epoch: int, evicted: tuple[int, ...] = ()) -> None:
        """Write a batch. Without evicted texts it announces the epoch, and gives the next snapshot an entry to end at."""
        batch = TextBatch(fold.origin, fold.sequence, epoch, evicted=evicted)
        self._store.append([(fold.namespace, encode_batch(batch, self._identity.vocab_size))])
        fold.sequence += 1
