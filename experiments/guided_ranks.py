"""Ranks for measurements: processes that follow a leader, with random weights along known outputs or with a real model."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType

import torch
from transformers import PreTrainedModel

from actors.heap import spare_collector
from actors.lookahead.executor import LookaheadParallelExecutor
from actors.lookahead.link import Address, Link, connect
from actors.lookahead.rank import RankServer
from actors.placement.pinning import pin_thread
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions
from engine.executor import LocalExecutor
from engine.forward.runner import ModelRunner
from engine.loading.model import LoadedModel, load_model, load_tokenizer
from experiments.guided import SIZES, GuidedExecutor, random_model

# A machine that measures is busy on purpose: no rank is given up because others had the processor.
PATIENT = ParallelismOptions(mode="lookahead", rank_timeout_s=30.0, step_timeout_s=300.0, adaptive=False)
_CONNECT_S = 60.0


@dataclass(frozen=True, slots=True)
class RankModel:
    """The model that every rank holds."""

    name: str  # a key of ``SIZES`` for random weights, or a folder
    vocab_size: int
    context: int  # tokens of prompt and output together
    draft_rows: int  # entries of a KV slot behind them: of the widest tree
    dtype: str
    seed: int
    tokenizer: str = ""  # folder, with random weights

    def load(self) -> PreTrainedModel:
        """The model in this process; raises ``ModelLoadError`` for a folder that holds none that can be used."""
        if self.name in SIZES:
            return random_model(self.name, self.vocab_size, self.context, getattr(torch, self.dtype), self.seed)
        return self.loaded().model

    def loaded(self, device: str = "cpu") -> LoadedModel:
        """The model as an engine takes it, with its tokenizer.

        Args:
            device: torch's name of it.

        Raises:
            ModelLoadError: a folder that holds no model or no tokenizer that can be used.
        """
        if self.name not in SIZES:
            return load_model(ModelOptions(self.name, dtype=self.dtype, device=device))  # type: ignore[arg-type]
        model = self.load() if device == "cpu" else self.load().to(device)
        return LoadedModel(model, load_tokenizer(self.tokenizer), f"random-{self.name}", self.context, ())

    def runner(self, model: PreTrainedModel) -> ModelRunner:
        """The model and one KV slot."""
        return ModelRunner(model, 1, self.context + self.draft_rows)


def executor_over(runner: ModelRunner, known: Mapping[str, Sequence[int]] | None) -> LocalExecutor:
    """Follows known outputs, by request id; or, without any, the model."""
    if known is None:
        return LocalExecutor(runner)
    guided = GuidedExecutor(runner)
    guided.known.update(known)
    return guided


def leader_over(local: LocalExecutor) -> LookaheadParallelExecutor:
    """A leader without ranks: see ``FollowerGroup.lead``."""
    return LookaheadParallelExecutor(local, PATIENT, EngineOptions().max_step_tokens)


def lead(executor: LookaheadParallelExecutor, links: dict[int, Link], addresses: Sequence[Address], secret: bytes) -> None:
    """Replaces the ranks of an executor, which does not compute now.

    Args:
        executor: the leader.
        links: to its former ranks, by rank; those to the new ones afterwards.
        addresses: of rank 1, 2, ...
        secret: of the ranks.
    """
    for rank in links:
        executor.remove_rank(rank)
    executor.tend()
    for link in links.values():
        link.close()
    links.clear()
    for rank, address in enumerate(addresses, start=1):
        links[rank] = connect(address, secret, _CONNECT_S)
        executor.add_rank(rank, links[rank])


def _follow(
    pipe: Connection,
    model: RankModel,
    known: Mapping[str, Sequence[int]] | None,
    secret: bytes,
    core: int | None,
    threads: int,
    device: str,
) -> None:
    """Of a rank's process: follows leaders until the other end of the pipe is gone."""
    torch.set_num_threads(threads)
    prepare = None if core is None else partial(pin_thread, (core,))
    runner = model.runner(model.loaded(device).model if device != "cpu" else model.load())
    server = RankServer(executor_over(runner, known), secret, PATIENT, prepare=prepare)
    spare_collector()
    pipe.send(server.address)
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.close()


class FollowerGroup:
    """The ranks beside the leader, which is the process that makes this: a process each. ``with`` ends them.

    They are those of ``actors.lookahead.group`` without Ray around them, which has no part in a step.
    """

    def __init__(
        self,
        model: RankModel,
        known: Mapping[str, Sequence[int]] | None,
        ranks: int,
        cores: Sequence[int] | None = None,
        threads: int = 1,
        devices: Sequence[str] = ("cpu",),
    ) -> None:
        """
        Args:
            model: that each rank holds.
            known: outputs by request id; None to follow the model.
            ranks: of the group, the leader among them.
            cores: rank i computes on ``cores[i % len(cores)]`` alone; where the system wants when absent.
            threads: of torch, in each rank.
            devices: rank i computes on ``devices[i % len(devices)]``.
        """
        self._secret = secrets.token_bytes(32)
        self._links: dict[int, Link] = {}
        self._addresses: list[Address] = []
        self._processes: list[tuple[SpawnProcess, Connection]] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(1, ranks):
            core = None if cores is None else cores[rank % len(cores)]
            pipe, theirs = context.Pipe()
            arguments = (theirs, model, known, self._secret, core, threads, devices[rank % len(devices)])
            process = context.Process(target=_follow, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, pipe))

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank from 1 on."""
        return [process.pid for process, _ in self._processes if process.pid is not None]

    def lead(self, executor: LookaheadParallelExecutor, ranks: int) -> None:
        """Lets an executor lead the first ``ranks - 1`` of the others from now on, over new connections.

        Raises:
            EOFError: a rank's process has ended.
        """
        if not self._addresses:
            self._addresses = [pipe.recv() for _, pipe in self._processes]
        lead(executor, self._links, self._addresses[: ranks - 1], self._secret)

    def close(self) -> None:
        """Ends the ranks."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        for process, pipe in self._processes:
            process.kill()  # it holds nothing that would have to be put in order
            process.join()
            pipe.close()
        self._processes.clear()

    def __enter__(self) -> FollowerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
