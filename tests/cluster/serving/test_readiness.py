"""``/ready`` waits for everything that is configured, and for Redis never."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from fastapi import Request

from outrider.actors.description import Description
from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cluster.http.errors import ApiError
from outrider.cluster.serving.generation import EnginePort
from outrider.cluster.serving.health import HealthService
from tests.cluster.memory import LocalCacheAdmin

ASKING = Request({"type": "http", "headers": []})


def missing(readiness: HealthService) -> str:
    """What ``/ready`` says is missing."""
    with pytest.raises(ApiError) as caught:
        asyncio.run(readiness.replicas())
    error = caught.value
    assert (error.status, error.code, error.headers) == (503, "not_ready", {"Retry-After": "1"})
    return error.message.removesuffix(": try again later")


def test_all_has_to_have_been_there_once(circle_engine: EnginePort) -> None:
    described: Description = asyncio.run(circle_engine.describe())[0]
    engines: list[Description] = [described]
    baseline: list[Description] = []

    async def replicas() -> list[Description]:
        return engines

    async def others() -> list[Description]:
        return baseline

    readiness = HealthService(replicas, 2, None, others)
    assert missing(readiness) == "1 of 2 engine replicas are answering, no baseline replica is answering"
    engines.append(described)
    assert missing(readiness) == "no baseline replica is answering"
    baseline.append(described)
    assert asyncio.run(readiness.replicas()) == 2
    engines.pop()
    baseline.clear()
    assert asyncio.run(readiness.replicas()) == 1  # the other one answers
    engines.clear()
    assert missing(readiness) == "0 of 2 engine replicas are answering"


def test_where_there_may_be_no_engine_one_has_to_have_been_there(circle_engine: EnginePort) -> None:
    engines: list[Description] = []
    woken: list[bool] = []

    async def replicas() -> list[Description]:
        return engines

    readiness = HealthService(replicas, 0, wake=lambda: woken.append(True))
    assert missing(readiness) == "0 of 1 engine replicas are answering" and woken == [True]
    with pytest.raises(ApiError, match="no engine replica is answering"):
        asyncio.run(readiness.health(ASKING))
    engines += asyncio.run(circle_engine.describe())
    assert asyncio.run(readiness.replicas()) == 1
    info = engines.pop().info
    assert asyncio.run(readiness.replicas()) == 0 and woken == [True]
    assert json.loads(bytes(asyncio.run(readiness.health(ASKING)).body))["status"] == "idle"
    assert asyncio.run(readiness.info()) == info


def test_the_shortest_context_of_all_replicas_is_served(circle_engine: EnginePort, caplog: pytest.LogCaptureFixture) -> None:
    described: Description = asyncio.run(circle_engine.describe())[0]
    engines: list[Description] = []

    async def replicas() -> list[Description]:
        return engines

    def holds(*lengths: int) -> int:
        infos = [dataclasses.replace(described.info, max_model_len=length) for length in lengths]
        engines[:] = [dataclasses.replace(described, info=info) for info in infos]
        assert asyncio.run(readiness.replicas()) == len(lengths)
        return asyncio.run(readiness.info()).max_model_len

    readiness = HealthService(replicas, 1)
    assert holds(32768, 32768) == 32768 and not caplog.records
    assert holds(32768, 16384) == 16384
    (line,) = caplog.records
    assert "16384" in line.getMessage() and "32768" in line.getMessage()
    assert holds(32768) == 16384  # while the other one is silent: it may get requests all the same
    assert holds(16384, 16384) == 16384 and caplog.records == [line]
    assert asyncio.run(readiness.info()) == dataclasses.replace(described.info, max_model_len=16384)


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_cache_service_is_waited_for_and_redis_is_not(circle_engine: EnginePort, is_lost: bool) -> None:
    with EmbeddedRedis.start() as redis:
        cache = LocalCacheAdmin(redis.url)
        if not is_lost:
            assert asyncio.run(HealthService(circle_engine.describe, 1, cache).replicas()) == 1
    if is_lost:
        assert asyncio.run(HealthService(circle_engine.describe, 1, cache).replicas()) == 1
