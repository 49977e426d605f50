"""Replicas that lead their own requests and follow each other's: outputs are those of plain decoding, whoever helps whom."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from outrider.actors.description import DeviceLostError, GroupState, ReplicaError
from outrider.actors.lookahead import elastic
from outrider.actors.lookahead.elastic import ElasticGroup
from outrider.actors.lookahead.executor import LookaheadParallelExecutor
from outrider.actors.replica import Replica
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.executor import VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.runner import ModelRunner
from tests.helpers import waiting
from tests.helpers.models import llama_config, save_model

SECRET = b"of the tests"
TOKENS = 80
WORLD = 4
ENGINE = EngineOptions(max_running=4, max_step_tokens=64)
AUTO = SpeculationOptions(strategy="auto", max_draft_tokens=8, options={"all_rows": True})
LOOKAHEAD = ParallelismOptions(mode="lookahead", rank_timeout_s=60.0, adaptive=False)  # a busy machine is no lost rank
PROMPTS = [[first, 6, 7, first, 6] for first in range(10, 22)]
EVERYBODY = tuple(range(WORLD))

Expected = dict[tuple[int, int | None], list[int]]  # by prompt and seed

eventually = functools.partial(waiting.eventually, timeout_s=60.0)


@pytest.fixture(autouse=True, scope="module")
def soon_idle() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "IDLE_S", 0.05)
        yield


class Watched(ElasticGroup):
    """Keeps its executor where a test can look at it."""

    group: LookaheadParallelExecutor

    def executor(self, runner: ModelRunner) -> LookaheadParallelExecutor:
        made = super().executor(runner)
        assert isinstance(made, LookaheadParallelExecutor)
        made.check_steps = 4
        self.group = made
        return made


class Node:
    """Some replicas, and the discovery that tells each of the others."""

    def __init__(self, model: ModelOptions, world: int, widest: int = WORLD) -> None:
        self.ranks = [Watched(LOOKAHEAD, SECRET, widest) for _ in range(world)]
        self.ended: list[int] = []  # replicas whose process would have ended
        ends = [functools.partial(self.ended.append, rank) for rank in range(world)]
        self.replicas = [Replica(model, ENGINE, AUTO, ranks=ranks, end=end) for ranks, end in zip(self.ranks, ends, strict=True)]
        self.meet(range(world))

    def meet(self, members: Sequence[int]) -> None:
        """Tells those members of each other."""
        for own in members:
            others = {rank: self.ranks[rank].address for rank in members if rank != own}
            self.ranks[own].update_peers(own, others)

    def state(self, rank: int) -> GroupState:
        found = self.ranks[rank].state()
        assert found is not None
        return found

    def widths(self) -> list[int]:
        """Ranks of each group at this moment."""
        return [ranks.group.begin_step() for ranks in self.ranks]

    def seen(self, rank: int, since: int = 0) -> list[int]:
        """How many ranks took part in each of the steps that a replica led."""
        return [len(step.rank_s) for step in list(self.ranks[rank].group.times)[since:]]

    def stop(self) -> None:
        for replica in self.replicas:
            replica.stop()


def request(name: str, prompt: Sequence[int], seed: int | None, tokens: int = TOKENS) -> Request:
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=0.0 if seed is None else 0.8, seed=seed or 0
    )  # fmt: skip
    return Request(name, prompt, params)


async def stream(replica: Replica, asked: Request, at: Callable[[int], None] = lambda count: None) -> list[int]:
    """The answer, all of it; ``at`` is called with the number of tokens after each step."""
    tokens: list[int] = []
    async with aclosing(replica.generate(asked)) as outputs:
        async for output in outputs:
            tokens += output.token_ids
            at(len(tokens))
    assert output.error is None
    return tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    folder: Path = save_model(tmp_path_factory.mktemp("elastic"), llama_config())
    return ModelOptions(path=str(folder), dtype="float32", threads=1)


@pytest.fixture(scope="module")
def expected(model: ModelOptions) -> dict[tuple[int, int | None], list[int]]:
    """What plain decoding answers, greedy and with a seed, by prompt and seed."""
    plain = Replica(model, ENGINE, SpeculationOptions(strategy="autoregressive"))
    found = {}
    for number, prompt in enumerate(PROMPTS):
        for seed in (None, 7):
            found[number, seed] = asyncio.run(stream(plain, request("plain", prompt, seed)))
    plain.stop()
    assert len({tuple(tokens) for tokens in found.values()}) > len(PROMPTS)
    return found


@pytest.fixture(scope="module")
def node(model: ModelOptions) -> Iterator[Node]:
    """Replicas that know each other."""
    made = Node(model, WORLD)
    eventually(lambda: all(made.state(rank).ready == EVERYBODY for rank in EVERYBODY))
    yield made
    for rank in EVERYBODY:
        state = made.state(rank)
        assert (state.losses, state.disagreements) == (0, 0), state.last_loss
    made.stop()


@pytest.mark.parametrize(("rank", "seed"), [(0, None), (2, 7)])
def test_one_request_alone_has_all_ranks(node: Node, expected: Expected, rank: int, seed: int | None) -> None:
    before = len(node.ranks[rank].group.times)
    for number in range(2):
        assert asyncio.run(stream(node.replicas[rank], request("alone", PROMPTS[number], seed))) == expected[number, seed]
    assert max(node.seen(rank, before)) == WORLD
    eventually(lambda: node.widths() == [1] * WORLD)
    state = node.state(rank)
    assert (state.world_size, state.ready, state.degraded) == (WORLD, EVERYBODY, False), "idle is not degraded"


async def until(condition: Callable[[], bool]) -> None:
    """``eventually``, while requests run."""
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.005)


async def keep_busy(replica: Replica, over: asyncio.Event, expected: Expected) -> int:
    """Two requests at a time, one after the other, until it is over; returns how many there were."""

    async def ask(lane: int) -> int:
        count = 0
        while not over.is_set():
            number, seed = (7 * lane + count) % len(PROMPTS), (None, 7)[count % 2]
            assert await stream(replica, request(f"{lane}-{count}", PROMPTS[number], seed)) == expected[number, seed]
            count += 1
        return count

    return sum(await asyncio.gather(ask(0), ask(1)))


def test_groups_follow_the_load(node: Node, expected: Expected) -> None:
    """One busy replica, two, all of them, and again one: the widths that buddy allocation gives, and every output right."""

    async def ask() -> None:
        over = [asyncio.Event() for _ in EVERYBODY]
        begin = lambda rank: asyncio.create_task(keep_busy(node.replicas[rank], over[rank], expected))  # noqa: E731
        tasks = [begin(1)]
        await until(lambda: node.widths() == [1, 4, 1, 1])
        tasks.append(begin(2))
        await until(lambda: node.widths() == [1, 2, 2, 1])
        tasks += [begin(0), begin(3)]
        await until(lambda: node.widths() == [1, 1, 1, 1])
        before = [len(ranks.group.times) for ranks in node.ranks]
        await until(lambda: all(len(ranks.group.times) > count for ranks, count in zip(node.ranks, before, strict=True)))
        for event in over[:3]:
            event.set()
        await until(lambda: node.widths() == [1, 1, 1, 4])
        over[3].set()
        assert min(await asyncio.gather(*tasks)) >= 2

    asyncio.run(ask())


def test_random_arrivals_and_aborts(node: Node, expected: Expected) -> None:
    before = [len(ranks.group.times) for ranks in node.ranks]
    dice = random.Random(3)

    async def one(index: int) -> None:
        number, seed = dice.randrange(len(PROMPTS)), dice.choice((None, 7))
        replica = node.replicas[dice.randrange(WORLD)]
        stops_at = dice.randrange(1, TOKENS) if dice.random() < 0.3 else TOKENS
        await asyncio.sleep(dice.random() * 2.0)
        tokens: list[int] = []
        async with aclosing(replica.generate(request(f"churn-{index}", PROMPTS[number], seed))) as outputs:
            async for output in outputs:
                tokens += output.token_ids
                if len(tokens) >= stops_at:
                    break
        assert len(tokens) >= stops_at
        assert tokens == expected[number, seed][: len(tokens)]

    async def ask() -> None:
        async with asyncio.timeout(120.0):
            await asyncio.gather(*(one(index) for index in range(32)))

    asyncio.run(ask())
    seen = [width for rank in EVERYBODY for width in node.seen(rank, before[rank])]
    assert min(seen) == 1 < max(seen), "some together, some alone"


@pytest.mark.parametrize("leaves", ["follower", "leader"])
def test_a_replica_that_ends_in_the_middle(model: ModelOptions, expected: Expected, leaves: str) -> None:
    node = Node(model, 3)
    over = asyncio.Event()

    async def ask() -> None:
        others = asyncio.create_task(keep_busy(node.replicas[1], over, expected))
        await until(lambda: node.ranks[1].group.begin_step() == 3)
        if leaves == "leader":
            last = asyncio.create_task(stream(node.replicas[0], request("last", PROMPTS[0], None, 240)))
            await until(lambda: node.ranks[0].group.begin_step() == 2 or last.done())
        await asyncio.to_thread(node.replicas[0].stop)
        if leaves == "leader":
            with contextlib.suppress(ReplicaError):
                await last
        await until(lambda: node.state(1).ready == (1, 2))
        assert node.state(1).degraded and node.state(1).world_size == 3
        node.meet([1, 2])
        await until(lambda: node.ranks[1].group.begin_step() == 2)
        assert not node.state(1).degraded
        over.set()
        assert await others >= 2

    asyncio.run(ask())
    node.stop()


def test_a_replica_whose_device_fails_in_the_step_of_another_one_ends(
    model: ModelOptions, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(model, 2)
    over = asyncio.Event()

    def fails(works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    async def ask() -> None:
        asked = asyncio.create_task(keep_busy(node.replicas[0], over, expected))
        await until(lambda: node.ranks[0].group.begin_step() == 2)
        server = node.ranks[1]._server
        assert server is not None
        monkeypatch.setattr(server._rank._executor, "execute", fails)
        await until(lambda: node.ended == [1])
        with pytest.raises(DeviceLostError):
            node.replicas[1].check_health()
        over.set()
        assert await asked >= 2
        node.replicas[0].check_health()

    asyncio.run(ask())
    node.stop()


def test_a_leader_s_step_that_runs_out_of_memory_is_computed_in_smaller_ones(
    model: ModelOptions, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(model, 2)
    local = node.ranks[0].group._local
    execute, lacked = local.execute, 0

    def short(works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        nonlocal lacked
        if len(works) > 2 or sum(work.end - work.start for work in works) > 4:
            lacked += 1
            raise torch.OutOfMemoryError
        return execute(works, top_k)

    monkeypatch.setattr(local, "execute", short)

    async def ask() -> None:
        await until(lambda: len(node.state(0).ready) == 2)
        asked = [(number, seed) for number in range(4) for seed in (None, 7)]
        streams = [stream(node.replicas[0], request(f"{number}-{seed}", PROMPTS[number], seed)) for number, seed in asked]
        assert await asyncio.gather(*streams) == [expected[each] for each in asked]

    asyncio.run(asyncio.wait_for(ask(), 120))
    assert lacked and max(node.seen(0)) == 2 and not node.ended
    assert node.state(0).losses == 0
    node.stop()


@pytest.mark.parametrize(("world", "widest"), [(1, 4), (3, 2)])
def test_a_group_is_as_wide_as_there_are_replicas_and_as_it_may_be(
    model: ModelOptions, expected: Expected, world: int, widest: int
) -> None:
    node = Node(model, world, widest)
    eventually(lambda: len(node.state(0).ready) == world)
    for number in range(2):
        assert asyncio.run(stream(node.replicas[0], request("alone", PROMPTS[number], None))) == expected[number, None]
    assert max(node.seen(0)) == min(world, widest) and not node.state(0).degraded
    node.stop()
