"""Mirrors over one real Redis: what one process generates all others can draft from, and what is deleted none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import redis

from cache_service.keeper.snapshot import Snapshot, SnapshotText, encode_snapshot
from cache_service.mirror.mirror import Mirror
from cache_service.namespace import Identity, namespace
from cache_service.records import CacheDelta, TextBatch, encode_batch
from cache_service.store.embedded import EmbeddedRedis
from cache_service.store.redis_store import RedisStore
from configs.slices import CacheOptions
from decoding.request import request_hash, text_key
from decoding.sources.history import PUBLIC, Histories, History
from tests.waiting import eventually

VOCAB = 500
IDENTITY = Identity("11" * 16, "22" * 16, VOCAB)
SECRET = b"secret"
OPTIONS = CacheOptions(flush_s=0.001, timeout_s=1.0, retry_s=0.1)
T1, T2, T3 = (text_key(name) for name in ("one", "two", "three"))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors look at where the streams stand ten times as often."""
    monkeypatch.setattr("cache_service.mirror.mirror.LOOK_S", 0.1)


class Replica:
    """A mirror, and the thread that would be the engine's."""

    def __init__(
        self, url: str, tenants: Sequence[str] = ("a", "b"), secret: bytes = SECRET, identity: Identity = IDENTITY
    ) -> None:
        self.memory = Histories(100_000)
        self.woken = 0
        self.mirror = Mirror(OPTIONS, url, secret, identity, tenants, self.memory, self._wake)
        self.mirror.start(5.0)

    def _wake(self) -> None:
        self.woken += 1

    def write(self, tenant: str, text: int, offset: int, tokens: Sequence[int], final: bool = False) -> None:
        """As an engine does: into its own history, and out."""
        self.history(tenant).extend(text, offset, tokens, final)
        self.mirror.publish(tenant, text, offset, tokens, final)

    def history(self, tenant: str) -> History:
        history = self.memory.of(tenant)
        assert history is not None
        return history

    def knows(self, tenant: str, *expected: Sequence[int]) -> bool:
        """Whether these texts, and nothing else, can be drafted from."""
        self.mirror.apply()
        return contents(self.history(tenant)) == sorted(list(tokens) for tokens in expected)


def contents(history: History) -> list[list[int]]:
    """The texts in a history's log."""
    owners = set(history.log.arrays.owners.tolist())
    texts = [history.log.tokens_of(number) for number in owners if number >= 0]
    return sorted(text.tolist() for text in texts if len(text))


