"""Replicas with a real model over a real Redis: what one of them generated the others draft from, and nobody else does.

Where that Redis is killed, paused or full while they stream, every output is right, and sharing comes back by itself.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from outrider.actors.description import identity_of
from outrider.actors.replica import Replica
from outrider.cache_service.access import CacheAccess
from outrider.cache_service.client.cache_client import CacheClientCounts
from outrider.cache_service.namespace import Identity
from outrider.cache_service.server.admin import CacheAdmin
from outrider.cache_service.server.snapshot import decode_snapshot
from outrider.cache_service.store.embedded import EmbeddedRedis
from outrider.cache_service.store.redis_store import RedisStore
from outrider.cluster.serving.cache_actor import CacheNotReadyError, CacheServerActor
from outrider.configs.slices import CacheOptions, EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams, SpecStats
from outrider.experiments.faults.redis_process import RedisProcess
from tests.helpers import waiting
from tests.helpers.models import llama_config, save_model
from tests.helpers.shared_memory import shorten_times

eventually = functools.partial(waiting.eventually, timeout_s=30.0)
TENANTS = ("acme", "umbra", "one", "two", "three", "four", "five", "six")
TOKENS = 64  # of an output
ENGINE = EngineOptions(max_running=2)
# All rows: how many pay depends on the machine.
AUTO = SpeculationOptions(strategy="auto", max_draft_tokens=16, options={"all_rows": True})
OPTIONS = CacheOptions(timeout_s=5.0)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shorten_times(patch)
        yield


@dataclass(frozen=True)
class Answer:
    """What a request gave."""

    tokens: list[int]
    stats: SpecStats

    @property
    def from_others(self) -> int:
        """Accepted tokens that stood in other requests' outputs."""
        return sum(self.stats.accepted_by_source.get(source, 0) for source in ("history", "similar"))


