"""Redis killed, paused, full, restarted empty, or talking nonsense: the cache client logs it once and recovers by itself."""

from __future__ import annotations

import logging
import os
import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
import redis

from outrider.cache_service.client import cache_client
from outrider.cache_service.records import TextBatch, encode_batch
from outrider.cache_service.store.circuit_breaker import RedisCircuitBreaker, failure_kind
from outrider.cache_service.store.redis_store import RedisStore
from outrider.decoding.sources.text_keys import text_key
from outrider.experiments.faults.redis_process import RedisProcess
from tests.helpers.shared_memory import IDENTITY, Cluster, Replica
from tests.helpers.waiting import eventually

T1, T2, T3 = (text_key(name) for name in ("one", "two", "three"))
LATE = [text_key(f"late {number}") for number in range(40)]
OPTIONS: dict[str, object] = {"tenants": ("a",), "timeout_s": 0.2, "start_timeout_s": 1.0}


@pytest.fixture
def cluster(make: Callable[..., Cluster], own_redis: RedisProcess) -> Cluster:
    """Over a Redis that fails."""
    return make(own_redis.url, **OPTIONS)


def put(replica: Replica, text: int, offset: int, tokens: Sequence[int], final: bool = True) -> None:
    replica.write("a", text, offset, tokens, final)


def said(caplog: pytest.LogCaptureFixture, level: int, words: str) -> int:
    return sum(record.levelno == level and words in record.getMessage() for record in caplog.records)


@pytest.fixture(autouse=True)
def often_and_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOOK_S", 0.1), ("RETRY_S", 0.05), ("OUTBOX_BYTES", 10_485)):
        monkeypatch.setattr(cache_client, name, value)
    caplog.set_level(logging.INFO)


def outage(one: Replica, kind: str) -> None:
    """Writes until the breaker of both directions knows, as an engine does that notices nothing."""
    eventually(lambda: one.cache_client.counts().breaker == "open")
    put(one, LATE[0], 0, [40])
    eventually(lambda: one.cache_client.counts().opened == 2)
    counts = one.cache_client.counts()
    assert not counts.connected and counts.failures[kind] >= 4
    for number, text in enumerate(LATE[1:]):  # more than the outbox holds: 10 KiB
        put(one, text, 0, [41 + number] * 100)
        one.cache_client.apply()
    counts = one.cache_client.counts()
    assert 0 < counts.outbox_bytes <= 10486
    assert counts.outbox_dropped_texts == 40 - counts.outbox_bytes // 464 - (counts.outbox_bytes % 464 != 0)
    assert counts.dropped_tokens > 0


def recovery(one: Replica, other: Replica, expected: list[list[int]]) -> None:
    """Without a restart: what waited arrives, the newest texts among it, and both directions work."""
    eventually(lambda: one.cache_client.counts().outbox_bytes == 0)
    eventually(lambda: [79] * 100 in other.texts("a"))
    put(other, T3, 0, [33, 34])
    eventually(lambda: [33, 34] in one.texts("a"))
    for replica in (one, other):
        eventually(lambda replica=replica: replica.cache_client.counts().breaker == "closed")  # type: ignore[misc]
        assert all(text in replica.texts("a") for text in expected)
        assert replica.cache_client.counts().connected and replica.cache_client.counts().corrupt_records == 0


@pytest.mark.parametrize(
    ("breaks", "mends", "kind"),
    [(RedisProcess.kill, RedisProcess.start, "connection"), (RedisProcess.pause, RedisProcess.resume, "timeout")],
    ids=["killed", "paused"],
)
def test_redis_away_and_back(
    cluster: Cluster, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture,
    breaks: Callable[[RedisProcess], None], mends: Callable[[RedisProcess], None], kind: str,
) -> None:  # fmt: skip
    a, b = cluster.replica(), cluster.replica()
    put(a, T1, 0, [1, 2], final=False)
    put(b, T2, 0, [5])
    eventually(lambda: all(one.texts("a") == [[1, 2], [5]] for one in (a, b)))
    breaks(own_redis)
    outage(a, kind)
    put(a, T1, 2, [3])  # local drafts grow meanwhile
    assert [1, 2, 3] in a.texts("a")
    assert said(caplog, logging.WARNING, "writing shared texts to Redis") == 1
    mends(own_redis)
    recovery(a, b, [[5]])
    assert [1, 2, 3] in a.texts("a")
    if mends is RedisProcess.resume:  # else Redis is empty, without the first part
        assert [1, 2, 3] in b.texts("a")
    for doing in ("reading", "writing"):
        # The two replicas, and each of them once; the second writes only after the outage.
        times = 2 if doing == "reading" else 1
        eventually(lambda words=f"{doing} shared texts", times=times: said(caplog, logging.INFO, words) == times)  # type: ignore[misc]
        assert said(caplog, logging.WARNING, f"{doing} shared texts") == times
    third = cluster.replica()
    assert [33, 34] in third.texts("a") and [79] * 100 in third.texts("a")


