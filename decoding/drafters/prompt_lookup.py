"""Prompt lookup: copy what followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from decoding.drafters.base import SOURCES, Drafter
from decoding.request import Request
from decoding.tree import DraftTree, Int32Array

_SOURCE = SOURCES.index("prompt_lookup")


class _NgramIndex:
    """Position after the first occurrence of each n-gram of a growing sequence, for n = 1 .. max_ngram.

    An n-gram counts only once a token follows it, so that a match never is the query itself.
    """

    def __init__(self, max_ngram: int) -> None:
        self._first: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]
        self._indexed = 1  # n-grams that end before this position are in the index

    def update(self, tokens: Int32Array) -> None:
        """Catches up with a sequence of which earlier calls saw a prefix."""
        offset = max(0, self._indexed - len(self._first))
        recent = tokens[offset:].tolist()
        for end in range(self._indexed - offset, len(recent)):
            for n, first in enumerate(self._first[:end], start=1):
                first.setdefault(tuple(recent[end - n : end]), end + offset)
        self._indexed = max(self._indexed, len(tokens))

    def find(self, tokens: Int32Array) -> int | None:
        """The position after the first occurrence of the longest indexed n-gram that ends ``tokens``."""
        suffix = tuple(tokens[-len(self._first) :].tolist())
        for n in range(len(suffix), 0, -1):
            position = self._first[n - 1].get(suffix[-n:])
            if position is not None:
                return position
        return None


class PromptLookupDrafter(Drafter):
    """transformers' prompt lookup decoding: n-gram sizes from ``max_ngram`` down to 1 over prompt and output, first occurrence,
    the ``num_tokens`` tokens after it.

    Example: after ``1 2 3 9 1 2`` with max_ngram 2, the n-gram ``1 2`` stands at the start and ``3 9 1 2`` is drafted.

    Source: the published generator as of transformers 5.23 (``prompt_lookup_num_tokens``). It departs from it in two points that
    change no output: end tokens are not cut from the draft, since verification stops at them, and the length cap counts the
    tokens that may still be emitted.
    """

    def __init__(self, max_ngram: int = 2, num_tokens: int = 10) -> None:
        """
        Args:
            max_ngram: longest n-gram to look up, at least 1.
            num_tokens: most tokens to copy, at least 1.

        Raises:
            ValueError: a value below 1.
        """
        if max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, got {max_ngram}")
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        self._max_ngram, self._num_tokens = max_ngram, num_tokens
        self._indices: dict[str, _NgramIndex] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        """One chain per request."""
        return [self._propose(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _propose(self, request: Request, budget: int) -> DraftTree:
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = _NgramIndex(self._max_ngram)
        index.update(request.tokens)
        position = index.find(request.tokens)
        if position is None:
            return DraftTree.chain(request.root, ())
        return DraftTree.chain(request.root, request.tokens[position : position + min(self._num_tokens, budget)], _SOURCE)

    def finish(self, request: Request) -> None:
        """Drops the index of the request."""
        self._indices.pop(request.request_id, None)
