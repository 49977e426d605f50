"""Cache clients over one real Redis: what one process generates all others can draft from, and what is deleted none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import redis

from outrider.cache_service.client.inbox import Inbox
from outrider.cache_service.client.outbox import Outbox
from outrider.cache_service.client.stream_reader import StreamReader
from outrider.cache_service.records import TextBatch
from outrider.cache_service.store.stream_ids import written_s
from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.llma import LlmaDrafter
from outrider.decoding.request import PUBLIC, Request, SamplingParams
from outrider.decoding.sources.embeddings import signs_of
from outrider.decoding.sources.history import Histories
from outrider.decoding.sources.similar import as_tokens, sketch_of
from outrider.decoding.sources.text_keys import request_hash, text_key
from tests.helpers.shared_memory import IDENTITY, Cluster, Replica, contents, delta, tokens
from tests.helpers.waiting import eventually

VOCAB = IDENTITY.vocab_size
T1, T2, T3 = (text_key(name) for name in ("one", "two", "three"))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache clients look at where the streams stand ten times as often."""
    monkeypatch.setattr("outrider.cache_service.client.cache_client.LOOK_S", 0.1)


@pytest.fixture
def cluster(make: Callable[..., Cluster]) -> Cluster:
    return make(tenants=("a", "b"))


def test_what_one_generates_the_other_drafts_from(cluster: Cluster) -> None:
    a, b = cluster.replica(), cluster.replica()
    a.write("a", T1, 0, [1, 2, 3])
    b.write("a", T2, 0, [7, 8], final=True)
    eventually(lambda: all(one.knows("a", [1, 2, 3], [7, 8]) for one in (a, b)))
    a.write("a", T1, 3, [4, 5], final=True)
    eventually(lambda: all(one.knows("a", [1, 2, 3, 4, 5], [7, 8]) for one in (a, b)))
    assert np.array_equal(a.history("a").frequencies, b.history("a").frequencies)
    assert b.woken > 0
    eventually(lambda: a.cache_client.counts().published_tokens == 5)
    counts = a.cache_client.counts()
    assert counts.connected and counts.breaker == "closed" and counts.failures == {} and counts.opened == 0
    assert counts.outbox_bytes == 0 and counts.applied_tokens >= 2


def noted(name: str, prompt: int, document: list[int]) -> Request:
    """A finished request with a document."""
    request = Request(name, tokens(prompt, 200), SamplingParams(max_tokens=9), [document], tenant="a")
    request.commit(tokens(99, 8))
    return request


def tell(replica: Replica, *requests: Request) -> None:
    """As an engine does when requests have ended."""
    for request in requests:
        replica.history("a").start(request.text)
        replica.write("a", request.text, 0, request.output_ids.tolist(), final=True)
        replica.history("a").remember(request)
        for key, note in replica.history("a").notes(request):
            replica.cache_client.publish("a", key, 0, note, True)


def recalled(replica: Replica, prompt: int) -> list[list[int]]:
    while replica.cache_client.apply():
        pass
    asking = Request("asking", tokens(prompt, 200), SamplingParams(max_tokens=9), tenant="a")
    return [text.tokens.tolist() for text in replica.history("a").recall(asking, 4)]


def test_similar_requests_of_one_are_recalled_by_the_other_until_they_are_deleted(cluster: Cluster, often: None) -> None:
    a, b = cluster.replica(), cluster.replica()
    cluster.server()
    documents = [tokens(7, 50), tokens(8, 5000)]
    tell(a, noted("one", 1, documents[0]), noted("two", 2, documents[1]))
    eventually(lambda: recalled(b, 1) == [tokens(99, 8), documents[0]])
    eventually(lambda: recalled(b, 2) == [tokens(99, 8), documents[1][:4096], documents[1][4096:]])
    eventually(lambda: len(cluster.now("a")) == 7)
    late = cluster.replica()
    assert recalled(late, 1) == [tokens(99, 8), documents[0]]

    cluster.admin.delete_documents("a", [documents[1]])
    eventually(lambda: all(recalled(one, 2) == [tokens(99, 8)] for one in (a, b, late)))
    cluster.admin.delete_request("a", "one")
    eventually(lambda: all(recalled(one, 1) == [] for one in (a, b, late)))
    kept = [documents[1][:4096], documents[1][4096:], documents[0]]
    eventually(lambda: not any(cluster.holds(text) for text in kept))
    assert len(cluster.now("a")) == 2  # an output and a sketch
    tell(a, noted("three", 2, documents[1]))  # a deleted document is not remembered again
    eventually(lambda: len(cluster.now("a")) == 4)
    assert recalled(b, 2) == [tokens(99, 8)] * 2


