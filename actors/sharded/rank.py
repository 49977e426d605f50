"""Rank with a part of a model: computes its part of every forward of its leader until the leader disconnects."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from transformers import PreTrainedModel

from outrider.actors.lookahead.link import LINK_ERRORS, Address, Link, accept, readable
from outrider.actors.lookahead.messages import Failure
from outrider.actors.ranks import GroupError
from outrider.actors.sharded.messages import JoinMessage, ReadyMessage, ShardedStep
from outrider.actors.sharded.pipeline_parallel import take_part as take_layers
from outrider.actors.sharded.shard import GroupSettings, ModelPart, ShardSpec, rendezvous
from outrider.actors.sharded.shared_sums import sweep
from outrider.actors.sharded.tensor_parallel import take_part as take_slices
from outrider.actors.wire import Message, WireError
from outrider.configs.slices import ModelOptions
from outrider.engine.errors import one_line
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.runner import ModelRunner, kv_shape
from outrider.engine.forward.sharded import apply_moves, following_runner, probe_logits
from outrider.engine.loading.model import load_model
from outrider.engine.measures.energy import meter_name

logger = logging.getLogger(__name__)

WATCH_S = 0.25  # period of the check for a forward that hangs
_HANGUP = getattr(select, "POLLRDHUP", select.POLLHUP)  # POLLRDHUP (Linux) also reports a half-closed connection

LoadWhole = Callable[[], PreTrainedModel]


def load_whole(options: ModelOptions) -> PreTrainedModel:
    """Load the model of which a rank keeps a part; a ``LoadWhole`` by ``functools.partial``. Raises ``ModelLoadError``."""
    return load_model(options).model


def end_process() -> NoReturn:
    """Exit this process at once, whatever its threads are doing."""
    os._exit(1)


MOST_DIFFERENT = 0.1  # relative error of the logits: half precision gives about 0.01, a wrong split about 1


def take_checked(model: PreTrainedModel, shard: ShardSpec) -> ModelPart:
    """Reduce a model to a shard's part, in place, after ``rendezvous``. All ranks call it. Raises GroupError if logits change."""
    # DeepSpeed silently splits architectures with fused projections at wrong positions, so the logits of a few rows are compared
    # before and after.
    whole = probe_logits(model, kv_shape(model)) if shard.rank == 0 else None
    part = take_slices(model, shard) if shard.mode == "tensor" else take_layers(model, shard)
    try:
        given = probe_logits(model, part.shape)
    except (RuntimeError, ArithmeticError) as error:
        raise GroupError(f"{type(model).__name__} cannot compute in {shard.world_size} parts: {one_line(error)}") from error
    if whole is not None:
        difference = float((given - whole).norm() / whole.norm())
        # Not `>`: a difference of NaN is a fault, too.
        if not difference <= MOST_DIFFERENT:
            raise GroupError(
                f"{type(model).__name__} in {shard.world_size} parts differs from the whole model: its logits differ by "
                f"{difference:.0%}; parallelism.mode {shard.mode} does not support this architecture, choose another mode"
            )
    return part


class ShardServer:
    """Server that accepts one leader, once, and follows it."""

    def __init__(self, model: PreTrainedModel | None, shard: ShardSpec, terms: GroupSettings) -> None:
        """Listen on a free loopback port. ``model`` is whole and on the CPU; this rank keeps its part."""
        self._model, self._shard, self._terms = model, shard, terms
        self._began_s: float | None = None  # start time of the running forward
        self._met: JoinMessage | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(terms.start_timeout_s)
        self.address: Address = self._listener.getsockname()[:2]

    def start(self) -> None:
        """Run in a new thread."""
        threading.Thread(target=self.run, name="shard", daemon=True).start()

    def run(self) -> None:
        """Follow the leader until it is gone, then exit the process."""
        link: Link | None = None
        try:
            raw, _ = self._listener.accept()
            link = accept(raw, self._terms.secret, self._terms.start_timeout_s)
            # A rank must not outlive its group: waiting for an all-reduce of a lost member spins forever, in native code that no
            # exception reaches. So this thread monitors the connection and ends the process.
            threading.Thread(target=self._watch, args=(link,), name="shard-watch", daemon=True).start()
            self._follow(link)
        except LINK_ERRORS as error:
            logger.info("lost the leader: %s", one_line(error))
        except Exception as error:  # any error of the model, DeepSpeed or device: the group cannot continue without this rank
            logger.exception("rank %d failed", self._shard.rank)
            self._report(link, str(error) if isinstance(error, GroupError) else one_line(error))
        self._finish()

    def _follow(self, link: Link) -> None:
        join = self._take(link)
        if not isinstance(join, JoinMessage):
            raise WireError(f"expected Join as the leader's first message, got {type(join).__name__}")
        self._met = join
        assert self._model is not None
        rendezvous(self._shard, join.host, join.port, self._terms.start_timeout_s)
        part = take_checked(self._model, self._shard)
        runner = following_runner(self._model, join.slots, join.capacity, part.shape)
        link.send(ReadyMessage(meter_name(self._model.device)))
        while True:
            step = self._take(link)
            if not isinstance(step, ShardedStep):
                raise WireError(f"expected ShardedStep from the leader, got {type(step).__name__}")
            self._began_s = time.monotonic()
            _compute(runner, part, step)
            self._began_s = None

    def _take(self, link: Link) -> Message:
        readable([link], None)  # without limit: the leader may be idle
        return link.take()

    def _report(self, link: Link | None, reason: str) -> None:
        if link is not None:
            try:
                link.send(Failure(reason))
            except LINK_ERRORS as error:
                logger.info("notifying the leader failed: %s", one_line(error))

    def _watch(self, link: Link) -> None:
        """Exit the process if the leader is gone or a forward takes too long."""
        poller = select.poll()
        poller.register(link.fileno(), _HANGUP)
        while not poller.poll(1e3 * WATCH_S):
            began_s = self._began_s
            if began_s is not None and time.monotonic() - began_s > self._terms.step_timeout_s:
                logger.error("a forward has been running for %.0f s: another rank hangs", self._terms.step_timeout_s)
                break
        self._finish()

    def _finish(self) -> None:
        # A leader that was killed during start-up leaves shared memory behind that only this rank removes.
        if self._met is not None:
            sweep(self._met.host, self._met.port, self._shard.world_size)
        end_process()


def _compute(runner: ModelRunner, part: ModelPart, step: ShardedStep) -> None:
    apply_moves(runner.cache, step.moves)
    batch = step.batch
    for segment in batch.segments:  # compiled code has no bounds checks
        assert segment.slot < runner.cache.slots and segment.start + segment.rows <= runner.cache.capacity, segment
    if not part.gives_logits:
        batch = Batch(batch.token_ids, batch.positions, batch.segments, np.zeros(0, np.int64), ())
    runner.forward(batch)
