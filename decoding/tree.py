"""Draft trees as arrays: the form that every drafter returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from outrider.decoding.arrays import Float64Array, Int8Array, Int32Array

if TYPE_CHECKING:
    from outrider.decoding.verify.grammar import Grammar

# ``DraftTree.sources`` holds indices into this tuple. Append only: records store the indices.
SOURCES = (
    "root", "prompt_lookup", "llma", "trie", "context_ngram", "bigram", "unigram", "jacobi", "suffix", "recycling", "copy",
    "history", "draft_model", "grammar", "similar",
)  # fmt: skip
_NO_PARENT, _ROOT_SOURCE = np.full(1, -1, np.int32), np.zeros(1, np.int8)  # arrays of a tree of one row


@dataclass(slots=True)  # not frozen: frozen instances are slower to create, and every request gets one per step
class DraftTree:
    """Tokens to compute below the committed sequence.

    Row 0 is the root: the last committed token, whose KV is not cached yet. ``parents[i] < i``, so one pass from the left yields
    depths, masks and paths. Plain decoding is the tree of one row.

    Example: root 7 with the branches 1 2 and 3 is ``tokens=[7, 1, 2, 3]``, ``parents=[-1, 0, 1, 0]``, ``depths=[0, 1, 2, 1]``.
    """

    tokens: Int32Array  # [n]
    parents: Int32Array  # [n], parents[0] == -1
    sources: Int8Array  # [n], index of the source that proposed the row, kept through merging for metrics
    num_candidates: int  # rows below this may be accepted; later rows only feed the drafter (jacobi window)
    rule: Rule | None = None  # verification rule of a proposed tree; None: ``verify_exact``, which keeps the output

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, root: int, draft: Sequence[int] | Int32Array, source: int = 0) -> DraftTree:
        """Build a tree of one branch, the root alone for an empty ``draft``; ``source`` is an index into ``SOURCES``."""
        n = len(draft) + 1
        if n == 1 and source == 0:  # fast path for plain decoding
            return cls(np.array((root,), np.int32), _NO_PARENT, _ROOT_SOURCE, 1)
        tokens = np.empty(n, np.int32)
        tokens[0] = root
        tokens[1:] = draft
        return cls(tokens, np.arange(-1, n - 1, dtype=np.int32), np.full(n, source, np.int8), n)

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int], sources: Sequence[int] | int) -> DraftTree:
        """Build a tree whose rows are all candidates. A single ``sources`` value applies to all rows but the root."""
        of_rows = np.full(len(tokens), sources, np.int8) if isinstance(sources, int) else np.array(sources, np.int8)
        of_rows[0] = 0
        return cls(np.array(tokens, np.int32), np.array(parents, np.int32), of_rows, len(tokens))

    def depths(self) -> Int32Array:
        """Return [n] int32, the number of edges from the root."""
        depths = np.zeros(len(self.parents), np.int32)
        if len(depths) > 1:
            from outrider.decoding.tree_rows import fill_depths  # imported here because it loads numba

            fill_depths(_own(self.parents), depths)
        return depths

    def path(self, row: int) -> list[int]:
        """Return the rows from below the root down to ``row``; empty for the root."""
        rows = []
        while row > 0:
            rows.append(row)
            row = int(self.parents[row])
        return rows[::-1]

    def children(self, rows: Sequence[int], token: int) -> list[int]:
        """Return the candidate children of any of ``rows`` that hold ``token``; several if the tree has duplicate branches."""
        hits = (self.tokens[1 : self.num_candidates] == token).nonzero()[0].tolist()
        return [row + 1 for row in hits if self.parents[row + 1] in rows]

    def clipped(self, max_rows: int, max_depth: int, vocab_size: int, max_window_depth: int | None = None) -> DraftTree:
        """Return the tree without rows outside the vocabulary, too deep, too many (root included), or below one, in order."""
        n = len(self.tokens)
        if n == 1:
            return self
        from outrider.decoding.tree_rows import keep_rows

        kept = np.empty(n, np.bool_)
        # The rows behind the candidates, a window, may reach deeper than what is emitted.
        window = max_depth if max_window_depth is None else max_window_depth
        tokens, parents = _own(self.tokens), _own(self.parents)
        if keep_rows(tokens, parents, int(self.num_candidates), max_rows, max_depth, window, vocab_size, kept) == n:
            return self
        return self.take(np.flatnonzero(kept).astype(np.int32))

    def take(self, rows: Int32Array) -> DraftTree:
        """Return the given ascending rows, ancestors included, as a tree in the same order and with the same sources."""
        assert len(rows) and rows[0] == 0, rows
        renumbered = np.full(len(self.tokens), -1, np.int32)
        renumbered[rows] = np.arange(len(rows), dtype=np.int32)
        parents = renumbered[self.parents[rows]]
        parents[0] = -1
        assert not (parents[1:] < 0).any(), (rows, self.parents)
        candidates = int(np.searchsorted(rows, self.num_candidates))
        return DraftTree(self.tokens[rows], parents, self.sources[rows], candidates)

    def partition(self, ranks: int) -> list[TreePart]:
        """Return one part for each rank that shares the step (lookahead parallelism, arXiv 2402.02057, section 3.4).

        Leaves are partitioned as runs in depth-first order (children in order of their rows), each with its ancestors, so that
        the largest part has as few rows as such runs allow. With fewer runs than ranks the last parts are the root alone.

        Example: root 7 with the branches 1 2, 3 4 and 5. Of two ranks the first gets 1 2 (three rows), the second 3 4 and 5 (four
        rows); with 3 4 the first would have five.
        """
        if ranks == 1 or len(self.tokens) == 1:
            return [TreePart(np.arange(len(self.tokens), dtype=np.int32), self)] * ranks
        from outrider.decoding.tree_rows import partition  # imported here because it loads numba

        # Every row is in some part, every leaf in exactly one, and every part holds the root. So the verification of a part is a
        # valid step by itself, and the longest accepted path over all parts is the longest in the tree.
        own = _own(self.tokens), _own(self.parents), self.sources.astype(np.int8)
        bounds, counts, rows, tokens, parents, sources = partition(*own, int(self.num_candidates), ranks)
        at, candidates = bounds.tolist(), counts.tolist()
        parts = []
        for rank in range(ranks):
            share = slice(at[rank], at[rank + 1])
            parts.append(TreePart(rows[share], DraftTree(tokens[share], parents[share], sources[share], candidates[rank])))
        return parts

    def check(self) -> None:
        """Assert the invariants of the arrays."""
        n = len(self.tokens)
        assert n >= 1 and len(self.parents) == n and len(self.sources) == n, (n, len(self.parents), len(self.sources))
        assert self.parents[0] == -1, self.parents[0]
        assert ((self.parents[1:] >= 0) & (self.parents[1:] < np.arange(1, n))).all(), self.parents
        assert 1 <= self.num_candidates <= n, (self.num_candidates, n)


@dataclass(frozen=True, slots=True)
class ChoiceTree:
    """Continuations of one text to score, as branches of one tree. Common beginnings share rows, and no row may be accepted.

    Example: root 7 with the choices 1 2 and 1 3 is the tree 7 1. Row 0 scores the token 1, row 1 scores the tokens 2 and 3.
    """

    tree: DraftTree
    scored: tuple[tuple[tuple[int, int], ...], ...]  # by choice: pairs of (row whose logits score the token, token)

    @classmethod
    def of(cls, root: int, choices: Sequence[Sequence[int]]) -> ChoiceTree:
        """Build the tree of choices of at least one token each."""
        tree = tree_of(root, [(choice[:-1], 0) for choice in choices], sum(map(len, choices)))
        tree.num_candidates = 1
        pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        rows = {pair: row for row, pair in enumerate(pairs)}
        scored = []
        for choice in choices:
            row, found = 0, list[tuple[int, int]]()
            for token in choice:
                found.append((row, token))
                row = rows.get((row, token), -1)  # -1: behind the last token
            scored.append(tuple(found))
        return cls(tree, tuple(scored))

    @property
    def rows(self) -> int:
        """Return the number of rows below the root."""
        return len(self.tree) - 1


@dataclass(frozen=True, slots=True)
class TreePart:
    """Rows of a tree that one rank computes."""

    rows: Int32Array  # [m] ascending rows of the whole tree, the root first, each with its ancestors
    tree: DraftTree  # the same rows, renumbered


def _own(values: Int32Array) -> Int32Array:
    """Return a contiguous, writable copy."""
    # numba would compile again for a read-only or strided array, in the middle of a step.
    return values.astype(np.int32, order="C")


def tree_of(
    root: int, rows: Iterable[tuple[Sequence[int], int]], budget: int, most: int | None = None, merged: bool = True
) -> DraftTree:
    """Build a draft tree from continuations below the root, adding them in order until the budget is used.

    Args:
        rows: continuations with their source ids.
        budget: maximum number of rows below the root.
        most: maximum number of continuations that add a row; unlimited if None.
        merged: whether continuations share the rows of a common prefix.
    """
    tokens, parents, sources = [root], [-1], [0]
    children: dict[tuple[int, int], int] = {}
    branches = 0
    for row, source in rows:
        before, parent = len(tokens), 0
        for token in row:
            child = children.get((parent, token)) if merged else None
            if child is None:
                if len(tokens) > budget:
                    break
                child = children[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                sources.append(source)
            parent = child
        branches += len(tokens) > before
        if branches == most or len(tokens) > budget:
            break
    return DraftTree.of(tokens, parents, sources)


def permitted(tree: DraftTree, grammar: Grammar) -> DraftTree:
    """Return the tree, below the grammar's last output token, without candidates that it forbids and the rows below them."""
    if len(tree) == 1:
        return tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    children: dict[int, list[int]] = {}
    for row in range(tree.num_candidates - 1, 0, -1):  # reversed, so that the first child is on top of the stack
        children.setdefault(parents[row], []).append(row)
    kept = np.zeros(len(tokens), np.bool_)
    kept[0] = True
    begin = grammar.length
    stack = [(row, begin) for row in children.get(0, ())]
    while stack:
        row, length = stack.pop()
        # Back to the prefix of the parent, wherever the last branch ended.
        grammar.truncate(length)
        if grammar.push(tokens[row]):
            kept[row] = True
            stack.extend((below, length + 1) for below in children.get(row, ()))
    grammar.truncate(begin)
    for row in range(tree.num_candidates, len(tokens)):  # window rows are never emitted, but need their ancestors
        kept[row] = kept[parents[row]]
    return tree if kept.all() else tree.take(np.flatnonzero(kept).astype(np.int32))


