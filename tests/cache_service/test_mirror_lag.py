"""How far a mirror is behind, and how much of what came in waits for the engine's thread."""

from __future__ import annotations

import time

import numpy as np

from cache_service.mirror.inbox import Inbox
from cache_service.mirror.outbox import Outbox
from cache_service.mirror.tail import Tail
from cache_service.namespace import Identity, namespace
from cache_service.records import CacheDelta, TextBatch, encode_batch
from cache_service.store.redis_store import RedisStore
from cache_service.store.stream_ids import written_s
from decoding.request import text_key
from decoding.sources.history import Histories

IDENTITY = Identity("11" * 16, "22" * 16, 500)
NAME = namespace(b"secret", "a", IDENTITY.model_revision, IDENTITY.tokenizer_revision)
WAITS_S = 0.1


def append(store: RedisStore, sequence: int) -> None:
    delta = CacheDelta(text_key("one"), 5 * sequence, np.asarray([1, 2, 3, 4, 5], np.int32), False)
    store.append([(NAME, encode_batch(TextBatch(7, sequence, 0, (delta,)), IDENTITY.vocab_size))])


def test_lag_is_the_age_of_what_is_read_until_all_is_read(store: RedisStore) -> None:
    inbox, memory = Inbox(), Histories(1000)
    tail = Tail(store, IDENTITY, {"a": NAME}, inbox, Outbox(1 << 20), 60.0)
    place = tail.places["a"]
    append(store, 0)
    began = time.monotonic()
    time.sleep(WAITS_S)
    assert tail.read(0.0)
    assert WAITS_S * 0.9 <= place.lag_s <= time.monotonic() - began + 1.0
    assert inbox.waiting_tokens == 5
    tail.look()
    assert place.lag_s == 0.0
    while inbox.apply(memory, 100):
        pass
    assert inbox.waiting_tokens == 0

    append(store, 1)
    tail.look()  # something is there that was not read: no news
    assert place.lag_s == 0.0
    assert tail.read(0.0) and 0.0 <= place.lag_s < WAITS_S * 100
    assert inbox.waiting_tokens == 5


def test_the_clock_of_an_id() -> None:
    assert written_s("1500-0") == written_s("1500-7") == 1.5
