"""Static group: ranks as Ray actors beside the leader, each with the whole model, monitored and restarted."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from outrider.actors.description import GroupState
from outrider.actors.heap import spare_collector
from outrider.actors.lookahead.executor import LookaheadParallelExecutor, StepTimes
from outrider.actors.lookahead.link import LINK_ERRORS, Address, Link, connect
from outrider.actors.lookahead.rank import RankServer
from outrider.actors.placement.bundles import BundleActor, bundles_for, reason
from outrider.actors.placement.pinning import allowed_cores, own_cores, pin_thread
from outrider.actors.ranks import GroupError, Ranks
from outrider.configs.slices import (
    EmulationOptions,
    EngineOptions,
    ModelOptions,
    ParallelismOptions,
    ServerOptions,
    SpeculationOptions,
)
from outrider.engine.emulation.device import local_executor
from outrider.engine.engine import load_runner
from outrider.engine.executor import Executor
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.measures.energy import meter_name

logger = logging.getLogger(__name__)

TEND_S = 0.25  # period of the supervisor
STEADY_S = 10.0  # a rank that took part for this long before it was lost starts again with zero failures
MOST_BACKOFF_S = 30.0
MOST_DOUBLINGS = 5  # most doublings of the one-second pause; MOST_BACKOFF_S caps the result
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Address, process and device of a rank."""

    address: Address
    pid: int
    node: str
    device: str  # model device as ``engine.measures.energy`` names it on that node
    max_model_len: int  # tokens of a request that fit into its slots


class RankActor:
    """Follower with a copy of the model. Ends with the actor that created it."""

    def __init__(
        self,
        model: ModelOptions,
        engine: EngineOptions,
        speculation: SpeculationOptions,
        parallelism: ParallelismOptions,
        world_size: int,
        emulation: EmulationOptions | None = None,
    ) -> None:
        self._model, self._engine, self._speculation, self._emulation = model, engine, speculation, emulation
        self._parallelism, self._world_size = parallelism, world_size
        self._server: RankServer | None = None

    def load(self, pinned: tuple[int, int] | None, secret: bytes) -> RankAddress:
        """Load the model and listen. ``pinned``: lower ranks on the node, cores per rank. Raises ModelLoadError, GroupError."""
        prepare = None if pinned is None else functools.partial(pin_thread, own_cores(*pinned, allowed_cores()))
        loaded, runner = load_runner(self._model, self._engine, self._speculation, self._world_size, self._emulation)
        spare_collector()
        host = "127.0.0.1" if self._parallelism.placement == "STRICT_PACK" else ray.util.get_node_ip_address()
        self._server = RankServer(local_executor(runner), secret, self._parallelism, host, prepare)
        node, device = ray.get_runtime_context().get_node_id(), meter_name(runner.model.device)
        return RankAddress(self._server.address, os.getpid(), node, device, loaded.max_model_len)


@dataclass(slots=True)
class _Member:
    """Rank and its current actor: loading (``loading``), taking part since ``joined_s``, or due to start at ``due_s``."""

    rank: int
    actor: BundleActor | None = None
    loading: ray.ObjectRef[Any] | None = None
    link: Link | None = None
    spawned_s: float = 0.0
    joined_s: float | None = None
    device: str | None = None  # model device, while the rank takes part on the leader's node
    failures: int = 0  # consecutive failures
    due_s: float = 0.0  # time of the next attempt to start an actor