def request(name: str, first: int, tenant: str | None, public: bool = True) -> Request:
    """The prompt that begins with a token; all answers are of one length."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    return Request(name, [first, 6, 7, first, 6], params, tenant=tenant, public=public)


async def stream(replica: Replica, asked: Request, on_tokens: Callable[[int], None] = lambda number: None) -> Answer:
    """Reads an answer to its end."""
    async for output in replica.generate(asked):
        on_tokens(len(output.token_ids))
    assert output.stats is not None, output.error
    return Answer(asked.output_ids.tolist(), output.stats)


def ask(replica: Replica, name: str, first: int, tenant: str | None, public: bool = True) -> Answer:
    return asyncio.run(stream(replica, request(name, first, tenant, public)))


def counts(replica: Replica) -> CacheClientCounts:
    found = replica.describe().cache
    assert found is not None
    return found


def applied(replica: Replica) -> int:
    """Tokens that have come from Redis, own ones included."""
    return counts(replica).applied_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    folder = save_model(tmp_path_factory.mktemp("shared"), llama_config())
    return ModelOptions(path=str(folder), dtype="float32", threads=1)


@pytest.fixture(scope="module")
def plain(model: ModelOptions) -> Iterator[Replica]:
    """Greedy decoding, one token a step."""
    replica = Replica(model, ENGINE, SpeculationOptions(strategy="autoregressive"))
    yield replica
    replica.stop()


class Cluster:
    """A Redis, its cache server, and as many replicas as are asked for."""

    def __init__(self, model: ModelOptions, redis: EmbeddedRedis) -> None:
        self._model = model
        self._access = CacheAccess(OPTIONS, redis.url, b"secret", TENANTS)
        self._replicas: list[Replica] = []
        self._store = RedisStore(redis.url, OPTIONS.prefix, OPTIONS.timeout_s)
        self.cache_server = CacheServerActor(self._access, dict.fromkeys((*TENANTS, "*"), 1 << 20), self._identity)

    def replica(self) -> Replica:
        """One more, with what the cluster remembers."""
        self._replicas.append(Replica(self._model, ENGINE, AUTO, self._access))
        return self._replicas[-1]

    @property
    def admin(self) -> CacheAdmin:
        """What operators use, once it is ready."""
        eventually(self._ready)
        return self.cache_server.admin

    def in_snapshot(self, tenant: str) -> int:
        """Tokens in the newest snapshot."""
        name = next(entry.namespace for entry in self.admin.stats() if entry.tenant == tenant)
        loaded = self._store.load_snapshot(name)
        return 0 if loaded is None else sum(len(text.tokens) for text in decode_snapshot(loaded[1]).texts)

    def stop(self) -> None:
        for replica in self._replicas:
            replica.stop()
        self.cache_server.stop()
        self._store.close()

    def _identity(self) -> Identity | None:
        if not self._replicas:
            return None
        return identity_of(self._replicas[0].describe().info)

    def _ready(self) -> bool:
        try:
            return self.cache_server.admin is not None
        except CacheNotReadyError:
            self.cache_server.check_health()
            return False


@pytest.fixture
def cluster(model: ModelOptions) -> Iterator[Cluster]:
    with EmbeddedRedis.start() as redis:
        made = Cluster(model, redis)
        yield made
        made.stop()


def test_one_tenant_drafts_from_the_other_replica_and_nobody_else_does(cluster: Cluster, plain: Replica) -> None:
    a, b = cluster.replica(), cluster.replica()
    cold = ask(a, "cold", 9, "acme")
    eventually(lambda: applied(b) == TOKENS)
    foreign, private, warm = (ask(b, f"b-{tenant}", 9, tenant) for tenant in ("umbra", None, "acme"))
    assert cold.from_others == foreign.from_others == private.from_others == 0
    assert warm.from_others > TOKENS // 2
    assert warm.stats.steps < min(cold.stats.steps, foreign.stats.steps, private.stats.steps) // 2
    expected = ask(plain, "plain", 9, None)
    assert expected.stats.steps == TOKENS
    assert all(answer.tokens == expected.tokens for answer in (cold, foreign, private, warm))


def test_a_growing_output_is_drafted_from_before_it_is_complete(cluster: Cluster) -> None:
    a, b = cluster.replica(), cluster.replica()

    async def run() -> None:
        request = Request("growing", [9, 6, 7, 9, 6], SamplingParams(max_tokens=200, ignore_eos=True), tenant="acme")
        stream = a.generate(request)
        while request.num_output < TOKENS:
            await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    eventually(lambda: applied(b) >= TOKENS)
    assert ask(b, "b", 9, "acme").from_others > TOKENS // 2


@pytest.mark.parametrize("folded", [False, True], ids=["stream", "snapshot"])
def test_a_replica_that_starts_later_is_warm_at_its_first_request(cluster: Cluster, folded: bool) -> None:
    a, b = cluster.replica(), cluster.replica()
    cold = ask(a, "cold", 9, "acme")
    eventually(lambda: applied(b) == TOKENS)
    warm = ask(b, "warm", 9, "acme")
    if folded:
        eventually(lambda: cluster.in_snapshot("acme") == 2 * TOKENS)
    third = ask(cluster.replica(), "third", 9, "acme")
    assert warm.stats.steps < cold.stats.steps // 2
    assert third.stats.steps <= warm.stats.steps + 2 and third.from_others > TOKENS // 2
    assert cold.tokens == warm.tokens == third.tokens


@pytest.mark.slow
def test_deletions_reach_all_replicas_within_two_seconds(cluster: Cluster) -> None:
    a, b = cluster.replica(), cluster.replica()
    by_request, whole = TENANTS[2:5], TENANTS[5:8]  # one for each replica that is asked afterwards, as it teaches the others then
    before = {tenant: ask(a, f"chatcmpl-{tenant}/0", 9, tenant) for tenant in (*by_request, *whole)}
    eventually(lambda: applied(b) == len(before) * TOKENS)
    for tenant in by_request:
        cluster.admin.delete_request(tenant, f"chatcmpl-{tenant}")
    for tenant in whole:
        cluster.admin.delete_tenant(tenant)
    time.sleep(2)
    for replica, *tenants in zip((a, b, cluster.replica()), by_request, whole, strict=True):
        for tenant in tenants:
            after = ask(replica, f"chatcmpl-{tenant}-again/0", 9, tenant)
            assert after.from_others == 0 and after.tokens == before[tenant].tokens
    eventually(lambda: {entry.tokens for entry in cluster.admin.stats() if entry.tenant in before} == {TOKENS})
    assert ask(cluster.replica(), "learned again", 9, whole[0]).from_others > TOKENS // 2


def test_all_tenants_draft_from_the_public_corpus_unless_they_do_not_want_to(cluster: Cluster, plain: Replica) -> None:
    a = cluster.replica()
    document = ask(plain, "plain", 9, None).tokens
    assert cluster.admin.preload([document]) == 1
    eventually(lambda: applied(a) == TOKENS)
    off = ask(a, "off", 9, None, public=False)
    others = [ask(a, f"for {tenant}", 9, tenant) for tenant in (None, "acme", "umbra")]
    assert off.from_others == 0 and all(answer.from_others > TOKENS // 2 for answer in others)
    assert all(answer.tokens == document for answer in (off, *others))
    texts = dict.fromkeys(TENANTS, 0) | {"acme": 1, "umbra": 1, "*": 1}  # nothing of a tenant is in the corpus
    eventually(lambda: {entry.tenant: entry.texts for entry in cluster.admin.stats()} == texts)


# ---- Redis fails ----------------------------------------------------------------------------------------------------------

PROMPTS, FIRST = 25, 10  # each prompt goes to two replicas; the token that the first begins with, the others count on from it
FAULTS: dict[str, tuple[Callable[[RedisProcess], None], Callable[[RedisProcess], None], str]] = {
    "killed": (RedisProcess.kill, RedisProcess.start, "connection"),
    "paused": (RedisProcess.pause, RedisProcess.resume, "timeout"),
    "full": (RedisProcess.fill, RedisProcess.make_room, "full"),
}


def known_of(replica: Replica, tenant: str) -> int:
    """Tokens that a replica knows of a tenant's outputs."""
    memory = replica._engine.histories
    assert memory is not None
    history = memory._by_tenant.get(tenant)  # ``of`` would make it, beside the engine's thread
    return 0 if history is None else history.num_tokens


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with RedisProcess() as process:
        yield process