def test_redis_is_full(cluster: Cluster, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture) -> None:
    a, b = cluster.replica(), cluster.replica()
    put(b, T2, 0, [5])
    eventually(lambda: a.texts("a") == [[5]])
    own_redis.client.config_set("maxmemory", 1)
    put(a, LATE[0], 0, [40])
    eventually(lambda: a.cache_client.counts().breaker == "open")
    counts = a.cache_client.counts()
    assert counts.failures["full"] >= 2 and counts.opened == 1  # reading goes on
    eventually(lambda: said(caplog, logging.WARNING, "writing shared texts to Redis failed: full") == 1)
    for number, text in enumerate(LATE[1:]):
        put(a, text, 0, [41 + number] * 100)
    assert 0 < a.cache_client.counts().outbox_bytes <= 10486
    own_redis.client.config_set("maxmemory", 0)
    recovery(a, b, [[5]])
    assert set(a.cache_client.counts().failures) == {"full"} and b.cache_client.counts().failures == {}
    eventually(lambda: said(caplog, logging.INFO, "writing shared texts to Redis: works again") == 1)


def test_redis_away_at_the_start(cluster: Cluster, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture) -> None:
    own_redis.kill()
    a, b = cluster.replica(), cluster.replica()
    assert said(caplog, logging.WARNING, "Redis is unreachable or slow") == 2
    outage(a, "connection")
    eventually(lambda: b.cache_client.counts().breaker == "open")
    own_redis.start()
    recovery(a, b, [])


