"""N-gram index of a growing text: earlier occurrences of its last tokens and their continuations."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from outrider.decoding.arrays import Int32Array


class NgramIndex:
    """End positions of the n-grams of a growing sequence, for several n, except of the one at its end."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._first: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self._later: dict[int, dict[tuple[int, ...], list[int]]] = {n: {} for n in self._first}  # occurrences after the first
        self._indexed = 1  # n-grams ending before this position are indexed

    def update(self, tokens: Int32Array) -> None:
        """Index new tokens of a sequence; earlier calls must have passed a prefix of it."""
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
        """Return the end positions of the indexed occurrences of the last ``n`` tokens, ascending."""
        ngram = tuple(tokens[-n:].tolist())
        first = self._first[n].get(ngram)
        return [] if first is None else [first, *self._later[n].get(ngram, ())]


class ContextNgrams:
    """Continuations of a growing sequence's last q tokens (N-Grammys, arXiv 2411.03786, section 4.2).

    ``query`` and ``length`` are q and w of the paper, both at least 1.
    """

    def __init__(self, query: int, length: int, max_occurrences: int) -> None:
        self._query, self._length, self._max_occurrences = query, length, max_occurrences
        self._index = NgramIndex((query,))

    def continuations(self, tokens: Int32Array, count: int, short: bool) -> list[list[int]]:
        """Return up to ``count`` distinct continuations of the last q tokens, by number of occurrences, then the latest first."""
        self._index.update(tokens)
        ends = self._index.ends(tokens, self._query)
        complete = bisect_right(ends, len(tokens) - self._length)
        # Departure from the paper: only the latest occurrences of a q-gram are counted, to bound the cost of a proposal.
        rows = self._ranked(tokens, ends[max(0, complete - self._max_occurrences) : complete], count)
        # Those of fewer than w tokens, cut off by the end of the sequence, follow unless they begin another row.
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
