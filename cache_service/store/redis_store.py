"""Streams, snapshots and leases in Redis: all commands that Outrider sends, and all keys that it uses.

All keys have the hash tag ``{PREFIX}``, so that a cluster keeps them in one slot and a script may use several of them:

=============================  ======  =========================================================================================
``{PREFIX}:NAMESPACE:log``     stream  one batch of records per entry, in the field ``b``
``{PREFIX}:NAMESPACE:snap``    hash    the newest snapshot: id in the stream up to which it goes, name, number of pieces, bytes
``{PREFIX}:NAMESPACE:snap:N``  hash    the pieces of the snapshot named N, of 1 MiB
``{PREFIX}:NAMESPACE:epoch``   string  number of deletions of the tenant
``{PREFIX}:NAMESPACE:counts``  hash    texts and tokens as counted last by the service, and the epoch
``{PREFIX}:lease:NAME``        string  holder of the lease
=============================  ======  =========================================================================================

Required Redis permissions: ``docs/sharing.md``.
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

from outrider.cache_service.store.addresses import Client, connect
from outrider.cache_service.store.stream_ids import id_of, text_of

MAX_ENTRIES = 100_000  # per stream, if no service trims it
MAX_BLOCK_S = 0.5  # longest blocking read; a server silent for this plus the timeout counts as down
CHUNK_BYTES = 1 << 20  # snapshot piece: longer values block the server's only thread
ORPHAN_S = 3600  # expiry of the pieces of an unfinished snapshot

_COMPARE = """
local function parts(id) return string.match(id, '^(%d+)-(%d+)$') end
local function before(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
local function older(a, b)
  local am, as = parts(a)
  local bm, bs = parts(b)
  if am ~= bm then return before(am, bm) end
  return before(as, bs)
end
"""
# KEYS: log, snap, epoch. Returns ids only; XINFO or XRANGE would also transfer the entries.
_HEAD_SCRIPT = """
local first, last = '0-0', '0-0'
if redis.call('EXISTS', KEYS[1]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
    if info[i] == 'first-entry' and info[i + 1] then first = info[i + 1][1] end
  end
end
return {first, last, redis.call('HGET', KEYS[2], 'id') or '0-0', redis.call('GET', KEYS[3]) or '0'}
"""
# KEYS: snap, its pieces, epoch. ARGV: stream id, name, pieces, bytes, epoch or ''. Returns 1 if it is the newest now.
_POINT_SCRIPT = (
    _COMPARE
    + """
local old = redis.call('HMGET', KEYS[1], 'id', 'name')
local late = old[1] and older(ARGV[1], old[1])
local dead = ARGV[5] ~= '' and (redis.call('GET', KEYS[3]) or '0') ~= ARGV[5]
if late or dead or redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('UNLINK', KEYS[2])
  return 0
end
if old[2] then redis.call('UNLINK', KEYS[1] .. ':' .. old[2]) end
redis.call('PERSIST', KEYS[2])
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'name', ARGV[2], 'pieces', ARGV[3], 'bytes', ARGV[4])
return 1
"""
)
# KEYS: log, snap, epoch. Memory is freed first: then a full Redis lets the script finish.
_DELETE_SCRIPT = """
local old = redis.call('HGET', KEYS[2], 'name')
if old then redis.call('UNLINK', KEYS[2] .. ':' .. old) end
redis.call('UNLINK', KEYS[2])
redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
return redis.call('INCR', KEYS[3])
"""
# KEYS: epoch. ARGV: lower bound.
_RAISE_SCRIPT = """
local now = tonumber(redis.call('GET', KEYS[1]) or '0')
if now >= tonumber(ARGV[1]) then return now end
redis.call('SET', KEYS[1], ARGV[1])
return tonumber(ARGV[1])
"""
# KEYS: any of ours, so that a cluster asks the server that dates the entries. Microseconds since 1970; TIME needs a permission.
_TIME_SCRIPT = "return string.match(redis.call('INFO', 'server'), 'server_time_usec:(%d+)')"
# KEYS: lease. ARGV: holder, milliseconds.
_ACQUIRE_SCRIPT = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE_SCRIPT = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Head:
    """Range of a namespace's stream, its newest snapshot, and its number of deletions."""

    first_id: str  # oldest remaining entry; "0-0" without one
    last_id: str  # newest entry ever added; "0-0" in a Redis without any
    snapshot_id: str  # "0-0": no snapshot
    epoch: int


@dataclass(frozen=True, slots=True)
class RedisUsage:
    """Use of Redis by a namespace."""

    stream_entries: int
    stream_bytes: int  # as Redis estimates it
    snapshot_bytes: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of texts and tokens of a namespace, as counted by the service."""

    texts: int
    tokens: int
    epoch: int


def translated(method: Callable[Concatenate[RedisStore, _P], _R]) -> Callable[Concatenate[RedisStore, _P], _R]:
    """Translate other exceptions of the client library to ``RedisError``."""

    @functools.wraps(method)
    def wrapped(store: RedisStore, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(store, *args, **kwargs)
        except RedisClusterException as error:  # not a subclass of RedisError: no node of the cluster answers
            raise redis.ConnectionError(f"cluster: {error}") from error
        except MasterNotFoundError as error:  # its message lists all connection settings
            raise redis.ConnectionError("no sentinel answers, or none knows a master of that name") from error
        except redis.InvalidResponse:
            store._drop_connections()
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # an invalid reply
            store._drop_connections()
            raise redis.InvalidResponse(f"not the answer of a Redis: {type(error).__name__}") from error

    return wrapped


class RedisStore:
    """Client of one Redis. Thread-safe, without retries. Raises ``redis.RedisError`` or ``OSError`` for any failure of Redis."""

    def __init__(self, url: str, prefix: str, timeout_s: float) -> None:
        """Parse the address without connecting. Raises ``ValueError`` if it is invalid."""
        if not prefix or "{" in prefix or "}" in prefix:
            raise ValueError(f"cache.prefix: {prefix!r} must not be empty or hold braces")
        self._url, self._timeout_s = url, timeout_s
        self._tag = f"{{{prefix}}}"
        self._lock = threading.Lock()
        self._closed = False
        self._clients: dict[float, Client] = {}  # by the longest blocking time
        if "+cluster:" not in url.partition("//")[0]:
            self._client()  # validates the address; a cluster would be contacted here

    @translated
    def ping(self) -> None:
        """Check that Redis answers."""
        if self._run("EVAL", "return 1", 0) != 1:
            raise redis.InvalidResponse("not the answer of a Redis")

    def close(self) -> None:
        """Close all connections permanently; pending calls of other threads raise ``redis.ConnectionError``."""
        with self._lock:
            self._closed = True
        self._drop_connections()

    # -- streams ---------------------------------------------------------------------------------------------------------------

    @translated
    def append(self, entries: Sequence[tuple[str, bytes]]) -> list[str]:
        """Add (namespace, data) entries in one round trip. Return their ids. After an error some may be stored."""
        options = ("MAXLEN", "~", MAX_ENTRIES, "*", "b")
        added = self._run_all([("XADD", self._key(namespace, "log"), *options, data) for namespace, data in entries])
        return [id_of(answer) for answer in added]

    @translated
    def read(self, cursors: Mapping[str, str], block_s: float, count: int) -> dict[str, list[tuple[str, bytes | None]]]:
        """Return (id, data) entries after the cursors by namespace, oldest first, ``count`` each; wait at most ``block_s``."""
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
            # Data is None for an entry without our field.
            found[names[text_of(key)]] = [(text_of(id), (fields or {}).get(b"b")) for id, fields in entries]
        return found

    @translated
    def heads(self, namespaces: Sequence[str]) -> dict[str, Head]:
        """Return the head of each namespace, in one round trip."""
        answers = self._run_all([("EVAL", _HEAD_SCRIPT, 3, *self._keys(name, "log", "snap", "epoch")) for name in namespaces])
        found = {}
        for namespace, (first, last, snapshot, epoch) in zip(namespaces, answers, strict=True):
            found[namespace] = Head(id_of(first), id_of(last), id_of(snapshot), int(epoch))
        return found

    def head(self, namespace: str) -> Head:
        """Return the head of one namespace."""
        return self.heads([namespace])[namespace]

    @translated
    def time_s(self) -> float:
        """Return the time of Redis, in seconds since 1970."""
        return int(self._run("EVAL", _TIME_SCRIPT, 1, f"{self._tag}:time")) / 1e6

    @translated
    def trim(self, namespace: str, before_id: str, exact: bool) -> int:
        """Remove entries older than ``before_id`` (some may stay unless ``exact``). Return the number removed."""
        command = ("XTRIM", self._key(namespace, "log"), "MINID", "=" if exact else "~", before_id)
        return int(self._run(*command))

    # -- snapshots -------------------------------------------------------------------------------------------------------------

    @translated
    def load_snapshot(self, namespace: str) -> tuple[str, bytes] | None:
        """Return the newest snapshot as (stream id up to which it goes, data); None without one."""
        pointer = self._key(namespace, "snap")
        previous = None
        while True:
            id, name, pieces = self._run("HMGET", pointer, "id", "name", "pieces")
            if id is None:
                return None
            key = f"{pointer}:{text_of(name)}"
            parts = [self._run("HGET", key, piece) for piece in range(int(pieces))]
            # Missing pieces are skipped: the snapshot's checksum detects them.
            if None not in parts or name == previous:
                return id_of(id), b"".join(part for part in parts if part is not None)
            previous = name  # replaced during the read, or damaged: read again to find out

    @translated
    def save_snapshot(self, namespace: str, stream_id: str, data: bytes, epoch: int | None = None) -> bool:
        """Store ``data``, up to ``stream_id``, as the newest snapshot. Return False if a newer one or another epoch exists."""
        # In pieces, which block the server only briefly. Another epoch: the tenant was deleted, and its texts must not return.
        pointer, name = self._key(namespace, "snap"), f"{stream_id}-{secrets.token_hex(4)}"
        key = f"{pointer}:{name}"
        pieces = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)] or [b""]
        for number, piece in enumerate(pieces):
            self._run("HSET", key, number, piece)
            self._run("EXPIRE", key, ORPHAN_S)
        moved = self._run(
            "EVAL", _POINT_SCRIPT, 3, pointer, key, self._key(namespace, "epoch"),
            stream_id, name, len(pieces), len(data), "" if epoch is None else epoch,
        )  # fmt: skip
        return int(moved) == 1

    @translated
    def delete(self, namespace: str) -> int:
        """Delete a tenant's snapshot and stream entries atomically, also in a full Redis. Return the increased epoch."""
        # The stream keeps its last id, so readers keep their positions.
        return int(self._run("EVAL", _DELETE_SCRIPT, 3, *self._keys(namespace, "log", "snap", "epoch")))

    @translated
    def raise_epoch(self, namespace: str, epoch: int) -> int:
        """Raise the epoch to at least ``epoch`` and return it."""
        # A Redis that restarted empty must not count deletions from 0 again.
        return int(self._run("EVAL", _RAISE_SCRIPT, 1, self._key(namespace, "epoch"), epoch))

    # -- counts ----------------------------------------------------------------------------------------------------------------

    @translated
    def save_counts(self, counts: Mapping[str, Counts]) -> None:
        """Store the counts of namespaces in one round trip."""
        self._run_all([
            ("HSET", self._key(namespace, "counts"), "texts", kept.texts, "tokens", kept.tokens, "epoch", kept.epoch)
            for namespace, kept in counts.items()
        ])  # fmt: skip

    @translated
    def load_counts(self, namespace: str) -> Counts | None:
        """Return the stored counts, or None."""
        found = self._run("HMGET", self._key(namespace, "counts"), "texts", "tokens", "epoch")
        return None if None in found else Counts(*map(int, found))

    # -- expiry, lease, state -------------------------------------------------------------------------------------------------

    @translated
    def keep(self, namespaces: Sequence[str], ttl_s: float) -> None:
        """Renew the expiry of namespaces. Redis deletes those not renewed within ``ttl_s``: they have no service any more."""
        pointers = [self._key(namespace, "snap") for namespace in namespaces]
        names = self._run_all([("HGET", pointer, "name") for pointer in pointers])
        keys = [key for namespace in namespaces for key in self._keys(namespace, "log", "snap", "epoch", "counts")]
        keys += [f"{pointer}:{text_of(name)}" for pointer, name in zip(pointers, names, strict=True) if name is not None]
        self._run_all([("EXPIRE", key, max(1, round(ttl_s))) for key in keys])

    @translated
    def acquire(self, name: str, holder: str, ttl_s: float) -> bool:
        """Acquire or extend a lease. Return True if ``holder`` has it for the next ``ttl_s`` seconds."""
        key = f"{self._tag}:lease:{name}"
        return int(self._run("EVAL", _ACQUIRE_SCRIPT, 1, key, holder, max(1, round(ttl_s * 1000)))) == 1

    @translated
    def release(self, name: str, holder: str) -> None:
        """Release a lease if ``holder`` has it."""
        self._run("EVAL", _RELEASE_SCRIPT, 1, f"{self._tag}:lease:{name}", holder)

    @translated
    def rewrite_files(self) -> bool:
        """Start a rewrite of Redis' append-only file, to remove deleted data. Return False if one is already running."""
        client: Any = self._client()
        nodes = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(client, RedisCluster) else {}
        persistence = client.execute_command("INFO", "persistence", **nodes)
        replies = persistence.values() if nodes and "aof_enabled" not in persistence else [persistence]
        if not any(int(one["aof_enabled"]) for one in replies):
            return True
        try:
            client.execute_command("BGREWRITEAOF", **nodes)
        except redis.ResponseError as error:
            # The running rewrite may have begun too early.
            if "in progress" in str(error):
                return False
            raise
        return True

    @translated
    def usage(self, namespace: str) -> RedisUsage:
        """Return the size of a namespace in Redis."""
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
        """Return the replies to several commands in one round trip. Raise the first error."""
        pipe: Any = self._client().pipeline(transaction=False)
        for words in commands:
            pipe.execute_command(*words)
        # Not raised by redis-py, which would add the command with all tokens to the message.
        answers: list[Any] = pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _drop_connections(self) -> None:
        """Close all connections: the rest of an invalid reply may follow, so the next command needs a new one."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _key(self, namespace: str, kind: str) -> str:
        return f"{self._tag}:{namespace}:{kind}"

    def _keys(self, namespace: str, *kinds: str) -> list[str]:
        return [self._key(namespace, kind) for kind in kinds]
