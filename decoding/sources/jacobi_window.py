"""State of Jacobi lookahead for a request (Lookahead Decoding, arXiv 2402.02057, sections 2 and 3), over token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.decoding.tree import DraftTree

Ngram = tuple[int, ...]


class PromptTokens:
    """Random tokens of a prompt, except ``excluded`` if others exist, in an order determined by prompt and seed (below 2**64)."""

    def __init__(self, prompt_ids: Int32Array, seed: int, excluded: Set[int] = frozenset()) -> None:
        kept = prompt_ids[~np.isin(prompt_ids, list(excluded))]
        self._tokens = kept if len(kept) else prompt_ids
        content = seed.to_bytes(8, "little") + prompt_ids.astype("<i4").tobytes()
        key = int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "little")
        self._stream = np.random.Philox(key=key)

    def draw(self, count: int) -> Int32Array:
        """Draw tokens with replacement, [count] int32."""
        # numpy keeps the raw Philox stream stable across versions.
        at = self._stream.random_raw(count) % np.uint64(len(self._tokens))
        drawn: Int32Array = self._tokens[at.astype(np.intp)].astype(np.int32)
        return drawn


class JacobiWindow:
    """Two-dimensional window: levels are Jacobi iterations (the oldest first), columns are positions after the root.

    Entry ``[level, column]`` stands ``level + column`` positions after the root. Entry ``[0, 0]``, the root's place, is ignored.
    Level 0 with the root is block 0, which is causal; an entry above it attends to block 0 up to its column, and to its own
    column.

    Example: width 3, ngram 3, initial row ``4 5 6``. With the answers ``1 7 8 9`` below root, 4, 5 and 6 it becomes full: level 0
    is ``_ 5 6``, level 1 ``7 8 9``. With the root 1 and the answers ``2 3 1`` below 7, 8 and 9 the n-grams are ``1 7 2``,
    ``5 8 3`` and ``6 9 1``, and the window is ``_ 8 9``, ``2 3 1``.

    Args:
        width: W of the paper, columns when full, at least 1.
        ngram: N of the paper, one more than the levels when full, at least 3.
        initial: [width + ngram - 3] initial guesses.
    """

    def __init__(self, width: int, ngram: int, initial: Int32Array) -> None:
        assert width >= 1 and ngram >= 3 and len(initial) == width + ngram - 3, (width, ngram, len(initial))
        self._ngram = ngram
        self.entries = np.zeros((1, len(initial) + 1), np.int32)  # [levels, columns]
        self.entries[0, 1:] = initial

    @property
    def levels(self) -> int:
        """Return the number of rows of ``entries``."""
        return self.entries.shape[0]

    @property
    def columns(self) -> int:
        """Return the number of columns of ``entries``."""
        return self.entries.shape[1]

    @property
    def full(self) -> bool:
        """Return whether a step yields n-grams."""
        return self.levels == self._ngram - 1

    @property
    def steps_to_ngrams(self) -> int:
        """Return the number of steps up to and including the first that yields n-grams."""
        return self._ngram - self.levels

    @property
    def peak_rows(self) -> int:
        """Return the maximum number of rows of this and later steps, without the root; it may be reached while filling."""
        last = self._ngram - 1
        return max(levels * (self.columns + self.levels - levels) for levels in range(self.levels, last + 1)) - 1

    def ngrams(self, root: int, answers: Int32Array) -> list[tuple[int, Ngram]]:
        """Return (first token, tokens after it) by column, given [k] answers below the newest entries of the first k columns."""
        assert self.full, (self.levels, self._ngram)
        count = len(answers)
        keys = [root, *self.entries[0, 1:count].tolist()]
        values = np.vstack([self.entries[1:, :count], answers]).T.tolist()
        return [(key, tuple(value)) for key, value in zip(keys, values, strict=count > 0)]

    def advance(self, answers: Int32Array) -> None:
        """Advance by one step with the answers of ``ngrams``; a full window keeps later columns, otherwise all are required."""
        if self.full:
            # Each column drops its oldest entry, however many tokens the step emitted: after m accepted draft tokens the content
            # lags m positions behind its new places (as in the published code).
            count = len(answers)
            self.entries[:-1, :count] = self.entries[1:, :count].copy()
            self.entries[-1, :count] = answers
        else:
            assert len(answers) == self.columns, (len(answers), self.columns)
            # The answers become a level, and column 0, whose position is emitted, is dropped.
            self.entries = np.vstack([self.entries[:, 1:], answers[1:]])

    def replace_newest(self, unwanted: Set[int], source: PromptTokens) -> None:
        """Replace unwanted tokens of the newest level by random prompt tokens."""
        for column, token in enumerate(self.entries[-1].tolist()):
            if token in unwanted:
                self.entries[-1, column] = source.draw(1)[0]


@dataclass(frozen=True, slots=True)
class WindowRows:
    """First columns of a window as rows of a draft tree, behind its candidates.

    Block 0 is a chain below the root, and each column is a branch that starts at its entry of block 0. So depths are the
    published positions, and ancestors the published mask.

    Example: two levels, three columns, ``_ 5 6`` and ``7 8 9``: tokens ``5 6 7 8 9``, parents ``-1 0 -1 0 1``, ends ``2 3 4``.
    """

    tokens: Int32Array  # [m]
    parents: Int32Array  # [m] indices into ``tokens``; -1 is the root
    ends: Int32Array  # [columns] the newest entry of each column; -1 is the root

    @classmethod
    def of(cls, window: JacobiWindow, columns: int) -> WindowRows:
        """Build the rows of the first ``columns`` columns, at least one."""
        entries, teeth = window.entries[:, :columns], window.levels - 1
        block = np.arange(-1, columns - 1, dtype=np.int32)  # the rows of block 0
        if teeth == 0:
            return cls(entries[0, 1:], block[:-1], block)
        parents = np.arange(-2, columns * (teeth + 1) - 2, dtype=np.int32)[1:]
        parents[columns - 1 :: teeth] = block
        ends = np.arange(columns + teeth - 2, columns * (teeth + 1) - 1, teeth, dtype=np.int32)
        return cls(np.concatenate([entries[0, 1:], entries[1:].T.ravel()]), parents, ends)

    def locate(self, tree: DraftTree) -> Int32Array:
        """Return the rows of ``tree`` with the newest entries of the first k columns, those that were computed completely."""
        # The engine may have dropped rows (``DraftTree.clipped``) or computed another tree, for example after a preemption.
        first = tree.num_candidates
        if len(tree) - first == len(self.tokens) and np.array_equal(tree.tokens[first:], self.tokens):
            return np.where(self.ends < 0, 0, self.ends + first).astype(np.int32)
        rows, at = [0], first  # rows[i + 1]: row of ``tree`` with row i, -1 if absent; kept rows are in order
        for token, parent in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            here = at < len(tree) and tree.tokens[at] == token and tree.parents[at] == rows[parent + 1]
            rows.append(at if here else -1)
            at += here
        found = np.array(rows, np.int32)[self.ends + 1]
        missing = np.flatnonzero(found < 0)
        return found[: missing[0]] if len(missing) else found


class NgramPool:
    """N-grams (N of the paper) by first token, at most ``guesses`` (G of the paper) each, evicted by time of last insertion.

    Example: with ``guesses`` 2, after ``1 2 3``, ``1 4 5``, ``1 2 3`` and ``1 6 7`` the entries of 1 are ``2 3`` and ``6 7``.
    """

    def __init__(self, ngram: int, guesses: int) -> None:
        assert ngram >= 2 and guesses >= 1, (ngram, guesses)
        self._ngram, self.guesses = ngram, guesses
        self._values: dict[int, dict[Ngram, None]] = {}  # ordered sets by first token

    def insert(self, key: int, value: Ngram) -> None:
        """Insert an n-gram, given as its first token and the others."""
        values = self._values.setdefault(key, {})
        values.pop(value, None)
        values[value] = None
        while len(values) > self.guesses:
            del values[next(iter(values))]

    def insert_sequence(self, tokens: Sequence[int]) -> None:
        """Insert all n-grams of a text, in order."""
        for start in range(len(tokens) - self._ngram + 1):
            self.insert(tokens[start], tuple(tokens[start + 1 : start + self._ngram]))

    def lookup(self, key: int) -> list[Ngram]:
        """Return up to ``guesses`` continuations of a token, the least recently inserted first."""
        return list(self._values.get(key, ()))[-self.guesses :]


class JacobiBlock:
    """Block of plain Jacobi decoding: one guess per position after the root, all replaced by the target's answers.

    Example: guesses ``4 5 6``, answers 4, 7, 8, 9 after root, 4, 5, 6: 4 is accepted, 7 emitted; next guesses: 8, 9, random.
    """

    def __init__(self, size: int, source: PromptTokens) -> None:
        self._source = source
        self.guesses = source.draw(size)  # [size]

    def advance(self, answers: Int32Array, emitted: int) -> None:
        """Advance by a step, given the target's tokens below the root and the first m guesses, [m + 1]."""
        size = len(self.guesses)
        known = np.concatenate([answers, self.guesses[len(answers) :]])[emitted : emitted + size]
        self.guesses = np.concatenate([known, self._source.draw(size - len(known))]).astype(np.int32)
