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

What a user of Redis must be allowed for it: ``cache_service/store/acl.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.cluster import RedisCluster

from cache_service.store import scripts
from cache_service.store.redis_link import RedisLink, answers_of, translated
from cache_service.store.stream_ids import id_of, text_of

MAX_ENTRIES = 100_000  # of a stream, should nobody trim it
MAX_BLOCK_S = 0.5  # longest wait of one read; a server that is silent for that and the timeout is away
CHUNK_BYTES = 1 << 20  # of a snapshot: longer values hold up the server's one thread
ORPHAN_S = 3600  # pieces of a snapshot that was never finished go after that


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


class RedisStore(RedisLink):
    """Streams and snapshots of tenants. Safe to use from several threads; a method is one or a few round trips.

    Every method raises ``redis.RedisError`` or ``OSError`` where Redis is away, slow, full, refuses or answers nonsense, and
    nothing is tried twice: what to do then is the caller's to say.
    """

    # -- streams ---------------------------------------------------------------------------------------------------------------

    @translated
    def append(self, entries: Sequence[tuple[str, bytes]]) -> list[str]:
        """Adds (namespace, data) entries in one round trip; returns their ids. After an error some of them may be there."""
        pipe = self._client().pipeline(transaction=False)
        for namespace, data in entries:
            pipe.execute_command("XADD", self._key(namespace, "log"), "MAXLEN", "~", MAX_ENTRIES, "*", "b", data)
        return [id_of(answer) for answer in answers_of(pipe)]

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
        pipe = self._client().pipeline(transaction=False)
        for namespace in namespaces:
            pipe.execute_command("EVAL", scripts.HEAD, 3, *self._keys(namespace, "log", "snap", "epoch"))
        found = {}
        for namespace, (first, last, snapshot, epoch) in zip(namespaces, answers_of(pipe), strict=True):
            found[namespace] = Head(id_of(first), id_of(last), id_of(snapshot), int(epoch))
        return found

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
        pipe = self._client().pipeline(transaction=False)
        for namespace, kept in counts.items():
            key = self._key(namespace, "counts")
            pipe.execute_command("HSET", key, "texts", kept.texts, "tokens", kept.tokens, "epoch", kept.epoch)
        answers_of(pipe)

    @translated
    def load_counts(self, namespace: str) -> Counts | None:
        """What was written down last; None where nothing was."""
        found = self._run("HMGET", self._key(namespace, "counts"), "texts", "tokens", "epoch")
        return None if None in found else Counts(*map(int, found))

    # -- expiry, lease, state -------------------------------------------------------------------------------------------------

    @translated
    def keep(self, namespaces: Sequence[str], ttl_s: float) -> None:
        """Lets Redis forget namespaces for which this is not called again within ``ttl_s``, as nobody serves them any more."""
        client = self._client()
        pointers = [self._key(namespace, "snap") for namespace in namespaces]
        names = client.pipeline(transaction=False)
        for pointer in pointers:
            names.execute_command("HGET", pointer, "name")
        pipe = client.pipeline(transaction=False)
        for namespace, pointer, name in zip(namespaces, pointers, answers_of(names), strict=True):
            keys = [
                pointer,
                *self._keys(namespace, "log", "epoch", "counts"),
                *([] if name is None else [f"{pointer}:{text_of(name)}"]),
            ]
            for key in keys:
                pipe.execute_command("EXPIRE", key, max(1, round(ttl_s)))
        answers_of(pipe)

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
