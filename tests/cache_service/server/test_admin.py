"""The operator's verbs on a real Redis, with and without a service beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import redis

from outrider.cache_service.namespace import Identity
from outrider.cache_service.records import MAX_BATCH_BYTES, MAX_ITEMS, TextBatch, decode_batch
from outrider.cache_service.server.admin import CacheAdmin, ForeignSnapshotError, UnknownTenantError
from outrider.cache_service.server.compaction import StreamCompactor
from outrider.cache_service.server.snapshot import CorruptSnapshotError, decode_snapshot
from outrider.cache_service.store.redis_store import Counts, RedisStore
from outrider.decoding.request import PUBLIC
from outrider.decoding.sources.text_keys import passage_key, request_hash, text_key
from tests.helpers.shared_memory import IDENTITY, Cluster, delta, expected, tokens
from tests.helpers.waiting import wait_for

Make = Callable[..., Cluster]


def test_export_is_of_now_and_import_brings_it_back(make: Make) -> None:
    cluster, other = make(), make()
    cluster.server()
    texts = {f"r{index}/{index % 3}": tokens(index, 5 + index) for index in range(60)}
    cluster.say(dict(list(texts.items())[:40]))
    assert wait_for(lambda: len(cluster.snapshot()) == 40)
    cluster.say(dict(list(texts.items())[40:]))  # in no snapshot yet, or in one: the same
    assert cluster.now() == expected(texts)
    exported = cluster.admin.export("acme")
    other.say({"there": [1, 2, 3]})
    assert other.admin.import_("acme", exported) == 60
    assert other.now() == expected(texts | {"there": [1, 2, 3]})
    assert other.admin.import_("acme", exported) == 60
    assert other.now() == expected(texts | {"there": [1, 2, 3]})
    assert other.now("umbra") == {}


def test_an_export_beside_a_purge_has_every_text(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    last = cluster.say({"r": [1, 2, 3]})
    load, purged = StreamCompactor.load, []

    def load_before_the_purge(store: RedisStore, namespace: str, identity: Identity) -> StreamCompactor:
        fold = load(store, namespace, identity)
        if not purged:
            purged.append(last)
            cluster.save("acme", last, {text_key("r"): [1, 2, 3]})
            ms, _, sequence = last.partition("-")
            assert store.trim(namespace, f"{ms}-{int(sequence) + 1}", exact=True) == 1
            cluster.say({"s": [4]})
        return fold

    monkeypatch.setattr(StreamCompactor, "load", load_before_the_purge)
    assert cluster.now() == expected({"r": [1, 2, 3], "s": [4]}) and purged


def test_long_texts_travel_in_batches_that_fit(make: Make) -> None:
    cluster, other = make(), make()
    texts = {f"r{index}": tokens(index, 200_000) for index in range(6)}
    for name, text in texts.items():
        for at in range(0, 200_000, 50_000):
            cluster.add("acme", TextBatch(1, 0, 0, (delta(text_key(name), at, text[at : at + 50_000], at == 150_000),)))
    assert other.admin.import_("umbra", cluster.admin.export("acme")) == 6
    assert other.now("umbra") == expected(texts)
    entries = other.entries("umbra")
    assert len(entries) == 3 and max(map(len, entries)) <= MAX_BATCH_BYTES
    batches = [decode_batch(data, IDENTITY.vocab_size) for data in entries]
    assert [batch.sequence for batch in batches] == [0, 1, 2]
    assert len({batch.origin for batch in batches}) == 1


def test_damaged_and_foreign_imports_are_refused(cluster: Cluster) -> None:
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
        foreign = CacheAdmin(cluster.access, identity)
        with pytest.raises(ForeignSnapshotError, match=rf"tokenizer revision b2 with 5000 tokens.*{said}"):
            foreign.import_("acme", exported)
        foreign.close()
    assert len(cluster.entries("umbra")) == before


def test_documents_loaded_twice_are_there_once(cluster: Cluster) -> None:
    documents = [tokens(1, 9000), tokens(2, 10), [], tokens(2, 10)]
    assert cluster.admin.preload(documents) == 4  # three parts, and the second document
    assert sorted(len(text) for text, _ in cluster.now(PUBLIC).values()) == [10, 808, 4096, 4096]
    size = len(cluster.entries(PUBLIC))
    assert cluster.admin.preload(documents) == 0
    assert len(cluster.entries(PUBLIC)) == size
    assert cluster.admin.preload([tokens(3, 10)]) == 1
    assert len(cluster.now(PUBLIC)) == 5
    assert cluster.now("acme") == {}
    with pytest.raises(ValueError, match=r"documents\[1\] must hold token ids from 0 to 4999, got 7 to 5000"):
        cluster.admin.preload([[1], [7, 5000]])


def test_what_was_evicted_can_be_loaded_again(cluster: Cluster) -> None:
    server = cluster.server({PUBLIC: 2000})  # 1000 tokens
    assert cluster.admin.preload([tokens(1, 800)]) == 1
    assert wait_for(lambda: len(cluster.snapshot(PUBLIC)) == 1)
    assert cluster.admin.preload([tokens(2, 800)]) == 1
    assert wait_for(lambda: server.status().evicted_texts == 1 and len(cluster.now(PUBLIC)) == 1)
    assert next(iter(cluster.now(PUBLIC).values()))[0] == tokens(2, 800)
    assert cluster.admin.preload([tokens(1, 800)]) == 1
    assert wait_for(lambda: server.status().evicted_texts == 2 and len(cluster.now(PUBLIC)) == 1)
    assert next(iter(cluster.now(PUBLIC).values()))[0] == tokens(1, 800)
    assert cluster.admin.preload([tokens(1, 800)]) == 0


def test_deletion_by_request_takes_all_choices_for_good(cluster: Cluster) -> None:
    cluster.say({"chatcmpl-7/0": [1, 2], "chatcmpl-7/1": [3, 4], "chatcmpl-70/0": [5, 6]})
    exported = cluster.admin.export("acme")
    cluster.admin.delete_request("acme", "chatcmpl-7")
    assert cluster.now() == expected({"chatcmpl-70/0": [5, 6]})
    cluster.say({"chatcmpl-7/0": [1, 2], "chatcmpl-7/2": [9]})
    assert cluster.now() == expected({"chatcmpl-70/0": [5, 6]})
    assert cluster.admin.import_("acme", exported) == 1  # nor does an old export bring it back
    assert cluster.now() == expected({"chatcmpl-70/0": [5, 6]})
    cluster.admin.delete_request("acme", "chatcmpl-70/3")  # of one choice: the whole request
    assert cluster.now() == {}
    assert {request for request, _ in decode_snapshot(cluster.admin.export("acme")).removed} == {
        request_hash("chatcmpl-7"), request_hash("chatcmpl-70")
    }  # fmt: skip


def test_more_documents_are_deleted_than_a_batch_names(cluster: Cluster) -> None:
    passages = [delta(passage_key(9, place), 0, [place, 7], True) for place in range(3)]
    cluster.add("acme", TextBatch(1, 0, 0, tuple(passages)))
    cluster.admin.delete_documents("acme", [[0, 7], *([number % 300, number // 300] for number in range(2400, MAX_ITEMS + 2500))])
    assert sorted(text[0] for text, _ in cluster.now().values()) == [1, 2]
    cluster.admin.delete_documents("acme", [[2, 7]])
    cluster.add("acme", TextBatch(2, 0, 0, (delta(passage_key(10, 0), 0, [2, 7], True),)))  # whoever brings it again
    assert [text[0] for text, _ in cluster.now().values()] == [1]


def test_deletion_of_a_tenant_leaves_others_and_starts_anew(cluster: Cluster) -> None:
    server = cluster.server()
    cluster.say({"r": [1, 2, 3]})
    cluster.say({"s": [4, 5]}, tenant="umbra")
    cluster.admin.preload([[6, 7]])
    exported = cluster.admin.export("acme")
    assert wait_for(lambda: server.status().texts == 3 and len(cluster.snapshot()) == 1)
    assert cluster.admin.delete_tenant("acme") == 1
    assert cluster.now() == {}
    cluster.say({"r": [1, 2, 3]})  # by one that has not heard of it
    assert cluster.now() == {}
    assert cluster.now("umbra") == expected({"s": [4, 5]}) and len(cluster.now(PUBLIC)) == 1
    assert wait_for(
        lambda: server.status().texts == 2 and cluster.store.load_snapshot(cluster.name()) is not None and not cluster.snapshot()
    )
    assert cluster.admin.import_("acme", exported) == 1
    assert cluster.now() == expected({"r": [1, 2, 3]})
    assert cluster.admin.delete_tenant("acme") == 2
    assert cluster.now() == {}


def test_deletion_that_nobody_has_said_counts(cluster: Cluster) -> None:
    cluster.say({"r": [1, 2, 3]})
    assert cluster.store.delete(cluster.name()) == 1  # and whoever did it died
    cluster.say({"r": [1, 2, 3]})  # by one that has not heard of it
    assert cluster.now() == {}
    assert cluster.admin.stats()[0].epoch == 1


def test_stats(cluster: Cluster) -> None:
    cluster.say({"r": [1, 2, 3], "s": [4]})
    by_tenant = {entry.tenant: entry for entry in cluster.admin.stats()}
    assert list(by_tenant) == ["acme", "umbra", PUBLIC]
    acme = by_tenant["acme"]
    assert (acme.texts, acme.tokens, acme.epoch, acme.stream_entries) == (2, 4, 0, 1)
    assert acme.namespace == cluster.name()
    assert acme.stream_bytes > 0 and acme.snapshot_bytes == 0 and acme.snapshot_age_s is None
    assert by_tenant["umbra"].texts == by_tenant["umbra"].stream_entries == by_tenant[PUBLIC].tokens == 0
    cluster.server()
    assert wait_for(lambda: len(cluster.snapshot()) == 2)
    acme = cluster.admin.stats()[0]
    assert (acme.texts, acme.tokens) == (2, 4)
    assert acme.snapshot_bytes > 0 and acme.snapshot_age_s is not None and 0.0 <= acme.snapshot_age_s < 60.0


def test_counts_are_those_that_the_service_keeps(cluster: Cluster) -> None:
    server = cluster.server()
    cluster.say({"r": [1, 2, 3], "s": [4]})

    def counted() -> tuple[int, int, int]:
        (entry,) = cluster.admin.stats("acme")
        return entry.texts, entry.tokens, entry.epoch

    assert wait_for(lambda: cluster.store.load_counts(cluster.name()) == Counts(2, 4, 0))
    cluster.admin.delete_request("acme", "r")
    assert wait_for(lambda: counted() == (1, 1, 0))
    cluster.say({"t": [5, 6]})
    assert wait_for(lambda: counted() == (2, 3, 0))
    assert wait_for(lambda: len(cluster.snapshot()) == 2)
    server.stop()
    with redis.Redis.from_url(cluster.url) as client:  # what would have to be read, if it was
        for key in client.scan_iter(f"{{{cluster.prefix}}}:*"):
            if not key.endswith((b":counts", b":epoch")):
                client.delete(key)
    assert counted() == (2, 3, 0)
    assert cluster.admin.delete_tenant("acme") == 1
    assert counted() == (0, 0, 1)


def test_counts_come_again_when_redis_has_lost_them(cluster: Cluster) -> None:
    cluster.server()
    cluster.say({"r": [1, 2, 3]})
    assert wait_for(lambda: len(cluster.snapshot()) == 1 and cluster.store.load_counts(cluster.name()) == Counts(1, 3, 0))
    with redis.Redis.from_url(cluster.url) as client:
        client.delete(*client.scan_iter(f"{{{cluster.prefix}}}:*"))
    assert wait_for(lambda: cluster.store.load_counts(cluster.name()) == Counts(1, 3, 0))


def test_verify_names_what_is_damaged(cluster: Cluster) -> None:
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
    assert cluster.now() == expected({"r": [1, 2, 3]})


def test_unknown_tenants_are_refused_without_naming_the_others(make: Make) -> None:
    admin = make().admin
    for verb in (
        lambda: admin.export("nobody"), lambda: admin.import_("nobody", b""), lambda: admin.delete_tenant("nobody"),
        lambda: admin.delete_request("nobody", "r"),
    ):  # fmt: skip
        with pytest.raises(UnknownTenantError, match="no tenant 'nobody': the configuration has 2") as raised:
            verb()
        assert "acme" not in str(raised.value)


def test_memories_of_adapters_are_apart_and_go_with_their_tenant(cluster: Cluster) -> None:
    identity = dataclasses.replace(IDENTITY, adapters=(("sql", "d1"), ("poems", "d2")))
    admin = CacheAdmin(cluster.access, identity)
    names = [entry.tenant for entry in admin.stats()]
    assert names == ["acme", "acme:sql", "acme:poems", "umbra", "umbra:sql", "umbra:poems", PUBLIC]
    assert len({entry.namespace for entry in admin.stats()}) == 7 and admin.stats()[0].namespace == cluster.name("acme")
    sql = next(entry.namespace for entry in admin.stats("acme") if entry.tenant == "acme:sql")
    retrained = dataclasses.replace(identity, adapters=(("sql", "d9"),))
    assert sql not in cluster.access.namespaces(retrained).values()

    replica = cluster.replica(identity)
    texts = {"acme": [1, 2, 3], "acme:sql": [4, 5], "acme:poems": [6, 7], "umbra:sql": [8]}
    for name, text in texts.items():
        replica.write(name, text_key("r/0"), 0, text, True)
    other = cluster.replica(identity)
    assert wait_for(lambda: all(other.knows(name, text) for name, text in texts.items()))
    assert [entry.tokens for entry in admin.stats("acme")] == [3, 2, 2] and admin.stats("acme:sql")[0].tokens == 2

    admin.delete_tenant("acme:poems")
    assert wait_for(lambda: other.knows("acme:poems") and other.knows("acme:sql", [4, 5]))
    exported = admin.export("acme:sql")
    admin.delete_tenant("acme")
    assert wait_for(lambda: all(other.knows(name) for name in ("acme", "acme:sql", "acme:poems")))
    assert other.knows("umbra:sql", [8])
    assert admin.import_("acme:sql", exported) == 1 and wait_for(lambda: other.knows("acme:sql", [4, 5]))
    admin.delete_request("acme", "r")
    assert wait_for(lambda: other.knows("acme:sql")) and other.knows("umbra:sql", [8])
    with pytest.raises(UnknownTenantError, match="no tenant 'acme:other': the configuration has 2"):
        admin.export("acme:other")
    admin.close()
