"""Table of token recycling: the target's top-k after each token when last computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.decoding.arrays import Float64Array, Int32Array, Int64Array
from outrider.decoding.jit import compiled
from outrider.decoding.request import Request
from outrider.decoding.sources.ranked.contexts import NO_CONTEXTS, NO_SIGNS, Contexts, keep_tree
from outrider.decoding.tree import DraftTree

WIDTH = 8  # tokens per entry
_PRIOR = (4.0, 1.2, 0.7, 0.5, 0.35, 0.3, 0.25, 0.2)  # initial hits by rank, out of _PRIOR_TRIALS
_PRIOR_TRIALS = 10.0
PRIOR_RATES = tuple(hits / _PRIOR_TRIALS for hits in _PRIOR)  # initial hit rate of each rank
MAX_TENANTS = 64  # tenants with a table; with 150,000 tokens one takes 5 MB, and up to 12 with contexts
_ZERO = np.zeros(1, np.int32)
_MAX_TRIALS = 4096.0  # hits and trials are halved beyond it, so that rates follow the traffic
# Ranking costs a pass over the vocabulary per row.
_USE_GAIN, _LEAST_USE, _SELDOM = 0.01, 0.01, 8  # below 0.01 accepted rows per step, learn every eighth step


@compiled
def replace_entries(entries: Int32Array, tokens: Int32Array, successors: Int32Array) -> None:
    """Set the entry of ``tokens[i]`` to ``successors[i]``, in order."""
    for at in range(len(tokens)):
        for rank in range(entries.shape[1]):
            entries[tokens[at], rank] = successors[at, rank]


@compiled
def replace_tree(entries: Int32Array, tokens: Int32Array, accepted: Int32Array, successors: Int32Array) -> None:
    """Set the [vocab, k] entry of each token of a tree to the [n, k] ranking below its row: an accepted one, else the lowest."""
    size, kept = len(tokens), len(accepted)
    for place in range(size + kept):
        # Backwards, then the accepted rows: the last write wins.
        row = size - 1 - place if place < size else accepted[place - size]
        for rank in range(entries.shape[1]):
            entries[tokens[row], rank] = successors[row, rank]


class SuccessorTable:
    """Most likely tokens of the target after each token when last computed (initially ``first``), and hit rate of each rank."""

    def __init__(self, vocab_size: int, first: Int32Array | None = None) -> None:
        self.width = min(WIDTH, vocab_size)
        self.entries: Int32Array = np.full((vocab_size, self.width), -1, np.int32)  # [vocab, width], -1 if unknown
        self.contexts = NO_CONTEXTS  # rows of trees by context
        self._first = first
        self._hits: Float64Array = np.array(_PRIOR[: self.width])
        self._trials = _PRIOR_TRIALS

    def after(self, token: int) -> list[int]:
        """Return the tokens stored after ``token``, the most likely first."""
        entry: list[int] = self.entries[token].tolist()
        if entry[0] >= 0:
            return entry
        first: list[int] = [] if self._first is None else self._first[token].tolist()
        return first

    def learn(self, tokens: Int32Array, successors: Int32Array) -> None:
        """Replace the entries of [n] tokens by [n, width] successors, the most likely first; the last of equal tokens wins."""
        # Copies, because a read-only or strided array would trigger a compilation in the middle of a step.
        replace_entries(self.entries, tokens.astype(np.int32, order="C"), successors.astype(np.int32, order="C"))

    def learn_tree(
        self,
        tree: DraftTree,
        before: Int32Array,
        above: Int64Array,
        accepted: Sequence[int],
        signs: Int64Array,
        successors: Int32Array,
    ) -> None:
        """Replace the entries of a tree's tokens (``replace_tree``), and store the rankings by context (``keep_tree``)."""
        if self.contexts is NO_CONTEXTS:
            self.contexts = Contexts.empty(len(self.entries), self.width)
        rows = np.array((0, *accepted), np.int32)
        tokens, parents, ranked = (values.astype(np.int32, order="C") for values in (tree.tokens, tree.parents, successors))
        replace_tree(self.entries, tokens, rows, ranked)
        keep_tree(self.contexts[:], tokens, parents, before, above, rows, signs, ranked)

    def count(self, token: int, follower: int) -> None:
        """Count the rank at which the entry of ``token`` held the emitted token."""
        entry = self.after(token)
        if not entry:
            return
        self._trials += 1.0
        if follower in entry:
            self._hits[entry.index(follower)] += 1.0
        if self._trials > _MAX_TRIALS:
            self._hits, self._trials = self._hits / 2, self._trials / 2

    def rates(self) -> list[float]:
        """Return the hit rate of each rank, [width]."""
        rates: list[float] = (self._hits / self._trials).tolist()
        return rates


