"""Streams, snapshots and leases in Redis: every command that Outrider sends to it, and the keys it uses.

Keys, all with the hash tag ``{PREFIX}``, so that a cluster keeps them in one slot and a script may use several of them:

=============================  ======  =========================================================================================
``{PREFIX}:NAMESPACE:log``     stream  one batch of records an entry, in the field ``b``
``{PREFIX}:NAMESPACE:snap``    hash    the newest snapshot: id in the stream up to which it goes, name, number of pieces, bytes
``{PREFIX}:NAMESPACE:snap:N``  hash    the pieces of the snapshot named N, of 1 MiB
``{PREFIX}:NAMESPACE:epoch``   string  how often the tenant was deleted
``{PREFIX}:NAMESPACE:counts``  hash    texts and tokens that the service kept last, and the epoch of that
``{PREFIX}:lease:NAME``        string  who holds the lease
=============================  ======  =========================================================================================

What a user of Redis must be allowed for it: ``docs/sharing.md``.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import redis
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException
from redis.sentinel import MasterNotFoundError

from cache_service.store import scripts
from cache_service.store.addresses import Client, connect
from cache_service.store.stream_ids import id_of, text_of

MAX_ENTRIES = 100_000  # of a stream, should nobody trim it
MAX_BLOCK_S = 0.5  # longest wait of one read; a server that is silent for that and the timeout is away
CHUNK_BYTES = 1 << 20  # of a snapshot: longer values hold up the server's one thread
ORPHAN_S = 3600  # pieces of a snapshot that was never finished go after that

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Head:
    """Where the stream of a namespace begins and ends, what is the newest snapshot, and how often the tenant was deleted."""

    first_id: str  # of the oldest entry that is left; "0-0" where there is none
    last_id: str  # of the newest entry that ever was; "0-0" in a Redis that has never seen one
    snapshot_id: str  # "0-0": no snapshot
    epoch: int


@dataclass(frozen=True, slots=True)
class RedisUsage:
    """What a namespace takes in Redis."""

    stream_entries: int
    stream_bytes: int  # as Redis estimates it
    snapshot_bytes: int


@dataclass(frozen=True, slots=True)
class Counts:
    """How much is kept of a namespace, as the service has counted it."""

    texts: int
    tokens: int
    epoch: int


def translated(method: Callable[Concatenate[RedisStore, _P], _R]) -> Callable[Concatenate[RedisStore, _P], _R]:
    """What the client library raises besides ``RedisError`` and ``OSError`` becomes one of them."""

    @functools.wraps(method)
    def wrapped(store: RedisStore, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(store, *args, **kwargs)
        except RedisClusterException as error:  # not a RedisError: no node of a cluster answers
            raise redis.ConnectionError(f"cluster: {error}") from error
        except MasterNotFoundError as error:  # its words are the settings of each connection, for pages
            raise redis.ConnectionError("no sentinel answers, or none knows a master of that name") from error
        except redis.InvalidResponse:
            store._drop_connections()
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # an answer that redis-py or we cannot read
            store._drop_connections()
            raise redis.InvalidResponse(f"not the answer of a Redis: {type(error).__name__}") from error

    return wrapped


class RedisStore:
    """Streams and snapshots of tenants in one Redis. Safe to use from several threads; a method is one or a few round trips.

    Every method raises ``redis.RedisError`` or ``OSError`` where Redis is away, slow, full, refuses or answers nonsense, and
    nothing is tried twice: what to do then is the caller's to say.
    """

    def __init__(self, url: str, prefix: str, timeout_s: float) -> None:
        """Reads the address; nothing is sent yet.

        Raises:
            ValueError: an address that cannot be.
        """
        if not prefix or "{" in prefix or "}" in prefix:
            raise ValueError(f"cache.prefix: {prefix!r} must not be empty or hold braces")
        self._url, self._timeout_s = url, timeout_s
        self._tag = f"{{{prefix}}}"
        self._lock = threading.Lock()
        self._closed = False
        self._clients: dict[float, Client] = {}  # by how long they may block
        if "+cluster:" not in url.partition("//")[0]:
            self._client()  # a bad address is an error now; a cluster is asked first when it is needed

    @translated
    def ping(self) -> None:
        """Returns if Redis answers."""
        if self._run("EVAL", "return 1", 0) != 1:
            raise redis.InvalidResponse("not the answer of a Redis")

    def close(self) -> None:
        """Closes all connections for good; what another thread is waiting for ends with ``redis.ConnectionError``."""
        with self._lock:
            self._closed = True
        self._drop_connections()

    # -- streams ---------------------------------------------------------------------------------------------------------------

    @translated
    def append(self, entries: Sequence[tuple[str, bytes]]) -> list[str]:
        """Adds (namespace, data) entries in one round trip; returns their ids. After an error some of them may be there."""
        options = ("MAXLEN", "~", MAX_ENTRIES, "*", "b")
        added = self._run_all([("XADD", self._key(namespace, "log"), *options, data) for namespace, data in entries])
        return [id_of(answer) for answer in added]

    @translated
    def read(self, cursors: Mapping[str, str], block_s: float, count: int) -> dict[str, list[tuple[str, bytes | None]]]:
        """Entries after the cursors, oldest first, ``count`` of each namespace at most; waits for the first one.

        Args:
            cursors: stream id by namespace; "0-0" is the beginning.
            block_s: at most ``MAX_BLOCK_S``; 0 does not wait.
            count: entries of one namespace.

        Returns:
            Only namespaces with entries: (id, data), where data is None for an entry that we did not write.
        """
        assert 0 <= block_s <= MAX_BLOCK_S, block_s
        if not cursors:
            return {}
        names = {self._key(namespace, "log"): namespace for namespace in cursors}
        block = ["BLOCK", max(1, int(block_s * 1000))] if block_s > 0 else []
        answer = self._run(
            "XREAD", "COUNT", count, *block, "STREAMS", *names, *cursors.values(), block_s=MAX_BLOCK_S if block else 0.0
        )
        found = {}
        for key, entries in answer or ():
            found[names[text_of(key)]] = [(text_of(id), (fields or {}).get(b"b")) for id, fields in entries]
        return found

    @translated
    def heads(self, namespaces: Sequence[str]) -> dict[str, Head]:
        """Where each namespace stands, in one round trip."""
        answers = self._run_all([("EVAL", scripts.HEAD, 3, *self._keys(name, "log", "snap", "epoch")) for name in namespaces])
        found = {}
        for namespace, (first, last, snapshot, epoch) in zip(namespaces, answers, strict=True):
            found[namespace] = Head(id_of(first), id_of(last), id_of(snapshot), int(epoch))
        return found

    def head(self, namespace: str) -> Head:
        """Where one namespace stands."""
        return self.heads([namespace])[namespace]

    @translated
    def time_s(self) -> float:
        """Return the time by the clock of Redis: seconds since 1970."""
        return int(self._run("EVAL", scripts.TIME, 1, f"{self._tag}:time")) / 1e6

    @translated
    def trim(self, namespace: str, before_id: str, exact: bool) -> int:
        """Removes entries older than ``before_id``; unless ``exact`` some of them may stay for a while. How many went."""
        command = ("XTRIM", self._key(namespace, "log"), "MINID", "=" if exact else "~", before_id)
        return int(self._run(*command))

    # -- snapshots -------------------------------------------------------------------------------------------------------------

    @translated
    def load_snapshot(self, namespace: str) -> tuple[str, bytes] | None:
        """The newest snapshot and the id up to which it covers the stream, None where there is none.

        Pieces that are missing are left out, so that the snapshot's checksum tells of them.
        """
        pointer = self._key(namespace, "snap")
        previous = None
        while True:
            id, name, pieces = self._run("HMGET", pointer, "id", "name", "pieces")
            if id is None:
                return None
            key = f"{pointer}:{text_of(name)}"
            parts = [self._run("HGET", key, piece) for piece in range(int(pieces))]
            if None not in parts or name == previous:
                return id_of(id), b"".join(part for part in parts if part is not None)
            previous = name  # replaced while it was read, or damaged: the second look tells

    @translated
    def save_snapshot(self, namespace: str, stream_id: str, data: bytes, epoch: int | None = None) -> bool:
        """Makes ``data`` the newest snapshot, in pieces that each take the server a moment only.

        Args:
            namespace: whose.
            stream_id: the last entry of the stream that is in it. A snapshot never replaces one of a later entry.
            data: its bytes.
            epoch: save it only if this is still the tenant's epoch: what was deleted meanwhile does not come back.

        Returns:
            False where a newer one is there or the tenant was deleted since; then nothing has changed.
        """
        pointer, name = self._key(namespace, "snap"), f"{stream_id}-{secrets.token_hex(4)}"
        key = f"{pointer}:{name}"
        pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)] or [b""]
        for number, piece in enumerate(pieces):
            self._run("HSET", key, number, piece)
            self._run("EXPIRE", key, ORPHAN_S)
        moved = self._run(
            "EVAL", scripts.POINT, 3, pointer, key, self._key(namespace, "epoch"),
            stream_id, name, len(pieces), len(data), "" if epoch is None else epoch,
        )  # fmt: skip
        return int(moved) == 1

    @translated
    def delete(self, namespace: str) -> int:
        """Forgets a tenant in one step: snapshot and stream are empty, and the epoch, which is returned, is one higher.

        It works in a Redis that is full, too. The stream keeps its last id, so that readers stay where they are.
        """
        return int(self._run("EVAL", scripts.DELETE, 3, *self._keys(namespace, "log", "snap", "epoch")))

    @translated
    def raise_epoch(self, namespace: str, epoch: int) -> int:
        """Makes the epoch at least ``epoch``: a Redis that was restarted empty must not count from 0 again. The epoch now."""
        return int(self._run("EVAL", scripts.RAISE, 1, self._key(namespace, "epoch"), epoch))

    # -- counts ----------------------------------------------------------------------------------------------------------------

    @translated
    def save_counts(self, counts: Mapping[str, Counts]) -> None:
        """Writes down how much is kept, by namespace, in one round trip."""
        self._run_all([
            ("HSET", self._key(namespace, "counts"), "texts", kept.texts, "tokens", kept.tokens, "epoch", kept.epoch)
            for namespace, kept in counts.items()
        ])  # fmt: skip

    @translated
    def load_counts(self, namespace: str) -> Counts | None:
        """What was written down last; None where nothing was."""
        found = self._run("HMGET", self._key(namespace, "counts"), "texts", "tokens", "epoch")
        return None if None in found else Counts(*map(int, found))

    # -- expiry, lease, state -------------------------------------------------------------------------------------------------

    @translated
    def keep(self, namespaces: Sequence[str], ttl_s: float) -> None:
        """Lets Redis forget namespaces for which this is not called again within ``ttl_s``, as nobody serves them any more."""
        pointers = [self._key(namespace, "snap") for namespace in namespaces]
        names = self._run_all([("HGET", pointer, "name") for pointer in pointers])
        keys = [key for namespace in namespaces for key in self._keys(namespace, "log", "snap", "epoch", "counts")]
        keys += [f"{pointer}:{text_of(name)}" for pointer, name in zip(pointers, names, strict=True) if name is not None]
        self._run_all([("EXPIRE", key, max(1, round(ttl_s))) for key in keys])

    @translated
    def acquire(self, name: str, holder: str, ttl_s: float) -> bool:
        """Takes or extends a lease: True if ``holder`` has it for the next ``ttl_s`` seconds."""
        key = f"{self._tag}:lease:{name}"
        return int(self._run("EVAL", scripts.ACQUIRE, 1, key, holder, max(1, round(ttl_s * 1000)))) == 1

    @translated
    def release(self, name: str, holder: str) -> None:
        """Gives a lease back; nothing happens if another one holds it."""
        self._run("EVAL", scripts.RELEASE, 1, f"{self._tag}:lease:{name}", holder)

    @translated
    def rewrite_files(self) -> bool:
        """Has Redis write its append-only file anew, without what is not in its memory any more.

        Returns:
            False where it is at it already, and may have begun too early; True where it has begun, or keeps no such file.
        """
        client: Any = self._client()
        nodes = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(client, RedisCluster) else {}
        told = client.execute_command("INFO", "persistence", **nodes)
        if not any(int(one["aof_enabled"]) for one in (told.values() if nodes and "aof_enabled" not in told else [told])):
            return True
        try:
            client.execute_command("BGREWRITEAOF", **nodes)
        except redis.ResponseError as error:
            if "in progress" in str(error):
                return False
            raise
        return True

    @translated
    def usage(self, namespace: str) -> RedisUsage:
        """What a namespace takes."""
        log, snap = self._keys(namespace, "log", "snap")
        return RedisUsage(
            int(self._run("XLEN", log)),
            int(self._run("MEMORY USAGE", log) or 0),
            int(self._run("HGET", snap, "bytes") or 0),
        )

    # -- connections ----------------------------------------------------------------------------------------------------------

    def _client(self, block_s: float = 0.0) -> Client:
        with self._lock:
            if self._closed:
                raise redis.ConnectionError("this store is closed")
            if block_s not in self._clients:
                self._clients[block_s] = connect(self._url, self._timeout_s, block_s)
            return self._clients[block_s]

    def _run(self, *words: Any, block_s: float = 0.0) -> Any:
        client: Any = self._client(block_s)
        return client.execute_command(*words)

    def _run_all(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """The answers to several commands in one round trip.

        The first error is raised as it is: redis-py would add the command, tokens and all, to it.
        """
        pipe: Any = self._client().pipeline(transaction=False)
        for words in commands:
            pipe.execute_command(*words)
        answers: list[Any] = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _drop_connections(self) -> None:
        """Nonsense may go on after the part that was read: the next command gets a connection of its own."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _key(self, namespace: str, kind: str) -> str:
        return f"{self._tag}:{namespace}:{kind}"

    def _keys(self, namespace: str, *kinds: str) -> list[str]:
        return [self._key(namespace, kind) for kind in kinds]
