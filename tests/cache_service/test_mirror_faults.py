"""Redis killed, paused, full, restarted empty, or talking nonsense: the mirror goes on, says so once, and recovers by itself."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import redis

from cache_service.mirror.mirror import Mirror
from cache_service.namespace import Identity, namespace
from cache_service.records import TextBatch, encode_batch
from cache_service.store.breaker import Guard, failure_kind
from cache_service.store.embedded import EmbeddedRedis
from cache_service.store.redis_store import RedisStore
from configs.slices import CacheOptions
from decoding.request import text_key
from decoding.sources.history import Histories
from experiments.redis_process import RedisProcess
from tests.waiting import eventually

IDENTITY = Identity("11" * 16, "22" * 16, 500)
SECRET = b"secret"
OPTIONS = CacheOptions(flush_s=0.001, timeout_s=0.2, retry_s=0.05, outbox_mib=0.01)
NAME = namespace(SECRET, "a", IDENTITY.model_revision, IDENTITY.tokenizer_revision)
T1, T2, T3 = (text_key(name) for name in ("one", "two", "three"))
LATE = [text_key(f"late {number}") for number in range(40)]


@pytest.fixture
def server(own_redis: RedisProcess) -> RedisProcess:
    """What fails."""
    return own_redis


class Replica:
    """A mirror, and the thread that would be the engine's."""

    def __init__(self, url: str) -> None:
        self.memory = Histories(50_000)
        self.mirror = Mirror(OPTIONS, url, SECRET, IDENTITY, ["a"], self.memory, lambda: None)
        self.mirror.start(1.0)

    def write(self, text: int, offset: int, tokens: Sequence[int], final: bool = True) -> None:
        history = self.memory.of("a")
        assert history is not None
        history.extend(text, offset, tokens, final)
        self.mirror.publish("a", text, offset, tokens, final)

    def texts(self) -> list[list[int]]:
        """What can be drafted from, after what has arrived is applied."""
        self.mirror.apply()
        history = self.memory.of("a")
        assert history is not None
        owners = {number for number in history.log.arrays.owners.tolist() if number >= 0}
        return sorted(text.tolist() for text in map(history.log.tokens_of, owners) if len(text))


@contextmanager
def replicas(url: str, count: int = 2) -> Iterator[list[Replica]]:
    made: list[Replica] = []
    try:
        for _ in range(count):
            made.append(Replica(url))
        yield made
    finally:
        for one in made:
            one.mirror.close(0.5)


def said(caplog: pytest.LogCaptureFixture, level: int, words: str) -> int:
    return sum(record.levelno == level and words in record.getMessage() for record in caplog.records)


@pytest.fixture(autouse=True)
def often_and_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_service.mirror.mirror.LOOK_S", 0.1)
    caplog.set_level(logging.INFO)


def outage(one: Replica, kind: str) -> None:
    """Writes until the breaker of both directions knows, as an engine does that notices nothing."""
    eventually(lambda: one.mirror.counts().breaker == "open")
    one.write(LATE[0], 0, [40])
    eventually(lambda: one.mirror.counts().opened == 2)
    counts = one.mirror.counts()
    assert not counts.connected and counts.failures[kind] >= 4
    for number, text in enumerate(LATE[1:]):  # more than the outbox holds: 10 KiB
        one.write(text, 0, [41 + number] * 100)
        one.mirror.apply()
    counts = one.mirror.counts()
    assert 0 < counts.outbox_bytes <= 10486
    assert counts.outbox_dropped_texts == 40 - counts.outbox_bytes // 464 - (counts.outbox_bytes % 464 != 0)
    assert counts.dropped_tokens > 0


def recovery(one: Replica, other: Replica, expected: list[list[int]]) -> None:
    """Without a restart: what waited arrives, the newest texts among it, and both directions work."""
    eventually(lambda: one.mirror.counts().outbox_bytes == 0)
    eventually(lambda: [79] * 100 in other.texts())
    other.write(T3, 0, [33, 34])
    eventually(lambda: [33, 34] in one.texts())
    for replica in (one, other):
        eventually(lambda replica=replica: replica.mirror.counts().breaker == "closed")  # type: ignore[misc]
        assert all(text in replica.texts() for text in expected)
        assert replica.mirror.counts().connected and replica.mirror.counts().corrupt_records == 0


