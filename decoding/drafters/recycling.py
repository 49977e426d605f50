"""Strategies ``recycling`` (the target's other candidates of earlier steps become drafts) and ``racer`` (with retrieval)."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from functools import cache
from weakref import WeakKeyDictionary

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter, Target, TargetRows
from outrider.decoding.drafters.options import check_options
from outrider.decoding.request import Request
from outrider.decoding.sources.history import Histories, History
from outrider.decoding.sources.ranked.successors import PRIOR_RATES, WIDTH, SuccessorTable, SuccessorTables
from outrider.decoding.sources.window_trie import WindowTrie
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree

_SOURCE, _RETRIEVED = SOURCES.index("recycling"), SOURCES.index("trie")
_LEAST_END = 2  # shortest suffix of the text that RACER looks up
# The published tree ("2.2.2"): number of children of each row, level by level from the root; rows that are not listed have none.
# Child r is the r-th token of its parent's entry, from 0: 8, 21, 25, 15, 8 and 3 rows at depths 1 to 6.
_PUBLISHED = (
    8,
    8, 4, 3, 2, 1, 1, 1, 1,
    8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0,
    5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0,
    3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0,
    2, 0, 0, 1,
)  # fmt: skip
PUBLISHED_ROWS = sum(_PUBLISHED)  # of the published tree


class RecyclingDrafter(Drafter):
    """Token recycling (arXiv 2408.08696): a table of the last seen top 8 after each token, grown into a tree at each step.

    After a forward, the 8 most likely tokens after each computed row, accepted or not, become the table entry of the row's token.
    A draft starts with the root's entry and continues with the entries of the drafted tokens.

    Shapes: ``published`` is the fixed tree of 80 rows (per rank, see ``_template``), cut level by level if the budget is smaller.
    ``ranked`` takes the rows with the best estimate: the product, along the path, of the past accuracy of each rank.

    Example: entries ``1 2`` after 7 and ``3 4`` after 1, ranks right at 0.5 and 0.2, budget 3: the row 1 (0.5), then 3 below it
    (0.25), then 2 (0.2); 4 below 1 would be 0.1.

    Departures from the paper: empty entries draft nothing, where the published zeros cost rows. A token that occurs twice in a
    tree is learned from its last place on the accepted path, otherwise from the first of the shallowest rows; the published
    result depends on the device. Rows behind the candidates teach nothing, since their context is a guess.

    **Privacy**: with ``scope="tenant"`` one table serves all requests of a tenant, so that within a tenant speed depends on its
    other requests; a request without a tenant has its own table. The tables of the 64 most recently served tenants are kept. They
    hold no texts, so that one text cannot be removed: if texts of a tenant are deleted, its table is dropped.

    Args:
        shape: ``ranked`` or ``published``.
        learn_rows: rows of a step to learn from, per rank, at least 1: accepted ones first, then the others by depth. Each costs
            a pass over the vocabulary.
        start: initial entries of the table: ``empty``, or ``bigram``, the model's bigram table.
        scope: ``tenant``, or ``request`` for one table per request.
    """

    needs_logits = True

    def __init__(self, shape: str = "ranked", learn_rows: int = 81, start: str = "empty", scope: str = "tenant") -> None:
        check_options("recycling", shape=shape, learn_rows=learn_rows, start=start, scope=scope)
        self.published_rows = PUBLISHED_ROWS
        self._ranked = shape == "ranked"
        self._learn_rows, self._start, self._by_request = learn_rows, start, scope == "request"
        self._tables: SuccessorTables | None = None
        self.histories = None if self._by_request else Histories(1)  # only notified of deletions
        self._begun: set[str] = set()  # ids of live requests that a history knows

    def keeps_output(self, request: Request) -> bool:
        """Return False: no output is kept."""
        return False

    def prepare(self, target: Target) -> None:
        """Create the tables. Before this call nothing is drafted."""
        first = target.bigram_table(min(WIDTH, target.vocab_size)) if self._start == "bigram" else None
        self._tables = SuccessorTables(target.vocab_size, first, self._by_request)
        self.top_k = self._tables.width  # learn from every step

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """Return one tree per request."""
        trees = []
        for request, budget in zip(requests, budgets, strict=True):
            if budget == 0 or self._tables is None:
                trees.append(DraftTree.chain(request.root, ()))
            elif self._ranked:
                trees.append(_grow_ranked(self._table(self._tables, request), request.root, budget))
            else:
                trees.append(_grow_fixed(self._table(self._tables, request), request.root, budget, _template(self.ranks)))
        return trees

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:
        """Learn the candidates after the computed rows, and the accuracy of the ranks on the accepted path."""
        if not target.has_logits:  # a replay of known outputs
            return
        assert self._tables is not None, "prepare comes before the first observation"
        table = self._table(self._tables, request)
        path = [0, *acceptance.rows]
        emitted = [*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token]
        # Counted before this step is learned, which would make every rank look right.
        for row, follower in zip(path, emitted, strict=True):
            table.count(int(tree.tokens[row]), follower)
        rows = _rows_to_learn(tree, path, self._learn_rows * self.ranks)
        table.learn(tree.tokens[rows], target.top_k(rows, table.width))

    def finish(self, request: Request) -> None:
        """Drop the request's own table, if it has one."""
        if self._tables is not None:
            self._tables.finish(request)
        history = self._history(request)
        if history is not None and request.request_id in self._begun:
            self._begun.remove(request.request_id)
            history.extend(request.text, 0, (), final=True)

    def tracked_requests(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._begun

    def _history(self, request: Request) -> History | None:
        return None if self.histories is None else self.histories.of(request.cache_namespace)

    def _table(self, tables: SuccessorTables, request: Request) -> SuccessorTable:
        """Return the table of a request; its own if its text was deleted while it runs."""
        history = self._history(request)
        if history is None:
            return tables.of(request)
        if request.request_id not in self._begun:
            self._begun.add(request.request_id)
            history.start(request.text)
        elif history.removed(request.text):
            tables.set_apart(request)
        return tables.of(request, history.version)


class RacerDrafter(RecyclingDrafter):
    """RACER (arXiv 2604.14885): retrieved continuations of the text's suffixes, with free slots filled by token recycling.

    Retrieval: see ``WindowTrie.grow``. Recycling: breadth-first from the root, a row of breadth ``b`` offers the first ``b``
    tokens of its entry, of which the j-th has breadth ``b >> j`` at the root and ``b >> j + 1`` below it, at least 1, until the
    tree has ``draft_nodes`` nodes.

    Example: after ``1 2 3 4 1 2 5 4 1 2`` with windows of 4 and 8 nodes: ``5 4`` and ``3 4`` are retrieved; with the entry
    ``3 6 5 7 9 ...`` of 2 the rows 6, 7 and 9 are recycled.

    Trie and table belong to a tenant and are dropped together: see ``RecyclingDrafter``. A replay has no ranks, only retrieval.

    Departures from the published code: every suffix is looked up at each step, where failure links are built after the prefill
    and decay; visiting a node makes its ancestors the most recent too, so that no subtree is lost; empty entries offer nothing
    instead of token 0; an accepted row wins over a rejected one of the same token; prompts teach nothing to the table.

    Args:
        draft_nodes: nodes of a tree, the root included, per rank, at least 2.
        window: tokens of a window, at least 2.
        capacity: nodes of a trie, at least 64.
        scope: ``tenant`` or ``request``.
    """

    needs_logits = False

    def __init__(self, draft_nodes: int = 64, window: int = 10, capacity: int = 10_000, scope: str = "tenant") -> None:
        check_options("racer", draft_nodes=draft_nodes, window=window, capacity=capacity)
        super().__init__(learn_rows=draft_nodes, scope=scope)
        self.published_rows = draft_nodes - 1
        self._draft_nodes, self._window, self._capacity = draft_nodes, window, max(capacity, window)
        self._tables = SuccessorTables(0)  # empty until ``prepare``
        self._tries: WeakKeyDictionary[SuccessorTable, WindowTrie] = WeakKeyDictionary()
        self._learned: dict[str, tuple[WindowTrie, int]] = {}  # by live request: its trie, and its tokens in it

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """Return one tree per request."""
        trees = []
        for request, budget in zip(requests, budgets, strict=True):
            table, trie = self._catch_up(request, request.num_tokens - 1)
            nodes = min(budget + 1, self._draft_nodes * self.ranks)
            trees.append(_grow_joined(table, trie, request.tokens[-self._window :].tolist(), nodes))
        return trees

    def finish(self, request: Request) -> None:
        """Learn the end of the output, then forget the request."""
        if request.request_id in self._learned:
            self._catch_up(request, request.num_tokens)
            del self._learned[request.request_id]
        super().finish(request)

    def tracked_requests(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._begun | self._learned.keys()

    def _catch_up(self, request: Request, count: int) -> tuple[SuccessorTable, WindowTrie]:
        """Return the table and the trie of a request, after adding its first ``count`` tokens to the trie."""
        assert self._tables is not None
        table = self._table(self._tables, request)
        trie = self._tries.get(table)
        if trie is None:
            trie = self._tries[table] = WindowTrie(self._window, self._capacity)
        kept, learned = self._learned.get(request.request_id, (None, 0))
        known = learned if kept is trie else 0
        first = max(0, known - self._window + 1)
        trie.learn(request.tokens[first:count], known - first)
        self._learned[request.request_id] = trie, count
        return table, trie


def _grow_joined(table: SuccessorTable, trie: WindowTrie, tail: Sequence[int], nodes: int) -> DraftTree:
    """Return RACER's tree below the last token of ``tail``, with at most ``nodes`` rows."""
    tokens, parents = trie.grow(tail, _LEAST_END, nodes if nodes > 1 else 0)
    sources, children = [_RETRIEVED] * len(tokens), [dict[int, int]() for _ in tokens]
    for row, parent in enumerate(parents[1:], start=1):
        children[parent][tokens[row]] = row

    def child(parent: int, token: int) -> int:
        row = children[parent].get(token)
        if row is None:
            row = children[parent][token] = len(tokens)
            tokens.append(token)
            parents.append(parent)
            sources.append(_SOURCE)
            children.append({})
        return row

    level, expanded = [(0, table.width)], set()
    for row, breadth in level:  # the list grows during iteration
        if row in expanded or breadth == 0:
            continue
        expanded.add(row)
        for rank, token in enumerate(table.after(tokens[row])[:breadth]):
            if len(tokens) >= nodes and token not in children[row]:
                continue
            level.append((child(row, token), max(1, breadth >> (rank + (row > 0)))))
    return DraftTree.of(tokens, parents, sources)


def _rows_to_learn(tree: DraftTree, path: Sequence[int], count: int) -> list[int]:
    """Return the rows in the order of writing: the last write wins."""
    accepted = path[-count:]
    depths = tree.depths()
    others = sorted(set(range(tree.num_candidates)) - set(path), key=lambda row: (depths[row], row))
    return [*others[: count - len(accepted)][::-1], *accepted]


@cache
def _template(ranks: int) -> tuple[int, ...]:
    """Return ``_PUBLISHED`` for ``ranks`` ranks: with ``ranks - 1`` times as many rows more, the likeliest by ``PRIOR_RATES``."""
    counts, parents, estimates = list(_PUBLISHED), [-1], [1.0]
    for row, count in enumerate(_PUBLISHED):
        for rank in range(count):
            parents.append(row)
            estimates.append(estimates[row] * PRIOR_RATES[rank])
    counts += [0] * (len(parents) - len(counts))
    # Next child of each row, as (estimate, row). Ranks are added in order, so that a row's children are its first ranks.
    following = [(-estimates[row] * PRIOR_RATES[count], row) for row, count in enumerate(counts) if count < WIDTH]
    heapq.heapify(following)
    for _ in range((ranks - 1) * (len(parents) - 1)):
        estimate, row = heapq.heappop(following)
        counts[row] += 1
        if counts[row] < WIDTH:
            heapq.heappush(following, (-estimates[row] * PRIOR_RATES[counts[row]], row))
        heapq.heappush(following, (estimate * PRIOR_RATES[0], len(parents)))
        parents.append(row)
        estimates.append(-estimate)
        counts.append(0)
    return _by_level(parents, counts)


def _by_level(parents: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Return the number of children of each row, level by level. The children of a row must be in order of rank."""
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents[1:], start=1):
        children[parent].append(row)
    order = [0]
    for row in order:  # the list grows during iteration
        order.extend(children[row])
    return tuple(counts[row] for row in order)


def _grow_fixed(table: SuccessorTable, root: int, budget: int, template: Sequence[int]) -> DraftTree:
    """Return a fixed tree, level by level, without rows whose entry is empty."""
    tokens, parents = [root], [-1]
    rows: list[int | None] = [0]  # row in the new tree of each template row; None if not drafted
    for at, children in enumerate(template):
        parent = rows[at]
        entry = table.after(tokens[parent]) if parent is not None and children else []
        for rank in range(children):
            if parent is None or rank >= len(entry) or len(tokens) > budget:
                rows.append(None)
            else:
                rows.append(len(tokens))
                tokens.append(entry[rank])
                parents.append(parent)
    return DraftTree.of(tokens, parents, _SOURCE)


def _grow_ranked(table: SuccessorTable, root: int, budget: int) -> DraftTree:
    """Return the rows with the highest estimates. A row never beats its parent, so parents come first."""
    rates = table.rates()
    order = sorted(range(len(rates)), key=lambda rank: -rates[rank])
    tokens, parents, estimates, entries = [root], [-1], [1.0], [table.after(root)]
    # (estimate, insertion order, parent, index in ``order``): one open child per row; its next sibling follows when it is taken.
    open_rows = [(-rates[order[0]], 0, 0, 0)] if entries[0] else []
    entered = 1
    while open_rows and len(tokens) <= budget:
        estimate, _, parent, place = heapq.heappop(open_rows)
        row = len(tokens)
        tokens.append(entries[parent][order[place]])
        parents.append(parent)
        estimates.append(-estimate)
        entries.append(table.after(tokens[row]))
        if place + 1 < len(order):
            heapq.heappush(open_rows, (-estimates[parent] * rates[order[place + 1]], entered, parent, place + 1))
        if entries[row]:
            heapq.heappush(open_rows, (-estimates[row] * rates[order[0]], entered + 1, row, 0))
        entered += 2
    return DraftTree.of(tokens, parents, _SOURCE)
