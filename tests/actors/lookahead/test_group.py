"""A static group on a real Ray: ranks that are killed, stopped, cannot be loaded or lose their leader."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.actors.lookahead.executor import LookaheadParallelExecutor
from outrider.actors.lookahead.group import Group
from outrider.actors.offline_group import GroupShape, OfflineLeader, group_shape
from outrider.actors.placement.pinning import own_cores
from outrider.actors.ranks import GroupError
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from tests.helpers import waiting
from tests.helpers.models import llama_config, save_model

eventually = functools.partial(waiting.eventually, timeout_s=90.0)  # a rank imports torch and loads a model first
ENGINE = EngineOptions(max_running=4)
SPECULATION = SpeculationOptions(strategy="jacobi", max_draft_tokens=24)
CORES = sorted(os.sched_getaffinity(0))
PINNED = len(CORES) >= 2
OPTIONS = ParallelismOptions(
    mode="lookahead", world_size=2, rank_timeout_s=1.0, adaptive=False, pin_threads=PINNED
)  # fmt: skip
TOKENS = 96


def requests(number: int = 4) -> list[Request]:
    """Greedy and sampled ones in turns."""
    params = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9 * (index % 2), seed=index) for index in range(number)
    ]
    return [Request(f"r{index}", [index + 5, 6, 7, index + 5, 6], params[index]) for index in range(number)]


def run(engine: Engine, asked: list[Request], after_step: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    """The outputs, from a thread of its own: pinning has no effect on the test's."""

    def work() -> None:
        for request in asked:
            engine.add(request)
        steps = 0
        while engine.has_work:
            engine.step()
            steps += 1
            after_step(steps)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    return [request.output_ids.tolist() for request in asked]


def processes(actor: str) -> list[psutil.Process]:
    """The processes of a class of actors in this run's Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{actor}"):
                found.append(process)
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@dataclass
class Running:
    """A group with its engine."""

    group: Group
    engine: Engine

    @property
    def ready(self) -> tuple[int, ...]:
        state = self.group.state()
        assert state is not None
        return state.ready


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    folder: Path = save_model(tmp_path_factory.mktemp("group"), llama_config())
    return ModelOptions(path=str(folder), dtype="float32", device="cpu", threads=1)


@pytest.fixture(autouse=True)
def often_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookaheadParallelExecutor, "check_steps", 4)


@pytest.fixture(scope="module")
def bundles() -> Iterator[PlacementGroup]:
    """Places for a leader and a rank, on a Ray for all tests of this file."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
             _node_ip_address="127.0.0.1", object_store_memory=128 * 2**20)  # fmt: skip
    yield placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    ray.shutdown()


@pytest.fixture(scope="module")
def expected(model: ModelOptions) -> list[list[int]]:
    """What plain decoding answers."""
    outputs = run(Engine.load(model, ENGINE, SpeculationOptions(strategy="autoregressive")), requests())
    assert len({tuple(tokens) for tokens in outputs}) == 4
    return outputs


@pytest.fixture(scope="module")
def running(model: ModelOptions, bundles: PlacementGroup) -> Iterator[Running]:
    """A leader in this process and a rank, through all faults of this file."""
    group = Group(model, ENGINE, SPECULATION, OPTIONS, bundles)
    engine = Engine.load(model, ENGINE, SPECULATION, group.world_size, group.executor)
    group.start()
    assert sorted(os.sched_getaffinity(0)) == CORES
    yield Running(group, engine)
    group.close()
    eventually(lambda: not processes("RankActor"))


def test_two_ranks_say_what_one_says(running: Running, expected: list[list[int]]) -> None:
    masks = []

    def note_affinity(step: int) -> None:
        running.group.occupied(True)
        masks.append(os.sched_getaffinity(0))

    assert run(running.engine, requests(), note_affinity) == expected
    assert running.ready == (0, 1)
    times = running.group.times()
    assert sum(len(step.rank_s) == 2 for step in times) > len(times) / 2  # nobody is asked where nothing was drafted
    if PINNED:
        assert masks[-1] == {CORES[0]}
        (rank,) = processes("RankActor")
        assert {CORES[1]} in [os.sched_getaffinity(thread.id) for thread in rank.threads()]


@pytest.mark.slow
def test_a_rank_that_stops_changes_no_token_and_comes_back(running: Running, expected: list[list[int]]) -> None:
    """One that is killed in the middle: ``test_parallel_service.py``, and without Ray ``test_lookahead_faults.py``."""
    (rank,) = processes("RankActor")
    before = running.group.state()
    assert before is not None and before.ready == (0, 1)

    assert run(running.engine, requests(), lambda step: rank.suspend() if step == 5 else None) == expected
    eventually(lambda: gone(rank))  # a stopped process, too
    eventually(lambda: running.ready == (0, 1))
    after = running.group.state()
    assert after is not None and after.losses == before.losses + 1 and after.disagreements == 0
    assert processes("RankActor") != [rank]
    assert run(running.engine, requests(), lambda step: None) == expected
    assert 2 in [len(step.rank_s) for step in running.group.times()[-8:]]


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs_comes_back(running: Running) -> None:
    (rank,) = processes("RankActor")
    rank.kill()
    eventually(lambda: running.ready == (0,))
    eventually(lambda: running.ready == (0, 1))
    assert processes("RankActor") != [rank]


