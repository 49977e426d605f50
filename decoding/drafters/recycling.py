"""Token recycling: the target's other candidates of earlier steps become drafts, alone or joined with retrieved text (RACER)."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from functools import cache
from weakref import WeakKeyDictionary

from decoding.budget.latency import StepLoad
from decoding.drafters.base import Drafter, Target, TargetRows, check_choice, check_least
from decoding.request import Acceptance, Request
from decoding.sources.history import Histories, History
from decoding.sources.ranked.successors import PRIOR_RATES, WIDTH, SuccessorTable, SuccessorTables
from decoding.sources.window_trie import WindowTrie
from decoding.tree import SOURCES, DraftTree

_SOURCE, _RETRIEVED = SOURCES.index("recycling"), SOURCES.index("trie")
_LEAST_END = 2  # tokens of an end of the text that RACER looks up
# The published tree ("2.2.2"): children of each row, the root first, level by level; rows that are not listed have none. A child
# is the r-th token after its parent, r counted from 0: 8, 21, 25, 15, 8 and 3 rows at depths 1 to 6.
_PUBLISHED = (
    8,
    8, 4, 3, 2, 1, 1, 1, 1,
    8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0,
    5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0,
    3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0,
    2, 0, 0, 1,
)  # fmt: skip


class RecyclingDrafter(Drafter):
    """Token recycling (arXiv 2408.08696): a table of the last seen top 8 after each token, grown into a tree at each step.

    After a forward, the 8 most likely tokens after each computed row become the entry of the row's token, whether or not the row
    was accepted. A draft starts at the root's entry and goes on with the entries of the drafted tokens.

    Shapes: ``published`` is the fixed tree of 80 rows, cut level by level where the budget is smaller; ``ranked`` takes the rows
    of the best expected gain: a row's estimate is the product, along its path, of how often its ranks were right so far. Where
    ranks share a step, ``ranked`` fills the larger budget, and the fixed tree has 80 rows for each rank: the published ones, and
    then those of the best estimate by the rates that a new table starts from (see ``_template``).

    Example: entries ``1 2`` after 7 and ``3 4`` after 1, ranks right at 0.5 and 0.2, budget 3: the row 1 (0.5), then 3 below it
    (0.25), then 2 (0.2); 4 below 1 would be 0.1.

    Departures from the paper: empty entries draft nothing, where the published zeros cost rows. A token that stands twice in a
    tree is learned from the accepted path, its last place there; else from the shallowest row, of equally deep ones the first:
    the published result is up to the device. Rows behind the candidates teach nothing, since what stands before them is a guess.

    **Privacy**: with ``scope="tenant"`` one table serves all requests of a tenant and outlives them; a request without a tenant
    has a table of its own, which goes when it ends. So no tenant drafts from what another's requests taught, nor does its speed
    tell of them. Within a tenant how fast a text comes depends on what its other requests generated; ``scope="request"`` gives
    every request a table of its own. The tables of the 64 tenants served last are kept. They hold no texts, so what one text
    taught cannot be taken out: where texts of a tenant are deleted, the tenant's table goes. ``memory`` is there to hear of it.
    """

    needs_logits = True

    def __init__(self, shape: str = "ranked", learn_rows: int = 81, start: str = "empty", scope: str = "tenant") -> None:
        """
        Args:
            shape: ``ranked`` or ``published``.
            learn_rows: rows of a step that are learned from, for each rank, at least 1: accepted ones first, then the others by
                depth. Each costs a pass over the vocabulary.
            start: what stands for a token before anything was learned of it: ``empty``, or ``bigram``, the model's bigram table.
            scope: ``tenant`` or ``request``.

        Raises:
            ValueError: a value that is not one of these.
        """
        check_choice(("ranked", "published"), shape=shape)
        check_choice(("empty", "bigram"), start=start)
        check_choice(("tenant", "request"), scope=scope)
        check_least(1, learn_rows=learn_rows)
        self._ranked = shape == "ranked"
        self._learn_rows, self._start, self._by_request = learn_rows, start, scope == "request"
        self._tables: SuccessorTables | None = None
        self.memory = None if self._by_request else Histories(1)
        self._begun: set[str] = set()  # ids of live requests that a history knows

    def remembers(self, request: Request) -> bool:
        """Never."""
        return False

    def prepare(self, target: Target) -> None:
        """Learns the size of the vocabulary. Before, nothing is drafted."""
        first = target.bigram_table(min(WIDTH, target.vocab_size)) if self._start == "bigram" else None
        self._tables = SuccessorTables(target.vocab_size, first, self._by_request)
        self.top_k = self._tables.width  # every step is learned from

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request."""
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
        """Learns the candidates after the computed rows, and how good the ranks were on the accepted path."""
        if not target.has_logits:  # a replay of known outputs, in which another drafter may well draft
            return
        assert self._tables is not None, "prepare comes before the first observation"
        table = self._table(self._tables, request)
        path = [0, *acceptance.rows]
        emitted = [*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token]
        for row, follower in zip(path, emitted, strict=True):
            table.count(int(tree.tokens[row]), follower)
        rows = _rows_to_learn(tree, path, self._learn_rows * self.ranks)
        table.learn(tree.tokens[rows], target.top_k(rows, table.width))

    def finish(self, request: Request) -> None:
        """Drops the table of the request, where it has one."""
        if self._tables is not None:
            self._tables.finish(request)
        history = self._history(request)
        if history is not None and request.request_id in self._begun:
            self._begun.remove(request.request_id)
            history.extend(request.text, 0, (), final=True)

    def held(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._begun

    def _history(self, request: Request) -> History | None:
        return None if self.memory is None else self.memory.of(request.memory)

    def _table(self, tables: SuccessorTables, request: Request) -> SuccessorTable:
        """The table of a request, which begins at the first call. One whose text was removed since has a table of its own."""
        history = self._history(request)
        if history is None:
            return tables.of(request)
        if request.request_id not in self._begun:
            self._begun.add(request.request_id)
            history.start(request.text)
        elif history.removed(request.text):
            tables.set_apart(request)
        return tables.of(request, history.edition)


class RacerDrafter(RecyclingDrafter):
    """RACER (arXiv 2604.14885): what followed the text's ends most often, and the slots that are left filled from the table of
    token recycling.

    Retrieval: the windows of ``window`` tokens of prompts and outputs lie in a trie. Of all nodes below the ends of the text that
    stand in it, two tokens and longer, the ``draft_nodes`` with the highest counts are taken, of equals the nearest to the root.
    Recycling: breadth-first from the root, a row of breadth ``b`` offers the first ``b`` tokens of its entry, of which the j-th
    has breadth ``b >> j`` at the root and ``b >> j + 1`` below it, at least 1, until the tree has ``draft_nodes`` nodes.

    Example: after ``1 2 3 4 1 2 5 4 1 2`` with windows of 4 and 8 nodes: ``5 4`` and ``3 4`` are retrieved; with the entry
    ``3 6 5 7 9 ...`` of 2 the rows 6, 7 and 9 are recycled.

    The trie and the table are those of a tenant, and go together: see ``RecyclingDrafter``. In a replay of known outputs nothing
    is ranked, and retrieval works alone.

    Departures from the published code: every end of the text is looked up at each step, where failure links are built after the
    prefill and decay (a copy never slows, and no end is one that the text has left); a node that is visited makes those above it
    the latest, so that no subtree is lost; entries that are empty offer nothing, instead of token 0; an accepted row wins over a
    rejected one of the same token; prompts are in the trie, but their rows teach nothing to the table, since the target does not
    rank what follows them.
    """

    needs_logits = False

    def __init__(self, draft_nodes: int = 64, window: int = 10, capacity: int = 10_000, scope: str = "tenant") -> None:
        """
        Args:
            draft_nodes: of a tree, its root included, for each rank, at least 2.
            window: tokens of a window, at least 2.
            capacity: nodes of a trie, at least 64.
            scope: ``tenant`` or ``request``.

        Raises:
            ValueError: a value that is not one of these.
        """
        super().__init__(learn_rows=max(draft_nodes, 1), scope=scope)
        check_least(2, draft_nodes=draft_nodes, window=window)
        check_least(64, capacity=capacity)
        self._draft_nodes, self._window, self._capacity = draft_nodes, window, max(capacity, window)
        self._tables = SuccessorTables(0)  # until the target is known: nothing can be ranked
        self._tries: WeakKeyDictionary[SuccessorTable, WindowTrie] = WeakKeyDictionary()
        self._learned: dict[str, tuple[WindowTrie, int]] = {}  # by live request: where its tokens are, and how many of them

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request."""
        trees = []
        for request, budget in zip(requests, budgets, strict=True):
            table, trie = self._catch_up(request, request.num_tokens - 1)
            nodes = min(budget + 1, self._draft_nodes * self.ranks)
            trees.append(_grow_joined(table, trie, request.tokens[-self._window :].tolist(), nodes))
        return trees

    def finish(self, request: Request) -> None:
        """Learns the end of the output, then forgets the request."""
        if request.request_id in self._learned:
            self._catch_up(request, request.num_tokens)
            del self._learned[request.request_id]
        super().finish(request)

    def held(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._begun | self._learned.keys()

    def _catch_up(self, request: Request, count: int) -> tuple[SuccessorTable, WindowTrie]:
        """The table and the trie of a request, which holds ``count`` of its tokens."""
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
    """RACER's tree below the last of ``tail``, of up to ``nodes`` rows."""
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
    for row, breadth in level:  # grows on the way
        if row in expanded or breadth == 0:
            continue
        expanded.add(row)
        for rank, token in enumerate(table.after(tokens[row])[:breadth]):
            if len(tokens) >= nodes and token not in children[row]:
                continue
            level.append((child(row, token), max(1, breadth >> (rank + (row > 0)))))
    return DraftTree.of(tokens, parents, sources)


def _rows_to_learn(tree: DraftTree, path: Sequence[int], count: int) -> list[int]:
    """Rows in the order of writing: what must win stands last."""
    accepted = path[-count:]
    depths = tree.depths()
    others = sorted(set(range(tree.num_candidates)) - set(path), key=lambda row: (depths[row], row))
    return [*others[: count - len(accepted)][::-1], *accepted]


@cache
def _template(ranks: int) -> tuple[int, ...]:
    """The fixed tree for so many ranks, as ``_PUBLISHED``: its rows, and ``ranks - 1`` times as many of the best estimate.

    A row's estimate is the product, along its path, of the rates that a new table starts from: 0.4 for the first rank, then 0.12,
    0.07 and so on. Rows are added below published and added ones alike, the best first.
    """
    counts, parents, estimates = list(_PUBLISHED), [-1], [1.0]
    for row, count in enumerate(_PUBLISHED):
        for rank in range(count):
            parents.append(row)
            estimates.append(estimates[row] * PRIOR_RATES[rank])
    counts += [0] * (len(parents) - len(counts))
    # The next child of each row, as (estimate, row): a row's ranks come one after the other, so that its children are the first.
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
    """How many children each row has, level by level, of rows in any order in which children of a row come by rank."""
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents[1:], start=1):
        children[parent].append(row)
    order = [0]
    for row in order:  # grows on the way
        order.extend(children[row])
    return tuple(counts[row] for row in order)


def _grow_fixed(table: SuccessorTable, root: int, budget: int, template: Sequence[int]) -> DraftTree:
    """A fixed tree, level by level, without rows whose entry is empty."""
    tokens, parents = [root], [-1]
    rows: list[int | None] = [0]  # row in our tree of each row of the fixed one; None where nothing is known
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
    """The rows of the highest estimates; a row never beats its parent, so parents come first."""
    rates = table.rates()
    order = sorted(range(len(rates)), key=lambda rank: -rates[rank])
    tokens, parents, estimates, entries = [root], [-1], [1.0], [table.after(root)]
    # (estimate, order of entering, parent, place in ``order``): one open child for each row, its siblings follow it.
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
