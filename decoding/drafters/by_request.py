"""Dispatch of requests to several strategies in one engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.draft_budget import RowBudget
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.drafters.base import Drafter, Target, TargetRows, TooManySettingsError
from outrider.decoding.request import BudgetCounts, Request
from outrider.decoding.tree import Acceptance, DraftTree

# Returns a new drafter, and its row budget if it has one, for a strategy with options such as ``jacobi:window=5``.
Build = Callable[[str], tuple[Drafter, RowBudget | None]]


class _PreparedTarget:
    """The target, which records the widest bigram table that drafters asked for when the engine started."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.vocab_size, self.end_token_ids, self.max_model_len = target.vocab_size, target.end_token_ids, target.max_model_len
        self._bigrams = np.empty((0, 0), np.int32)  # the widest table so far

    def bigram_table(self, width: int) -> Int32Array:
        """See ``Target``."""
        table = self._target.bigram_table(width)
        if table.shape[1] > self._bigrams.shape[1]:
            self._bigrams = table
        return table

    def unigram_ranking(self, width: int) -> Int32Array:
        """See ``Target``."""
        return self._target.unigram_ranking(width)

    def latency(self) -> LatencyCurve:
        """See ``Target``."""
        return self._target.latency()


class _RunningTarget(_PreparedTarget):
    """The target for drafters that are built while requests run: it builds no bigram table, which is slow."""

    def __init__(self, prepared: _PreparedTarget) -> None:
        super().__init__(prepared._target)
        self._bigrams = prepared._bigrams

    def bigram_table(self, width: int) -> Int32Array:
        """Return columns of the table that was built at the start. Raises ``ValueError`` if it has fewer."""
        most = self._bigrams.shape[1]
        if width > most:
            raise ValueError(f"this needs a bigram table of {width} columns, and the server was started with {most}")
        return self._bigrams[:, :width]


class ByRequest(Drafter):
    """Drafter that sends each request to the drafter of its strategy (``Request.strategy``), for its whole life.

    Args:
        drafters: new drafters by strategy, at least one. The first is the default.
        paying: row limits of strategies that would otherwise draft as many rows as allowed.
        build: builds a drafter for a strategy with options of a request (``admit``); None: requests cannot set options.
        max_settings: most drafters of ``build`` at a time. The one unused for the longest time makes room for another.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        paying: Mapping[str, RowBudget] | None = None,
        build: Build | None = None,
        max_settings: int = 0,
    ) -> None:
        self._build, self._max_settings = build, max_settings
        self._built: dict[str, None] = {}  # strategies with options of requests, the one unused for the longest time first
        self._target: _PreparedTarget | None = None
        self._drafters, self._paying = dict(drafters), dict(paying or {})
        self._default = next(iter(self._drafters))
        self._all = tuple(self._drafters.values())
        self._num_configured = len(self._drafters)
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
        self._paid: dict[str, int] = {}  # by request: rows in its last tree that pay, if they are fewer than its budget
        self._latency: Callable[[], LatencyCurve] | None = None

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the strategies that requests may choose, the default first."""
        return tuple(self._drafters)[: self._num_configured]

    def keeps_output(self, request: Request) -> bool:
        """Return whether the strategy of the request keeps outputs."""
        return self._drafters[self._name(request)].keeps_output(request)

    def prepare(self, target: Target) -> None:
        """Prepare all drafters."""
        if self._paying:
            self._latency = target.latency
            target.latency()  # measure now if needed
        self._target = _PreparedTarget(target)
        for drafter in self._all:
            drafter.draft_model = self.draft_model
            drafter.prepare(self._target)

    def admit(self, request: Request) -> None:
        """Build the drafter of a request's options, if there is none yet."""
        name = self._name(request)
        if name not in self._drafters:
            self._make_room()
            self._add(name)
        if name in self._built:
            del self._built[name]
            self._built[name] = None
            self._live[name].add(request.request_id)

    def _make_room(self) -> None:
        """Drop the least recently used drafter without requests if the limit is reached. Raises ``TooManySettingsError``."""
        if len(self._built) < self._max_settings:
            return
        unused = next((name for name in self._built if not self._live[name]), None)
        if unused is None:
            raise TooManySettingsError(
                f"requests with {self._max_settings} other sets of options are running (speculation.max_settings): try later"
            )
        del self._built[unused], self._drafters[unused], self._live[unused], self._asking[unused]
        self._paying.pop(unused, None)
        self._all = tuple(self._drafters.values())

    def _add(self, name: str) -> None:
        """Build and prepare the drafter of a strategy with options. Raises ``ValueError`` if the server has no room for it."""
        assert self._build is not None and self._target is not None, "options are checked against those that requests may set"
        drafter, paying = self._build(name)
        if drafter.draft_rows > self.draft_rows:
            raise ValueError(
                f"the server has room for {self.draft_rows} rows of the draft model, and {drafter.draft_rows} are needed"
            )
        if drafter.own_rules and not self.own_rules:
            raise ValueError("the server was started with strategies that verify by exact matching only")
        if drafter.histories is not None:
            if self.histories is None:
                raise ValueError("the server was started without a history of past outputs")
            drafter.histories = self.histories
        drafter.draft_model, drafter.ranks = self.draft_model, self.ranks
        drafter.prepare(_RunningTarget(self._target))
        self._drafters[name], self._live[name], self._asking[name] = drafter, set(), 0
        if paying is not None:
            self._paying[name] = paying
        self._built[name] = None
        self._all = tuple(self._drafters.values())

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
                [requests[at] for at in mine], self._bounded(name, requests, mine, budgets, drafter_load), drafter_load
            )
            for at, tree in zip(mine, proposed, strict=True):
                trees[at] = tree
            rows += sum(map(len, proposed)) - len(proposed)
            self._asking[name] = drafter.top_k
        drafted = [name for name, mine in places.items() if mine]
        self._alone = drafted[0] if len(drafted) == 1 else None
        self.top_k = max(self._asking.values())  # maximum over strategies with live requests
        return [tree for tree in trees if tree is not None]

    def _bounded(
        self, name: str, requests: Sequence[Request], places: Sequence[int], budgets: Sequence[int], load: StepLoad
    ) -> list[int]:
        """Return the budgets of a strategy's requests, limited to rows that pay off, or to the published ones."""
        paying, mine = self._paying.get(name), [budgets[at] for at in places]
        if paying is None or self._latency is None or not mine:
            return mine
        published = self._drafters[name].published_rows * self.ranks
        bounded = sum(not requests[at].as_published for at in places)
        rows = paying.rows(self._latency(), load, bounded, self.ranks) if bounded else 0
        limits = [published if requests[at].as_published else rows for at in places]
        for at, budget, limit in zip(places, mine, limits, strict=True):
            if limit < budget:
                self._paid[requests[at].request_id] = limit
            else:
                self._paid.pop(requests[at].request_id, None)
        return [min(budget, limit) for budget, limit in zip(mine, limits, strict=True)]

    def cut_rows(self, request: Request, tree: DraftTree, budget: int) -> tuple[int, bool]:
        """See ``Drafter``."""
        paid = self._paid.get(request.request_id)
        wanted, _ = self._drafters[self._name(request)].cut_rows(request, tree, budget if paid is None else paid)
        return wanted, paid is not None

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
        if name not in self._drafters:  # its drafter could not be built
            return
        self._live[name].discard(request.request_id)
        self._paid.pop(request.request_id, None)
        self._drafters[name].finish(request)

    def _name(self, request: Request) -> str:
        return request.strategy or self._default