class LearningSteps:
    """Selection of the steps to learn from: few while hardly any row of a table is accepted."""

    def __init__(self) -> None:
        self._use, self._steps = 1.0, 0  # moving average of accepted rows per step

    def due(self, requests: int) -> bool:
        """Return whether one of the next steps of ``requests`` requests may be learned from: a prediction of ``count``."""
        return self._use >= _LEAST_USE or self._steps % _SELDOM + max(1, requests) >= _SELDOM

    def count(self, accepted: int) -> bool:
        """Count a step of one request with its accepted rows from a table; return whether to learn from it."""
        self._use += (accepted - self._use) * _USE_GAIN
        self._steps += 1
        return self._use >= _LEAST_USE or self._steps % _SELDOM == 0


class SuccessorTables:
    """One table per tenant, and one per request without a tenant or, with ``by_request``, for every request."""

    def __init__(self, vocab_size: int, first: Int32Array | None = None, by_request: bool = False) -> None:
        self.width = min(WIDTH, vocab_size)  # tokens per entry
        self._vocab_size, self._first, self._by_request = vocab_size, first, by_request
        self._tenants: dict[str, tuple[object, SuccessorTable]] = {}  # edition and table; in order of last learning
        self._requests: dict[str, SuccessorTable] = {}
        self._apart: set[str] = set()
        SuccessorTable(1).learn(_ZERO, _ZERO[:, None])  # compiled here, so that no request waits for it

    @staticmethod
    def compile() -> None:
        """Compile the learning from trees before the first request."""
        tree, before, ranked = DraftTree.chain(0, ()), np.full(2, -1, np.int32), np.full((1, 1), -1, np.int32)
        SuccessorTable(1).learn_tree(tree, before, NO_SIGNS, (), NO_SIGNS[None].copy(), ranked)

    def known(self, request: Request, history_version: object = None) -> SuccessorTable | None:
        """Return the table that a request drafts from; None if nothing was learned for it."""
        tenant = self._tenant(request)
        if tenant is None:
            return self._requests.get(request.request_id)
        kept, table = self._tenants.get(tenant, (None, None))
        # The whole table is discarded with the version of the tenant's history: single texts cannot be removed from it.
        return table if kept is history_version else None

    def of(self, request: Request, history_version: object = None) -> SuccessorTable:
        """Return the table that learns from a request, created at the first call."""
        table = self.known(request, history_version)
        if table is None:
            table = SuccessorTable(self._vocab_size, self._first)
        tenant = self._tenant(request)
        if tenant is None:
            self._requests[request.request_id] = table
            return table
        self._tenants.pop(tenant, None)
        self._tenants[tenant] = history_version, table
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return table

    def set_apart(self, request: Request) -> None:
        """Give a request a separate table from now on, for example because its text was removed while it runs."""
        self._apart.add(request.request_id)

    def finish(self, request: Request) -> None:
        """Drop the separate table of a request, if any."""
        self._requests.pop(request.request_id, None)
        self._apart.discard(request.request_id)

    def _tenant(self, request: Request) -> str | None:
        alone = self._by_request or request.request_id in self._apart
        return None if alone else request.cache_namespace
