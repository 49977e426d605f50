"""The store's contract on a real Redis."""

from __future__ import annotations

import threading
import time

import pytest
import redis

from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cache_service.store.redis_store import MAX_BLOCK_S, Head, RedisStore
from outrider.cache_service.store.stream_ids import compare_ids
from tests.helpers.redis_user import acl_rule, use_every_command

A, B = "a" * 32, "b" * 32


def test_entries_come_back_in_order_and_by_namespace(store: RedisStore) -> None:
    ids = store.append([(A, b"one"), (B, b"other"), (A, b"two\r\n\x00")])
    assert compare_ids(ids[0], ids[2]) < 0
    found = store.read({A: "0-0", B: "0-0"}, 0, 10)
    assert found == {A: [(ids[0], b"one"), (ids[2], b"two\r\n\x00")], B: [(ids[1], b"other")]}
    assert store.read({A: ids[0], B: ids[1]}, 0, 10) == {A: [(ids[2], b"two\r\n\x00")]}
    assert store.read({A: ids[2], B: ids[1]}, 0, 10) == {}
    assert store.read({A: "0-0"}, 0, 1) == {A: [(ids[0], b"one")]}
    assert store.read({}, 0.5, 1) == {}
    assert store.append([]) == []


def test_read_waits_for_the_first_entry(store: RedisStore, server: EmbeddedRedis) -> None:
    writer = RedisStore(server.url, "outrider", 2.0)
    found: list[dict[str, list[tuple[str, bytes | None]]]] = []
    waiting = threading.Thread(target=lambda: found.append(store.read({A: "0-0", B: "0-0"}, MAX_BLOCK_S, 10)))
    waiting.start()
    time.sleep(0.1)
    (id,) = writer.append([(B, b"late")])
    waiting.join()
    assert found == [{B: [(id, b"late")]}]
    assert store.read({A: "0-0"}, 0.02, 10) == {}
    writer.close()


def test_entries_of_others_have_no_data(store: RedisStore, raw: redis.Redis) -> None:
    id = raw.xadd(f"{{outrider}}:{A}:log", {"x": "y"})
    assert store.read({A: "0-0"}, 0, 10) == {A: [(id.decode(), None)]}


def test_the_stream_is_bounded(store: RedisStore, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cache_service.store.redis_store.MAX_ENTRIES", 300)
    for _ in range(10):
        store.append([(A, b"x")] * 100)
    assert 300 <= raw.xlen(f"{{outrider}}:{A}:log") < 1000


def test_heads(store: RedisStore, raw: redis.Redis) -> None:
    assert store.heads([A, B]) == {A: Head("0-0", "0-0", "0-0", 0), B: Head("0-0", "0-0", "0-0", 0)}
    ids = store.append([(A, b"%d" % i) for i in range(5)])
    assert store.save_snapshot(A, ids[2], b"data")
    assert store.heads([B, A]) == {B: Head("0-0", "0-0", "0-0", 0), A: Head(ids[0], ids[4], ids[2], 0)}
    assert store.trim(A, ids[2], exact=True) == 2
    assert store.head(A) == Head(ids[2], ids[4], ids[2], 0)
    raw.xtrim(f"{{outrider}}:{A}:log", maxlen=0, approximate=False)
    assert store.head(A) == Head("0-0", ids[4], ids[2], 0)  # an empty stream knows how far it was
    assert store.heads([]) == {}


def test_inexact_trim_keeps_whole_nodes(store: RedisStore) -> None:
    ids = store.append([(A, b"x")] * 250)
    assert store.trim(A, ids[50], exact=False) == 0
    assert store.trim(A, ids[150], exact=False) == 100  # entries in a node of the stream
    assert store.head(A).first_id == ids[100]


def test_snapshot_of_several_pieces(store: RedisStore, raw: redis.Redis) -> None:
    assert store.load_snapshot(A) is None
    data = bytes(range(256)) * 4096 * 3 + b"end"  # 3 MiB and a piece of 3 bytes
    assert store.save_snapshot(A, "5-1", data)
    assert store.load_snapshot(A) == ("5-1", data)
    assert store.load_snapshot(B) is None
    (key,) = raw.keys("*:snap:*")
    assert raw.hlen(key) == 4 and max(map(len, raw.hvals(key))) == 1 << 20
    assert raw.ttl(key) == -1
    assert store.save_snapshot(B, "1-0", b"") and store.load_snapshot(B) == ("1-0", b"")


@pytest.mark.parametrize(
    ("old", "new", "moves"),
    [("9-0", "10-0", True), ("10-0", "9-9", False), ("7-9", "7-10", True), ("7-10", "7-9", False), ("7-3", "7-3", True)],
)  # fmt: skip
def test_snapshot_moves_forward_only(store: RedisStore, raw: redis.Redis, old: str, new: str, moves: bool) -> None:
    assert store.save_snapshot(A, old, b"old")
    assert store.save_snapshot(A, new, b"new") is moves
    assert store.load_snapshot(A) == ((new, b"new") if moves else (old, b"old"))
    assert len(raw.keys("*:snap:*")) == 1  # the pieces of the other one are gone


def test_unfinished_snapshots_expire_and_change_nothing(store: RedisStore, raw: redis.Redis) -> None:
    store.save_snapshot(A, "1-0", b"whole")
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + (3 << 20))
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        store.save_snapshot(A, "2-0", b"x" * (8 << 20))
    raw.config_set("maxmemory", 0)
    assert store.load_snapshot(A) == ("1-0", b"whole")
    times = sorted(raw.ttl(key) for key in raw.keys("*:snap:*"))
    assert len(times) == 2 and times[0] == -1 and 0 < times[1] <= 3600