@pytest.fixture
def replica(server: EmbeddedRedis, raw: redis.Redis) -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(*args: object, **kwargs: object) -> Replica:
        made.append(Replica(server.url, *args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.mirror.close()


def name_of(tenant: str) -> str:
    return namespace(SECRET, tenant, IDENTITY.model_revision, IDENTITY.tokenizer_revision)


def delta(text: int, offset: int, tokens: Sequence[int], final: bool = False) -> CacheDelta:
    return CacheDelta(text, offset, np.array(tokens, np.int32), final)


def add(store: RedisStore, tenant: str, batch: TextBatch) -> str:
    return store.append([(name_of(tenant), encode_batch(batch, VOCAB))])[0]


def save(store: RedisStore, tenant: str, id: str, texts: dict[int, Sequence[int]]) -> None:
    kept = tuple(SnapshotText(key, np.array(tokens, np.int32), True, time.time()) for key, tokens in texts.items())
    snapshot = Snapshot(id, 0, VOCAB, IDENTITY.tokenizer_revision, time.time(), kept)
    assert store.save_snapshot(name_of(tenant), id, encode_snapshot(snapshot))


def test_what_one_generates_the_other_drafts_from(replica: Callable[..., Replica]) -> None:
    a, b = replica(), replica()
    a.write("a", T1, 0, [1, 2, 3])
    b.write("a", T2, 0, [7, 8], final=True)
    for one in (a, b):
        eventually(lambda one=one: one.knows("a", [1, 2, 3], [7, 8]))  # type: ignore[misc]
    a.write("a", T1, 3, [4, 5], final=True)
    for one in (a, b):
        eventually(lambda one=one: one.knows("a", [1, 2, 3, 4, 5], [7, 8]))  # type: ignore[misc]
    assert np.array_equal(a.history("a").frequencies, b.history("a").frequencies)
    assert b.woken > 0
    eventually(lambda: a.mirror.counts().published_tokens == 5)
    counts = a.mirror.counts()
    assert counts.connected and counts.breaker == "closed" and counts.failures == {} and counts.opened == 0
    assert counts.outbox_bytes == 0 and counts.applied_tokens >= 2


def test_tenants_secrets_and_models_are_apart(replica: Callable[..., Replica]) -> None:
    a, b = replica(), replica()
    others = [
        replica(secret=b"other"), replica(identity=replace(IDENTITY, model_revision="33")),
        replica(identity=replace(IDENTITY, tokenizer_revision="44")), replica(("b",)),
    ]  # fmt: skip
    a.write("a", T1, 0, [1, 2, 3], final=True)
    a.write("b", T2, 0, [4], final=True)
    eventually(lambda: b.knows("a", [1, 2, 3]) and b.knows("b", [4]))
    eventually(lambda: others[3].knows("b", [4]))
    for one in others:
        assert one.knows("a")
    for one in (a, b, *others):
        assert one.knows(PUBLIC)
    with pytest.raises(AssertionError):
        a.mirror.publish("*", T1, 0, [1], True)
    with pytest.raises(AssertionError):
        a.mirror.publish("unknown", T1, 0, [1], True)


def test_names_of_tenants_are_not_in_redis(replica: Callable[..., Replica], raw: redis.Redis) -> None:
    a = replica(("somebody",))
    a.write("somebody", T1, 0, [1, 2], final=True)
    eventually(lambda: raw.keys("*:log") != [])
    assert not any(b"somebody" in key for key in raw.keys("*"))


def test_one_that_starts_later_is_warm_at_once(replica: Callable[..., Replica], store: RedisStore) -> None:
    a = replica()
    a.write("a", T1, 0, [1, 2, 3], final=True)
    eventually(lambda: a.mirror.counts().published_tokens == 3)
    id = store.heads([name_of("a")])[name_of("a")].last_id
    save(store, "a", id, {T1: [1, 2, 3], T3: [9]})
    store.trim(name_of("a"), f"{id}9", exact=True)
    a.write("a", T2, 0, [4, 5])
    add(store, PUBLIC, TextBatch(1, 0, 0, (delta(T3, 0, [30, 31], True),)))
    eventually(lambda: a.mirror.counts().published_tokens == 5)
    third = replica()
    assert contents(third.history("a")) == [[1, 2, 3], [4, 5], [9]]  # nothing applied after the start
    assert contents(third.memory.public) == [[30, 31]]
    assert third.mirror.counts().reloads == 0


def test_replays_and_reordering_change_nothing(replica: Callable[..., Replica], raw: redis.Redis, store: RedisStore) -> None:
    a, b = replica(), replica()
    for at in range(0, 60, 3):
        a.write("a", T1, at, [at, at + 1, at + 2], final=at == 57)
        a.write("a", T2, at, [at + 200] * 3)
    eventually(lambda: b.knows("a", list(range(60)), [at + 200 for at in range(0, 60, 3) for _ in range(3)]))
    before, frequencies = contents(b.history("a")), b.history("a").frequencies.copy()
    key = f"{{outrider}}:{name_of('a')}:log"
    entries = [fields for _, fields in raw.xrange(key)]
    for fields in [*entries[::-1], *entries]:
        raw.xadd(key, fields)
    add(store, "a", TextBatch(77, 0, 0, (delta(T3, 0, [5], True),)))  # the end of the replay
    eventually(lambda: (b.mirror.apply(), [5] in contents(b.history("a")))[1])
    frequencies[5] += 1
    assert contents(b.history("a")) == sorted([*before, [5]])
    assert np.array_equal(b.history("a").frequencies, frequencies)
    assert b.mirror.counts().lost_records == 0 and b.mirror.counts().reloads == 0


def test_a_deleted_request_is_gone_everywhere_and_stays_away(replica: Callable[..., Replica], store: RedisStore) -> None:
    a, b = replica(), replica()
    a.write("a", T1, 0, [1, 2, 3])
    a.write("a", T2, 0, [4])
    a.write("b", T1, 0, [6])
    eventually(lambda: b.knows("a", [1, 2, 3], [4]) and b.knows("b", [6]))
    add(store, "a", TextBatch(9, 0, 0, removed=(request_hash("one"),)))
    for one in (a, b):
        eventually(lambda one=one: one.knows("a", [4]))  # type: ignore[misc]
    a.write("a", T1, 3, [7], final=True)  # it was still running
    add(store, "a", TextBatch(8, 0, 0, (delta(T1, 0, [1, 2, 3, 7], True), delta(T3, 0, [5], True))))  # a late writer
    eventually(lambda: b.knows("a", [4], [5]))
    assert b.knows("b", [6])
    eventually(lambda: a.mirror.counts().outbox_bytes == 0 and a.knows("a", [4], [5]))
    assert replica().knows("a", [4], [5])


@pytest.mark.parametrize("said", [True, False])
def test_a_deleted_tenant_is_gone_everywhere(
    replica: Callable[..., Replica], store: RedisStore, raw: redis.Redis, said: bool
) -> None:
    """With the batch that says so, and without: the epoch alone is seen within a second."""
    a, b = replica(), replica()
    a.write("a", T1, 0, [1, 2, 3])
    a.write("b", T2, 0, [4])
    eventually(lambda: b.knows("a", [1, 2, 3]) and b.knows("b", [4]))
    epoch = store.delete(name_of("a"))
    if said:
        add(store, "a", TextBatch(9, 0, epoch))
    for one in (a, b):
        eventually(lambda one=one: one.knows("a"))  # type: ignore[misc]
    add(store, "a", TextBatch(8, 0, 0, (delta(T3, 0, [5], True),)))  # one who has not heard of it
    a.write("a", T1, 3, [7], final=True)  # the rest of a text that was running
    a.write("a", T3, 0, [6], final=True)
    eventually(lambda: b.knows("a", [6]))
    eventually(lambda: a.knows("a", [6]))
    assert b.knows("b", [4])
    assert len(raw.xrange(f"{{outrider}}:{name_of('a')}:log")) == 2 + said


def test_evicted_texts_go(replica: Callable[..., Replica], store: RedisStore) -> None:
    a, b = replica(), replica()
    a.write("a", T1, 0, [1, 2, 3], final=True)
    a.write("a", T2, 0, [4], final=True)
    eventually(lambda: b.knows("a", [1, 2, 3], [4]))
    add(store, "a", TextBatch(9, 0, 0, evicted=(T1,)))
    for one in (a, b):
        eventually(lambda one=one: one.knows("a", [4]))  # type: ignore[misc]


@pytest.mark.usefixtures("often")
def test_one_that_fell_behind_goes_on_from_the_snapshot(replica: Callable[..., Replica], store: RedisStore) -> None:
    a = replica()
    add(store, "a", TextBatch(5, 0, 0, (delta(T1, 0, [1], True),)))
    eventually(lambda: a.knows("a", [1]))
    # Entries that a has not read are trimmed: the numbers of their writer tell.
    ids = [add(store, "b", TextBatch(5, number, 0)) for number in range(3)]
    save(store, "a", ids[-1], {T1: [1], T2: [2, 2]})
    time.sleep(0.003)  # ids begin with the millisecond, and these are of two streams
    add(store, "a", TextBatch(5, 3, 0, (delta(T3, 0, [3], True),)))
    eventually(lambda: a.knows("a", [1], [2, 2], [3]))
    counts = a.mirror.counts()
    assert counts.lost_records == 2 and counts.reloads == 1
    add(store, "a", TextBatch(5, 4, 0, (delta(text_key("four"), 0, [4], True),)))
    eventually(lambda: a.knows("a", [1], [2, 2], [3], [4]))
    assert a.mirror.counts().reloads == 1


@pytest.mark.usefixtures("often")
def test_a_newer_snapshot_alone_is_no_reason_to_reload(replica: Callable[..., Replica], store: RedisStore) -> None:
    a = replica()
    id = add(store, "a", TextBatch(5, 0, 0, (delta(T1, 0, [1], True),)))
    eventually(lambda: a.knows("a", [1]))
    save(store, "a", id, {T1: [1]})
    store.trim(name_of("a"), f"{id}9", exact=True)
    seen = a.woken
    for number in range(1, 4):
        add(store, "a", TextBatch(5, number, 0, (delta(T2, number - 1, [2]),)))
        time.sleep(0.15)  # the mirror looks
    eventually(lambda: a.knows("a", [1], [2, 2, 2]))
    assert a.woken > seen and a.mirror.counts().reloads == 0


def test_apply_is_fair_and_bounded(replica: Callable[..., Replica], store: RedisStore) -> None:
    a = replica()
    for number in range(40):
        add(store, "a", TextBatch(5, number, 0, (delta(number << 16, 0, [number] * 2000, True),)))
    add(store, "b", TextBatch(5, 0, 0, (delta(T1, 0, [9, 9, 9], True),)))
    eventually(lambda: a.mirror._inbox.weight("a") == 80_000 and a.mirror._inbox.weight("b") == 3)
    assert a.history("a").num_tokens == 0
    assert a.mirror.apply(3000)
    assert contents(a.history("b")) == [[9, 9, 9]]
    assert 0 < a.history("a").num_tokens <= 4096
    steps = 0
    while a.mirror.apply(4096):
        steps += 1
    assert steps >= 15
    assert a.history("a").num_tokens == 80_000
    assert not a.mirror.apply()


def test_close_writes_what_waits(replica: Callable[..., Replica]) -> None:
    a, b = replica(), replica()
    for number in range(50):
        a.write("a", number << 16, 0, [number] * 3, final=True)
    a.mirror.close()
    a.mirror.close()
    assert a.mirror.counts().published_tokens == 150
    eventually(lambda: b.knows("a", *[[number] * 3 for number in range(50)]))
    a.mirror.publish("a", T1, 0, [1], True)  # an engine that ends a little later
    assert not a.mirror.apply()


def test_tokens_of_another_vocabulary_are_not_written(replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture) -> None:
    a, b = replica(), replica()
    a.mirror.publish("a", T1, 0, [1, VOCAB], True)
    a.mirror.publish("b", T2, 0, [3], True)
    eventually(lambda: b.knows("b", [3]))
    assert a.mirror.counts().dropped_tokens == 2 and a.mirror.counts().breaker == "closed"
    assert "not shared" in caplog.text