def meaning(seed: int, off: float = 0.0) -> Int32Array:
    """The embedding of something, or one that is off it."""
    vector, other = (np.random.default_rng(each).standard_normal(384) for each in (seed, 9))
    return signs_of((vector + off * other).tolist())


def paraphrased(replica: Replica, tenant: str = "a", embedding: Int32Array | None = None) -> list[list[int]]:
    """What is recalled for a request that has no word in common with others."""
    while replica.cache_client.apply():
        pass
    embedding = meaning(1, off=0.4) if embedding is None else embedding
    asking = Request("asking", tokens(77, 200), SamplingParams(max_tokens=9), tenant=tenant, embedding=embedding)
    return [text.tokens.tolist() for text in replica.history(tenant).recall(asking, 4)]


@pytest.mark.parametrize("how", ["request", "tenant"])
def test_the_same_asked_in_other_words_is_recalled_by_its_embedding_until_it_is_deleted(
    cluster: Cluster, often: None, how: str
) -> None:
    a, b = cluster.replica(), cluster.replica()
    cluster.server()
    request = Request("one", tokens(1, 200), SamplingParams(max_tokens=9), tenant="a", embedding=meaning(1))
    request.commit(tokens(99, 8))
    tell(a, request)
    eventually(lambda: all(paraphrased(one) == [tokens(99, 8)] for one in (a, b)))
    late, sketch = cluster.replica(), as_tokens(sketch_of(request.prompt_ids, request.embedding)).tolist()
    assert paraphrased(late) == [tokens(99, 8)]
    assert paraphrased(b, "b") == paraphrased(b, embedding=meaning(2)) == []  # another tenant, and another question
    assert cluster.holds(sketch)
    if how == "request":
        cluster.admin.delete_request("a", "one")
    else:
        cluster.admin.delete_tenant("a")
    eventually(lambda: all(paraphrased(one) == [] for one in (a, b, late)))
    eventually(lambda: not cluster.holds(sketch[-34:]) and not cluster.now("a"))


def about(name: str, document: list[int], tenant: str | None = "a") -> Request:
    """A finished request whose prompt has a passage between words of its own."""
    seed = int.from_bytes(name.encode())
    request = Request(name, [*tokens(seed, 60), *document, *tokens(seed + 1, 40)], SamplingParams(max_tokens=40), tenant=tenant)
    request.commit(tokens(99, 8))
    return request


def copied(replica: Replica, like: Request, document: list[int], tenant: str = "a") -> list[int]:
    """What LLMA drafts for a request that resembles one, without its passage, once the output quotes the passage."""
    while replica.cache_client.apply():
        pass
    drafter = LlmaDrafter(match_length=4, copy_length=20)
    drafter.histories = replica.memory
    own = [*like.prompt_ids[:60], *like.prompt_ids[-40:]]
    asking = Request("asking", own, SamplingParams(max_tokens=40), tenant=tenant)
    asking.commit(document[100:106])
    (tree,) = drafter.propose([asking], [20])
    return tree.tokens[1:].tolist()


@pytest.mark.parametrize("how", ["request", "tenant", "document"])
def test_a_passage_that_only_prompts_of_one_carried_is_drafted_by_the_other_until_it_is_deleted(
    cluster: Cluster, often: None, how: str
) -> None:
    a, b, document = cluster.replica(), cluster.replica(), tokens(7, 300)
    cluster.server()
    requests = [about(name, document) for name in ("one", "two", "three")]
    tell(a, *requests)
    eventually(lambda: copied(b, requests[1], document) == document[106:126])
    late, written = cluster.replica(), document[40:260]
    assert copied(late, requests[1], document) == document[106:126]
    assert copied(b, requests[1], document, "b") == [] and b.texts("b") == []  # another tenant
    eventually(lambda: cluster.holds(written))
    eventually(lambda: len(cluster.now("a")) == 7)  # three outputs and sketches, and the passage once
    if how == "request":
        cluster.admin.delete_request("a", "two")
    elif how == "tenant":
        cluster.admin.delete_tenant("a")
    else:
        cluster.admin.delete_documents("a", [tokens(55, 90) + document[:200]])  # it begins otherwise, and ends earlier
    eventually(lambda: all(copied(one, requests[1], document) == [] for one in (a, b, late)))
    eventually(lambda: not any(cluster.holds(part) for part in (written, written[-100:])))
    if how == "document":  # what is deleted is not remembered again
        tell(b, about("four", document[:200]), about("five", document[:200]))
        eventually(lambda: len(cluster.now("a")) == 10)
        assert not cluster.holds(document[60:140])