class Group(Ranks):
    """``Ranks`` dedicated to the steps of one engine: rank i is an actor in bundle i of a placement group.

    The leader runs in bundle 0 of the same placement group. A lost rank is killed and restarted in its bundle: at once the first
    time, then with backoff (1, 2, 4, ... 30 s) if it keeps failing.
    """

    def __init__(
        self,
        model: ModelOptions,
        engine: EngineOptions,
        speculation: SpeculationOptions,
        parallelism: ParallelismOptions,
        placement_group: PlacementGroup | None = None,
        start_timeout_s: float = ServerOptions().start_timeout_s,
        emulation: EmulationOptions | None = None,
    ) -> None:
        """Start the actors. Raises ValueError for ``world_size`` auto, GroupError without a bundle for each rank."""
        if parallelism.world_size == "auto":
            raise ValueError("parallelism.world_size must be a number for a static group, got 'auto'")
        self.world_size = parallelism.world_size
        self._parallelism, self._chunk, self._emulation = parallelism, engine.max_step_tokens, emulation
        self._model, self._engine, self._speculation = _for_a_rank(model), engine, speculation
        self._bundles = bundles_for(self.world_size, placement_group)
        self._threads = model.threads or torch.get_num_threads()
        self._allowed = allowed_cores() if parallelism.pin_threads else ()
        self._cores = own_cores(0, self._threads, self._allowed) if parallelism.pin_threads else ()
        self._pinned: int | None = None  # identity of the pinned compute thread
        self._start_timeout_s, self._secret = start_timeout_s, secrets.token_bytes(32)
        self._executor: LookaheadParallelExecutor | None = None
        self._max_model_len = 0  # the leader's
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="group", daemon=True)
        self._members = [_Member(rank) for rank in range(1, self.world_size)]
        for member in self._members:
            self._spawn(member)

    def executor(self, runner: ModelRunner) -> Executor:
        """See ``Ranks``. Pins the calling thread until ``start``, if pinning is enabled, so that it measures real step times."""
        if self._cores:
            pin_thread(self._cores)
        self._executor = LookaheadParallelExecutor(local_executor(runner), self._parallelism, self._chunk)
        self._max_model_len = runner.cache.capacity - self._speculation.most_draft_tokens * self.world_size
        return self._executor

    def start(self) -> None:
        """See ``Ranks``. Raises GroupError if a rank cannot be loaded or is not ready in time."""
        assert self._executor is not None, "the engine must be created before its ranks"
        if self._cores:
            pin_thread(self._allowed)
        deadline = time.monotonic() + self._start_timeout_s
        try:
            waiting = {member.loading: member for member in self._members}
            while waiting:
                ready, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = ", ".join(str(member.rank) for member in waiting.values())
                    raise GroupError(f"rank {late} did not load {self._model.path} within {self._start_timeout_s:.0f} s")
                self._join(waiting.pop(ready[0]))
            self._executor.check_liveness()  # so that they take part from the first step on
        except BaseException:
            self.close()
            raise
        self._supervisor.start()

    def occupied(self, busy: bool) -> None:
        """See ``Ranks``. Pins the calling thread, which is the engine's."""
        if self._cores and self._pinned != threading.get_ident():
            pin_thread(self._cores)
            self._pinned = threading.get_ident()

    def state(self) -> GroupState | None:
        """See ``Ranks``."""
        return None if self._executor is None else self._executor.state(self.world_size)

    def devices(self) -> tuple[str, ...] | None:
        """See ``Ranks``. A restarted rank returns on the device of its bundle."""
        devices = [member.device for member in self._members]
        return None if None in devices else tuple(device for device in devices if device is not None)

    def times(self) -> list[StepTimes]:
        """See ``Ranks``."""
        return [] if self._executor is None else list(self._executor.times)

    def close(self) -> None:
        """Stop the ranks. Idempotent."""
        self._closing.set()
        if self._supervisor.ident is not None:
            self._supervisor.join(CLOSE_S)
        for member in self._members:
            self._end(member)

    def _spawn(self, member: _Member) -> None:
        pinned = self._pin_of(member.rank) if self._cores else None
        arguments = (self._model, self._engine, self._speculation, self._parallelism, self.world_size, self._emulation)
        member.actor = BundleActor(RankActor, self._bundles, member.rank, *arguments)
        # The secret is not an argument of the actor: Ray stores those where a new head node finds them.
        member.loading = member.actor.handle.load.remote(pinned, self._secret)
        member.spawned_s, member.joined_s = time.monotonic(), None

    def _pin_of(self, rank: int) -> tuple[int, int]:
        nodes = placement_group_table(self._bundles)["bundles_to_node_id"]
        return sum(nodes[lower] == nodes[rank] for lower in range(rank)), self._threads

    def _join(self, member: _Member) -> None:
        """Add a loaded rank. Raises GroupError if it failed, has shorter slots than the leader, or does not answer."""
        assert self._executor is not None and member.actor is not None and member.loading is not None
        try:
            place: RankAddress = ray.get(member.loading)
            if place.max_model_len < self._max_model_len:
                raise GroupError(
                    f"rank {member.rank} has memory for requests of {place.max_model_len} tokens, and the leader serves "
                    f"{self._max_model_len}: set model.max_model_len={place.max_model_len}, or stop other processes on its GPU"
                )
            if place.node == ray.get_runtime_context().get_node_id():
                member.actor.process, member.device = psutil.Process(place.pid), place.device
            member.link = connect(place.address, self._secret, self._parallelism.rank_timeout_s)
        except (RayError, psutil.NoSuchProcess) as error:
            raise GroupError(f"rank {member.rank} could not be loaded: {reason(error)}") from error
        except LINK_ERRORS as error:
            raise GroupError(f"rank {member.rank} does not answer at {place.address}: {reason(error)}") from error
        self._executor.add_rank(member.rank, member.link)
        member.loading, member.joined_s = None, time.monotonic()
        logger.info("rank %d is ready %.1f s after its start", member.rank, member.joined_s - member.spawned_s)

    def _supervise(self) -> None:
        while not self._closing.wait(TEND_S):
            try:
                self._tend()
            except Exception:  # keep monitoring after any error
                logger.exception("monitoring the ranks failed, retrying")

    def _tend(self) -> None:
        assert self._executor is not None
        self._executor.check_liveness()
        for lost in self._executor.take_lost():
            self._fail(self._members[lost.rank - 1], f"lost: {lost.reason}")
        for member in self._members:
            now = time.monotonic()
            if member.actor is None and now >= member.due_s:
                self._spawn(member)
            elif member.loading is not None and ray.wait([member.loading], timeout=0)[0]:
                try:
                    self._join(member)
                except GroupError as error:
                    self._fail(member, str(error))
            elif member.loading is not None and now - member.spawned_s > self._start_timeout_s:
                self._fail(member, f"not loaded within {self._start_timeout_s:.0f} s")

    def _fail(self, member: _Member, why: str) -> None:
        now = time.monotonic()
        if member.joined_s is not None and now - member.joined_s >= STEADY_S:
            member.failures = 0
        backoff_s = min(MOST_BACKOFF_S, 2.0 ** min(member.failures - 1, MOST_DOUBLINGS)) if member.failures else 0.0
        member.failures, member.due_s = member.failures + 1, now + backoff_s
        self._end(member)
        again = f"in {backoff_s:.0f} s" if backoff_s else "now"
        logger.warning("rank %d: %s; restarting it %s", member.rank, why, again)

    def _end(self, member: _Member) -> None:
        actor, link = member.actor, member.link
        member.actor = member.loading = member.link = member.joined_s = member.device = None
        if link is not None:
            link.close()
        if actor is not None:
            actor.kill()


def _for_a_rank(model: ModelOptions) -> ModelOptions:
    # Ray shows each actor only its own GPU, as number 0, whichever number the leader's has.
    return dataclasses.replace(model, device="cuda") if model.device.startswith("cuda:") else model
