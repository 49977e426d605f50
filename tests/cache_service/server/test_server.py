"""The service on a real Redis: what it keeps, what it lets go of, and what it does when Redis or another service dies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import redis

from outrider.cache_service.records import TextBatch, decode_batch, encode_batch
from outrider.cache_service.server import cache_server
from outrider.cache_service.server.cache_server import CacheServer
from outrider.cache_service.server.compaction import StreamCompactor
from outrider.cache_service.server.snapshot import decode_snapshot
from outrider.cache_service.store.stream_ids import compare_ids
from outrider.cache_service.texts import TenantTexts
from outrider.decoding.request import PUBLIC
from outrider.decoding.sources.text_keys import request_hash, text_key
from outrider.experiments.faults.redis_process import RedisProcess
from tests.helpers.shared_memory import DAMAGED, IDENTITY, Cluster, expected, tokens
from tests.helpers.waiting import wait_for

HOLD = """
import sys, time
import pytest
from tests.helpers.shared_memory import Cluster, shorten_times
shorten_times(pytest.MonkeyPatch())
url, prefix = sys.argv[1:]
server = Cluster(url, prefix=prefix).server()
while not server.status().tokens:
    time.sleep(0.01)
print("leads", flush=True)
time.sleep(600)
"""


def test_streams_become_snapshots_that_load_equal(cluster: Cluster) -> None:
    texts = {f"r{index}/1": tokens(index, 1 + index % 90) for index in range(400)}
    first = cluster.say({"r0/1": texts["r0/1"]})
    server = cluster.server()
    for name, text in texts.items():
        cluster.say({name: text[: len(text) // 2]}, final=False)
        last = cluster.say({name: text})
    head = cluster.name()
    assert wait_for(lambda: cluster.store.head(head).snapshot_id == last)
    assert cluster.snapshot() == expected(texts)
    assert server.status().texts == 400
    assert server.status().tokens == sum(map(len, texts.values()))
    # Another snapshot, and the stream up to the one before it goes (node by node, of up to 100 entries).
    cluster.say({"more": [1, 2, 3]}, tenant="acme")
    assert wait_for(lambda: cluster.store.usage(head).stream_entries < 200)
    assert cluster.store.head(head).first_id != first
    everything = expected(texts | {"more": [1, 2, 3]})
    assert cluster.now() == everything
    server.stop()
    other = cluster.server()
    assert wait_for(lambda: other.status().texts == 401)
    assert other.status().corrupt_records == other.status().failures == 0
    assert other.status().last_error is None


def test_only_one_of_several_leads_and_the_next_takes_over(cluster: Cluster) -> None:
    first, second = cluster.server(), cluster.server()
    assert wait_for(lambda: first.status().leader or second.status().leader)
    leader, other = (first, second) if first.status().leader else (second, first)
    cluster.say({"r": [1, 2, 3]})
    assert wait_for(lambda: leader.status().tokens == 3)
    assert not other.status().leader and other.status().namespaces == 0
    leader.stop()
    cluster.say({"s": [4, 5]})
    assert wait_for(lambda: other.status().tokens == 5)
    assert other.status().leader and not leader.status().leader


def test_killed_leader_is_replaced_when_its_lease_runs_out(cluster: Cluster) -> None:
    cluster.say({"r": [1, 2, 3]})
    command = [sys.executable, "-c", HOLD, cluster.url, cluster.prefix]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "leads\n"
        server = cluster.server()
        time.sleep(0.3)
        assert not server.status().leader
        process.kill()
        cluster.say({"s": [4, 5]})
        assert wait_for(lambda: server.status().tokens == 5)
        assert server.status().leader
        assert wait_for(lambda: cluster.snapshot() == expected({"r": [1, 2, 3], "s": [4, 5]}))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("rare_snapshots")
def test_full_tenant_lets_go_and_says_so(make: Callable[..., Cluster]) -> None:
    cluster = make()
    server = cluster.server({"acme": 2000})  # bytes: 1000 tokens
    for index in range(100):
        cluster.say({f"r{index}": tokens(index, 30)})
    assert wait_for(lambda: 0 < server.status().tokens <= 1000 and len(cluster.now()) * 30 == server.status().tokens)
    left = cluster.now()
    assert len(left) >= 30  # as much as fits, but for the room that is left free
    assert text_key("r99") in left  # of texts that were said once the oldest go
    assert server.status().evicted_texts == 100 - len(left)
    # Who read the stream alone, without a snapshot, lets go of the same.
    cache_client = TenantTexts()
    for _, data in cluster.store.read({cluster.name(): "0-0"}, 0.0, 1000)[cluster.name()]:
        cache_client.apply(decode_batch(data or b"", IDENTITY.vocab_size), 0.0)
    assert {key: (text.tokens.tolist(), text.final) for key, text in cache_client.texts.items()} == left


@pytest.mark.usefixtures("rare_snapshots")
def test_flood_of_one_tenant_leaves_the_other(make: Callable[..., Cluster]) -> None:
    cluster = make()
    mine = {f"r{index}": tokens(index, 50) for index in range(20)}
    cluster.say(mine, tenant="umbra")
    server = cluster.server({"acme": 200_000})
    flood = tokens(1, 50_000)
    for step in range(3):
        before = server.status().snapshots
        for index in range(20):  # 2 MB: more than the stream may grow by without a snapshot
            cluster.say({f"flood{step}/{index}": flood})
        assert wait_for(lambda before=before: server.status().snapshots > before)
    assert wait_for(lambda: cluster.store.usage(cluster.name()).stream_entries < 40)
    assert wait_for(lambda: server.status().tokens <= 100_000 + 1000)
    assert cluster.now("umbra") == expected(mine)


def test_old_texts_are_forgotten_but_for_the_public_corpus(make: Callable[..., Cluster]) -> None:
    cluster = make(ttl_s=0.5)
    server = cluster.server()
    cluster.say({"r": [1, 2, 3]}, removed=["gone"])
    cluster.say({"doc": [7, 8, 9]}, tenant=PUBLIC)
    assert wait_for(lambda: cluster.snapshot() == expected({"r": [1, 2, 3]}))
    assert wait_for(lambda: cluster.snapshot() == {} and cluster.now() == {})
    assert cluster.now(PUBLIC) == expected({"doc": [7, 8, 9]})
    assert server.status().evicted_texts == 1
    stored = cluster.store.load_snapshot(cluster.name())
    assert stored is not None
    assert decode_snapshot(stored[1]).removed == ()  # and so is what was removed


def test_a_clock_that_jumps_deletes_nothing(make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make(ttl_s=30 * 86400.0)
    cluster.say({f"r{number}": [1, 2, number] for number in range(100)})
    server = CacheServer(cluster.access, IDENTITY, {})
    right, ahead_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: right() + ahead_s[0])
    for days in (0, 0, 1 / 24, 31, 0, 3650, -31, 0):
        ahead_s[0] = days * 86400.0
        server._check_at = server._expire_at = 0.0
        server._lease.acquire_or_renew()
        server._turn()
        assert server.status().texts == 100 and server.status().evicted_texts == 0
    server.stop()


def test_deleted_request_is_nowhere_in_redis(cluster: Cluster) -> None:
    server = cluster.server()
    mine, other = tokens(1, 40), tokens(2, 40)
    cluster.say({"doomed/0": mine, "other": other})
    cluster.say({"doomed/1": mine[:20]}, final=False)
    assert wait_for(lambda: len(cluster.snapshot()) == 3)
    assert cluster.holds(mine) and cluster.holds(other)
    cluster.say(removed=["doomed"])
    assert wait_for(lambda: not cluster.holds(mine[:20]))
    assert cluster.now() == expected({"other": other})
    # A replica that has not heard of it writes on: that goes as well, and in a stream that is never quite empty.
    cluster.say({"doomed/1": mine})
    cluster.say({"third": [1, 2, 3]})
    assert wait_for(lambda: not cluster.holds(mine[:20]) and not cluster.holds(mine[20:]))
    assert wait_for(lambda: cluster.now() == expected({"other": other, "third": [1, 2, 3]}))
    assert server.status().failures == 0


def test_bytes_that_are_trimmed_in_the_middle_of_a_node_leave_later(cluster: Cluster) -> None:
    store, name = cluster.store, cluster.name()
    mine = tokens(1, 40)
    cluster.say({"doomed": mine})
    cluster.say(removed=["doomed"])
    fold = StreamCompactor.load(store, name, IDENTITY)
    fold.catch_up(store, cluster.head_id())
    cluster.say({"later": [1, 2, 3]})  # in the same node of the stream, while the snapshot is written
    assert fold.due(60.0)
    assert store.save_snapshot(name, fold.cursor, b"", fold.epoch)
    fold.saved(0, store)
    assert cluster.holds(mine)  # why one such trim is not enough
    assert not fold.due(60.0)
    fold.catch_up(store, cluster.head_id())
    assert fold.due(0.0)
    fold.saved(0, store)
    assert not cluster.holds(mine)
    assert not fold.due(0.0)


@pytest.mark.parametrize("said", [True, False])
def test_deleted_tenant_is_nowhere_in_redis(cluster: Cluster, said: bool) -> None:
    server = cluster.server()
    mine, other = tokens(1, 40), tokens(2, 40)
    last = cluster.say({"r": mine})
    cluster.say({"s": other}, tenant="umbra")
    assert wait_for(lambda: len(cluster.snapshot()) == 1 and server.status().texts == 2)
    epoch = cluster.store.delete(cluster.name())
    if said:  # else whoever deleted it died before saying so, and the service does
        cluster.say(epoch=epoch)
    else:
        assert wait_for(lambda: compare_ids(cluster.head_id(), last) > 0)
    cluster.say({"r": mine})  # late, of the old epoch
    cluster.say({"new": [1, 2, 3]}, epoch=epoch)
    assert wait_for(lambda: not cluster.holds(mine) and cluster.now() == expected({"new": [1, 2, 3]}))
    assert cluster.now("umbra") == expected({"s": other})
    assert server.status().texts == 2


def test_damage_is_dropped_and_counted(cluster: Cluster) -> None:
    cluster.say({"r": [1, 2, 3]})
    cluster.store.append([(cluster.name(), b"nonsense")])
    cluster.store.save_snapshot(cluster.name("umbra"), *DAMAGED)
    server = cluster.server()
    assert wait_for(lambda: server.status().corrupt_records == 2)
    assert wait_for(lambda: cluster.snapshot() == expected({"r": [1, 2, 3]}))
    cluster.say({"s": [4, 5]}, tenant="umbra")
    assert wait_for(lambda: cluster.snapshot("umbra") == expected({"s": [4, 5]}))
    assert server.status().corrupt_records == 2


def test_two_services_with_different_tenants_do_each_other_no_harm(cluster: Cluster) -> None:
    cluster.server()
    extra = cluster.server(tenants=["acme"])
    texts = {f"r{index}": tokens(index, 20) for index in range(50)}
    for name, text in texts.items():
        cluster.say({name: text})
    assert wait_for(lambda: cluster.snapshot() == expected(texts))
    assert extra.status().leader and cluster.servers[0].status().leader
    assert wait_for(lambda: extra.status().texts == cluster.servers[0].status().texts == 50)


@pytest.mark.usefixtures("rare_snapshots")
def test_newer_snapshot_of_another_service_is_taken_over(make: Callable[..., Cluster]) -> None:
    cluster = make()
    server = cluster.server()
    cluster.say({"r": [1, 2, 3]})
    assert wait_for(lambda: server.status().tokens == 3)
    # The entries that led to it are not in the stream any more.
    cluster.save("acme", "9999999999999-0", {text_key(f"s{index}"): range(4) for index in range(5)})
    assert wait_for(lambda: server.status().tokens == 20)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["quiet", "a replica is faster than the service", "its clock was ahead"])
@pytest.mark.usefixtures("rare_snapshots")
def test_redis_that_restarts_empty_is_filled_again(make: Callable[..., Cluster], own_redis: RedisProcess, case: str) -> None:
    cluster = make(own_redis.url)
    assert cluster.store.delete(cluster.name()) == 1
    server = cluster.server()
    texts = {f"r{index}": tokens(index, 30) for index in range(20)}
    cluster.say(texts, epoch=1, removed=["x"])  # a removal, so that a snapshot is written at once
    cluster.say({"s": [1, 2]}, tenant="umbra", removed=["x"])
    if case == "its clock was ahead":
        data = encode_batch(TextBatch(8, 0, 1, removed=(request_hash("y"),)), IDENTITY.vocab_size)
        with redis.Redis.from_url(own_redis.url) as client:
            client.xadd(cluster.key(), {"b": data}, id="9999999999999-0")
        assert wait_for(lambda: cluster.store.head(cluster.name()).snapshot_id == "9999999999999-0")
    assert wait_for(lambda: cluster.snapshot() == expected(texts) and len(cluster.snapshot("umbra")) == 1)
    own_redis.kill()
    assert wait_for(lambda: server.status().failures > 0)
    assert server.status().last_error is not None
    own_redis.start()
    if case == "a replica is faster than the service":
        texts["new"] = [5, 6, 7]
        cluster.say({"new": texts["new"]}, epoch=1)
    assert wait_for(lambda: cluster.now() == expected(texts) and cluster.snapshot() and len(cluster.snapshot("umbra")) == 1)
    head = cluster.store.head(cluster.name())
    assert head.epoch == 1  # so that the next deletion is a newer one
    cluster.say({"later": [8]}, epoch=1)
    assert wait_for(lambda: server.status().tokens == 3 + sum(map(len, texts.values())))
    assert cluster.store.delete(cluster.name()) == 2
    assert wait_for(lambda: cluster.now() == {} and server.status().texts == 1)


@pytest.mark.usefixtures("rare_snapshots")
def test_texts_of_no_snapshot_survive_a_restart_before_which_nobody_looked(
    make: Callable[..., Cluster], own_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_server, "RETRY_S", 1.0)
    cluster = make(own_redis.url)
    server = cluster.server()
    cluster.say({"old": [1, 2, 3]})
    assert wait_for(lambda: server.status().tokens == 3)
    own_redis.kill()
    assert wait_for(lambda: server.status().failures > 0)
    own_redis.start()
    cluster.say({"new": [4, 5]})  # so that the stream's last entry is newer than what the service has read
    assert wait_for(lambda: cluster.now() == expected({"old": [1, 2, 3], "new": [4, 5]}))


def test_full_redis_is_survived(make: Callable[..., Cluster], own_redis: RedisProcess) -> None:
    cluster = make(own_redis.url)
    server = cluster.server()
    texts = {f"r{index}": [1, 2, index] for index in range(5)}
    for name, text in texts.items():
        cluster.say({name: text})
    assert wait_for(lambda: cluster.snapshot() == expected(texts))
    assert cluster.store.usage(cluster.name()).stream_entries == 5
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", "1")
        assert wait_for(lambda: "OOM" in (server.status().last_error or ""))
        assert wait_for(lambda: cluster.store.usage(cluster.name()).stream_entries == 1)  # what a snapshot holds makes room
        client.config_set("maxmemory", "0")
    cluster.say({"s": [4, 5]})
    assert wait_for(lambda: cluster.snapshot() == expected(texts | {"s": [4, 5]}))
    assert server.status().leader


def in_files(folder: Path, text: Sequence[int]) -> bool:
    """Whether the bytes of these tokens are in a file of Redis."""
    packed = np.array(text, "<u2").tobytes()
    return any(packed in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def rewrites(client: redis.Redis) -> int:
    """How often its files were asked to be written anew."""
    told: dict[str, dict[str, int]] = client.info("commandstats")
    return told.get("cmdstat_bgrewriteaof", {"calls": 0})["calls"]


@pytest.fixture
def writing_redis() -> Iterator[RedisProcess]:
    """One that keeps an append-only file."""
    with RedisProcess(has_files=True) as process:
        process.client.config_set("rdbcompression", "no")
        yield process


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_deleted_leaves_the_files_of_redis(
    make: Callable[..., Cluster], writing_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr("outrider.cache_service.server.cache_server._REWRITE_S", 0.5)
    cluster, folder = make(writing_redis.url), Path(writing_redis.client.config_get("dir")["dir"])
    server = cluster.server()
    for name in ("first", "second"):
        text = tokens(len(name), 40)
        epoch = cluster.store.head(cluster.name()).epoch
        cluster.say({name: text}, epoch=epoch)
        assert wait_for(lambda text=text: len(cluster.snapshot()) > 0 and in_files(folder, text))
        if whole:
            cluster.say(epoch=cluster.store.delete(cluster.name()))
        else:
            cluster.say(removed=[name], epoch=epoch)
        assert wait_for(lambda text=text: not cluster.holds(text) and not in_files(folder, text))
    assert server.status().failures == 0


def test_many_deletions_have_the_files_written_anew_once(make: Callable[..., Cluster], writing_redis: RedisProcess) -> None:
    cluster = make(writing_redis.url)
    server = cluster.server()
    for number in range(1, 9):
        cluster.say({f"r{number}": [1, 2, number]}, epoch=number - 1)
        assert wait_for(lambda number=number: server.status().texts == 1)
        cluster.say(epoch=cluster.store.delete(cluster.name()))
        assert wait_for(lambda: server.status().texts == 0 and cluster.snapshot() == {})
    assert wait_for(lambda: rewrites(writing_redis.client) == 1)
    assert server.status().failures == 0


def test_a_redis_that_may_not_write_its_files_anew_is_told_of(
    make: Callable[..., Cluster], writing_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    writing_redis.client.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "-bgrewriteaof")
    cluster = make(writing_redis.url.replace("redis://", "redis://limited:secret@"))
    server = cluster.server()
    cluster.say({"r": [1, 2, 3]})
    assert wait_for(lambda: server.status().texts == 1)
    cluster.say(epoch=cluster.store.delete(cluster.name()))
    assert wait_for(lambda: "stay in Redis' append-only file until it is rewritten" in caplog.text)
    assert server.status().failures == 0


def test_nothing_is_written_where_redis_keeps_no_files(make: Callable[..., Cluster], own_redis: RedisProcess) -> None:
    assert make(own_redis.url).store.rewrite_files()
    assert rewrites(own_redis.client) == 0
