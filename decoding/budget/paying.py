"""A strategy that drafts as many rows as pay on this device."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from decoding.budget.latency import LatencyCurve, StepLoad
from decoding.drafters.base import Drafter, Target, TargetRows
from decoding.request import Acceptance, Request
from decoding.sources.history import Histories
from decoding.tree import DraftTree

_RATE = 0.08  # of what is expected is of the last step
_PRIOR = 0.4  # accepted tokens that each doubling of the rows is expected to add before anything was seen
_SLACK = 1.5  # a step with guesses for later steps may take so many times as long as one without
_FURTHER = 2  # rows beyond the best number that are drafted to see whether more would pay, or half as many again


class PayingDrafter(Drafter):
    """Bounds the rows of another drafter by what its trees gave so far and what rows cost.

    Strategies put their best guesses first. So a step tells, of each smaller number of rows, how many tokens it would have
    given: the accepted ones among the first so many rows. What is expected of a number of rows, over the time of a step with so
    many, has a best number; a few more are drafted, so that it can rise. Who computes guesses for later steps beside its
    candidates (``Drafter.looks_ahead``) gets the rows that cost little.

    Example: a step takes 6 ms without drafts and 0.2 ms more for each row, and of ten rows the first two are accepted in every
    second step: 2 tokens in 6.4 ms are more than 1 in 6 and 2 in 8. Four rows are drafted.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        """
        Args:
            drafter: not prepared yet.
            most: rows of a request in a step, for each rank.
        """
        self._drafter, self._ranks = drafter, 1
        self._counts = np.arange(most + 1)
        self._gains = _PRIOR * np.log2(1.0 + self._counts)  # [most + 1] expected accepted tokens of so many rows
        self._curve: LatencyCurve | None = None
        self._load: StepLoad | None = None
        self.needs_logits, self.own_rules = drafter.needs_logits, drafter.own_rules

    @property
    def memory(self) -> Histories | None:
        """The drafter's."""
        return self._drafter.memory

    @memory.setter
    def memory(self, memory: Histories | None) -> None:
        self._drafter.memory = memory

    def remembers(self, request: Request) -> bool:
        """As the drafter."""
        return self._drafter.remembers(request)

    @property
    def top_k(self) -> int:
        """The drafter's."""
        return self._drafter.top_k

    def prepare(self, target: Target) -> None:
        """Times the steps of the target."""
        self._curve = target.latency()
        self._drafter.prepare(target)

    def scale(self, ranks: int) -> None:
        """Rows for each rank."""
        self._ranks = ranks
        self._drafter.scale(ranks)

    def plan(self, load: StepLoad) -> None:
        """What a row costs depends on what the step computes besides."""
        self._load = load
        self._drafter.plan(load)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        """One tree per request; fewer rows than the budgets where more do not pay."""
        if requests and self._curve is not None:
            count = len(requests)
            load = self._load or StepLoad(count, count, sum(request.num_tokens - 1 for request in requests))
            rows = self._rows(self._curve, load, count)
            budgets = [min(budget, rows) for budget in budgets]
        self._load = None
        return self._drafter.propose(requests, budgets)

    def _rows(self, curve: LatencyCurve, load: StepLoad, requests: int) -> int:
        """To draft for each of the requests, on all ranks together."""
        seconds = curve.seconds(load.rows + requests * self._counts.astype(np.float64), load)
        if self._drafter.looks_ahead:
            return int(np.count_nonzero(seconds <= _SLACK * seconds[0]) - 1) * self._ranks
        best = int(np.argmax((1.0 + self._gains) / seconds))
        return min(best + max(_FURTHER, best // 2), len(self._counts) - 1) * self._ranks

    def timed(self, seconds: float) -> None:
        """Tells the drafter."""
        self._drafter.timed(seconds)

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """Learns what a step gave, and tells the drafter."""
        drafted = min(-(-(tree.num_candidates - 1) // self._ranks), len(self._counts) - 1)
        if drafted > 0:
            known, further = self._gains[: drafted + 1], self._gains[drafted + 1 :] - self._gains[drafted]
            found = np.searchsorted(np.array(acceptance.rows), self._counts[: drafted + 1] * self._ranks, side="right")
            known += _RATE * (found - known)
            self._gains[drafted + 1 :] = known[-1] + further
        self._drafter.observe(request, tree, target, acceptance)

    def held(self) -> Collection[str]:
        """The drafter's."""
        return self._drafter.held()

    def finish(self, request: Request) -> None:
        """Tells the drafter."""
        self._drafter.finish(request)
