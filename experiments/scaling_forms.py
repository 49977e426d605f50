"""The forms of ``outrider bench scaling`` in the process that leads one: what computes its steps, and what a step is made of."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from typing import Any

import psutil
import torch
from torch import distributed
from transformers import PreTrainedTokenizerFast

from actors.placement.pinning import pin_thread
from actors.sharded.processes import RankProcesses, process_group
from configs.slices import EngineOptions, ModelOptions
from decoding.budget.latency import LatencyCurve
from engine.executor import Executor, LocalExecutor
from engine.loading.model import LoadedModel, ModelInfo
from experiments.guided_ranks import PATIENT, FollowerGroup, RankModel, executor_over, leader_over
from experiments.scaling_clocks import CallClock, Spent, StageLoad, shared_steps
from experiments.scaling_options import Form

Known = Mapping[str, Sequence[int]]


class Place:
    """A form, started: its ranks, of which this process is the first; here the only one."""

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: PreTrainedTokenizerFast,
        executor: Executor,
        local: LocalExecutor,
        pids: Sequence[int] = (),
    ) -> None:
        """
        Args:
            info: of the whole model.
            tokenizer: of it.
            executor: computes the steps.
            local: this process's part in that.
            pids: of all other ranks.
        """
        self.info, self.tokenizer, self.executor, self.local = info, tokenizer, executor, local
        self.pids = (os.getpid(), *pids)

    def first_token(self) -> None:
        """Forgets what steps were made of so far."""

    def spent(self, curve: Callable[[], LatencyCurve]) -> Spent:
        """What steps were made of since; ``curve`` gives the time of one rank's steps."""
        return Spent()

    def facts(self) -> dict[str, Any]:
        """Parameters of the whole model; MiB of each rank's process, and of this one what its weights and KV slots take."""
        shape, cache = self.local.runner.cache.shape, self.local.runner.cache
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in self.local.runner.model.parameters()}
        mib = {"weights_mib": sum(weights.values()), "kv_mib": shape.bytes_per_token() * cache.slots * cache.capacity}
        if shape.device.type == "cuda":
            mib["gpu_mib"] = torch.cuda.max_memory_allocated(shape.device)
        each = [round(psutil.Process(pid).memory_info().rss / 2**20, 1) for pid in self.pids]
        return {"parameters": self.info.num_parameters, "rss_mib": each} | {
            name: round(size / 2**20, 3) for name, size in mib.items()
        }

    def close(self) -> None:
        """Ends the other ranks."""


class _Lookahead(Place):
    """Ranks with a copy of the model each."""

    def __init__(self, loaded: LoadedModel, local: LocalExecutor, group: FollowerGroup, ranks: int) -> None:
        self._leader, self._group, self._ranks = leader_over(local), group, ranks
        super().__init__(loaded.info("", True), loaded.tokenizer, self._leader, local, group.pids)
        group.lead(self._leader, ranks)

    def first_token(self) -> None:
        """See ``Place``."""
        self._leader.times.clear()

    def spent(self, curve: Callable[[], LatencyCurve]) -> Spent:
        """See ``Place``. Raises ``RuntimeError`` when a rank was lost."""
        state = self._leader.state(self._ranks)
        if state.degraded:
            raise RuntimeError(f"a rank was lost in the middle of the measurement: {state.last_loss}")
        return shared_steps(list(self._leader.times), curve())

    def close(self) -> None:
        """See ``Place``."""
        self._group.close()


class _Sharded(Place):
    """Ranks with a part of the model each. A process can lead one such group in its life."""

    def __init__(self, form: Form, model: RankModel, known: Known | None, device: str) -> None:
        """Raises ``GroupError`` or ``ModelLoadError`` where the ranks cannot be had or the model cannot be dealt to them."""
        self._busy_s = get_context("spawn").RawArray(ctypes.c_double, form.workers)
        load = StageLoad(model, self._busy_s) if form.kind == "pipeline" and device == "cpu" else model.load
        options = ModelOptions(model.name, device=device, threads=form.rank_threads)
        self._group = process_group("tensor" if form.kind == "tensor" else "pipeline", form.workers, options, PATIENT, load)
        try:
            loaded = model.loaded()
            info = loaded.info("", True)  # of the whole model, before parts of it go
            runner = self._group.runner(loaded.model, model.context + model.draft_rows, EngineOptions(max_running=1))
            local = executor_over(runner, known)
        except BaseException:
            self._group.close()
            raise
        assert isinstance(self._group.housing, RankProcesses)
        super().__init__(info, loaded.tokenizer, local, local, self._group.housing.pids)
        self._calls, self._told = CallClock(), device == "cpu"  # a GPU's calls return before they are done
        self._before = 0.0
        self._kind = form.kind
        if self._told:
            self._watch()

    def _watch(self) -> None:
        if self._kind == "tensor":
            from deepspeed.comm import comm

            self._calls.around(comm.cdb, "inference_all_reduce")
        else:
            self._calls.around(distributed, "send")
            self._calls.around(distributed, "recv")

    def _waited_s(self) -> float:
        """Without what the other ranks of a pipeline computed meanwhile."""
        return self._calls.seconds - sum(self._busy_s)

    def first_token(self) -> None:
        """See ``Place``."""
        self._before = self._waited_s()

    def spent(self, curve: Callable[[], LatencyCurve]) -> Spent:
        """See ``Place``."""
        return Spent(exchange_s=max(0.0, self._waited_s() - self._before) if self._told else None)

    def facts(self) -> dict[str, Any]:
        """See ``Place``; and of tensor parallelism on processors, what the sums go through."""
        if self._kind != "tensor" or not self._told:
            return super().facts()
        shared = hasattr(torch.ops.deepspeed, "inference_all_reduce_")  # as DeepSpeed asks, at every sum
        return super().facts() | {"sums": "shared memory" if shared else "gloo"}

    def close(self) -> None:
        """See ``Place``."""
        self._group.close()


def open_place(form: Form, model: RankModel, known: Known | None, device: str, pin: bool) -> Place:
    """Starts a form's ranks beside this process.

    Args:
        form: to start.
        model: of every rank.
        known: outputs to follow, by request id; None to follow the model.
        device: ``cpu`` or ``cuda``; rank i then has the i-th GPU.
        pin: ranks stay on cores of their own.

    Raises:
        GroupError, ModelLoadError, OSError: they cannot be had.
    """
    torch.set_num_threads(form.rank_threads)
    cores = sorted(os.sched_getaffinity(0)) if pin and form.ranks > 1 else []
    if form.kind in ("tensor", "pipeline"):
        place = _Sharded(form, model, known, device)
        for rank, pid in enumerate(place.pids if cores else ()):
            os.sched_setaffinity(pid, cores[rank % len(cores) :][:1])
        return place
    first = "cpu" if device == "cpu" else "cuda:0"
    if form.kind != "lookahead":
        loaded = model.loaded(first)
        local = executor_over(model.runner(loaded.model), known)
        return Place(loaded.info("", True), loaded.tokenizer, local, local)
    devices = [first] if device == "cpu" else [f"cuda:{rank}" for rank in range(form.workers)]
    group = FollowerGroup(model, known, form.workers, cores or None, form.rank_threads, devices)
    try:
        loaded = model.loaded(first)
        if cores:
            pin_thread(cores[:1])
        return _Lookahead(loaded, executor_over(model.runner(loaded.model), known), group, form.workers)
    except BaseException:
        group.close()
        raise
