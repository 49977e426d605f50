"""Prompt lookup: copy what followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from decoding.drafters.base import SOURCES, Drafter
from decoding.request import Request
from decoding.sources.branches import LOOKED_AT, tree_of
from decoding.tree import DraftTree, Int32Array

_SOURCE = SOURCES.index("prompt_lookup")


class _NgramIndex:
    """Positions after the occurrences of each n-gram of a growing sequence, for n = 1 .. max_ngram.

    An n-gram counts only once a token follows it, so that a match never is the query itself.
    """

    def __init__(self, max_ngram: int) -> None:
        self._first: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]
        self._later: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(max_ngram)]  # of those that came again
        self._indexed = 1  # n-grams that end before this position are in the index

    def update(self, tokens: Int32Array) -> None:
        """Catches up with a sequence of which earlier calls saw a prefix."""
        offset = max(0, self._indexed - len(self._first))
        recent = tokens[offset:].tolist()
        for end in range(self._indexed - offset, len(recent)):
            position = end + offset
            for n, first in enumerate(self._first[:end], start=1):
                ngram = tuple(recent[end - n : end])
                if first.setdefault(ngram, position) != position:
                    self._later[n - 1].setdefault(ngram, []).append(position)
        self._indexed = max(self._indexed, len(tokens))

    def find(self, tokens: Int32Array) -> Iterator[int]:
        """The positions after occurrences of n-grams that end ``tokens``: of the longest n-gram first, and of each n-gram the
        first one, then the others from the latest on."""
        suffix = tuple(tokens[-len(self._first) :].tolist())
        for n in range(len(suffix), 0, -1):
            position = self._first[n - 1].get(suffix[-n:])
            if position is not None:
                yield position
                yield from reversed(self._later[n - 1].get(suffix[-n:], ()))


class PromptLookupDrafter(Drafter):
    """transformers' prompt lookup decoding: n-gram sizes from ``max_ngram`` down to 1 over prompt and output, first occurrence,
    the ``num_tokens`` tokens after it.

    Example: after ``1 2 3 9 1 2`` with max_ngram 2, the n-gram ``1 2`` stands at the start and ``3 9 1 2`` is drafted.

    Where ranks share a step, each gets a copy: the tree has as many branches, from further occurrences of the longest n-gram, the
    latest first, and of shorter ones.

    Source: the published generator as of transformers 5.23 (``prompt_lookup_num_tokens``). It departs from it in two points that
    change no output: end tokens are not cut from the draft, since verification stops at them, and the length cap counts the
    tokens that may still be emitted.
    """

    def __init__(self, max_ngram: int = 2, num_tokens: int = 10) -> None:
        """
        Args:
            max_ngram: longest n-gram to look up, at least 1.
            num_tokens: most tokens of a copy, at least 1; each rank gets one copy.

        Raises:
            ValueError: a value below 1.
        """
        if max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, got {max_ngram}")
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        self._max_ngram, self._num_tokens = max_ngram, num_tokens
        self._ranks = 1
        self._indices: dict[str, _NgramIndex] = {}

    def scale(self, ranks: int) -> None:
        """A copy for each rank."""
        self._ranks = ranks

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        """One chain per request; where ranks share the step, as many branches as there are ranks."""
        return [self._propose(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _propose(self, request: Request, budget: int) -> DraftTree:
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = _NgramIndex(self._max_ngram)
        index.update(request.tokens)
        count = min(self._num_tokens, budget)
        positions = index.find(request.tokens)
        if self._ranks == 1:
            at = next(positions, request.num_tokens)
            return DraftTree.chain(request.root, request.tokens[at : at + count], _SOURCE)
        looked_at = islice(positions, LOOKED_AT * self._ranks)
        rows = ((request.tokens[at : at + count].tolist(), _SOURCE) for at in looked_at)
        return tree_of(request.root, rows, budget, self._ranks)

    def held(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._indices

    def finish(self, request: Request) -> None:
        """Drops the index of the request."""
        self._indices.pop(request.request_id, None)
