"""The memory of a cluster in a real Redis: what replicas write to it, what is there, and services and cache clients over it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import redis

from outrider.cache_service.access import CacheAccess
from outrider.cache_service.client import cache_client
from outrider.cache_service.client.cache_client import CacheClient
from outrider.cache_service.namespace import Identity
from outrider.cache_service.records import CacheDelta, TextBatch, encode_batch
from outrider.cache_service.server import cache_server
from outrider.cache_service.server.admin import CacheAdmin
from outrider.cache_service.server.cache_server import CacheServer
from outrider.cache_service.server.snapshot import Snapshot, SnapshotText, TextTable, decode_snapshot, encode_snapshot
from outrider.configs.slices import CacheOptions
from outrider.decoding.sources.history import Histories, History
from outrider.decoding.sources.text_keys import request_hash, text_key

SECRET = b"of the tests"
IDENTITY = Identity("a1", "b2", 5000)
DAMAGED = ("5-5", b"nonsense")  # a snapshot
_TIMES = (
    (cache_server, "SNAPSHOT_S", 0.05), (cache_server, "LEASE_S", 0.6), (cache_server, "RETRY_S", 0.1),
    (cache_client, "FLUSH_S", 0.001), (cache_client, "RETRY_S", 0.1),
)  # fmt: skip
Texts = dict[int, tuple[list[int], bool]]  # by text key: tokens, and whether the text ends with them


def shorten_times(patch: pytest.MonkeyPatch) -> None:
    """Sets the delays of services and mirrors to fractions of a second."""
    for module, name, seconds in _TIMES:
        patch.setattr(module, name, seconds)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, IDENTITY.vocab_size, count).tolist()


def delta(text: int, offset: int, tokens: Sequence[int], final: bool = False) -> CacheDelta:
    return CacheDelta(text, offset, np.array(tokens, np.int32), final)


def expected(texts: Mapping[str, Sequence[int]]) -> Texts:
    """Whole texts, by name."""
    return {text_key(name): (list(text), True) for name, text in texts.items()}


def as_dict(texts: TextTable | Sequence[SnapshotText]) -> Texts:
    return {text.text: (text.tokens.tolist(), text.final) for text in texts}


def contents(history: History) -> list[list[int]]:
    """The texts in a history's log."""
    owners = {number for number in history.log.arrays.owners.tolist() if number >= 0}
    return sorted(text.tolist() for text in map(history.log.tokens_of, owners) if len(text))


class Replica:
    """A cache client, and the thread that would be the engine's."""

    def __init__(self, access: CacheAccess, identity: Identity = IDENTITY) -> None:
        self.memory, self.woken = Histories(100_000), 0
        self.cache_client = CacheClient(access, identity, self.memory, self._wake)
        self.cache_client.start(access.options.start_timeout_s)

    def _wake(self) -> None:
        self.woken += 1

    def write(self, tenant: str, text: int, offset: int, tokens: Sequence[int], final: bool = False) -> None:
        """As an engine does: into its own history, and out."""
        self.history(tenant).extend(text, offset, tokens, final)
        self.cache_client.publish(tenant, text, offset, tokens, final)

    def history(self, tenant: str) -> History:
        history = self.memory.of(tenant)
        assert history is not None
        return history

    def texts(self, tenant: str) -> list[list[int]]:
        """What can be drafted from, once what has arrived is applied."""
        while self.cache_client.apply():
            pass
        return contents(self.history(tenant))

    def knows(self, tenant: str, *texts: Sequence[int]) -> bool:
        """Whether these texts, and nothing else, can be drafted from."""
        return self.texts(tenant) == sorted(list(text) for text in texts)


