"""By request: several strategies in one engine, each request drafted for by the one that it asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from decoding.budget.latency import StepLoad
from decoding.budget.row_budget import BudgetCounts
from decoding.drafters.base import Drafter, Target, TargetRows
from decoding.request import Acceptance, Request
from decoding.tree import DraftTree

if TYPE_CHECKING:
    from decoding.drafters.with_model.draft_model import DraftModel
    from decoding.verify.rules import Rule


class ByRequest(Drafter):
    """A drafter for each strategy, of which every request has one (``Request.strategy``) for all of its life.

    A request is known to the drafter of its strategy alone: no other proposes for it or learns from it. Those that keep past
    outputs keep them in one memory, the largest of theirs: they draft from each other's texts, a text that is deleted is deleted
    for all of them, and it is this memory that replicas share.

    The first strategy proposes last, and is told of the rows that the others drafted as of rows that the step computes anyway.

    Example: with ``auto`` and ``llma``, four requests of which the second asks for ``llma``: ``llma`` drafts 20 rows for it, then
    ``auto`` decides what the first, third and fourth are worth in a step of 4 + 20 rows. The trees come back in the order of the
    requests.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        """
        Args:
            drafters: new ones by strategy, at least one. The first is that of requests that ask for none.
        """
        self._drafters = dict(drafters)
        self._default = next(iter(self._drafters))
        self._all = tuple(self._drafters.values())
        self.needs_logits = any(drafter.needs_logits for drafter in self._all)
        self.own_rules = any(drafter.own_rules for drafter in self._all)
        memories = [drafter.memory for drafter in self._all if drafter.memory is not None]
        self.memory = max(memories, key=lambda memory: memory.capacity, default=None)
        for drafter in self._all:
            if drafter.memory is not None:
                drafter.memory = self.memory
        self._live: dict[str, set[str]] = {name: set() for name in self._drafters}  # ids of requests that a drafter has met
        self._asking: dict[str, int] = dict.fromkeys(self._drafters, 0)  # top_k of each in this step
        self._ranks = 1
        self._load: StepLoad | None = None
        self._proposed: list[Drafter] = []  # who drafted last

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies that requests may ask for; the first is that of those that ask for none."""
        return tuple(self._drafters)

    def remembers(self, request: Request) -> bool:
        """Whether the strategy of the request keeps outputs."""
        return self._drafters[self._name(request)].remembers(request)

    @property
    def top_k(self) -> int:
        """The most that a strategy with live requests asks for."""
        return max(self._asking.values())

    @property
    def draft_rows(self) -> int:
        """The most that any of them asks for: they have one draft model, whose slot of a request one of them uses."""
        return max(drafter.draft_rows for drafter in self._all)

    def attach(self, model: DraftModel) -> None:
        """To all of them."""
        for drafter in self._all:
            drafter.attach(model)

    def prepare(self, target: Target) -> None:
        """Prepares all of them: a request may ask for any."""
        for drafter in self._all:
            drafter.prepare(target)

    def scale(self, ranks: int) -> None:
        """For all of them."""
        self._ranks = ranks
        for drafter in self._all:
            drafter.scale(ranks)

    def plan(self, load: StepLoad) -> None:
        """Kept for ``propose``, which adds what was drafted before."""
        self._load = load

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        """One tree per request, in order. A strategy proposes for all of its requests at once."""
        places: dict[str, list[int]] = {name: [] for name in self._drafters}
        for at, request in enumerate(requests):
            name = self._name(request)
            places[name].append(at)
            self._live[name].add(request.request_id)
        trees: list[DraftTree | None] = [None] * len(requests)
        load, self._proposed = self._load, []
        for name, drafter in reversed(self._drafters.items()):
            self._asking[name] = 0
            if not self._live[name]:
                continue
            if load is not None:
                drafter.plan(load)
            mine = places[name]
            if mine:
                self._proposed.append(drafter)
            proposed = drafter.propose([requests[at] for at in mine], [budgets[at] for at in mine])
            for at, tree in zip(mine, proposed, strict=True):
                trees[at] = tree
            if load is not None and mine:
                load = replace(load, rows=load.rows + sum(map(len, proposed)) - len(proposed))
            self._asking[name] = drafter.top_k
        return [tree for tree in trees if tree is not None]

    def rule(self, request: Request) -> Rule | None:
        """By the strategy of the request."""
        return self._drafters[self._name(request)].rule(request)

    def budget(self) -> BudgetCounts | None:
        """That of the first strategy which has one."""
        return next((counts for counts in (drafter.budget() for drafter in self._all) if counts is not None), None)

    def timed(self, seconds: float) -> None:
        """To who drafted alone: of several, how long each took is not known."""
        if len(self._proposed) == 1:
            self._proposed[0].timed(seconds)

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """To the strategy of the request."""
        name = self._name(request)
        self._live[name].add(request.request_id)
        if self._ranks > 1 and self._asking[name] == 0:  # what other ranks ranked was for others, and may be fewer tokens
            target = TargetRows(target.ids, None)
        self._drafters[name].observe(request, tree, target, acceptance)

    def held(self) -> Collection[str]:
        """What any of them holds, and the requests that they have met."""
        return set().union(*self._live.values(), *(drafter.held() for drafter in self._all))

    def finish(self, request: Request) -> None:
        """To the strategy of the request."""
        name = self._name(request)
        self._live[name].discard(request.request_id)
        self._drafters[name].finish(request)

    def _name(self, request: Request) -> str:
        return request.strategy or self._default
