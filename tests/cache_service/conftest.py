"""A real Redis for the tests of a file, empty for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from cache_service.store.embedded import EmbeddedRedis
from cache_service.store.redis_store import RedisStore
from experiments.redis_process import RedisProcess


@pytest.fixture(scope="module")
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


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    """A server of the test's own, which may be killed and started again."""
    with RedisProcess() as process:
        yield process