@pytest.mark.parametrize("fault", ["killed", "paused"])
def test_redis_away_and_back(server: RedisProcess, caplog: pytest.LogCaptureFixture, fault: str) -> None:
    with replicas(server.url) as (a, b):
        a.write(T1, 0, [1, 2], final=False)
        b.write(T2, 0, [5])
        for one in (a, b):
            eventually(lambda one=one: one.texts() == [[1, 2], [5]])  # type: ignore[misc]
        if fault == "killed":
            server.kill()
        else:
            server.pause()
        outage(a, "connection" if fault == "killed" else "timeout")
        a.write(T1, 2, [3])  # local drafts grow meanwhile
        assert [1, 2, 3] in a.texts()
        assert said(caplog, logging.WARNING, "writing what was generated here") == 1
        if fault == "killed":
            server.start()  # empty
        else:
            server.resume()
        recovery(a, b, [[5]])
        assert [1, 2, 3] in a.texts()
        if fault == "paused":  # its first part was written before
            assert [1, 2, 3] in b.texts()
        for doing in ("reading", "writing"):
            # The two replicas, and each of them once; the second writes only after the outage.
            warned, closed = said(caplog, logging.WARNING, f"{doing} wh"), said(caplog, logging.INFO, f"{doing} wh")
            assert warned == closed == (2 if doing == "reading" else 1)
        with replicas(server.url, 1) as (third,):
            assert [33, 34] in third.texts() and [79] * 100 in third.texts()


def test_redis_is_full(server: RedisProcess, caplog: pytest.LogCaptureFixture) -> None:
    with replicas(server.url) as (a, b):
        b.write(T2, 0, [5])
        eventually(lambda: a.texts() == [[5]])
        server.client.config_set("maxmemory", 1)
        a.write(LATE[0], 0, [40])
        eventually(lambda: a.mirror.counts().breaker == "open")
        counts = a.mirror.counts()
        assert counts.failures["full"] >= 2 and counts.opened == 1  # reading goes on
        assert said(caplog, logging.WARNING, "writing what was generated here: full") == 1
        for number, text in enumerate(LATE[1:]):
            a.write(text, 0, [41 + number] * 100)
        assert 0 < a.mirror.counts().outbox_bytes <= 10486
        server.client.config_set("maxmemory", 0)
        recovery(a, b, [[5]])
        assert set(a.mirror.counts().failures) == {"full"} and b.mirror.counts().failures == {}
        assert said(caplog, logging.INFO, "writing what was generated here: works again") == 1


