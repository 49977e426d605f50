"""Dispatch of requests to several strategies in one engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from outrider.decoding.budget.draft_budget import RowBudget
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.drafters.base import Drafter, Target, TargetRows
from outrider.decoding.request import Acceptance, BudgetCounts, Request
from outrider.decoding.tree import DraftTree


class ByRequest(Drafter):
    """Drafter that sends each request to the drafter of its strategy (``Request.strategy``), for its whole life.

    Args:
        drafters: new drafters by strategy, at least one. The first is the default.
        paying: row limits of strategies that would otherwise draft as many rows as allowed.
    """

    def __init__(self, drafters: Mapping[str, Drafter], paying: Mapping[str, RowBudget] | None = None) -> None:
        self._drafters, self._paying = dict(drafters), dict(paying or {})
        self._default = next(iter(self._drafters))
        self._all = tuple(self._drafters.values())
        self.needs_logits = any(drafter.needs_logits for drafter in self._all)
        self.own_rules = any(drafter.own_rules for drafter in self._all)
        self.draft_rows = max(drafter.draft_rows for drafter in self._all)  # in a request's slot, used by one drafter only
        # Drafters that keep past outputs share one history, the largest: a deletion applies to all, and replicas share it.
        memories = [drafter.histories for drafter in self._all if drafter.histories is not None]
        self.histories = max(memories, key=lambda memory: memory.capacity, default=None)
        for drafter in self._all:
            if drafter.histories is not None:
                drafter.histories = self.histories
        self._live: dict[str, set[str]] = {name: set() for name in self._drafters}  # ids of live requests by strategy
        self._asking: dict[str, int] = dict.fromkeys(self._drafters, 0)  # top_k of each strategy in this step
        # Strategy of the last step if only one drafted: with several, the drafting time of each is unknown.
        self._alone: str | None = None
        self._latency: Callable[[], LatencyCurve] | None = None

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the strategies that requests may choose, the default first."""
        return tuple(self._drafters)

    def keeps_output(self, request: Request) -> bool:
        """Return whether the strategy of the request keeps outputs."""
        return self._drafters[self._name(request)].keeps_output(request)

    def prepare(self, target: Target) -> None:
        """Prepare all drafters."""
        if self._paying:
            self._latency = target.latency
            target.latency()  # measure now if needed
        for drafter in self._all:
            drafter.draft_model = self.draft_model
            drafter.prepare(target)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """Return one tree per request, in order. Each strategy proposes for all of its requests at once."""
        places: dict[str, list[int]] = {name: [] for name in self._drafters}
        for at, request in enumerate(requests):
            name = self._name(request)
            places[name].append(at)
            self._live[name].add(request.request_id)
        trees: list[DraftTree | None] = [None] * len(requests)
        load = load or StepLoad.of(requests)
        rows = load.rows
        # The first strategy proposes last, and sees the rows that the others drafted as rows that the step computes anyway.
        for name, drafter in reversed(self._drafters.items()):
            self._asking[name] = 0
            if not self._live[name]:
                continue
            mine = places[name]
            propose_s = load.propose_s if name == self._alone else None
            drafter_load = StepLoad(load.sequences, rows, load.context, load.prefill_rows, propose_s)
            drafter.ranks = self.ranks
            proposed = drafter.propose(
                [requests[at] for at in mine], self._bounded(name, mine, budgets, drafter_load), drafter_load
            )
            for at, tree in zip(mine, proposed, strict=True):
                trees[at] = tree
            rows += sum(map(len, proposed)) - len(proposed)
            self._asking[name] = drafter.top_k
        drafted = [name for name, mine in places.items() if mine]
        self._alone = drafted[0] if len(drafted) == 1 else None
        self.top_k = max(self._asking.values())  # maximum over strategies with live requests
        return [tree for tree in trees if tree is not None]

    def _bounded(self, name: str, places: Sequence[int], budgets: Sequence[int], load: StepLoad) -> list[int]:
        """Return the budgets of a strategy's requests, limited to rows that pay off."""
        paying, mine = self._paying.get(name), [budgets[at] for at in places]
        if paying is None or self._latency is None or not mine:
            return mine
        rows = paying.rows(self._latency(), load, len(mine), self.ranks)
        return [min(budget, rows) for budget in mine]

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """Let the drafter of the request's strategy learn from the step."""
        name = self._name(request)
        self._live[name].add(request.request_id)
        if self.ranks > 1 and self._asking[name] == 0:  # other ranks may have ranked fewer tokens
            target = TargetRows(target.ids, None)
        if name in self._paying:
            self._paying[name].observe(tree, acceptance, self.ranks)
        self._drafters[name].observe(request, tree, target, acceptance)

    def budget(self) -> BudgetCounts | None:
        """Return the decisions of the first strategy that has a row budget."""
        return next((counts for counts in (drafter.budget() for drafter in self._all) if counts is not None), None)

    def tracked_requests(self) -> Collection[str]:
        """Return the ids of requests that any drafter holds or has met."""
        return set().union(*self._live.values(), *(drafter.tracked_requests() for drafter in self._all))

    def finish(self, request: Request) -> None:
        """Let the drafter of the request's strategy forget the request."""
        name = self._name(request)
        self._live[name].discard(request.request_id)
        self._drafters[name].finish(request)

    def _name(self, request: Request) -> str:
        return request.strategy or self._default
