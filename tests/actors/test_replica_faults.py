"""Redis killed, paused or full while replicas stream: every output is right, and sharing comes back by itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.cache_access import CacheAccess
from actors.replica import Replica
from cache_service.mirror.mirror import MirrorCounts
from configs.slices import CacheOptions, EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import Request, SamplingParams, SpecStats
from experiments.redis_process import RedisProcess
from tests import waiting
from tests.models import llama_config, save_model

PROMPTS, TOKENS = 25, 48  # each prompt goes to both replicas: 50 requests
FIRST = 10  # token of the first prompt; the others count on from it
ENGINE = EngineOptions(max_running=4)
AUTO = SpeculationOptions(strategy="auto", max_draft_tokens=16, options={"all_rows": True})
OPTIONS = CacheOptions(flush_s=0.005, timeout_s=0.2, retry_s=0.1)
FAULTS: dict[str, tuple[Callable[[RedisProcess], None], Callable[[RedisProcess], None], str]] = {
    "killed": (RedisProcess.kill, RedisProcess.start, "connection"),
    "paused": (RedisProcess.pause, RedisProcess.resume, "timeout"),
    "full": (RedisProcess.fill, RedisProcess.make_room, "full"),
}


eventually = functools.partial(waiting.eventually, timeout_s=30.0)


def request(name: str, first: int, tenant: str) -> Request:
    prompt = [first, 6, 7, first, 6]
    return Request(name, prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True), tenant=tenant)


async def stream(replica: Replica, asked: Request, on_tokens: Callable[[int], None] = lambda number: None) -> SpecStats:
    """Reads an answer to its end; ``asked`` holds it then."""
    async for output in replica.generate(asked):
        on_tokens(len(output.token_ids))
    assert output.stats is not None, output.error
    return output.stats


def from_others(replica: Replica, asked: Request) -> int:
    """Accepted tokens that stood in other requests' outputs."""
    return asyncio.run(stream(replica, asked)).accepted_by_source.get("history", 0)


def known_of(replica: Replica, tenant: str) -> int:
    """Tokens that a replica knows of a tenant's outputs."""
    memory = replica._engine.memory
    assert memory is not None
    history = memory._by_tenant.get(tenant)  # ``of`` would make it, beside the engine's thread
    return 0 if history is None else history.num_tokens


def counts(replica: Replica) -> MirrorCounts:
    found = replica.describe().cache
    assert found is not None
    return found


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    folder: Path = save_model(tmp_path_factory.mktemp("faults"), llama_config())
    return ModelOptions(path=str(folder), dtype="float32", threads=1)


@pytest.fixture(scope="module")
def replicas(model: ModelOptions, redis: RedisProcess) -> Iterator[list[Replica]]:
    """Two that share, through all faults of this file."""
    access = CacheAccess(OPTIONS, redis.url, b"secret", (*FAULTS, *(f"after {fault}" for fault in FAULTS)))
    made = [Replica(model, ENGINE, AUTO, access) for _ in range(2)]
    yield made
    for replica in made:
        replica.stop()


@pytest.fixture(scope="module")
def expected(model: ModelOptions) -> dict[int, list[int]]:
    """What greedy decoding answers, one token a step, one request at a time; by the first token of the prompt."""
    plain = Replica(model, ENGINE, SpeculationOptions(strategy="autoregressive"))
    found = {}
    for first in range(FIRST, FIRST + PROMPTS):
        asked = request(f"plain-{first}", first, "nobody")
        stats = asyncio.run(stream(plain, asked))
        assert stats.steps == TOKENS
        found[first] = asked.output_ids.tolist()
    plain.stop()
    assert len({tuple(tokens) for tokens in found.values()}) > PROMPTS // 2
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_of_fifty_streams(
    redis: RedisProcess, replicas: list[Replica], expected: dict[int, list[int]], fault: str
) -> None:
    breaks, mends, kind = FAULTS[fault]
    asked = [request(f"{fault}-{number}", FIRST + number % PROMPTS, fault) for number in range(2 * PROMPTS)]
    before = [counts(replica) for replica in replicas]
    emitted, broken_at = 0, 0

    def count(number: int) -> None:
        nonlocal emitted, broken_at
        emitted += number
        if not broken_at and emitted > PROMPTS * TOKENS * 0.8:  # of twice as many
            breaks(redis)
            broken_at = emitted

    async def ask_all() -> None:
        await asyncio.gather(*(stream(replicas[number // PROMPTS], one, count) for number, one in enumerate(asked)))

    asyncio.run(ask_all())
    assert 0 < broken_at < emitted == 2 * PROMPTS * TOKENS
    assert [one.output_ids.tolist() for one in asked] == [expected[int(one.prompt_ids[0])] for one in asked]
    for replica, earlier in zip(replicas, before, strict=True):
        eventually(lambda replica=replica, earlier=earlier: counts(replica).opened > earlier.opened)  # type: ignore[misc]
        assert counts(replica).failures[kind] > earlier.failures.get(kind, 0)
        assert counts(replica).published_tokens > earlier.published_tokens
        replica.check_health()

    mends(redis)
    for replica in replicas:
        eventually(lambda replica=replica: counts(replica).connected and counts(replica).outbox_bytes == 0)  # type: ignore[misc]
        assert counts(replica).breaker == "closed" and counts(replica).dropped_tokens == 0
    a, b = replicas
    first, second = (request(f"{fault}-{name}", FIRST, f"after {fault}") for name in "ab")
    assert from_others(a, first) == 0
    eventually(lambda: known_of(b, f"after {fault}") >= TOKENS)  # its counters also move for what waited meanwhile
    assert from_others(b, second) > TOKENS // 2
    assert first.output_ids.tolist() == second.output_ids.tolist() == expected[FIRST]
