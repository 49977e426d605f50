"""What competes in ``experiments.lookahead_scaling``: one model, engines on one rank or on several, and where their time goes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from actors.lookahead_parallel import StepTimes
from actors.pinning import pin_thread
from cluster.strategy_option import StrategyChoice
from configs.slices import EngineOptions
from decoding.drafters import LOSSLESS
from decoding.latency import LatencyCurve, StepLoad
from engine.engine import Engine
from engine.executor import LocalExecutor
from engine.loading import LoadedModel
from engine.scheduler import Scheduler
from engine.target import LocalTarget
from experiments.competition import Tally
from experiments.contestants import EngineContestant, Prompt, Run
from experiments.guided import GuidedExecutor
from experiments.guided_ranks import FollowerGroup, leader_over


@dataclass(frozen=True, slots=True)
class Entry:
    """A strategy on so many ranks with so many threads each, with a budget for each rank."""

    strategy: StrategyChoice
    ranks: int
    threads: int
    budget: int  # most drafted rows of a step, for each rank

    @property
    def way(self) -> str:
        """Without the budget."""
        return f"{self.strategy.label}, {self.ranks} x {self.threads}"

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.way}, {self.budget}"


class ScalingBench:
    """One model in this process, its followers, and engines that take turns on them."""

    def __init__(self, loaded: LoadedModel, local: LocalExecutor, group: FollowerGroup, pinned: bool) -> None:
        """
        Args:
            loaded: what ``local`` computes with.
            local: of this process, the leader.
            group: the other ranks.
            pinned: this process's thread stays on the first core while it leads.
        """
        self.loaded, self.local, self._group = loaded, local, group
        cores = sorted(os.sched_getaffinity(0))
        self._cores = cores, cores[:1] if pinned else cores
        self._targets: dict[int, LocalTarget] = {}  # by threads: each has its own curve
        self.leader, self._led = leader_over(local), 1  # ranks that it leads now, itself included

    def target(self, threads: int) -> LocalTarget:
        """The model as drafters see it, timed with so many threads."""
        torch.set_num_threads(threads)
        if threads not in self._targets:
            self._targets[threads] = LocalTarget(self.local.runner, self.loaded.info("", True), self.loaded.tokenizer)
        return self._targets[threads]

    def engine(self, entry: Entry) -> Engine:
        """A new engine with a drafter that knows nothing."""
        drafter = entry.strategy.build()
        drafter.prepare(self.target(entry.threads))
        info = self.loaded.info(entry.label, entry.strategy.name in LOSSLESS)
        executor = self.local if entry.ranks == 1 else self.leader
        return Engine(executor, drafter, Scheduler(EngineOptions(max_running=1), entry.budget), info)

    def begin(self, entry: Entry) -> None:
        """Before an engine's turn."""
        torch.set_num_threads(entry.threads)
        pin_thread(self._cores[entry.ranks > 1])
        if entry.ranks > 1 and entry.ranks != self._led:
            self._group.lead(self.leader, entry.ranks)
            self._led = entry.ranks

    def curve(self) -> LatencyCurve:
        """How long a step on one thread takes."""
        return self.target(1).latency()


class ScalingContestant(EngineContestant):
    """An entry; it keeps the times of the steps that its group took after the first token."""

    def __init__(self, bench: ScalingBench, entry: Entry, max_tokens: int) -> None:
        guide = bench.local if isinstance(bench.local, GuidedExecutor) else None
        super().__init__(partial(bench.engine, entry), max_tokens, guide)
        self.name, self.entry, self._bench = entry.label, entry, bench
        self.steps: list[StepTimes] = []

    def run(self, prompts: Sequence[Prompt]) -> Run:
        """See ``Contestant``."""
        self._bench.begin(self.entry)
        if self.entry.ranks == 1:
            return super().run(prompts)
        executor = self._bench.leader
        executor.times.clear()
        run = super().run(prompts)
        self.steps.extend(list(executor.times)[len(prompts) :])
        state = executor.state(self.entry.ranks)
        if state.degraded:
            raise RuntimeError(f"a rank was lost in the middle of the measurement: {state.last_loss}")
        return run


def decode_rates(tally: Tally, repeats: int, prompts: int) -> list[float]:
    """Tokens per second after the first token, repeat by repeat."""
    tokens = tally.tokens / repeats - prompts
    return [tokens / (wall - prefill) for wall, prefill in zip(tally.wall_s, tally.prefill_s, strict=True)]


def total_rates(tally: Tally, repeats: int) -> list[float]:
    """Tokens per second, prefill included, repeat by repeat."""
    return [tally.tokens / repeats / wall for wall in tally.wall_s]


def step_split(tally: Tally, prefills: int, steps: Sequence[StepTimes], curve: LatencyCurve) -> dict[str, Any]:
    """Milliseconds of one step after the first token, on average.

    ``recompute`` is what tokens that others had computed add to the slowest rank's rows by the measured curve, ``compute`` what
    is left of that rank's time, ``exchange`` the step beyond it, ``propose`` the drafting and ``rest`` the engine's other work.

    Example: the slowest rank computes 9 rows in 30 ms, 2 of them again; 9 rows take 29 ms by the curve and 7 take 26: 3 ms
    are recompute and 27 compute.

    Args:
        tally: of all runs.
        prefills: requests that it ran.
        steps: of the group; empty for one rank.
        curve: of one rank.

    Returns:
        Those five; for a group also ``exchange_share`` of the step, ``rows`` and ``recomputed`` of a rank, ``balance``, the
        mean rank's compute as a share of the slowest's, and ``shared_steps``, the share of steps in which others had a part.
    """
    count = max(tally.steps - prefills, 1)
    assert tally.propose_s is not None
    forward, propose = sum(tally.forward_s) / count, sum(tally.propose_s) / count
    rest = (sum(tally.wall_s) - sum(tally.prefill_s)) / count - forward - propose
    recompute = exchange = 0.0
    extra: dict[str, Any] = {}
    if steps:
        slowest = [int(np.argmax(step.rank_s)) for step in steps]
        rows = np.array([[step.rows[at], step.recomputed[at]] for step, at in zip(steps, slowest, strict=True)], np.float64)
        one = StepLoad(1, 1, curve.context)
        recompute = float((curve.seconds(rows[:, 0], one) - curve.seconds(rows[:, 0] - rows[:, 1], one)).mean())
        exchange = statistics.fmean(step.exchange_s for step in steps)
        extra = {
            "exchange_share": round(exchange / (forward + propose + rest), 4),
            "exchange_p50": round(1e3 * statistics.median(step.exchange_s for step in steps), 3),
            "rows": round(statistics.fmean(statistics.fmean(step.rows) for step in steps), 2),
            "recomputed": round(statistics.fmean(statistics.fmean(step.recomputed) for step in steps), 2),
            "balance": round(statistics.fmean(statistics.fmean(step.rank_s) / max(step.rank_s) for step in steps), 3),
            "shared_steps": round(statistics.fmean(len(step.rank_s) > 1 for step in steps), 3),
        }
    parts = {
        "propose": propose, "compute": forward - exchange - recompute, "recompute": recompute, "exchange": exchange, "rest": rest,
    }  # fmt: skip
    return {name: round(1e3 * seconds, 3) for name, seconds in parts.items()} | extra


def ratios(own: Mapping[str, list[float]], base: Mapping[str, list[float]]) -> list[float]:
    """Own rates over those of another, as the mean over workloads, repeat by repeat."""
    pairs = [[a / b for a, b in zip(own[name], base[name], strict=True)] for name in own]
    return [round(statistics.fmean(repeat), 3) for repeat in zip(*pairs, strict=True)]