@pytest.fixture(scope="module")
def replicas(model: ModelOptions, redis: RedisProcess) -> Iterator[list[Replica]]:
    """Two that share, through all faults of this file."""
    options = CacheOptions(timeout_s=0.2)
    access = CacheAccess(options, redis.url, b"secret", (*FAULTS, *(f"after {fault}" for fault in FAULTS)))
    made = [Replica(model, EngineOptions(max_running=4), AUTO, access) for _ in range(2)]
    yield made
    for replica in made:
        replica.stop()


@pytest.fixture(scope="module")
def expected(plain: Replica) -> dict[int, list[int]]:
    """What greedy decoding answers, one request at a time, by the first token of the prompt."""
    found = {first: ask(plain, f"plain-{first}", first, "nobody").tokens for first in range(FIRST, FIRST + PROMPTS)}
    assert len({tuple(tokens) for tokens in found.values()}) > PROMPTS // 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_of_fifty_streams(
    redis: RedisProcess, replicas: list[Replica], expected: dict[int, list[int]], fault: str
) -> None:
    breaks, mends, kind = FAULTS[fault]
    asked = [request(f"{fault}-{number}", FIRST + number % PROMPTS, fault) for number in range(2 * PROMPTS)]
    before = [counts(replica) for replica in replicas]
    for number, (replica, earlier) in enumerate(zip(replicas, before, strict=True)):  # what is shared is, until then
        ask(replica, f"{fault}-before-{number}", FIRST, fault)
        eventually(lambda replica=replica, earlier=earlier: counts(replica).published_tokens > earlier.published_tokens)  # type: ignore[misc]
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
        # On a busy machine a slow read may open a breaker before the fault does.
        known = earlier.failures.get(kind, 0)
        eventually(lambda replica=replica, known=known: counts(replica).failures.get(kind, 0) > known)  # type: ignore[misc]
        eventually(lambda replica=replica, earlier=earlier: counts(replica).opened > earlier.opened)  # type: ignore[misc]
        replica.check_health()

    mends(redis)
    for replica in replicas:
        eventually(lambda replica=replica: counts(replica).connected and counts(replica).outbox_bytes == 0)  # type: ignore[misc]
        assert counts(replica).breaker == "closed" and counts(replica).dropped_tokens == 0
    a, b = replicas
    first = ask(a, f"{fault}-a", FIRST, f"after {fault}")
    assert first.from_others == 0
    eventually(lambda: known_of(b, f"after {fault}") >= TOKENS)  # its counters also move for what waited meanwhile
    second = ask(b, f"{fault}-b", FIRST, f"after {fault}")
    assert second.from_others > TOKENS // 2
    assert first.tokens == second.tokens == expected[FIRST]