def test_missing_piece_shortens_the_snapshot(store: RedisStore, raw: redis.Redis) -> None:
    store.save_snapshot(A, "1-0", b"a" * (1 << 20) + b"b")
    (key,) = raw.keys("*:snap:*")
    raw.hdel(key, "0")
    assert store.load_snapshot(A) == ("1-0", b"b")


def test_snapshot_of_an_older_epoch_is_refused(store: RedisStore, raw: redis.Redis) -> None:
    assert store.save_snapshot(A, "1-0", b"x", epoch=0)
    assert store.delete(A) == 1
    assert not store.save_snapshot(A, "2-0", b"deleted", epoch=0)
    assert store.load_snapshot(A) is None
    assert raw.keys("*:snap*") == []
    assert store.save_snapshot(A, "2-0", b"y", epoch=1)


def test_delete_is_one_step_and_keeps_the_ids(store: RedisStore, raw: redis.Redis) -> None:
    ids = store.append([(A, b"x"), (B, b"y"), (A, b"z")])
    store.save_snapshot(A, ids[0], b"data")
    store.save_snapshot(B, ids[1], b"data")
    assert store.delete(A) == 1
    assert store.heads([A, B]) == {A: Head("0-0", ids[2], "0-0", 1), B: Head(ids[1], ids[1], ids[1], 0)}
    assert raw.keys(f"*{A}:snap*") == []
    assert store.delete(A) == 2
    assert store.delete("never seen") == 1


def test_delete_works_in_a_full_redis_and_the_epoch_is_never_lowered(store: RedisStore, raw: redis.Redis) -> None:
    store.append([(A, b"x" * 1000)])
    store.save_snapshot(A, "1-0", b"data")
    raw.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        store.append([(A, b"more")])
    assert store.delete(A) == 1
    assert store.head(A).epoch == 1 and store.usage(A).stream_entries == 0
    raw.config_set("maxmemory", 0)
    assert [store.raise_epoch(A, 3), store.raise_epoch(A, 2), store.delete(A)] == [3, 3, 4]


def test_lease_is_taken_over_after_its_time_and_not_before(store: RedisStore, raw: redis.Redis) -> None:
    assert store.acquire("service", "one", 60)
    assert not store.acquire("service", "two", 60)
    assert store.acquire("service", "one", 90)  # extended
    assert 60_000 < raw.pttl("{outrider}:lease:service") <= 90_000
    assert store.acquire("other", "two", 60)
    assert store.acquire("service", "one", 0.05)
    deadline = time.monotonic() + 10
    while not store.acquire("service", "two", 60):
        assert time.monotonic() < deadline
    assert not store.acquire("service", "one", 60)
    store.release("service", "one")  # not its own any more
    assert not store.acquire("service", "one", 60)
    store.release("service", "two")
    assert store.acquire("service", "one", 60)