def test_what_private_prompts_carried_is_nowhere(cluster: Cluster) -> None:
    a, document = cluster.replica(), tokens(7, 300)
    for name in ("one", "two"):
        a.history("a").remember(about(name, document, tenant=None))
    tell(a, about("three", document))
    eventually(lambda: len(cluster.now("a")) == 2)
    assert not cluster.holds(document[40:140])


def test_tenants_secrets_and_models_are_apart(cluster: Cluster) -> None:
    a, b = cluster.replica(), cluster.replica()
    others = [
        cluster.replica(secret=b"other"), cluster.replica(identity=replace(IDENTITY, model_revision="33")),
        cluster.replica(identity=replace(IDENTITY, tokenizer_revision="44")), cluster.replica(tenants=("b",)),
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
        a.cache_client.publish("*", T1, 0, [1], True)
    with pytest.raises(AssertionError):
        a.cache_client.publish("unknown", T1, 0, [1], True)


def test_names_of_tenants_are_not_in_redis(cluster: Cluster, raw: redis.Redis) -> None:
    a = cluster.replica(tenants=("somebody",))
    a.write("somebody", T1, 0, [1, 2], final=True)
    eventually(lambda: raw.keys("*:log") != [])
    assert not any(b"somebody" in key for key in raw.keys("*"))


def test_one_that_starts_later_is_warm_at_once(cluster: Cluster) -> None:
    a = cluster.replica()
    a.write("a", T1, 0, [1, 2, 3], final=True)
    eventually(lambda: a.cache_client.counts().published_tokens == 3)
    id = cluster.head_id("a")
    cluster.save("a", id, {T1: [1, 2, 3], T3: [9]})
    cluster.store.trim(cluster.name("a"), f"{id}9", exact=True)
    a.write("a", T2, 0, [4, 5])
    cluster.add(PUBLIC, TextBatch(1, 0, 0, (delta(T3, 0, [30, 31], True),)))
    eventually(lambda: a.cache_client.counts().published_tokens == 5)
    third = cluster.replica()
    assert contents(third.history("a")) == [[1, 2, 3], [4, 5], [9]]  # nothing applied after the start
    assert contents(third.memory.public) == [[30, 31]]
    assert third.cache_client.counts().reloads == 0


def test_replays_and_reordering_change_nothing(cluster: Cluster, raw: redis.Redis) -> None:
    a, b = cluster.replica(), cluster.replica()
    for at in range(0, 60, 3):
        a.write("a", T1, at, [at, at + 1, at + 2], final=at == 57)
        a.write("a", T2, at, [at + 200] * 3)
    eventually(lambda: b.knows("a", list(range(60)), [at + 200 for at in range(0, 60, 3) for _ in range(3)]))
    before, frequencies = contents(b.history("a")), b.history("a").frequencies.copy()
    key = cluster.key("a")
    entries = [fields for _, fields in raw.xrange(key)]
    for fields in [*entries[::-1], *entries]:
        raw.xadd(key, fields)
    cluster.add("a", TextBatch(77, 0, 0, (delta(T3, 0, [5], True),)))  # the end of the replay
    eventually(lambda: (b.cache_client.apply(), [5] in contents(b.history("a")))[1])
    frequencies[5] += 1
    assert contents(b.history("a")) == sorted([*before, [5]])
    assert np.array_equal(b.history("a").frequencies, frequencies)
    assert b.cache_client.counts().lost_records == 0 and b.cache_client.counts().reloads == 0


def test_a_deleted_request_is_gone_everywhere_and_stays_away(cluster: Cluster) -> None:
    a, b = cluster.replica(), cluster.replica()
    a.write("a", T1, 0, [1, 2, 3])
    a.write("a", T2, 0, [4])
    a.write("b", T1, 0, [6])
    eventually(lambda: b.knows("a", [1, 2, 3], [4]) and b.knows("b", [6]))
    cluster.add("a", TextBatch(9, 0, 0, removed=(request_hash("one"),)))
    eventually(lambda: all(one.knows("a", [4]) for one in (a, b)))
    a.write("a", T1, 3, [7], final=True)  # it was still running
    cluster.add("a", TextBatch(8, 0, 0, (delta(T1, 0, [1, 2, 3, 7], True), delta(T3, 0, [5], True))))  # a late writer
    eventually(lambda: b.knows("a", [4], [5]))
    assert b.knows("b", [6])
    eventually(lambda: a.cache_client.counts().outbox_bytes == 0 and a.knows("a", [4], [5]))
    assert cluster.replica().knows("a", [4], [5])


@pytest.mark.parametrize("said", [True, False])
def test_a_deleted_tenant_is_gone_everywhere(cluster: Cluster, raw: redis.Redis, said: bool) -> None:
    """With the batch that says so, and without: the epoch alone is seen within a second."""
    a, b = cluster.replica(), cluster.replica()
    a.write("a", T1, 0, [1, 2, 3])
    a.write("b", T2, 0, [4])
    eventually(lambda: b.knows("a", [1, 2, 3]) and b.knows("b", [4]))
    epoch = cluster.store.delete(cluster.name("a"))
    if said:
        cluster.add("a", TextBatch(9, 0, epoch))
    eventually(lambda: all(one.knows("a") for one in (a, b)))
    cluster.add("a", TextBatch(8, 0, 0, (delta(T3, 0, [5], True),)))  # one who has not heard of it
    a.write("a", T1, 3, [7], final=True)  # the rest of a text that was running
    a.write("a", T3, 0, [6], final=True)
    eventually(lambda: b.knows("a", [6]))
    eventually(lambda: a.knows("a", [6]))
    assert b.knows("b", [4])
    assert len(raw.xrange(cluster.key("a"))) == 2 + said


@pytest.mark.usefixtures("often")
def test_one_that_fell_behind_goes_on_from_the_snapshot(cluster: Cluster) -> None:
    a = cluster.replica()
    cluster.add("a", TextBatch(5, 0, 0, (delta(T1, 0, [1], True),)))
    eventually(lambda: a.knows("a", [1]))
    # Entries that a has not read are trimmed: the numbers of their writer tell.
    ids = [cluster.add("b", TextBatch(5, number, 0)) for number in range(3)]
    cluster.save("a", ids[-1], {T1: [1], T2: [2, 2]})
    time.sleep(0.003)  # ids begin with the millisecond, and these are of two streams
    cluster.add("a", TextBatch(5, 3, 0, (delta(T3, 0, [3], True),)))
    eventually(lambda: a.knows("a", [1], [2, 2], [3]))
    counts = a.cache_client.counts()
    assert counts.lost_records == 2 and counts.reloads == 1
    cluster.add("a", TextBatch(5, 4, 0, (delta(text_key("four"), 0, [4], True),)))
    eventually(lambda: a.knows("a", [1], [2, 2], [3], [4]))
    assert a.cache_client.counts().reloads == 1


@pytest.mark.usefixtures("often")
def test_a_newer_snapshot_alone_is_no_reason_to_reload(cluster: Cluster) -> None:
    a = cluster.replica()
    id = cluster.add("a", TextBatch(5, 0, 0, (delta(T1, 0, [1], True),)))
    eventually(lambda: a.knows("a", [1]))
    cluster.save("a", id, {T1: [1]})
    cluster.store.trim(cluster.name("a"), f"{id}9", exact=True)
    seen = a.woken
    for number in range(1, 4):
        cluster.add("a", TextBatch(5, number, 0, (delta(T2, number - 1, [2]),)))
        time.sleep(0.15)  # the cache client looks
    eventually(lambda: a.knows("a", [1], [2, 2, 2]))
    assert a.woken > seen and a.cache_client.counts().reloads == 0


def test_apply_is_fair_and_bounded(cluster: Cluster) -> None:
    a = cluster.replica()
    for number in range(40):
        cluster.add("a", TextBatch(5, number, 0, (delta(number << 16, 0, [number] * 2000, True),)))
    cluster.add("b", TextBatch(5, 0, 0, (delta(T1, 0, [9, 9, 9], True),)))
    eventually(lambda: a.cache_client._inbox.weight("a") == 80_000 and a.cache_client._inbox.weight("b") == 3)
    assert a.history("a").num_tokens == 0
    assert a.cache_client.apply(3000)
    assert contents(a.history("b")) == [[9, 9, 9]]
    assert 0 < a.history("a").num_tokens <= 4096
    steps = 0
    while a.cache_client.apply(4096):
        steps += 1
    assert steps >= 15
    assert a.history("a").num_tokens == 80_000
    assert not a.cache_client.apply()


def test_close_writes_what_waits(cluster: Cluster) -> None:
    a, b = cluster.replica(), cluster.replica()
    for number in range(50):
        a.write("a", number << 16, 0, [number] * 3, final=True)
    a.cache_client.close()
    a.cache_client.close()
    assert a.cache_client.counts().published_tokens == 150
    eventually(lambda: b.knows("a", *[[number] * 3 for number in range(50)]))
    a.cache_client.publish("a", T1, 0, [1], True)  # an engine that ends a little later
    assert not a.cache_client.apply()


def test_tokens_of_another_vocabulary_are_not_written(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    a, b = cluster.replica(), cluster.replica()
    a.cache_client.publish("a", T1, 0, [1, VOCAB], True)
    a.cache_client.publish("b", T2, 0, [3], True)
    eventually(lambda: b.knows("b", [3]))
    assert a.cache_client.counts().dropped_tokens == 2 and a.cache_client.counts().breaker == "closed"
    assert "not shared" in caplog.text


def test_lag_is_the_age_of_what_is_read_until_all_is_read(cluster: Cluster) -> None:
    memory, waits_s = Histories(1000), 0.1
    inbox = Inbox(memory)
    tail = StreamReader(cluster.store, IDENTITY, {"a": cluster.name("a")}, inbox, Outbox(1 << 20), 60.0)
    place = tail.places["a"]
    cluster.add("a", TextBatch(7, 0, 0, (delta(T1, 0, [1, 2, 3, 4, 5]),)))
    began = time.monotonic()
    time.sleep(waits_s)
    assert tail.read(0.0)
    assert waits_s * 0.9 <= place.lag_s <= time.monotonic() - began + 1.0
    assert inbox.waiting_tokens == 5
    tail.look()
    assert place.lag_s == 0.0
    while inbox.apply(100):
        pass
    assert inbox.waiting_tokens == 0

    cluster.add("a", TextBatch(7, 1, 0, (delta(T1, 5, [1, 2, 3, 4, 5]),)))
    tail.look()  # something is there that was not read: no news
    assert place.lag_s == 0.0
    assert tail.read(0.0) and 0.0 <= place.lag_s < waits_s * 100
    assert inbox.waiting_tokens == 5
    assert written_s("1500-0") == written_s("1500-7") == 1.5


def test_service_operator_and_cache_clients_know_the_same_through_deletion_and_eviction(make: Callable[..., Cluster]) -> None:
    cluster = make()
    server, writer, texts = cluster.server({"acme": 4000}), cluster.replica(), dict[str, list[int]]()
    cluster.replica()  # one that writes nothing

    def write(name: str, text: list[int]) -> None:
        half = len(text) // 2
        writer.write("acme", text_key(name), 0, text[:half])
        writer.write("acme", text_key(name), half, text[half:], final=True)
        texts[name] = text

    def agree(texts: dict[str, list[int]]) -> bool:
        kept = {key: text for key, (text, _) in cluster.now().items()}
        return (
            kept == {text_key(name): text for name, text in texts.items()}
            and server.status().texts == len(texts)
            and all(replica.knows("acme", *kept.values()) for replica in cluster.replicas)
        )

    for index in range(60):
        write(f"r{index}", tokens(index, 20))
    eventually(lambda: agree(texts))
    cluster.admin.delete_request("acme", "r7")
    del texts["r7"]
    eventually(lambda: agree(texts))
    cluster.replica()  # one that starts later
    assert agree(texts)
    for index in range(60, 140):  # beyond the quota of 2000 tokens
        write(f"r{index}", tokens(index, 20))
    eventually(lambda: server.status().evicted_texts > 0 and server.status().tokens <= 2000)

    def left() -> dict[str, list[int]]:
        kept = cluster.now()
        return {name: text for name, text in texts.items() if text_key(name) in kept}

    eventually(lambda: agree(left()))
    assert 80 <= len(left()) <= 100
    cluster.admin.delete_tenant("acme")
    eventually(lambda: agree({}))
    write("r150", [1, 2, 3, 4])
    eventually(lambda: agree({"r150": [1, 2, 3, 4]}))


def test_evicted_texts_go(cluster: Cluster) -> None:
    a, b = cluster.replica(), cluster.replica()
    a.write("a", T1, 0, [1, 2, 3], final=True)
    a.write("a", T2, 0, [4], final=True)
    eventually(lambda: b.knows("a", [1, 2, 3], [4]))
    cluster.add("a", TextBatch(9, 0, 0, evicted=(T1,)))
    eventually(lambda: all(one.knows("a", [4]) for one in (a, b)))
