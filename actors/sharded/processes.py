"""Ranks with parts of one model, as local processes without Ray: for tests and measurements."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import secrets
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch

from outrider.actors.heap import spare_collector
from outrider.actors.lookahead.link import Address
from outrider.actors.ranks import GroupError
from outrider.actors.sharded.emulated import EmulatedShards, EmulatedShardServer
from outrider.actors.sharded.group import ShardedGroup, device_of, whole_model
from outrider.actors.sharded.rank import LoadWhole, ShardServer, load_whole
from outrider.actors.sharded.shard import GroupSettings, ShardMode, ShardSpec
from outrider.configs.slices import EmulationOptions, ModelOptions, ParallelismOptions, ServerOptions
from outrider.engine.errors import one_line

logger = logging.getLogger(__name__)


class RankProcesses:
    """``RankHost`` of processes, which end with their parent. Each calls ``load``, which must be picklable."""

    def __init__(
        self, shards: Sequence[ShardSpec], terms: GroupSettings, load: LoadWhole, threads: int,
        emulation: EmulationOptions | None = None,
    ) -> None:  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._processes: list[tuple[Connection, SpawnProcess]] = []
        for shard in shards:
            ours, theirs = context.Pipe()
            arguments = (theirs, load, shard, terms, threads, emulation)
            process = context.Process(target=_follow, args=arguments, name=f"{shard.mode}-{shard.rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append((ours, process))

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids, by rank from 1 on."""
        return tuple(process.pid for _, process in self._processes if process.pid is not None)

    def addresses(self, timeout_s: float) -> list[Address]:
        """See ``RankHost``."""
        deadline = time.monotonic() + timeout_s
        found = []
        for rank, (pipe, _) in enumerate(self._processes, start=1):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise GroupError(f"rank {rank} did not load the model within {timeout_s:.0f} s")
            try:
                received: Address | str = pipe.recv()
            except EOFError:
                raise GroupError(f"rank {rank} ended before it had loaded the model") from None
            if isinstance(received, str):
                raise GroupError(f"rank {rank} could not be loaded: {received}")
            found.append(received)
        return found

    def close(self) -> None:
        """See ``RankHost``."""
        for pipe, process in self._processes:
            pipe.close()
            process.kill()
            process.join()


def _follow(
    pipe: Connection, load: LoadWhole, shard: ShardSpec, terms: GroupSettings, threads: int, emulation: EmulationOptions | None
) -> None:
    # The leader handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        server = ShardServer(load(), shard, terms) if emulation is None else EmulatedShardServer(shard, terms, emulation)
    except Exception as error:  # any load error: the leader reports it
        logger.exception("rank %d could not be loaded", shard.rank)
        pipe.send(one_line(error))
        return
    spare_collector()
    pipe.send(server.address)
    server.run()


def process_group(
    mode: ShardMode,
    world_size: int,
    model: ModelOptions,
    parallelism: ParallelismOptions | None = None,
    load: LoadWhole | None = None,
    start_timeout_s: float = ServerOptions().start_timeout_s,
    emulation: EmulationOptions | None = None,
) -> ShardedGroup | EmulatedShards:
    """Return a group of this process and new ones, for ``ranks`` of an engine or replica over ``whole_model(model)``.

    Example: ``OfflineEngine(whole_model(model), engine, speculation, process_group("tensor", 2, model))``. Where a rank is lost,
    this process ends: give it a separate process. Device and threads of ``model`` apply to each rank, which calls ``load``.
    """
    leader = ShardSpec(mode, 0, world_size, device_of(model))
    terms = GroupSettings(secrets.token_bytes(32), start_timeout_s, (parallelism or ParallelismOptions()).step_timeout_s)
    load = load or functools.partial(load_whole, whole_model(model) if emulation is None else model)
    housing = RankProcesses(leader.others, terms, load, model.threads or torch.get_num_threads(), emulation)
    return ShardedGroup(leader, housing, terms) if emulation is None else EmulatedShards(leader, housing, terms)
