"""Prompt lookup: copy what followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Iterator

from decoding.drafters.base import CopyDrafter, check_least
from decoding.request import Request
from decoding.sources.ngrams import NgramIndex
from decoding.tree import SOURCES, Int32Array


class PromptLookupDrafter(CopyDrafter[NgramIndex]):
    """transformers' prompt lookup decoding: n-gram sizes from ``max_ngram`` down to 1 over prompt and output, first occurrence,
    the ``num_tokens`` tokens after it.

    Example: after ``1 2 3 9 1 2`` with max_ngram 2, the n-gram ``1 2`` stands at the start and ``3 9 1 2`` is drafted.

    Where ranks share a step, further copies are from other occurrences of the longest n-gram, the latest first, and of shorter
    ones.

    Source: the published generator as of transformers 5.23 (``prompt_lookup_num_tokens``). It departs from it in two points that
    change no output: end tokens are not cut from the draft, since verification stops at them, and the length cap counts the
    tokens that may still be emitted.
    """

    source = SOURCES.index("prompt_lookup")

    def __init__(self, max_ngram: int = 2, num_tokens: int = 10) -> None:
        """
        Args:
            max_ngram: longest n-gram to look up, at least 1.
            num_tokens: most tokens of a copy, at least 1; each rank gets one copy.

        Raises:
            ValueError: a value below 1.
        """
        super().__init__()
        check_least(1, max_ngram=max_ngram, num_tokens=num_tokens)
        self._max_ngram, self._num_tokens = max_ngram, num_tokens

    def begin(self, request: Request) -> NgramIndex:
        """An index of its n-grams."""
        return NgramIndex(range(1, self._max_ngram + 1))

    def copies(self, request: Request, state: NgramIndex, most: int) -> Iterator[Int32Array]:
        """See ``CopyDrafter``: of the longest n-gram, and of each the first occurrence, then the others from the latest on."""
        tokens, count = request.tokens, min(self._num_tokens, most)
        state.update(tokens)
        for n in range(self._max_ngram, 0, -1):
            ends = state.ends(tokens, n)
            for at in (*ends[:1], *ends[:0:-1]):
                yield tokens[at : at + count]
