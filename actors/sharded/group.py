"""Leader of ranks that hold parts of one model: forms the group, announces each forward, and monitors the ranks.

A group fails as a whole. A lost rank takes the KV of its part with it, and a leader that waits for its all-reduce may spin
forever. So the leader's process exits as soon as a rank is lost, and its requests continue on another replica, as after any
replica failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import select
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import distributed
from transformers import PreTrainedModel

from outrider.actors.description import GroupState
from outrider.actors.lookahead.link import LINK_ERRORS, Address, Link, connect
from outrider.actors.lookahead.messages import Failure
from outrider.actors.ranks import GroupError, Ranks
from outrider.actors.sharded.messages import JoinMessage, ReadyMessage, ShardedStep
from outrider.actors.sharded.rank import WATCH_S, end_process, take_checked
from outrider.actors.sharded.shard import GroupSettings, ShardSpec, rendezvous
from outrider.actors.sharded.shared_sums import sweep
from outrider.actors.wire import encode
from outrider.configs.slices import EngineOptions, ModelOptions
from outrider.engine.emulation.device import local_executor
from outrider.engine.errors import DeviceError, ModelLoadError, one_line
from outrider.engine.executor import Executor
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.sharded import LeadingRunner, Move
from outrider.engine.loading.hybrids import refuse_role
from outrider.engine.loading.model import load_config

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"  # all ranks are on one machine
CONNECT_S = 30.0  # limit of a handshake, and of a message that a rank does not take
RAISE_S = 5.0  # time for a starting leader to raise the error before its process is ended


class RankHost(Protocol):
    """Owner of the followers' processes or Ray actors, which have begun to load the model."""

    def addresses(self, timeout_s: float) -> Sequence[Address]:
        """Return the addresses of ranks 1, 2, ... once they have loaded the model. Raises GroupError if one fails or is late."""

    def close(self) -> None:
        """Kill the followers, whatever they are doing. Idempotent."""


def device_of(model: ModelOptions) -> Literal["cpu", "cuda"]:
    """Return the device type on which the parts compute."""
    return "cpu" if model.device == "cpu" or not torch.cuda.is_available() else "cuda"


def whole_model(model: ModelOptions) -> ModelOptions:
    """Return the options for loading a model to split. Raises ModelLoadError for no model, or one with recurrent layers."""
    refuse_role(load_config(model.path), "parallelism.mode tensor or pipeline", "set parallelism.mode to none or lookahead")
    # The whole model may not fit one device, and block-quantized weights cannot be split.
    return dataclasses.replace(model, device="cpu", weights="dequantized")


