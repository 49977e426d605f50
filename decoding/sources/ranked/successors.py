"""Table of token recycling: the target's top-k after each token when last computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from decoding.jit import compiled
from decoding.request import Request
from decoding.sources.embeddings import Int64Array
from decoding.sources.ranked.contexts import NO_CONTEXTS, NO_SIGNS, Contexts, keep_tree
from decoding.tree import DraftTree, Int32Array

WIDTH = 8  # tokens kept after each
_PRIOR = (4.0, 1.2, 0.7, 0.5, 0.35, 0.3, 0.25, 0.2)  # hits by rank that a new table starts from, out of _PRIOR_TRIALS
_PRIOR_TRIALS = 10.0
PRIOR_RATES = tuple(hits / _PRIOR_TRIALS for hits in _PRIOR)  # how often each rank is right, before anything was counted
MAX_TENANTS = 64  # tables of tenants that are kept
_ZERO = np.zeros(1, np.int32)
_MAX_TRIALS = 4096.0  # then hits and trials are halved, so that the rates follow the traffic
_USE_GAIN, _LEAST_USE, _SELDOM = 0.01, 0.01, 8  # below so many accepted recycled rows a step, one step of eight is learned from


@compiled
def replace_entries(entries: Int32Array, tokens: Int32Array, successors: Int32Array) -> None:
    """Writes ``successors[i]`` over the entry of ``tokens[i]``, in their order."""
    for at in range(len(tokens)):
        for rank in range(entries.shape[1]):
            entries[tokens[at], rank] = successors[at, rank]


@compiled
def replace_tree(entries: Int32Array, tokens: Int32Array, accepted: Int32Array, successors: Int32Array) -> None:
    """Writes what was ranked below each row of a tree over the entry of its token.

    Of rows of one token an accepted one stays, then the one of the lowest number.

    Args:
        entries: [vocab, k].
        tokens: [n] of the tree.
        accepted: [m] the root and the accepted rows.
        successors: [n, k].
    """
    size, kept = len(tokens), len(accepted)
    for place in range(size + kept):
        row = size - 1 - place if place < size else accepted[place - size]
        for rank in range(entries.shape[1]):
            entries[tokens[row], rank] = successors[row, rank]


class SuccessorTable:
    """The tokens last seen as the target's most likely ones after each token, and how often each rank was right.

    It takes vocab * 32 bytes, and up to vocab * 8 bytes and 6 MB more once trees are learned as a whole (``learn_tree``).
    """

    def __init__(self, vocab_size: int, first: Int32Array | None = None) -> None:
        """
        Args:
            vocab_size: tokens are below it.
            first: [vocab, <= 8] what stands for a token until something was learned of it; empty rows when absent.
        """
        self.width = min(WIDTH, vocab_size)
        self.entries: Int32Array = np.full((vocab_size, self.width), -1, np.int32)  # [vocab, width], -1 where nothing is known
        self.contexts = NO_CONTEXTS  # of rows of trees
        self._first = first
        self._hits: npt.NDArray[np.float64] = np.array(_PRIOR[: self.width])
        self._trials = _PRIOR_TRIALS

    def after(self, token: int) -> list[int]:
        """The tokens kept after ``token``, the most likely first; empty when nothing is known."""
        entry: list[int] = self.entries[token].tolist()
        if entry[0] >= 0:
            return entry
        first: list[int] = [] if self._first is None else self._first[token].tolist()
        return first

    def learn(self, tokens: Int32Array, successors: Int32Array) -> None:
        """Replaces the entries of some tokens; of a token that stands twice, the later row stays.

        Args:
            tokens: [n].
            successors: [n, width] the most likely tokens after each, the most likely first.
        """
        # Copies: an array that is read-only or has gaps would be a new type to the compiler, in the middle of a step.
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
        """Replaces what was ranked after the token of each row of a tree, and keeps it with the row's context.

        Args:
            tree: that was computed.
            before: [2] the tokens before the root, the last one first, -1 where there is none.
            above: [WORDS] signs of the row before the root, ``NO_SIGNS`` where it is not known.
            accepted: rows of the tree. Of rows of one token an accepted one stays, then the one of the lowest number.
            signs: [n, WORDS] of the last hidden state of each row, see ``decoding.sources.ranked.contexts``.
            successors: [n, width] the most likely tokens below each row, the most likely first.
        """
        if self.contexts is NO_CONTEXTS:
            self.contexts = Contexts.empty(len(self.entries), self.width)
        rows = np.array((0, *accepted), np.int32)
        tokens, parents, ranked = (values.astype(np.int32, order="C") for values in (tree.tokens, tree.parents, successors))
        replace_tree(self.entries, tokens, rows, ranked)
        keep_tree(self.contexts[:], tokens, parents, before, above, rows, signs, ranked)

    def count(self, token: int, follower: int) -> None:
        """Counts at which rank the entry of ``token`` held what the target then emitted."""
        entry = self.after(token)
        if not entry:
            return
        self._trials += 1.0
        if follower in entry:
            self._hits[entry.index(follower)] += 1.0
        if self._trials > _MAX_TRIALS:
            self._hits, self._trials = self._hits / 2, self._trials / 2

    def rates(self) -> list[float]:
        """[width] how often the token of each rank is right."""
        rates: list[float] = (self._hits / self._trials).tolist()
        return rates


class LearningSteps:
    """Which steps are learned from.

    Ranking what comes next costs a pass over the vocabulary a row: where hardly any row that a table gave was accepted of late,
    most steps are left out.
    """

    def __init__(self) -> None:
        self._use, self._steps = 1.0, 0  # accepted rows per step, of late

    def due(self, requests: int) -> bool:
        """Whether one of the next steps of so many requests may be learned from.

        It foretells ``count``, but for a source that is just then found to be of use: that step is left out.
        """
        return self._use >= _LEAST_USE or self._steps % _SELDOM + max(1, requests) >= _SELDOM

    def count(self, accepted: int) -> bool:
        """Counts a step of one request, in which so many rows that a table gave were accepted; whether it is learned from."""
        self._use += (accepted - self._use) * _USE_GAIN
        self._steps += 1
        return self._use >= _LEAST_USE or self._steps % _SELDOM == 0


class SuccessorTables:
    """A table for each tenant, and one for each request that has none, so that no tenant learns of another's texts.

    The tables of the ``MAX_TENANTS`` tenants that taught last are kept: with a vocabulary of 150,000 tokens a table takes 5 MB,
    and up to 12 with contexts.
    A tenant whose table was dropped starts anew. A table holds no texts, so what one text taught cannot be taken out of it: where
    texts of a tenant are removed, which gives its history another ``edition``, the tenant's table goes as a whole.
    """

    def __init__(self, vocab_size: int, first: Int32Array | None = None, by_request: bool = False) -> None:
        """
        Args:
            vocab_size: see ``SuccessorTable``, also ``first``.
            by_request: every request has a table of its own, whoever its tenant is.
        """
        self.width = min(WIDTH, vocab_size)  # of an entry
        self._vocab_size, self._first, self._by_request = vocab_size, first, by_request
        self._tenants: dict[str, tuple[object, SuccessorTable]] = {}  # with their edition; the one that taught last stands last
        self._requests: dict[str, SuccessorTable] = {}
        self._apart: set[str] = set()
        SuccessorTable(1).learn(_ZERO, _ZERO[:, None])  # compiled here, so that no request waits for it

    @staticmethod
    def compile() -> None:
        """Calls what learning from trees compiles at its first call."""
        tree, before, ranked = DraftTree.chain(0, ()), np.full(2, -1, np.int32), np.full((1, 1), -1, np.int32)
        SuccessorTable(1).learn_tree(tree, before, NO_SIGNS, (), NO_SIGNS[None].copy(), ranked)

    def known(self, request: Request, edition: object = None) -> SuccessorTable | None:
        """The table that a request drafts from; None where nothing was learned for it."""
        tenant = self._tenant(request)
        if tenant is None:
            return self._requests.get(request.request_id)
        kept, table = self._tenants.get(tenant, (None, None))
        return table if kept is edition else None

    def of(self, request: Request, edition: object = None) -> SuccessorTable:
        """The table that a request teaches, made at the first call."""
        table = self.known(request, edition)
        if table is None:
            table = SuccessorTable(self._vocab_size, self._first)
        tenant = self._tenant(request)
        if tenant is None:
            self._requests[request.request_id] = table
            return table
        self._tenants.pop(tenant, None)
        self._tenants[tenant] = edition, table
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return table

    def set_apart(self, request: Request) -> None:
        """From now on a request has a table of its own, as when its text was removed while it runs."""
        self._apart.add(request.request_id)

    def finish(self, request: Request) -> None:
        """Drops the table of a request, where it has one of its own."""
        self._requests.pop(request.request_id, None)
        self._apart.discard(request.request_id)

    def _tenant(self, request: Request) -> str | None:
        alone = self._by_request or request.request_id in self._apart
        return None if alone else request.memory
