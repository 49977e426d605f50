"""Ranks that compute in turn, each as if it were alone, and what their steps would take with a device for each rank."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from actors.lookahead.link import Link
from actors.lookahead.rank import RankServer
from decoding.drafters.base import Drafter, TargetRows
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from engine.executor import Outcome
from engine.forward.batch import Work
from engine.forward.runner import ModelRunner
from experiments.contestants import Prompt
from experiments.guided import GuidedExecutor
from experiments.guided_ranks import PATIENT, RankModel, lead, leader_over

_SECRET = b"of the measurement"


class Turns:
    """Whose turn it is to compute, and what the step's drafter wants to know."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.top_k = 0


class TurnExecutor(GuidedExecutor):
    """A rank that computes while no other does, and keeps how long its latest share took by itself, ranking included."""

    def __init__(self, runner: ModelRunner, turns: Turns) -> None:
        super().__init__(runner)
        self._turns, self.latest_s = turns, 0.0

    def execute(self, works: Sequence[Work], top_k: int = 0) -> list[Outcome | None]:
        """See ``Executor``."""
        with self._turns.lock:
            began = time.perf_counter()
            outcomes = [outcome and self._ranked(outcome) for outcome in super().execute(works, top_k)]
            self.latest_s = time.perf_counter() - began
            return outcomes

    def _ranked(self, outcome: Outcome) -> Outcome:
        """With what will be asked of it already there, so that nothing of the share is left for after the turn."""
        if not self._turns.top_k:
            return outcome
        ranked = outcome.target.top_k(range(len(outcome.tree)), self._turns.top_k)
        return dataclasses.replace(outcome, target=TargetRows(outcome.target.ids, None, ranked))


class TurnGroup:
    """A leader and ranks in threads of this process."""

    def __init__(self, model: RankModel, weights: PreTrainedModel, known: Mapping[str, Sequence[int]], most: int) -> None:
        """
        Args:
            model: that the ranks hold.
            weights: of all ranks.
            known: outputs by request id.
            most: ranks of the largest group.
        """
        self.turns = Turns()
        self.ranks = [TurnExecutor(model.runner(weights), self.turns) for _ in range(most)]
        for rank in self.ranks:
            rank.known.update(known)
        self._servers = [RankServer(rank, _SECRET, PATIENT) for rank in self.ranks[1:]]
        self.leader = leader_over(self.ranks[0])
        self._links: dict[int, Link] = {}

    def lead(self, world: int) -> None:
        """Makes a group of so many ranks."""
        lead(self.leader, self._links, [server.address for server in self._servers[: world - 1]], _SECRET)

    def close(self) -> None:
        """Ends all ranks."""
        for server in self._servers:
            server.close()


@dataclass(slots=True)
class Prediction:
    """Steps after the first token of some requests."""

    steps: int = 0
    tokens: int = 0
    around_s: float = 0.0  # drafting and what else the leader does besides
    compute_s: float = 0.0  # slowest shares
    every_s: float = 0.0  # all shares, of all ranks
    exchange_s: float = 0.0
    recomputed: int = 0  # tokens that others had computed, over all ranks
    shares: int = 0  # over all steps

    @property
    def rate(self) -> float:
        """Predicted tokens per second."""
        return self.tokens / (self.around_s + self.compute_s + self.exchange_s)

    def figures(self) -> dict[str, float]:
        """For the record; milliseconds are of a step."""
        ms = {"around": self.around_s, "compute": self.compute_s, "exchange": self.exchange_s}
        return {
            "tokens_per_s": round(self.rate, 2),
            "tokens_per_step": round(self.tokens / self.steps, 3),
            "mean_share_ms": round(1e3 * self.every_s / self.shares, 3),
            "recomputed_per_share": round(self.recomputed / self.shares, 3),
        } | {f"{name}_ms": round(1e3 * seconds / self.steps, 3) for name, seconds in ms.items()}


def follow(group: TurnGroup, engine: Engine, drafter: Drafter, world: int, prompt: Prompt, exchange_s: float) -> Prediction:
    """Runs one request on a group of so many ranks, and adds up what its steps would take."""
    assert prompt.known is not None, prompt.id
    engine.add(Request(prompt.id, prompt.ids, SamplingParams(len(prompt.known)), prompt.references, tenant="local"))
    done, emitted = Prediction(), 0
    while engine.has_work:
        group.turns.top_k = drafter.top_k if world > 1 else 0
        group.leader.times.clear()
        began = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - began
        tokens = sum(len(output.token_ids) for output in outputs)
        emitted += tokens
        if emitted == tokens:  # the prefill and the first token, which no drafting shortens
            continue
        if world == 1:
            shares, around, recomputed = [group.ranks[0].latest_s], took - group.ranks[0].latest_s, 0
        else:
            (times,) = group.leader.times
            shares = [rank.latest_s for rank in group.ranks[: len(times.rank_s)]]  # the last ranks are the ones without a share
            around, recomputed = took - max(times.rank_s) - times.exchange_s, sum(times.recomputed)
        done.steps += 1
        done.tokens += tokens
        done.around_s += around
        done.compute_s += max(shares)
        done.every_s += sum(shares)
        done.shares += len(shares)
        done.exchange_s += exchange_s if len(shares) > 1 else 0.0
        done.recomputed += recomputed
    return done
