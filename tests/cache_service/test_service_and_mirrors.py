"""A service, an operator and two mirrors over one real Redis: all of them know the same texts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from cache_service.keeper.admin import CacheAdmin
from cache_service.keeper.server import CacheServer
from cache_service.keeper.snapshot import decode_snapshot
from cache_service.mirror.mirror import Mirror
from cache_service.namespace import Identity
from cache_service.store.embedded import EmbeddedRedis
from configs.slices import CacheOptions
from decoding.request import text_key
from decoding.sources.history import Histories
from tests.waiting import wait_for

SECRET = b"of the tests"
IDENTITY = Identity("a1", "b2", 5000)


class Cluster:
    """The service and two replicas, of which the second writes nothing."""

    def __init__(self, url: str) -> None:
        self.options = CacheOptions(
            prefix=f"t{secrets.token_hex(4)}", snapshot_s=0.05, lease_s=0.6, retry_s=0.1, flush_s=0.001, ttl_s=3600.0
        )
        self.admin = CacheAdmin(self.options, url, SECRET, IDENTITY, ["acme"])
        self.server = CacheServer(self.options, url, SECRET, IDENTITY, ["acme"], {"acme": 4000})
        self.server.start()
        self.url = url
        self.replicas: list[tuple[Mirror, Histories]] = []
        self.writer, self.reader = self.replica(), self.replica()

    def replica(self) -> tuple[Mirror, Histories]:
        memory = Histories(100_000)
        mirror = Mirror(self.options, self.url, SECRET, IDENTITY, ["acme"], memory, lambda: None)
        mirror.start(5.0)
        self.replicas.append((mirror, memory))
        return self.replicas[-1]

    def write(self, name: str, text: Sequence[int]) -> None:
        mirror, memory = self.writer
        history = memory.of("acme")
        assert history is not None
        half = len(text) // 2
        for at, part, final in ((0, text[:half], False), (half, text[half:], True)):
            history.extend(text_key(name), at, part, final)
            mirror.publish("acme", text_key(name), at, part, final)

    def agree(self, texts: dict[str, list[int]]) -> bool:
        """Whether operator, service and every mirror know these texts and no others."""
        kept = {text.text: text.tokens.tolist() for text in decode_snapshot(self.admin.export("acme")).texts}
        return (
            kept == {text_key(name): text for name, text in texts.items()}
            and self.server.status().texts == len(texts)
            and all(known(*replica) == sorted(kept.values()) for replica in self.replicas)
        )

    def close(self) -> None:
        for mirror, _ in self.replicas:
            mirror.close()
        self.server.stop()
        self.admin.close()


def known(mirror: Mirror, memory: Histories) -> list[list[int]]:
    """The texts that a replica can draft from."""
    while mirror.apply():
        pass
    history = memory.of("acme")
    assert history is not None
    texts = [history.log.tokens_of(number).tolist() for number in set(history.log.arrays.owners.tolist()) if number >= 0]
    return sorted(text for text in texts if text)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with EmbeddedRedis.start() as server:
        made = Cluster(server.url)
        yield made
        made.close()


def test_all_know_the_same_through_deletion_and_eviction(cluster: Cluster) -> None:
    random = np.random.default_rng(5)
    texts = {f"r{index}": random.integers(0, 5000, 20).tolist() for index in range(60)}
    for name, text in texts.items():
        cluster.write(name, text)
    assert wait_for(lambda: cluster.agree(texts))
    cluster.admin.delete_request("acme", "r7")
    del texts["r7"]
    assert wait_for(lambda: cluster.agree(texts))
    cluster.replica()  # one that starts later
    assert cluster.agree(texts)
    for index in range(60, 140):  # beyond the quota of 2000 tokens
        texts[f"r{index}"] = random.integers(0, 5000, 20).tolist()
        cluster.write(f"r{index}", texts[f"r{index}"])
    assert wait_for(lambda: cluster.server.status().evicted_texts > 0 and cluster.server.status().tokens <= 2000)

    def left() -> dict[str, list[int]]:
        kept = {text.text for text in decode_snapshot(cluster.admin.export("acme")).texts}
        return {name: text for name, text in texts.items() if text_key(name) in kept}

    assert wait_for(lambda: cluster.agree(left()))
    assert 80 <= len(left()) <= 100
    cluster.admin.delete_tenant("acme")
    assert wait_for(lambda: cluster.agree({}))
    cluster.write("r150", [1, 2, 3, 4])
    assert wait_for(lambda: cluster.agree({"r150": [1, 2, 3, 4]}))
