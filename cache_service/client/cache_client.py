"""Cache client: exchanges texts with other replicas through Redis without ever blocking a step of the engine."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.cache_service.access import CacheAccess
from outrider.cache_service.client.inbox import Inbox
from outrider.cache_service.client.outbox import Outbox
from outrider.cache_service.client.stream_reader import StreamReader
from outrider.cache_service.namespace import Identity
from outrider.cache_service.records import CacheDelta, TextBatch, encode_batch, split_deltas
from outrider.cache_service.store.circuit_breaker import RedisCircuitBreaker
from outrider.cache_service.store.redis_store import MAX_BLOCK_S
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import PUBLIC

if TYPE_CHECKING:
    from outrider.decoding.sources.history import Histories

logger = logging.getLogger(__name__)

FLUSH_S = 0.02  # delay of new tokens, to send several together
OUTBOX_BYTES = 8 * 2**20  # tokens of one tenant kept for sending while Redis is away
RETRY_S = 1.0  # pause after a failure of Redis
LOOK_S = 1.0  # period of comparisons with the state of the streams
TAKE_TOKENS = 1 << 16  # tokens of all tenants written per round trip
_PAUSE_S = 0.01  # pause while the engine's thread is behind
_IDLE_S = 5.0  # longest sleep of an idle writer


@dataclass(frozen=True, slots=True)
class CacheClientCounts:
    """Counters of a cache client since the start of the process."""

    connected: bool  # the last read and the last write, if any, succeeded
    breaker: str  # the worse state of reading and writing: "closed", "half-open" or "open"
    opened: int  # times a breaker opened
    failures: dict[str, int]  # by kind: connection, timeout, full, refused, read-only, nonsense, wrong type, other, internal
    published_tokens: int  # accepted by Redis
    applied_tokens: int  # applied to histories, including this replica's own
    dropped_tokens: int  # generated here, never stored in Redis
    corrupt_records: int
    corrupt_snapshots: int
    lost_records: int  # batches written but never received
    reloads: int  # reloads from a snapshot, except the first
    outbox_bytes: int
    outbox_dropped_texts: int
    waiting_tokens: int = 0  # received, not applied yet
    lag_s: float = 0.0  # age of the entries read now, by the clocks of Redis and this host; 0 if all are read


class CacheClient:
    """Synchronisation of this process's histories with all processes that have the same Redis, secret, model and tokenizer."""

    # Two threads talk to Redis. The engine's thread owns the histories and only uses queues: `publish` fills the outbox, `apply`
    # drains the inbox. Failures of Redis raise nothing here, and only `start` and `close` wait.

    def __init__(self, access: CacheAccess, identity: Identity, memory: Histories, wake: Callable[[], None]) -> None:
        """Prepare threads. One calls ``wake`` when updates can be applied. Raises ``ValueError`` for a bad address or secret."""
        options = access.options
        self._memory, self._wake, self._vocab_size = memory, wake, identity.vocab_size
        self._namespaces, self._store = access.namespaces(identity), access.store()
        self._outbox = Outbox(OUTBOX_BYTES)
        self._inbox = Inbox(memory)
        self._tail = StreamReader(self._store, identity, self._namespaces, self._inbox, self._outbox, options.ttl_s)
        self._reading = RedisCircuitBreaker("reading shared texts from Redis", RETRY_S)
        self._writing = RedisCircuitBreaker("writing shared texts to Redis", RETRY_S)
        self._origin = secrets.randbits(64)
        self._sequences = dict.fromkeys(self._namespaces, 0)
        self._published_tokens = self._unwritable_tokens = 0
        self._look_at_s = 0.0
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=loop, name=f"cache-client-{name}", daemon=True) for name, loop in (
            ("reader", self._read_until_closed), ("writer", self._write_until_closed),
        )]  # fmt: skip

    # -- the engine's thread ---------------------------------------------------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        """Load the shared cache into ``memory``, for at most ``timeout_s``, then follow its updates in threads."""
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s
        caught_up = False

        def catch_up() -> None:
            nonlocal caught_up
            caught_up = self._tail.catch_up(deadline_s)

        while not caught_up and time.monotonic() < deadline_s and not self._reading.attempt(catch_up):
            # The engine's thread does not run yet, so this one applies what the inbox holds before more is read.
            while self._inbox.apply(1 << 20):
                pass
        tokens = sum(history.num_tokens for name in self._namespaces if (history := self._memory.of(name)) is not None)
        if caught_up:
            logger.info("shared texts: %d tokens in %.2f s", tokens, time.monotonic() - began_s)
        else:
            logger.warning("shared texts: Redis is unreachable or slow; starting with %d tokens, loading the rest later", tokens)
        for thread in self._threads:
            thread.start()

    def publish(self, tenant: str, text: int, offset: int, tokens: Sequence[int] | Int32Array, final: bool) -> None:
        """Queue generated tokens of a text, from ``offset`` on, for the other replicas. Does not block."""
        assert tenant in self._namespaces and tenant != PUBLIC, "tenant is unknown to this cache client"
        self._outbox.put(tenant, CacheDelta(text, offset, np.asarray(tokens, np.int32), final))

    def apply(self, max_tokens: int = 4096) -> bool:
        """Apply about ``max_tokens`` of received updates to the histories, tenants in turn. Return whether more waits."""
        return self._inbox.apply(max_tokens)

    def counts(self) -> CacheClientCounts:
        """Return the counters, from any thread."""
        guards = (self._reading, self._writing)
        states = [guard.state for guard in guards]
        return CacheClientCounts(
            connected=self._reading.succeeded and self._writing.state == "closed",
            breaker=next((state for state in ("open", "half-open") if state in states), "closed"),
            opened=sum(guard.opened for guard in guards),
            failures=dict(self._reading.failures + self._writing.failures),
            published_tokens=self._published_tokens,
            applied_tokens=self._inbox.applied_tokens,
            dropped_tokens=self._outbox.dropped_tokens + self._unwritable_tokens,
            corrupt_records=self._tail.corrupt_records,
            corrupt_snapshots=self._tail.corrupt_snapshots,
            lost_records=self._tail.lost_records,
            reloads=self._tail.reloads,
            outbox_bytes=self._outbox.nbytes,
            outbox_dropped_texts=self._outbox.dropped_texts,
            waiting_tokens=self._inbox.waiting_tokens,
            lag_s=max(place.lag_s for place in self._tail.places.values()),
        )

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most ``timeout_s`` and only while Redis works, then stop the threads. Idempotent."""
        deadline_s = time.monotonic() + timeout_s
        # Without a writer the outbox would never become idle.
        if self._threads[1].is_alive():
            while not self._outbox.idle and self._writing.state == "closed" and time.monotonic() < deadline_s:
                time.sleep(0.002)
        self._closing.set()
        self._outbox.wake()
        self._store.close()  # ends a blocking read
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.1, deadline_s - time.monotonic()))

    # -- the threads -----------------------------------------------------------------------------------------------------------

    def _read_until_closed(self) -> None:
        while not self._closing.is_set():
            wait_s = self._reading.attempt(self._read_once)
            if wait_s:
                self._look_at_s = 0.0  # Redis may have lost its data when it answers again
                self._closing.wait(wait_s)

    def _read_once(self) -> None:
        try:
            looked = time.monotonic() >= self._look_at_s
            if looked:
                if self._tail.look():
                    self._wake()
                self._look_at_s = time.monotonic() + LOOK_S
            if self._tail.crowded:
                self._closing.wait(_PAUSE_S)
            elif self._tail.read(0.0 if looked else MAX_BLOCK_S):
                self._wake()
        except Exception:
            if not self._closing.is_set():  # otherwise `close` ended the read
                raise

    def _write_until_closed(self) -> None:
        while not self._closing.is_set():
            if not self._outbox.wait(_IDLE_S) or self._closing.is_set():
                continue
            # One round trip carries the tokens of several steps.
            self._closing.wait(FLUSH_S)
            wait_s = self._writing.attempt(self._write_once)
            if wait_s:
                self._closing.wait(wait_s)

    def _write_once(self) -> None:
        """Write waiting deltas to Redis; put them back if that fails."""
        # Epochs and tokens are read together: after a deletion in between, old texts would leave under the new epoch.
        with self._tail.deleting:
            epochs = {tenant: place.ledger.epoch for tenant, place in self._tail.places.items()}
            taken = self._outbox.take(TAKE_TOKENS)
        entries: list[tuple[str, bytes]] = []
        sequences = dict(self._sequences)
        tokens = 0
        for tenant, deltas in taken.items():
            kept = [delta for delta in deltas if self._tail.places[tenant].ledger.allows(delta.text, delta.tokens)]
            for group in split_deltas(kept, self._vocab_size):
                batch = TextBatch(self._origin, sequences[tenant], epochs[tenant], group)
                try:
                    data = encode_batch(batch, self._vocab_size)
                except ValueError as error:  # tokens outside the vocabulary: a retry cannot succeed
                    self._unwritable_tokens += sum(len(delta.tokens) for delta in group)
                    logger.error("tenant %s: tokens are not shared: %s", tenant, error)
                    continue
                entries.append((self._namespaces[tenant], data))
                sequences[tenant] = (sequences[tenant] + 1) % 2**32
                tokens += sum(len(delta.tokens) for delta in group)
        try:
            self._store.append(entries)
        except BaseException:
            self._outbox.give_back(taken)
            raise
        self._outbox.delivered()
        self._sequences = sequences  # a failed batch is resent under its number: a gap would count as a lost batch
        self._published_tokens += tokens