class ShardedGroup(Ranks):
    """``Ranks`` with parts of the engine's model, ready when ``runner`` returns. One group per process lifetime."""

    world_size = 1  # all ranks compute the same trees

    def __init__(self, shard: ShardSpec, housing: RankHost, terms: GroupSettings) -> None:
        """Store the parts. ``housing`` loads the model in the followers; ``shard`` is the leader's, rank 0."""
        assert shard.rank == 0 and shard.world_size > 1, shard
        self._shard, self.housing, self._terms = shard, housing, terms
        self._links: list[Link] = []
        self._ready: dict[int, str] = {}  # devices of the ranks that are ready
        self._all_ready, self._closing, self._lost = threading.Event(), threading.Event(), threading.Event()
        self._fault: str | None = None
        self._losing = threading.Lock()
        self._began_s: float | None = None  # start time of the running forward
        self._store: distributed.TCPStore | None = None
        self._watcher = threading.Thread(target=self._watch, name="sharded-watch", daemon=True)

    def runner(self, model: PreTrainedModel, capacity: int, options: EngineOptions, tree_rows: int) -> ModelRunner:
        """See ``Ranks``. Keeps the leader's part of the model and waits for the followers. Also raises ModelLoadError."""
        if options.compile:
            raise GroupError("engine.compile=true is not supported with parallelism.mode tensor or pipeline: leave it out")
        deadline = time.monotonic() + self._terms.start_timeout_s
        try:
            for address in self.housing.addresses(self._terms.start_timeout_s):
                self._links.append(connect(address, self._terms.secret, CONNECT_S))
            self._watcher.start()
            slots = options.most_slots(True)
            port = self._meet(slots, capacity)
            part = take_checked(model, self._shard)
            runner = LeadingRunner(model, slots, capacity, part.shape, self._together, self._shard.world_size)
            while not self._all_ready.wait(WATCH_S):
                if self._fault is not None or time.monotonic() > deadline:
                    raise GroupError(self._fault or f"the ranks were not ready within {self._terms.start_timeout_s:.0f} s")
            sweep(HOST, port, self._shard.world_size)
        except (ModelLoadError, GroupError):
            raise
        except (RuntimeError, *LINK_ERRORS) as error:
            self._lost.wait(2 * WATCH_S)  # a lost rank may have reported the reason
            raise GroupError(self._fault or one_line(error)) from error
        return runner

    def executor(self, runner: ModelRunner) -> Executor:
        """See ``Ranks``. Returns a local executor over the leader's part."""
        return local_executor(runner)

    def state(self) -> GroupState | None:
        """See ``Ranks``. All ranks are ready for as long as this process runs."""
        return GroupState(self._shard.world_size, tuple(range(self._shard.world_size)), (), 0, None, 0, 0)

    def devices(self) -> tuple[str, ...] | None:
        """See ``Ranks``."""
        return tuple(self._ready[rank] for rank in sorted(self._ready))

    def close(self) -> None:
        """See ``Ranks``."""
        self._closing.set()
        for link in self._links:
            link.close()
        self.housing.close()
        if self._store is not None:
            sweep(HOST, self._store.port, self._shard.world_size)

    def _meet(self, slots: int, capacity: int) -> int:
        world_size = self._shard.world_size
        self._store = distributed.TCPStore(HOST, 0, world_size, is_master=True, wait_for_workers=False)
        port = int(self._store.port)
        sweep(HOST, port, world_size)  # buffers of a group that was killed while it formed on this port
        for link in self._links:
            link.send(JoinMessage(HOST, port, slots, capacity))
        rendezvous(self._shard, HOST, port, self._terms.start_timeout_s)
        return port

    @contextlib.contextmanager
    def _together(self, moves: Sequence[Move], batch: Batch) -> Iterator[None]:
        """Announce a forward to the followers; the block computes the leader's part of it."""
        self._began_s = time.monotonic()
        try:
            data = encode(ShardedStep(tuple(moves), batch))
            for link in self._links:
                link.send_bytes(data)
            yield
        except Exception as error:  # the ranks are out of step: none is usable
            self._lose(f"the ranks are out of step, a forward failed: {one_line(error)}")
            if self._lost.is_set():  # another thread ends the process
                raise DeviceError(self._fault or one_line(error)) from error
            raise
        self._began_s = None

    # ---- below: the watcher's thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poller = select.poll()
        ranks = {link.fileno(): rank for rank, link in enumerate(self._links, start=1)}
        for descriptor in ranks:
            poller.register(descriptor, select.POLLIN)
        while not self._closing.is_set():
            heard = [ranks[descriptor] for descriptor, _ in poller.poll(1e3 * WATCH_S)]
            began_s, limit_s = self._began_s, self._terms.step_timeout_s
            for rank in heard:
                reason = self._hear(rank)
                if reason is not None:
                    self._lose(f"rank {rank} is gone: {reason}")
                    return
            if began_s is not None and time.monotonic() - began_s > limit_s:
                self._lose(f"a forward has been running for {limit_s:.0f} s: a rank hangs")
                return

    def _hear(self, rank: int) -> str | None:
        """Take a follower's message; return the reason if the rank is lost, else None."""
        try:
            message = self._links[rank - 1].take()
        except LINK_ERRORS as error:
            return one_line(error)
        if not isinstance(message, ReadyMessage):
            return message.reason if isinstance(message, Failure) else f"it sent {type(message).__name__}"
        self._ready[rank] = message.device
        if len(self._ready) == len(self._links):
            self._all_ready.set()
        return None

    def _lose(self, reason: str) -> None:
        """End the group, notify the requests, and end this process. During start-up the leader may raise the reason first."""
        # A second thread that notices returns at once: it must not end the process before the requests are notified.
        with self._losing:
            if self._closing.is_set() or self._lost.is_set():
                return
            self._fault = self._fault or reason
            self._lost.set()
        logger.error("the group ends: %s", self._fault)
        if not self._all_ready.is_set() and self._closing.wait(RAISE_S):
            return  # the leader raised the error and closed the group
        self.close()
        if self.device_failed is not None:
            self.device_failed(DeviceError(self._fault))
        end_process()