@pytest.mark.parametrize(
    ("nonsense", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "nonsense"), (b"\x00\xff\x17" * 400, "nonsense"), (b"+OK\r\n", "nonsense"),
        (b"*2\r\n:1\r\n$-1\r\n", "nonsense"), (b"*1\r\n*2\r\n+a\r\n*1\r\n:1\r\n", "nonsense"), (b":5\r\n", "nonsense"),
        (b"$5\r\nabc", "timeout"), (b"", "connection"), (b"-LOADING Redis is loading the dataset\r\n", "connection"),
        (b"-WHAT is that\r\n", "other"), (b"-READONLY You can't write against a read only replica.\r\n", "read-only"),
        (b"-NOAUTH none\r\n", "refused"),
    ],
)  # fmt: skip
def test_nonsense_opens_the_breaker_and_raises_nothing(
    make: Callable[..., Cluster], nonsense: bytes, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with babbler(nonsense) as port:
        one = make(f"redis://127.0.0.1:{port}", **OPTIONS).replica()
        put(one, T1, 0, [1, 2, 3])
        eventually(lambda: one.cache_client.counts().opened == 2)
        assert not one.cache_client.apply()
        counts = one.cache_client.counts()
        assert counts.failures.get(kind, 0) >= 2, counts.failures
        assert "internal" not in counts.failures
        assert one.texts("a") == [[1, 2, 3]] and counts.applied_tokens == counts.published_tokens == 0
        assert said(caplog, logging.WARNING, "reading shared texts from Redis") == 1
        assert all("\n" not in record.getMessage() and len(record.getMessage()) < 400 for record in caplog.records)
        one.cache_client.close(0.5)


@contextmanager
def babbler(nonsense: bytes) -> Iterator[int]:
    """Answers every command with the same bytes; with none it hangs up."""

    class Talk(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # hung up
                while (heard := self.request.recv(1 << 16)) and nonsense:
                    self.request.sendall(nonsense * len(re.findall(rb"(?:^|\r\n)\*\d+\r\n", heard)))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_corrupt_records_are_dropped_and_counted(
    cluster: Cluster, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    key = cluster.key("a")
    good = encode_batch(TextBatch(1, 0, 0), IDENTITY.vocab_size)
    own_redis.client.xadd(key, {"b": b"before the start"})
    a, b = cluster.replica(), cluster.replica()
    for data in (b"", b"\x00" * 40, os.urandom(200), good[:-1], good + b"x", good[:-1] + bytes([good[-1] ^ 1])):
        own_redis.client.xadd(key, {"b": data})
    own_redis.client.xadd(key, {"other": "field"})
    put(a, T1, 0, [1, 2])
    for one in (a, b):
        eventually(lambda one=one: one.texts("a") == [[1, 2]] and one.cache_client.counts().corrupt_records == 8)  # type: ignore[misc]
        assert one.cache_client.counts().breaker == "closed" and one.cache_client.counts().failures == {}
    assert 2 <= said(caplog, logging.WARNING, "is dropped") <= 10  # some lines, not sixteen


def test_a_corrupt_snapshot_is_dropped_and_the_stream_read(
    cluster: Cluster, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    a = cluster.replica()
    put(a, T1, 0, [1, 2])
    eventually(lambda: a.cache_client.counts().published_tokens == 2)
    assert cluster.store.save_snapshot(cluster.name("a"), cluster.head_id("a"), b"nonsense")
    late = cluster.replica()
    assert late.texts("a") == [[1, 2]]
    put(a, T2, 0, [3])
    eventually(lambda: late.texts("a") == [[1, 2], [3]])
    time.sleep(0.3)  # more looks
    assert late.cache_client.counts().corrupt_snapshots == 1
    assert said(caplog, logging.WARNING, "snapshot") == 1


def test_a_key_of_the_wrong_type(cluster: Cluster, own_redis: RedisProcess) -> None:
    a = cluster.replica()
    own_redis.client.set(cluster.key("a"), "x")
    put(a, T1, 0, [1])
    eventually(lambda: a.cache_client.counts().opened == 2)
    assert a.cache_client.counts().failures["wrong type"] >= 4
    own_redis.client.delete(cluster.key("a"))
    eventually(lambda: a.cache_client.counts().published_tokens == 1 and a.cache_client.counts().breaker == "closed")


def test_an_emptied_redis_learns_the_epoch_again(cluster: Cluster, own_redis: RedisProcess) -> None:
    store, name = cluster.store, cluster.name("a")
    a, b = cluster.replica(), cluster.replica()
    put(a, T1, 0, [1])
    eventually(lambda: b.texts("a") == [[1]])
    assert [store.delete(name), store.delete(name)] == [1, 2]
    eventually(lambda: a.texts("a") == b.texts("a") == [])
    own_redis.client.flushall()
    eventually(lambda: store.head(name).epoch == 2)
    put(b, T2, 0, [2])
    eventually(lambda: a.texts("a") == [[2]])
    assert cluster.replica().texts("a") == [[2]]


def test_the_engines_thread_never_talks_to_redis(
    cluster: Cluster, own_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Redis paused, and by the calls that this thread makes to sockets: none."""
    a = cluster.replica()
    own_redis.pause()
    asked: list[str] = []
    mine = threading.get_ident()
    for name in ("append", "read", "heads", "_run", "_run_all", "_client"):
        original = getattr(RedisStore, name)

        def noted(*args: object, name: str = name, original: Callable[..., object] = original, **kwargs: object) -> object:
            if threading.get_ident() == mine:
                asked.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(RedisStore, name, noted)
    began = time.monotonic()
    for number in range(5000):
        a.cache_client.publish("a", T1, number, [number % 500], False)
        a.cache_client.apply()
        a.cache_client.counts()
    assert time.monotonic() - began < 10  # 5,000 waits of 0.2 s would be a quarter of an hour
    assert asked == []
    own_redis.resume()


def test_guard_counts_and_logs_once_and_survives_bugs(caplog: pytest.LogCaptureFixture) -> None:
    guard = RedisCircuitBreaker("reading", 0.01)
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise KeyError("a bug")

    assert guard.attempt(fail) > 0 and guard.state == "closed"
    assert guard.attempt(lambda: None) == 0 and guard.state == "closed"  # only failures in a row open it
    for _ in range(2):
        guard.attempt(fail)
    assert guard.state == "open" and guard.opened == 1 and len(calls) == 3
    assert guard.attempt(fail) > 0 and len(calls) == 3  # left alone
    time.sleep(0.02)
    assert guard.attempt(fail) > 0 and len(calls) == 4 and guard.state == "open"  # one attempt, no second line
    time.sleep(0.02)
    assert guard.attempt(lambda: None) == 0 and guard.state == "closed" and guard.succeeded
    assert guard.failures == {"internal": 4} and guard.opened == 1
    assert said(caplog, logging.WARNING, "reading failed: internal (KeyError") == 1
    assert said(caplog, logging.INFO, "reading: works again") == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (redis.TimeoutError(), "timeout"), (TimeoutError(), "timeout"), (redis.AuthenticationError(), "refused"),
        (redis.exceptions.NoPermissionError(), "refused"), (redis.exceptions.OutOfMemoryError(), "full"),
        (redis.ResponseError("Error running script: @user_script:1: -OOM command not allowed"), "full"),
        (redis.BusyLoadingError(), "connection"), (OSError(), "connection"), (redis.InvalidResponse(), "nonsense"),
        (redis.ReadOnlyError(), "read-only"), (redis.ResponseError("WRONGTYPE x"), "wrong type"),
        (redis.ResponseError("what"), "other"), (redis.WatchError(), "other"), (KeyError(), "internal"),
    ],
)  # fmt: skip
def test_failure_kinds(error: Exception, kind: str) -> None:
    assert failure_kind(error) == kind
