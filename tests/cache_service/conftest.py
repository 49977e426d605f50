"""A real Redis for all tests: empty for those that look into it as a whole, a prefix each for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from outrider.cache_service.server import cache_server
from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cache_service.store.redis_store import RedisStore
from outrider.experiments.faults.redis_process import RedisProcess
from tests.helpers.shared_memory import Cluster, shorten_times


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedRedis]:
    """The server, which nobody stops."""
    with EmbeddedRedis.start() as embedded:
        yield embedded


@pytest.fixture
def raw(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A client of it, which finds nothing in it and no limit."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.config_set("maxmemory", 0)
        yield client


@pytest.fixture
def store(server: EmbeddedRedis, raw: redis.Redis) -> Iterator[RedisStore]:
    """The store on it."""
    opened = RedisStore(server.url, "outrider", 2.0)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short delays, for all tests."""
    shorten_times(monkeypatch)


@pytest.fixture
def rare_snapshots(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are written after a minute, if nothing else demands one."""
    monkeypatch.setattr(cache_server, "SNAPSHOT_S", 60.0)


@pytest.fixture
def make(server: EmbeddedRedis) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, of that server where no other address is given."""
    made: list[Cluster] = []

    def build(url: str = server.url, **options: object) -> Cluster:
        made.append(Cluster(url, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(make: Callable[..., Cluster]) -> Cluster:
    """A cluster on that server."""
    return make()


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    """A server of the test's own, which may be killed and started again."""
    with RedisProcess() as process:
        yield process
