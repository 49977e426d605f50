"""Lookahead-parallel groups over tiny models, without Ray: followers in threads of this process, or in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Literal

import numpy as np

from outrider.actors.description import GroupState
from outrider.actors.lookahead.executor import LookaheadParallelExecutor, StepTimes
from outrider.actors.lookahead.link import connect, readable
from outrider.actors.lookahead.rank import RankServer
from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.request import Request, TokenLogprob
from outrider.decoding.tree import DraftTree
from outrider.engine.engine import Engine, load_runner
from outrider.engine.executor import LocalExecutor, VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.runner import ModelRunner
from tests.helpers.models import CONTEXT, MAX_DRAFT, SLOTS, VOCAB, engine_over, tiny_model

SECRET = b"of the tests"
MOST_RANKS = 5
CAPACITY = CONTEXT + MAX_DRAFT * MOST_RANKS
CONNECT_S = 60.0
CHECK_STEPS = 8
# Threads of one process wait for each other and for the compiler: nobody is lost for that.
PATIENT = ParallelismOptions(mode="lookahead", rank_timeout_s=60.0, step_timeout_s=120.0, adaptive=False)

# Forked from a process that has imported everything: a rank is there in half a second, not in ten.
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.helpers.ranks"])


@dataclass(frozen=True, slots=True)
class Fault:
    """What a rank does at its n-th forward, counted from 1."""

    kind: Literal["raise", "hang", "corrupt"]
    at: int


class FaultyExecutor(LocalExecutor):
    """A rank's executor with a fault in it."""

    def __init__(self, runner: ModelRunner, fault: Fault) -> None:
        super().__init__(runner)
        self._fault, self._forwards = fault, 0

    def execute(self, works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        """See ``Executor``; raises ``RuntimeError``, hangs, or writes into the text of the first request when it is time to."""
        self._forwards += 1
        if self._forwards == self._fault.at:
            if self._fault.kind == "raise":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1099511627776 bytes")
            if self._fault.kind == "hang":
                time.sleep(600)
            works[0].request.tokens[0] += 1
        return super().execute(works, top_k)


def twin(family: str, dtype: str, slots: int = SLOTS, capacity: int = CAPACITY, fixed_rows: int | None = None) -> ModelRunner:
    """A tiny model once more, with the same weights and KV slots of its own."""
    return ModelRunner(deepcopy(tiny_model(family, dtype).runner.model), slots, capacity, fixed_rows=fixed_rows)


@cache
def rank_runner(family: str, dtype: str, rank: int, fixed_rows: int | None = None) -> ModelRunner:
    """Of a rank of this process; groups use it one after another."""
    return twin(family, dtype, fixed_rows=fixed_rows)


class BranchingDrafter(Drafter):
    """Trees of equal branches below the root, one of which is right: any of them, so that every rank of a group gets its turn."""

    def __init__(self, answers: Mapping[str, Sequence[int]], branches: int = 12, depth: int = 2, seed: int = 0) -> None:
        """
        Args:
            answers: the outputs of the requests, by id.
            branches: of a tree.
            depth: of a branch; so many drafted tokens are accepted in each step.
            seed: of the choice of the right branch.
        """
        self._answers, self._branches, self._depth = answers, branches, depth
        self._rng = np.random.default_rng(seed)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request, whatever the budget."""
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> DraftTree:
        ahead = self._answers[request.request_id][request.num_output : request.num_output + self._depth]
        right = np.array([*ahead, *[0] * self._depth][: self._depth], np.int32)
        chosen = int(self._rng.integers(self._branches))
        tokens = [right if at == chosen else (right + 1 + at) % VOCAB for at in range(self._branches)]
        parents = np.arange(self._branches * self._depth, dtype=np.int32)
        parents[:: self._depth] = 0
        rows = 1 + len(parents)
        return DraftTree(
            np.concatenate([[request.root], *tokens]).astype(np.int32),
            np.concatenate([[-1], parents]).astype(np.int32),
            np.ones(rows, np.int8),
            rows,
        )


class RankProcess:
    """A follower in a process of its own. ``with`` ends it, whatever state it is in."""

    def __init__(
        self,
        family: str,
        dtype: str = "float32",
        options: ParallelismOptions = PATIENT,
        fault: Fault | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        """Starts it; ``address`` waits until it listens.

        Args:
            family: of ``tiny_model``.
            dtype: likewise.
            options: of the group.
            fault: what goes wrong in it; nothing when absent.
            capacity: entries of one of its KV slots.
        """
        self._pipe, theirs = forks.Pipe()
        self._process = forks.Process(target=_follow, args=(theirs, family, dtype, options, fault, capacity), daemon=True)
        self._process.start()
        theirs.close()
        self._address: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        if self._address is None:
            assert self._pipe.poll(CONNECT_S), "the rank's process does not say where it listens"
            self._address = self._pipe.recv()
        return self._address

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        """Sends it SIGKILL, SIGSTOP, SIGCONT, ..."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


def _follow(pipe: Connection, family: str, dtype: str, options: ParallelismOptions, fault: Fault | None, capacity: int) -> None:
    """Of a rank's process: follows leaders until the other end of the pipe is gone."""
    runner = twin(family, dtype, capacity=capacity)
    server = RankServer(LocalExecutor(runner) if fault is None else FaultyExecutor(runner, fault), SECRET, options)
    pipe.send(server.address)
    with contextlib.suppress(EOFError, ConnectionResetError):
        pipe.recv()
    server.close()


class TinyGroup:
    """A leader's engine in this process, and followers. ``with`` ends those that are threads; processes are the test's.

    ``join`` and ``leave`` may be called while requests run.
    """

    def __init__(
        self,
        family: str,
        drafter: Drafter,
        world: int = 1,
        *,
        dtype: str = "float32",
        options: ParallelismOptions = PATIENT,
        batch: int = SLOTS,
        step_tokens: int = 256,
        check_steps: int = CHECK_STEPS,
        strategy: str = "test",
        fixed_rows: int | None = None,
    ) -> None:
        """
        Args:
            family: of ``tiny_model``.
            drafter: new and prepared.
            world: ranks in threads, the leader among them; they take part from the first step on.
            dtype: of the model.
            options: of the group.
            batch: requests in one step.
            step_tokens: rows of one rank's forward.
            check_steps: steps between comparisons of the texts.
            strategy: the name to show.
            fixed_rows: of the runners of ranks in threads.
        """
        self._family, self._dtype, self._options, self._fixed_rows = family, dtype, options, fixed_rows
        self._ranks = {0}  # that were ever there
        self._servers: dict[int, RankServer] = {}
        runner = rank_runner(family, dtype, 0, fixed_rows)
        self.executor = LookaheadParallelExecutor(LocalExecutor(runner), options, step_tokens)
        self.executor.check_steps = check_steps
        self.engine = engine_over(runner, drafter, batch, step_tokens, strategy, self.executor)
        for rank in range(1, world):
            self.join(rank)

    def join(self, rank: int, follower: RankProcess | None = None) -> None:
        """A new rank: a process, or a thread of this one."""
        self._ranks.add(rank)
        if follower is None:
            executor = LocalExecutor(rank_runner(self._family, self._dtype, rank, self._fixed_rows))
            server = self._servers[rank] = RankServer(executor, SECRET, self._options)
            address = server.address
        else:
            address = follower.address
        self.executor.add_rank(rank, connect(address, SECRET, CONNECT_S))

    def leave(self, rank: int) -> None:
        """A rank goes, in good order."""
        self.executor.remove_rank(rank)

    def catch_up(self) -> None:
        """Waits until the ranks that are refilled have answered, as no step does: on a busy machine all would be over before."""
        for rank_state in self.executor._membership.rank_states.copy().values():
            if rank_state.refilling and rank_state.unanswered:
                readable([rank_state.link], CONNECT_S)

    @property
    def state(self) -> GroupState:
        """Who takes part, of all ranks that ever did, and what went wrong."""
        return self.executor.state(len(self._ranks))

    @property
    def times(self) -> list[StepTimes]:
        """Of all steps so far."""
        return list(self.executor.times)

    def run(self, requests: Sequence[Request], between: Callable[[int], None] = lambda step: None) -> list[list[int]]:
        """The outputs of some requests.

        Args:
            requests: to be added at once.
            between: called before each step, with the number of steps done.
        """
        return self.answers(requests, between)[0]

    def answers(
        self, requests: Sequence[Request], between: Callable[[int], None] = lambda step: None
    ) -> tuple[list[list[int]], list[list[TokenLogprob]]]:
        """As ``run``, with the log-probabilities that were reported."""
        logprobs: dict[str, list[TokenLogprob]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.engine.add(request)
        steps = 0
        while self.engine.has_work:
            between(steps)
            for output in self.engine.step():
                logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())
            steps += 1
        return [request.output_ids.tolist() for request in requests], [logprobs[request.request_id] for request in requests]

    def __enter__(self) -> TinyGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for rank in (*self.state.ready, *self.state.refilling):
            if rank:
                self.executor.remove_rank(rank)
        for server in self._servers.values():
            server.close()


@contextlib.contextmanager
def loaded_group(
    model: ModelOptions, engine: EngineOptions, speculation: SpeculationOptions, world: int
) -> Iterator[tuple[Engine, LookaheadParallelExecutor]]:
    """An engine as it is loaded from a folder, whose steps ranks in threads of this process share."""
    groups: list[LookaheadParallelExecutor] = []

    def lead(runner: ModelRunner) -> LookaheadParallelExecutor:
        groups.append(LookaheadParallelExecutor(LocalExecutor(runner), PATIENT, engine.max_step_tokens))
        groups[0].check_steps = CHECK_STEPS
        return groups[0]

    leader = Engine.load(model, engine, speculation, world, lead)
    with contextlib.ExitStack() as stack:
        for rank in range(1, world):
            server = RankServer(LocalExecutor(load_runner(model, engine, speculation, world)[1]), SECRET, PATIENT)
            stack.callback(server.close)
            stack.callback(groups[0].remove_rank, rank)
            groups[0].add_rank(rank, connect(server.address, SECRET, CONNECT_S))
        yield leader, groups[0]