def test_redis_away_at_the_start(server: RedisProcess, caplog: pytest.LogCaptureFixture) -> None:
    server.kill()
    with replicas(server.url) as (a, b):
        assert said(caplog, logging.WARNING, "Redis is away or slow") == 2
        outage(a, "connection")
        eventually(lambda: b.mirror.counts().breaker == "open")
        server.start()
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
def test_nonsense_opens_the_breaker_and_raises_nothing(nonsense: bytes, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with babbler(nonsense) as port, replicas(f"redis://127.0.0.1:{port}", 1) as (one,):
        one.write(T1, 0, [1, 2, 3])
        eventually(lambda: one.mirror.counts().opened == 2)
        assert not one.mirror.apply()
        counts = one.mirror.counts()
        assert counts.failures.get(kind, 0) >= 2, counts.failures
        assert "internal" not in counts.failures
        assert one.texts() == [[1, 2, 3]] and counts.applied_tokens == counts.published_tokens == 0
        assert said(caplog, logging.WARNING, "reading what others generated") == 1
        assert all("\n" not in record.getMessage() and len(record.getMessage()) < 400 for record in caplog.records)


@contextmanager
def babbler(nonsense: bytes) -> Iterator[int]:
    """Answers every command with the same bytes; with none it hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(peer: socket.socket) -> None:
        with peer:
            try:
                while (heard := peer.recv(1 << 16)) and nonsense:
                    peer.sendall(nonsense * len(re.findall(rb"(?:^|\r\n)\*\d+\r\n", heard)))
            except OSError:
                return  # hung up

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return  # closed below
            threading.Thread(target=talk, args=(peer,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_corrupt_records_are_dropped_and_counted(server: RedisProcess, caplog: pytest.LogCaptureFixture) -> None:
    key = f"{{outrider}}:{NAME}:log"
    good = encode_batch(TextBatch(1, 0, 0), IDENTITY.vocab_size)
    server.client.xadd(key, {"b": b"before the start"})
    with replicas(server.url) as (a, b):
        for data in (b"", b"\x00" * 40, os.urandom(200), good[:-1], good + b"x", good[:-1] + bytes([good[-1] ^ 1])):
            server.client.xadd(key, {"b": data})
        server.client.xadd(key, {"other": "field"})
        a.write(T1, 0, [1, 2])
        for one in (a, b):
            eventually(lambda one=one: one.texts() == [[1, 2]] and one.mirror.counts().corrupt_records == 8)  # type: ignore[misc]
            assert one.mirror.counts().breaker == "closed" and one.mirror.counts().failures == {}
        assert 2 <= said(caplog, logging.WARNING, "is dropped") <= 10  # some lines, not sixteen


def test_a_corrupt_snapshot_is_dropped_and_the_stream_read(server: RedisProcess, caplog: pytest.LogCaptureFixture) -> None:
    store = RedisStore(server.url, "outrider", 2.0)
    with replicas(server.url, 1) as (a,):
        a.write(T1, 0, [1, 2])
        eventually(lambda: a.mirror.counts().published_tokens == 2)
        assert store.save_snapshot(NAME, store.heads([NAME])[NAME].last_id, b"nonsense")
        with replicas(server.url, 1) as (late,):
            assert late.texts() == [[1, 2]]
            a.write(T2, 0, [3])
            eventually(lambda: late.texts() == [[1, 2], [3]])
            time.sleep(0.3)  # more looks
            assert late.mirror.counts().corrupt_snapshots == 1
        assert said(caplog, logging.WARNING, "snapshot") == 1
    store.close()


def test_a_key_of_the_wrong_type(server: RedisProcess) -> None:
    with replicas(server.url, 1) as (a,):
        server.client.set(f"{{outrider}}:{NAME}:log", "x")
        a.write(T1, 0, [1])
        eventually(lambda: a.mirror.counts().opened == 2)
        assert a.mirror.counts().failures["wrong type"] >= 4
        server.client.delete(f"{{outrider}}:{NAME}:log")
        eventually(lambda: a.mirror.counts().published_tokens == 1 and a.mirror.counts().breaker == "closed")


def test_an_emptied_redis_learns_the_epoch_again() -> None:
    with EmbeddedRedis.start() as embedded, redis.Redis.from_url(embedded.url) as raw, replicas(embedded.url) as (a, b):
        store = RedisStore(embedded.url, "outrider", 2.0)
        a.write(T1, 0, [1])
        eventually(lambda: b.texts() == [[1]])
        assert [store.delete(NAME), store.delete(NAME)] == [1, 2]
        eventually(lambda: a.texts() == b.texts() == [])
        raw.flushall()
        eventually(lambda: store.heads([NAME])[NAME].epoch == 2)
        b.write(T2, 0, [2])
        eventually(lambda: a.texts() == [[2]])
        with replicas(embedded.url, 1) as (late,):
            assert late.texts() == [[2]]
        store.close()


def test_the_engines_thread_never_talks_to_redis(server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Redis paused, and by the calls that this thread makes to sockets: none."""
    with replicas(server.url, 1) as (a,):
        server.pause()
        asked: list[str] = []
        mine = threading.get_ident()
        for name in ("append", "read", "heads", "_run", "_client"):
            original = getattr(RedisStore, name)

            def noted(*args: object, name: str = name, original: Callable[..., object] = original, **kwargs: object) -> object:
                if threading.get_ident() == mine:
                    asked.append(name)
                return original(*args, **kwargs)

            monkeypatch.setattr(RedisStore, name, noted)
        began = time.monotonic()
        for number in range(5000):
            a.mirror.publish("a", T1, number, [number % 500], False)
            a.mirror.apply()
            a.mirror.counts()
        assert time.monotonic() - began < 10  # 5,000 waits of 0.2 s would be a quarter of an hour
        assert asked == []
        server.resume()


def test_guard_counts_and_logs_once_and_survives_bugs(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("reading", 0.01)
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
    assert said(caplog, logging.WARNING, "reading: internal (KeyError") == 1
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