def test_what_nobody_keeps_goes(store: RedisStore, server: EmbeddedRedis) -> None:
    for name in (A, B):
        (id,) = store.append([(name, b"x")])
        assert store.save_snapshot(name, id, b"s") and store.raise_epoch(name, 1) == 1
    store.keep([A, B], 1000.0)
    store.keep([A, "c" * 32], 1.0)
    with redis.Redis.from_url(server.url) as client:
        assert all(0 < client.ttl(key) <= 1000 for key in client.scan_iter())
        deadline = time.monotonic() + 20
        while any(A.encode() in key for key in client.scan_iter()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert store.load_snapshot(A) is None and store.head(A) == Head("0-0", "0-0", "0-0", 0)
    assert store.load_snapshot(B) == (id, b"s")


def test_usage(store: RedisStore) -> None:
    assert store.usage(A) == store.usage(B)
    assert store.usage(A).stream_bytes == 0
    store.append([(A, b"x" * 5000)] * 3)
    store.save_snapshot(A, "1-0", b"z" * 4321)
    usage = store.usage(A)
    assert (usage.stream_entries, usage.snapshot_bytes) == (3, 4321)
    assert 15_000 < usage.stream_bytes < 60_000
    store.ping()


def test_prefixes_are_apart(store: RedisStore, server: EmbeddedRedis) -> None:
    other = RedisStore(server.url, "elsewhere", 2.0)
    store.append([(A, b"x")])
    store.acquire("service", "one", 60)
    assert other.read({A: "0-0"}, 0, 10) == {}
    assert other.acquire("service", "two", 60)
    other.close()
    with pytest.raises(ValueError, match=r"cache\.prefix"):
        RedisStore(server.url, "a}b", 2.0)


def test_the_documented_acl_rule_is_enough_and_holds(server: EmbeddedRedis, raw: redis.Redis) -> None:
    raw.execute_command("ACL", "SETUSER", "limited", "on", ">se:cret", *acl_rule("outrider").split())
    url = f"unix://limited:se%3Acret@{server.url.partition('@')[2]}"
    mine = RedisStore(url, "outrider", 2.0)
    use_every_command(mine)
    mine.close()
    other = RedisStore(url, "another", 2.0)
    for attempt in (
        lambda: other.append([(A, b"x")]), lambda: other.read({A: "0-0"}, 0, 1), lambda: other.heads([A]),
        lambda: other.delete(A), lambda: other.raise_epoch(A, 9), lambda: other.trim(A, "1-0", exact=True),
        lambda: other.save_snapshot(A, "1-0", b""), lambda: other.load_snapshot(A), lambda: other.acquire("a", "b", 1),
        lambda: other.keep([A], 60.0), lambda: other.usage(A),
    ):  # fmt: skip
        with pytest.raises(redis.RedisError, match=r"permission|NOPERM"):
            attempt()
    other.close()
    with redis.Redis.from_url(url) as client:
        for command in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["PUBLISH", "a", "b"], ["GET", "outrider"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
    assert raw.keys("*another*") == []


def test_no_error_is_swallowed(server: EmbeddedRedis, raw: redis.Redis, store: RedisStore) -> None:
    raw.set(f"{{outrider}}:{A}:log", "not a stream")
    for attempt in (lambda: store.append([(B, b"y"), (A, b"x")]), lambda: store.read({A: "0-0"}, 0, 1), lambda: store.heads([A])):
        with pytest.raises(redis.ResponseError, match=r"wrong kind|WRONGTYPE"):
            attempt()
    with EmbeddedRedis.start() as gone:
        late = RedisStore(gone.url, "outrider", 0.5)
        late.ping()
    with pytest.raises(redis.ConnectionError):
        late.ping()
    wrong = RedisStore(f"unix://:wrong@{server.url.partition('@')[2]}", "outrider", 2.0)
    with pytest.raises(redis.AuthenticationError):
        wrong.ping()


@pytest.mark.parametrize(("a", "b", "order"), [("1-1", "1-1", 0), ("1-2", "1-10", -1), ("10-0", "9-99", 1), ("0-0", "1-0", -1)])
def test_compare_ids(a: str, b: str, order: int) -> None:
    assert compare_ids(a, b) == order
    assert compare_ids(b, a) == -order
