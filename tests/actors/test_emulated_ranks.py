"""Eight emulated GPUs at once: every rank takes part, and requests get the known outputs in at least the time of the GPUs."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection

import pytest

from outrider.actors.lookahead.executor import LookaheadParallelExecutor
from outrider.actors.lookahead.link import Address, connect
from outrider.actors.lookahead.rank import RankServer
from outrider.actors.sharded.emulated import EmulatedShards, EmulatedShardServer
from outrider.actors.sharded.processes import RankProcesses, process_group
from outrider.actors.sharded.shard import GroupSettings, ShardMode, ShardSpec
from outrider.configs.slices import EmulationOptions, EngineOptions, ModelOptions
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.emulation.device import EmulatedDevice, local_executor
from outrider.engine.emulation.known_outputs import KnownOutputs
from outrider.engine.emulation.roofline import DeviceRoofline
from outrider.engine.errors import DeviceError
from outrider.engine.executor import Executor
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import CONTEXT, MAX_DRAFT, SLOTS, engine_over, run, tiny_model
from tests.helpers.parts import whole
from tests.helpers.ranks import CONNECT_S, PATIENT, SECRET, forks, twin

DEVICES = 8
CAPACITY = CONTEXT + MAX_DRAFT * DEVICES
OPTIONS = EmulationOptions("A100-80", "llama-3.1-8b", time_dilation=2.0, form="graphs")
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 10, 5, 6, 7, 11, 5, 6, 7, 12, 5, 6, 7, 13, 5, 6]
OUTPUT = [7, 8, 9, 5, 6, 7, 12, 5, 6, 7, 8, 9, 14, 3, 5, 6, 7, 13, 5, 6, 7, 10, 4, 0]


def emulated(runner: ModelRunner) -> ModelRunner:
    runner.emulated = EmulatedDevice(DeviceRoofline.of(OPTIONS), OPTIONS.time_dilation, KnownOutputs([(PROMPT, OUTPUT)]))
    return runner


def check(runner: ModelRunner, executor: Executor, strategy: str = "llma") -> None:
    """Run some requests at once and check their outputs and times."""
    device = runner.emulated
    assert device is not None
    drafter = build_drafter(strategy, {"match_length": 1, "copy_length": 6} if strategy == "llma" else {})
    drafter.prepare(tiny_model("llama", "float32").target)
    engine = engine_over(runner, drafter, executor=executor)
    began, wall = device.clock.now(), device.clock.wall()
    asked = [Request(str(at), PROMPT, SamplingParams(len(OUTPUT)), [PROMPT]) for at in range(SLOTS)]
    assert run(engine, *asked) == [OUTPUT] * SLOTS
    counts = device.counts()
    assert counts.forwards < len(OUTPUT)  # drafts were accepted
    assert counts.device_s * 0.9 <= device.clock.now() - began < device.clock.wall() - wall  # a sleep may end a moment early


@contextlib.contextmanager
def followers(executor: LookaheadParallelExecutor) -> Iterator[list[ModelRunner]]:
    """Ranks of a lookahead-parallel group, in threads of this process."""
    runners = [emulated(twin("llama", "float32", capacity=CAPACITY)) for _ in range(1, DEVICES)]
    with contextlib.ExitStack() as stack:
        for rank, runner in enumerate(runners, start=1):
            server = RankServer(local_executor(runner), SECRET, PATIENT)
            stack.callback(server.close)
            stack.callback(executor.remove_rank, rank)
            executor.add_rank(rank, connect(server.address, SECRET, CONNECT_S))
        yield runners


def test_lookahead_parallelism_of_eight() -> None:
    leader = emulated(twin("llama", "float32", capacity=CAPACITY))
    executor = LookaheadParallelExecutor(local_executor(leader), PATIENT, 256)
    with followers(executor) as runners:
        check(leader, executor, "suffix")
        devices = [runner.emulated for runner in runners]
        assert all(device is not None and device.counts().forwards > 0 for device in devices)
        state = executor.state(DEVICES)
        assert state.losses == state.divergences == state.disagreements == 0
        for times in executor.times:  # emulated times: of all ranks, and no wait for a rank is counted twice
            assert len(times.rank_s) > 0 and times.exchange_s > -0.01


class ForkedRanks:
    """``RankHost`` of followers that are forked from a process that has imported everything."""

    def __init__(self, shards: list[ShardSpec], terms: GroupSettings) -> None:
        self.found: list[tuple[Connection, multiprocessing.process.BaseProcess]] = []
        for shard in shards:
            ours, theirs = forks.Pipe()
            process = forks.Process(target=follow, args=(theirs, shard, terms), daemon=True)
            process.start()
            self.found.append((ours, process))

    def addresses(self, timeout_s: float) -> list[Address]:
        """See ``RankHost``."""
        assert all(pipe.poll(timeout_s) for pipe, _ in self.found)
        return [pipe.recv() for pipe, _ in self.found]

    def close(self) -> None:
        """See ``RankHost``."""
        for _, process in self.found:
            process.kill()
            process.join()


def follow(pipe: Connection, shard: ShardSpec, terms: GroupSettings) -> None:
    """Of a follower's process."""
    server = EmulatedShardServer(shard, terms, OPTIONS)
    pipe.send(server.address)
    server.run()


def check_parts(group: EmulatedShards, mode: ShardMode, devices: int, kill: Callable[[], object]) -> None:
    try:
        runner = emulated(group.runner(whole("llama"), CAPACITY, EngineOptions(max_running=SLOTS), 1 + MAX_DRAFT))
        check(runner, group.executor(runner))
        device = runner.emulated
        assert device is not None and device.counts().exchange_bytes > 0
        assert (device.roofline.split, device.roofline.ranks) == (mode, devices)
        assert group.done == [device.counts().forwards] * (devices - 1)

        kill()  # a rank that is lost ends the group, as in an all-reduce
        engine = engine_over(runner, build_drafter("autoregressive", {}), executor=local_executor(runner))
        engine.add(Request("x", PROMPT, SamplingParams(4)))
        with pytest.raises(DeviceError, match="a rank is gone"):
            engine.step()
    finally:
        group.close()


def test_tensor_parallelism_of_eight() -> None:
    shard, terms = ShardSpec("tensor", 0, DEVICES, "cpu"), GroupSettings(SECRET * 2, CONNECT_S, CONNECT_S)
    ranks = ForkedRanks(shard.others, terms)
    check_parts(EmulatedShards(shard, ranks, terms), "tensor", DEVICES, ranks.found[3][1].kill)


def test_a_pipeline_of_processes() -> None:
    group = process_group("pipeline", 2, ModelOptions(threads=1, device="cpu"), emulation=OPTIONS)
    assert isinstance(group, EmulatedShards) and isinstance(group.housing, RankProcesses)
    (pid,) = group.housing.pids
    check_parts(group, "pipeline", 2, partial(os.kill, pid, signal.SIGKILL))
