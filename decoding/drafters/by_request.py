"""By request: several strategies in one engine, each request drafted for by the one that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from decoding.budget.latency import LatencyCurve, StepLoad
from decoding.budget.paying import PayingRows
from decoding.drafters.base import Drafter, Target, TargetRows
from decoding.request import Acceptance, Request
from decoding.step_output import BudgetCounts
from decoding.tree import DraftTree


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

    def __init__(self, drafters: Mapping[str, Drafter], paying: Mapping[str, PayingRows] | None = None) -> None:
        """
        Args:
            drafters: new ones by strategy, at least one. The first is that of requests that ask for none.
            paying: what bounds the rows of strategies that draft as many as they may; others are left alone.
        """
        self._drafters, self._paying = dict(drafters), dict(paying or {})
        self._default = next(iter(self._drafters))
        self._all = tuple(self._drafters.values())
        self.needs_logits = any(drafter.needs_logits for drafter in self._all)
        self.own_rules = any(drafter.own_rules for drafter in self._all)
        self.draft_rows = max(drafter.draft_rows for drafter in self._all)  # in one slot of a request, which one of them uses
        memories = [drafter.memory for drafter in self._all if drafter.memory is not None]
        self.memory = max(memories, key=lambda memory: memory.capacity, default=None)
        for drafter in self._all:
            if drafter.memory is not None:
                drafter.memory = self.memory
        self._live: dict[str, set[str]] = {name: set() for name in self._drafters}  # ids of requests that a drafter has met
        self._asking: dict[str, int] = dict.fromkeys(self._drafters, 0)  # top_k of each in this step
        self._alone: str | None = None  # who drafted last, if one alone did: of several, how long each took is not known
        self._latency: Callable[[], LatencyCurve] | None = None

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies that requests may ask for; the first is that of those that ask for none."""
        return tuple(self._drafters)

    def remembers(self, request: Request) -> bool:
        """Whether the strategy of the request keeps outputs."""
        return self._drafters[self._name(request)].remembers(request)

    def prepare(self, target: Target) -> None:
        """Prepares all of them: a request may ask for any."""
        if self._paying:
            self._latency = target.latency
            target.latency()  # measured now, if it has to be
        for drafter in self._all:
            drafter.draft_model = self.draft_model
            drafter.prepare(target)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request, in order. A strategy proposes for all of its requests at once."""
        places: dict[str, list[int]] = {name: [] for name in self._drafters}
        for at, request in enumerate(requests):
            name = self._name(request)
            places[name].append(at)
            self._live[name].add(request.request_id)
        trees: list[DraftTree | None] = [None] * len(requests)
        load = load or StepLoad.of(requests)
        rows = load.rows
        for name, drafter in reversed(self._drafters.items()):
            self._asking[name] = 0
            if not self._live[name]:
                continue
            mine = places[name]
            propose_s = load.propose_s if name == self._alone else None
            told = StepLoad(load.sequences, rows, load.context, load.prefill_rows, propose_s)
            drafter.ranks = self.ranks
            proposed = drafter.propose([requests[at] for at in mine], self._bounded(name, mine, budgets, told), told)
            for at, tree in zip(mine, proposed, strict=True):
                trees[at] = tree
            rows += sum(map(len, proposed)) - len(proposed)
            self._asking[name] = drafter.top_k
        drafted = [name for name, mine in places.items() if mine]
        self._alone = drafted[0] if len(drafted) == 1 else None
        self.top_k = max(self._asking.values())  # the most that a strategy with live requests asks for
        return [tree for tree in trees if tree is not None]

    def _bounded(self, name: str, places: Sequence[int], budgets: Sequence[int], load: StepLoad) -> list[int]:
        """The budgets of a strategy's requests, as far as its rows pay."""
        paying, mine = self._paying.get(name), [budgets[at] for at in places]
        if paying is None or self._latency is None or not mine:
            return mine
        rows = paying.rows(self._latency(), load, len(mine), self.ranks)
        return [min(budget, rows) for budget in mine]

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """To the strategy of the request."""
        name = self._name(request)
        self._live[name].add(request.request_id)
        if self.ranks > 1 and self._asking[name] == 0:  # what other ranks ranked was for others, and may be fewer tokens
            target = TargetRows(target.ids, None)
        if name in self._paying:
            self._paying[name].observe(tree, acceptance, self.ranks)
        self._drafters[name].observe(request, tree, target, acceptance)

    def budget(self) -> BudgetCounts | None:
        """That of the first strategy which has one."""
        return next((counts for counts in (drafter.budget() for drafter in self._all) if counts is not None), None)

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
