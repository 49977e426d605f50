"""N-grams of a growing text: where its last tokens stood before, and what followed them."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from decoding.tree import Int32Array


class NgramIndex:
    """Positions behind the occurrences of the n-grams of a growing sequence, for some n.

    An n-gram counts only once a token follows it, so that a match never is the end of the sequence itself.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._first: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self._later: dict[int, dict[tuple[int, ...], list[int]]] = {n: {} for n in self._first}  # of those that came again
        self._indexed = 1  # n-grams that end before this position are in the index

    def update(self, tokens: Int32Array) -> None:
        """Catches up with a sequence of which earlier calls saw a prefix."""
        offset = max(0, self._indexed - max(self._first))
        recent = tokens[offset:].tolist()
        for end in range(self._indexed - offset, len(recent)):
            for n, first in self._first.items():
                if n <= end:
                    ngram = tuple(recent[end - n : end])
                    if first.setdefault(ngram, end + offset) != end + offset:
                        self._later[n].setdefault(ngram, []).append(end + offset)
        self._indexed = max(self._indexed, len(tokens))

    def ends(self, tokens: Int32Array, n: int) -> list[int]:
        """The positions behind the occurrences of the last ``n`` tokens of a sequence that ``update`` has seen, ascending."""
        ngram = tuple(tokens[-n:].tolist())
        first = self._first[n].get(ngram)
        return [] if first is None else [first, *self._later[n].get(ngram, ())]


class ContextNgrams:
    """The continuations of a growing sequence's last q tokens (N-Grammys, arXiv 2411.03786, section 4.2).

    Example: with q = 1 and w = 2 the sequence ``5 1 2 5 1 2 5 1 3 5`` has three earlier 5s, followed by ``1 2``, ``1 2`` and
    ``1 3``: the rows are ``1 2`` (twice) and then ``1 3`` (once). With equal counts, the row that occurred last comes first.

    Departure from the paper: of a q-gram that occurs very often, only the latest ``max_occurrences`` are counted, so that a
    proposal is not slower in a long or repetitive context.
    """

    def __init__(self, query: int, length: int, max_occurrences: int) -> None:
        """
        Args:
            query: q of the paper, tokens to match, at least 1.
            length: w of the paper, tokens of a continuation, at least 1.
            max_occurrences: occurrences to look at, at least 1.
        """
        self._query, self._length, self._max_occurrences = query, length, max_occurrences
        self._index = NgramIndex((query,))

    def continuations(self, tokens: Int32Array, count: int, short: bool) -> list[list[int]]:
        """What followed earlier occurrences of the last q tokens.

        Args:
            tokens: [n] the sequence, of which earlier calls saw a prefix.
            count: most rows to return.
            short: occurrences so near to the end that fewer than w tokens follow them come last, the latest first.

        Returns:
            Distinct rows of w tokens by how often they occurred, then by the latest occurrence; with ``short``, shorter ones
            behind them that begin none of the rows before.
        """
        self._index.update(tokens)
        ends = self._index.ends(tokens, self._query)
        complete = bisect_right(ends, len(tokens) - self._length)
        rows = self._ranked(tokens, ends[max(0, complete - self._max_occurrences) : complete], count)
        if short:
            for end in reversed(ends[complete:]):
                row = tokens[end:].tolist()
                if len(rows) >= count:
                    break
                if not any(other[: len(row)] == row for other in rows):
                    rows.append(row)
        return rows

    def _ranked(self, tokens: Int32Array, ends: list[int], count: int) -> list[list[int]]:
        if not ends:
            return []
        windows = tokens[np.add.outer(ends, np.arange(self._length))]  # [occurrences, w]
        packed, size = windows.tobytes(), windows.itemsize * self._length
        counts: dict[bytes, int] = {}
        latest: dict[bytes, int] = {}
        for at in range(len(ends)):
            row = packed[at * size : (at + 1) * size]
            counts[row] = counts.get(row, 0) + 1
            latest[row] = at
        best = heapq.nlargest(count, counts, key=lambda row: (counts[row], latest[row]))
        return [windows[latest[row]].tolist() for row in best]