@pytest.mark.slow
@pytest.mark.usefixtures("bundles")  # for its Ray
def test_a_rank_that_cannot_be_loaded_says_why(model: ModelOptions, tmp_path: Path) -> None:
    bundles = placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    absent = ModelOptions(path=str(tmp_path / "absent"), device="cpu", threads=1)
    group = Group(absent, ENGINE, SPECULATION, ParallelismOptions(mode="lookahead", world_size=2), bundles)
    Engine.load(model, ENGINE, SPECULATION, group.world_size, group.executor)
    with pytest.raises(GroupError, match=r"rank 1 could not be loaded: model path '.*absent' does not exist"):
        group.start()
    remove_placement_group(bundles)


@pytest.mark.slow
@pytest.mark.usefixtures("bundles")
def test_a_rank_with_shorter_slots_than_the_leader_s_is_refused(model: ModelOptions) -> None:
    bundles = placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    shorter = dataclasses.replace(model, max_model_len=64)
    group = Group(shorter, ENGINE, SPECULATION, ParallelismOptions(mode="lookahead", world_size=2), bundles)
    Engine.load(dataclasses.replace(model, max_model_len=96), ENGINE, SPECULATION, group.world_size, group.executor)
    with pytest.raises(GroupError, match=r"rank 1 .* 64 tokens, .* 96: set model\.max_model_len=64"):
        group.start()
    remove_placement_group(bundles)


@pytest.mark.proof
@pytest.mark.usefixtures("bundles")
def test_ranks_end_with_their_leader(model: ModelOptions) -> None:
    bundles = placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    placed = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=0)
    others = processes("RankActor")
    leader = ray.remote(OfflineLeader).options(num_cpus=1, scheduling_strategy=placed).remote()
    options = ParallelismOptions(mode="lookahead", world_size=2)
    ray.get(leader.load.remote(model, ENGINE, SPECULATION, options))
    (rank,) = [process for process in processes("RankActor") if process not in others]
    (process,) = processes("OfflineLeader")
    process.kill()
    eventually(lambda: gone(rank))
    assert rank not in processes("RankActor")
    remove_placement_group(bundles)


def test_what_a_group_needs(model: ModelOptions, bundles: PlacementGroup) -> None:
    with pytest.raises(GroupError, match="3 ranks need a placement group with a bundle for each, but there are 2 bundles"):
        Group(model, ENGINE, SPECULATION, ParallelismOptions(mode="lookahead", world_size=3), bundles)
    with pytest.raises(GroupError, match=r"2 ranks need a placement group .* 0 bundles"):
        Group(model, ENGINE, SPECULATION, ParallelismOptions(mode="lookahead", world_size=2))
    with pytest.raises(ValueError, match="world_size"):
        Group(model, ENGINE, SPECULATION, ParallelismOptions(mode="lookahead"), bundles)


def test_cores_of_ranks() -> None:
    assert [own_cores(index, 2, (0, 1, 4, 5)) for index in range(2)] == [(0, 1), (4, 5)]
    with pytest.raises(GroupError, match="3 ranks with 2 threads each need 6 cores on their node, which has 4"):
        own_cores(2, 2, (0, 1, 4, 5))


@pytest.mark.parametrize(
    ("world_size", "device", "threads", "cpus", "gpus", "shape"),
    [
        ("auto", "auto", None, 16, 8, GroupShape(8, "cuda", None)),
        ("auto", "cpu", 4, 16, 8, GroupShape(4, "cpu", 4)),
        ("auto", "auto", None, 2, 0, GroupShape(2, "cpu", 1)),
        (3, "auto", None, 16, 0, GroupShape(3, "cpu", 5)),
        (2, "cuda", None, 4, 2, GroupShape(2, "cuda", None)),
    ],
)
def test_shape(world_size: int | str, device: str, threads: int | None, cpus: int, gpus: int, shape: GroupShape) -> None:
    assert group_shape(world_size, ModelOptions(device=device, threads=threads), cpus, gpus) == shape
    assert shape.bundle == ({"GPU": 1.0} if shape.device == "cuda" else {"CPU": float(shape.threads or 0)})


@pytest.mark.parametrize(
    ("world_size", "device", "threads", "said"),
    [
        (4, "cuda", None, "world size 4 needs 4 GPUs, one for each rank, but there are 2"),
        (3, "cpu", 2, "world size 3 with 2 threads a rank needs 6 CPU cores, but there are 4"),
        ("auto", "cpu", 5, "needs 5 CPU cores, but there are 4"),
        (2, "cuda:1", None, "device cuda:1 is one GPU"),
    ],
)
def test_more_than_there_is(world_size: int | str, device: str, threads: int | None, said: str) -> None:
    with pytest.raises(GroupError, match=said):
        group_shape(world_size, ModelOptions(device=device, threads=threads), cpus=4, gpus=2)