@dataclass(slots=True)  # not frozen: frozen instances are slower to create, and every request gets one per step
class Acceptance:
    """Verification result of one tree: accepted rows in order of depth, and the target's own next token (bonus token)."""

    rows: tuple[int, ...]
    next_token: int

    @property
    def count(self) -> int:
        """Return the number of emitted tokens: accepted drafts and the bonus token."""
        return len(self.rows) + 1


class RowDistributions(Protocol):
    """The target's choices and probabilities at the rows of a computed tree, as a rule reads them (``TargetDistributions``)."""

    remaining: int  # tokens that may still be emitted
    end_tokens: frozenset[int]

    def choose(self, row: int) -> int:
        """Return the request's own token below a row: exactly what plain decoding emits there."""
        ...

    def warped(self, row: int) -> Float64Array:
        """Return [vocab] sampling probabilities below a row; for a greedy request 1 at its token."""
        ...

    def raw_logprobs(self, row: int) -> Float64Array:
        """Return [vocab] log-probabilities below a row, before temperature and truncation, but after the logits processors."""
        ...

    def accepts(self, row: int, probability: float, index: int = 0) -> bool:
        """Return whether the ``index``-th draft token below ``row`` is accepted with this probability; 1 or more is certain."""
        ...

    def draw(self, row: int, distribution: Float64Array) -> int:
        """Draw a token below a row from a [vocab] distribution, to replace rejected ones."""
        ...


class Rule(Protocol):
    """Verification rule of one tree."""

    def accept(self, tree: DraftTree, distributions: RowDistributions) -> Acceptance:
        """Return the accepted rows and the token after them: 1 to ``distributions.remaining`` tokens."""
        ...
