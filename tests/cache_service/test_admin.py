"""The operator's verbs on a real Redis, with and without a service beside them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import redis

from cache_service.keeper.admin import CacheAdmin, ForeignSnapshotError, UnknownTenantError
from cache_service.keeper.server import CacheServer
from cache_service.keeper.snapshot import CorruptSnapshotError, decode_snapshot
from cache_service.namespace import Identity, namespace
from cache_service.records import MAX_BATCH_BYTES, CacheDelta, TextBatch, decode_batch, encode_batch
from cache_service.store.embedded import EmbeddedRedis
from cache_service.store.redis_store import Counts, RedisStore
from configs.slices import CacheOptions
from decoding.request import request_hash, text_key
from decoding.sources.history import PUBLIC
from tests.waiting import wait_for

SECRET = b"of the tests"
IDENTITY = Identity("a1", "b2", 5000)
Texts = dict[int, tuple[list[int], bool]]


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, IDENTITY.vocab_size, count).tolist()


class Cluster:
    """A prefix of its own in the Redis of all tests here."""

    def __init__(self, url: str) -> None:
        self.options = CacheOptions(prefix=f"t{secrets.token_hex(4)}", snapshot_s=0.05, lease_s=0.6, retry_s=0.1)
        self.url = url
        self.store = RedisStore(url, self.options.prefix, 1.0)
        self.admin = CacheAdmin(self.options, url, SECRET, IDENTITY, ["acme", "umbra"])
        self.server: CacheServer | None = None

    def serve(self, quotas: dict[str, int] | None = None) -> CacheServer:
        self.server = CacheServer(self.options, self.url, SECRET, IDENTITY, ["acme", "umbra"], quotas or {})
        self.server.start()
        return self.server

    def name(self, tenant: str = "acme") -> str:
        return namespace(SECRET, tenant, IDENTITY.model_revision, IDENTITY.tokenizer_revision)

    def say(self, texts: dict[str, Sequence[int]], tenant: str = "acme", epoch: int = 0, final: bool = True) -> None:
        deltas = tuple(CacheDelta(text_key(name), 0, np.array(text, np.int32), final) for name, text in texts.items())
        batch = TextBatch(secrets.randbits(64), 0, epoch, deltas)
        self.store.append([(self.name(tenant), encode_batch(batch, IDENTITY.vocab_size))])

    def texts(self, tenant: str = "acme") -> Texts:
        exported = decode_snapshot(self.admin.export(tenant))
        return {text.text: (text.tokens.tolist(), text.final) for text in exported.texts}

    def entries(self, tenant: str = "acme") -> list[bytes]:
        found = self.store.read({self.name(tenant): "0-0"}, 0.0, 10_000).get(self.name(tenant), [])
        return [data or b"" for _, data in found]

    def saved(self, tenant: str = "acme") -> int:
        """Texts in the stored snapshot."""
        stored = self.store.load_snapshot(self.name(tenant))
        return -1 if stored is None else len(decode_snapshot(stored[1]).texts)

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.admin.close()
        self.store.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedRedis.start() as server:
        yield server.url


@pytest.fixture
def make(url: str) -> Iterator[Callable[[], Cluster]]:
    made: list[Cluster] = []

    def build() -> Cluster:
        made.append(Cluster(url))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


def expected(texts: dict[str, list[int]]) -> Texts:
    return {text_key(name): (text, True) for name, text in texts.items()}


def test_export_is_of_now_and_import_brings_it_back(make: Callable[[], Cluster]) -> None:
    cluster, other = make(), make()
    cluster.serve()
    texts = {f"r{index}/{index % 3}": tokens(index, 5 + index) for index in range(60)}
    cluster.say(dict(list(texts.items())[:40]))
    assert wait_for(lambda: cluster.saved() == 40)
    cluster.say(dict(list(texts.items())[40:]))  # in no snapshot yet, or in one: the same
    assert cluster.texts() == expected(texts)
    exported = cluster.admin.export("acme")
    other.say({"there": [1, 2, 3]})
    assert other.admin.import_("acme", exported) == 60
    assert other.texts() == expected(texts | {"there": [1, 2, 3]})
    assert other.admin.import_("acme", exported) == 60
    assert other.texts() == expected(texts | {"there": [1, 2, 3]})
    assert other.texts("umbra") == {}


def test_long_texts_travel_in_batches_that_fit(make: Callable[[], Cluster]) -> None:
    cluster, other = make(), make()
    texts = {f"r{index}": tokens(index, 200_000) for index in range(6)}
    for name, text in texts.items():
        for at in range(0, 200_000, 50_000):
            delta = CacheDelta(text_key(name), at, np.array(text[at : at + 50_000], np.int32), at == 150_000)
            cluster.store.append([(cluster.name(), encode_batch(TextBatch(1, 0, 0, (delta,)), IDENTITY.vocab_size))])
    assert other.admin.import_("umbra", cluster.admin.export("acme")) == 6
    assert other.texts("umbra") == expected(texts)
    entries = other.entries("umbra")
    assert len(entries) == 3 and max(map(len, entries)) <= MAX_BATCH_BYTES
    batches = [decode_batch(data, IDENTITY.vocab_size) for data in entries]
    assert [batch.sequence for batch in batches] == [0, 1, 2]
    assert len({batch.origin for batch in batches}) == 1


def test_damaged_and_foreign_imports_are_refused(make: Callable[[], Cluster]) -> None:
    cluster = make()
    cluster.say({"r": tokens(1, 30)})
    exported = cluster.admin.export("acme")
    before = len(cluster.entries("umbra"))
    for at in (0, 40, len(exported) // 2, len(exported) - 1):
        damaged = bytearray(exported)
        damaged[at] ^= 1
        with pytest.raises(CorruptSnapshotError):
            cluster.admin.import_("umbra", bytes(damaged))
    with pytest.raises(CorruptSnapshotError):
        cluster.admin.import_("umbra", exported[:-5])
    for identity, said in ((Identity("a1", "c3", 5000), "c3"), (Identity("a1", "b2", 6000), "6000")):
        foreign = CacheAdmin(cluster.options, cluster.url, SECRET, identity, ["acme"])
        with pytest.raises(ForeignSnapshotError, match=rf"tokenizer revision b2 with 5000 tokens.*{said}"):
            foreign.import_("acme", exported)
        foreign.close()
    assert len(cluster.entries("umbra")) == before


def test_documents_loaded_twice_are_there_once(make: Callable[[], Cluster]) -> None:
    cluster = make()
    documents = [tokens(1, 9000), tokens(2, 10), [], tokens(2, 10)]
    assert cluster.admin.preload(documents) == 4  # three parts, and the second document
    assert sorted(len(text) for text, _ in cluster.texts(PUBLIC).values()) == [10, 808, 4096, 4096]
    size = len(cluster.entries(PUBLIC))
    assert cluster.admin.preload(documents) == 0
    assert len(cluster.entries(PUBLIC)) == size
    assert cluster.admin.preload([tokens(3, 10)]) == 1
    assert len(cluster.texts(PUBLIC)) == 5
    assert cluster.texts("acme") == {}
    with pytest.raises(ValueError, match=r"documents\[1\] must hold token ids from 0 to 4999, got 7 to 5000"):
        cluster.admin.preload([[1], [7, 5000]])


def test_what_was_evicted_can_be_loaded_again(make: Callable[[], Cluster]) -> None:
    cluster = make()
    server = cluster.serve({PUBLIC: 2000})  # 1000 tokens
    assert cluster.admin.preload([tokens(1, 800)]) == 1
    assert wait_for(lambda: cluster.saved(PUBLIC) == 1)
    assert cluster.admin.preload([tokens(2, 800)]) == 1
    assert wait_for(lambda: server.status().evicted_texts == 1 and len(cluster.texts(PUBLIC)) == 1)
    assert next(iter(cluster.texts(PUBLIC).values()))[0] == tokens(2, 800)
    assert cluster.admin.preload([tokens(1, 800)]) == 1
    assert wait_for(lambda: server.status().evicted_texts == 2 and len(cluster.texts(PUBLIC)) == 1)
    assert next(iter(cluster.texts(PUBLIC).values()))[0] == tokens(1, 800)
    assert cluster.admin.preload([tokens(1, 800)]) == 0


def test_deletion_by_request_takes_all_choices_for_good(make: Callable[[], Cluster]) -> None:
    cluster = make()
    cluster.say({"chatcmpl-7/0": [1, 2], "chatcmpl-7/1": [3, 4], "chatcmpl-70/0": [5, 6]})
    exported = cluster.admin.export("acme")
    cluster.admin.delete_request("acme", "chatcmpl-7")
    assert cluster.texts() == expected({"chatcmpl-70/0": [5, 6]})
    cluster.say({"chatcmpl-7/0": [1, 2], "chatcmpl-7/2": [9]})
    assert cluster.texts() == expected({"chatcmpl-70/0": [5, 6]})
    assert cluster.admin.import_("acme", exported) == 1  # nor does an old export bring it back
    assert cluster.texts() == expected({"chatcmpl-70/0": [5, 6]})
    cluster.admin.delete_request("acme", "chatcmpl-70/3")  # of one choice: the whole request
    assert cluster.texts() == {}
    assert {request for request, _ in decode_snapshot(cluster.admin.export("acme")).removed} == {
        request_hash("chatcmpl-7"), request_hash("chatcmpl-70")
    }  # fmt: skip


def test_deletion_of_a_tenant_leaves_others_and_starts_anew(make: Callable[[], Cluster]) -> None:
    cluster = make()
    server = cluster.serve()
    cluster.say({"r": [1, 2, 3]})
    cluster.say({"s": [4, 5]}, tenant="umbra")
    cluster.admin.preload([[6, 7]])
    exported = cluster.admin.export("acme")
    assert wait_for(lambda: server.status().texts == 3 and cluster.saved() == 1)
    assert cluster.admin.delete_tenant("acme") == 1
    assert cluster.texts() == {}
    cluster.say({"r": [1, 2, 3]})  # by one that has not heard of it
    assert cluster.texts() == {}
    assert cluster.texts("umbra") == expected({"s": [4, 5]}) and len(cluster.texts(PUBLIC)) == 1
    assert wait_for(lambda: server.status().texts == 2 and cluster.saved() == 0)
    assert cluster.admin.import_("acme", exported) == 1
    assert cluster.texts() == expected({"r": [1, 2, 3]})
    assert cluster.admin.delete_tenant("acme") == 2
    assert cluster.texts() == {}


def test_deletion_that_nobody_has_said_counts(make: Callable[[], Cluster]) -> None:
    cluster = make()
    cluster.say({"r": [1, 2, 3]})
    assert cluster.store.delete(cluster.name()) == 1  # and whoever did it died
    cluster.say({"r": [1, 2, 3]})  # by one that has not heard of it
    assert cluster.texts() == {}
    assert cluster.admin.stats()[0].epoch == 1


def test_stats(make: Callable[[], Cluster]) -> None:
    cluster = make()
    cluster.say({"r": [1, 2, 3], "s": [4]})
    by_tenant = {entry.tenant: entry for entry in cluster.admin.stats()}
    assert list(by_tenant) == ["acme", "umbra", PUBLIC]
    acme = by_tenant["acme"]
    assert (acme.texts, acme.tokens, acme.epoch, acme.stream_entries) == (2, 4, 0, 1)
    assert acme.namespace == cluster.name()
    assert acme.stream_bytes > 0 and acme.snapshot_bytes == 0 and acme.snapshot_age_s is None
    assert by_tenant["umbra"].texts == by_tenant["umbra"].stream_entries == by_tenant[PUBLIC].tokens == 0
    cluster.serve()
    assert wait_for(lambda: cluster.saved() == 2)
    acme = cluster.admin.stats()[0]
    assert (acme.texts, acme.tokens) == (2, 4)
    assert acme.snapshot_bytes > 0 and acme.snapshot_age_s is not None and 0.0 <= acme.snapshot_age_s < 60.0


def test_counts_are_those_that_the_service_keeps(make: Callable[[], Cluster]) -> None:
    cluster = make()
    server = cluster.serve()
    cluster.say({"r": [1, 2, 3], "s": [4]})

    def counted() -> tuple[int, int, int]:
        (entry,) = cluster.admin.stats("acme")
        return entry.texts, entry.tokens, entry.epoch

    assert wait_for(lambda: cluster.store.load_counts(cluster.name()) == Counts(2, 4, 0))
    cluster.admin.delete_request("acme", "r")
    assert wait_for(lambda: counted() == (1, 1, 0))
    cluster.say({"t": [5, 6]})
    assert wait_for(lambda: counted() == (2, 3, 0))
    assert wait_for(lambda: cluster.saved() == 2)
    server.stop()
    with redis.Redis.from_url(cluster.url) as client:  # what would have to be read, if it was
        for key in client.scan_iter(f"{{{cluster.options.prefix}}}:*"):
            if not key.endswith((b":counts", b":epoch")):
                client.delete(key)
    assert counted() == (2, 3, 0)
    assert cluster.admin.delete_tenant("acme") == 1
    assert counted() == (0, 0, 1)


def test_counts_come_again_when_redis_has_lost_them(make: Callable[[], Cluster]) -> None:
    cluster = make()
    cluster.serve()
    cluster.say({"r": [1, 2, 3]})
    assert wait_for(lambda: cluster.saved() == 1 and cluster.store.load_counts(cluster.name()) == Counts(1, 3, 0))
    with redis.Redis.from_url(cluster.url) as client:
        client.delete(*client.scan_iter(f"{{{cluster.options.prefix}}}:*"))
    assert wait_for(lambda: cluster.store.load_counts(cluster.name()) == Counts(1, 3, 0))


def test_verify_names_what_is_damaged(make: Callable[[], Cluster]) -> None:
    cluster = make()
    cluster.say({"r": [1, 2, 3]})
    cluster.say({"s": [4]}, tenant="umbra")
    assert cluster.admin.verify() == []
    damaged = bytearray(cluster.entries()[0])
    damaged[-6] ^= 1
    (entry,) = cluster.store.append([(cluster.name(), bytes(damaged))])
    cluster.store.save_snapshot(cluster.name("umbra"), "5-5", b"nonsense")
    problems = cluster.admin.verify()
    assert [(problem.tenant, problem.place) for problem in problems] == [("acme", f"entry {entry}"), ("umbra", "snapshot 5-5")]
    assert "checksum" in problems[0].what and "begin like a snapshot" in problems[1].what
    with pytest.raises(CorruptSnapshotError, match="outrider cache verify"):
        cluster.admin.export("umbra")
    assert cluster.texts() == expected({"r": [1, 2, 3]})


def test_unknown_tenants_are_refused_without_naming_the_others(make: Callable[[], Cluster]) -> None:
    admin = make().admin
    for verb in (
        lambda: admin.export("nobody"), lambda: admin.import_("nobody", b""), lambda: admin.delete_tenant("nobody"),
        lambda: admin.delete_request("nobody", "r"),
    ):  # fmt: skip
        with pytest.raises(UnknownTenantError, match="no tenant 'nobody': the configuration has 2") as raised:
            verb()
        assert "acme" not in str(raised.value)