class Cluster:
    """A prefix of its own in one Redis. ``close`` ends what was started over it."""

    def __init__(self, url: str, tenants: Sequence[str] = ("acme", "umbra"), **options: object) -> None:
        made = CacheOptions(**{"prefix": f"t{secrets.token_hex(4)}", "start_timeout_s": 5.0} | options)  # type: ignore[arg-type]
        self.access = CacheAccess(made, url, SECRET, tuple(tenants))
        self.url, self.prefix = url, made.prefix
        self.store, self.admin = self.access.store(), CacheAdmin(self.access, IDENTITY)
        self.servers: list[CacheServer] = []
        self.replicas: list[Replica] = []
        self._sequence = 0

    def server(self, quotas: Mapping[str, int] | None = None, tenants: Sequence[str] | None = None) -> CacheServer:
        """One more service, of all tenants or of some."""
        access = self.access if tenants is None else replace(self.access, tenants=tuple(tenants))
        self.servers.append(CacheServer(access, IDENTITY, quotas or {}))
        self.servers[-1].start()
        return self.servers[-1]

    def replica(self, identity: Identity = IDENTITY, **changes: object) -> Replica:
        """One more, with other access where something is to change."""
        self.replicas.append(Replica(replace(self.access, **changes), identity))  # type: ignore[arg-type]
        return self.replicas[-1]

    def name(self, tenant: str = "acme") -> str:
        return self.access.of_tenant(tenant, IDENTITY)[tenant]

    def key(self, tenant: str = "acme") -> str:
        """Of the tenant's stream in Redis."""
        return f"{{{self.prefix}}}:{self.name(tenant)}:log"

    def add(self, tenant: str, batch: TextBatch) -> str:
        """Writes an entry; its id."""
        return self.store.append([(self.name(tenant), encode_batch(batch, IDENTITY.vocab_size))])[0]

    def say(
        self, texts: Mapping[str, Sequence[int]] = {}, tenant: str = "acme", epoch: int = 0, removed: Sequence[str] = (),
        final: bool = True,
    ) -> str:  # fmt: skip
        """Writes texts and deletions of requests, as one replica; the entry's id."""
        deltas = tuple(delta(text_key(name), 0, text, final) for name, text in texts.items())
        self._sequence += 1
        return self.add(tenant, TextBatch(7, self._sequence - 1, epoch, deltas, tuple(map(request_hash, removed))))

    def save(self, tenant: str, id: str, texts: Mapping[int, Sequence[int]]) -> None:
        """Stores a snapshot up to an entry."""
        kept = [SnapshotText(key, np.array(tokens, np.int32), True, time.time()) for key, tokens in texts.items()]
        snapshot = Snapshot(id, 0, IDENTITY.vocab_size, IDENTITY.tokenizer_revision, time.time(), kept)
        assert self.store.save_snapshot(self.name(tenant), id, encode_snapshot(snapshot))

    def head_id(self, tenant: str = "acme") -> str:
        """Of the stream's last entry."""
        return self.store.head(self.name(tenant)).last_id

    def snapshot(self, tenant: str = "acme") -> Texts:
        """What the stored snapshot holds; nothing where there is none, or a damaged one."""
        stored = self.store.load_snapshot(self.name(tenant))
        return {} if stored is None or stored == DAMAGED else as_dict(decode_snapshot(stored[1]).texts)

    def now(self, tenant: str = "acme") -> Texts:
        """What a replica that starts now would load: snapshot and stream."""
        return as_dict(decode_snapshot(self.admin.export(tenant)).texts)

    def entries(self, tenant: str = "acme") -> list[bytes]:
        found = self.store.read({self.name(tenant): "0-0"}, 0.0, 10_000).get(self.name(tenant), [])
        return [data or b"" for _, data in found]

    def holds(self, text: Sequence[int]) -> bool:
        """Whether the bytes of these tokens are anywhere in Redis, as far as it is this cluster's."""
        packed = np.array(text, "<u2").tobytes()
        with redis.Redis.from_url(self.url) as client:
            client.config_set("rdbcompression", "no")
            return any(packed in (client.dump(key) or b"") for key in client.scan_iter(f"*{self.prefix}*"))

    def close(self) -> None:
        for replica in self.replicas:
            replica.cache_client.close(0.5)
        for server in self.servers:
            server.stop()
        self.admin.close()
        self.store.close()
