"""A day of requests about documents has the same answers while a replica and Redis are killed."""

from __future__ import annotations

import asyncio

import pytest

from outrider.cache_service.namespace import hash_key
from outrider.experiments.bench.record import ROOT
from outrider.experiments.faults.redis_process import RedisProcess
from outrider.experiments.rag.traffic import TENANTS, Item, make_day
from outrider.experiments.rag.users import Told, api_key, users_of
from outrider.experiments.service.served import Served, served

REQUESTS = 36
TEXT = "The harbour number {} has {} piers. It was opened in {}."
ITEMS = [Item((TEXT.format(number, number + 2, 1800 + number),), ("When was it opened?",), ("a",)) for number in range(60)]


@pytest.mark.proof  # short forms: tests/cluster/service/faults/test_resume.py, tests/cluster/service/test_shared_cache.py
@pytest.mark.timeout(600)
def test_answers_equal_those_without_faults() -> None:
    day = make_day(ITEMS, REQUESTS, 0)
    keys = [f'tenancy.tenants.{name}.keys=["{hash_key(api_key(name))}"]' for name in (*TENANTS, "warm-up")]
    replicas = ["model.threads=1", "server.replicas=2", "server.cpus_per_replica=0.5"]

    async def play(server: Served, redis: RedisProcess) -> list[dict[str, Told]]:
        done = 0

        def strike(text: str) -> None:
            nonlocal done
            done += 1
            if done == REQUESTS // 3:
                server.processes("ray::ServeReplica:outrider:engine")[0].kill()
            elif done == 2 * REQUESTS // 3:
                redis.kill()

        async with users_of(server.url, "demo_model", 24, True, 4) as users:
            calm, _ = await users.play(day, 3, 0.0, lambda text: None)
            struck, _ = await users.play(day, 3, 0.0, strike)
        assert done == REQUESTS
        return [calm, struck]

    with RedisProcess() as redis, served(str(ROOT / "demo_model"), [*replicas, f"redis_url={redis.url}", *keys]) as server:
        calm, struck = asyncio.run(play(server, redis))
    assert [one.error for one in struck.values()] == [None] * REQUESTS
    assert {key: one.text for key, one in struck.items()} == {key: one.text for key, one in calm.items()}
    assert sum(len(one.text) for one in calm.values()) > REQUESTS
