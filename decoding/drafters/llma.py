"""LLMA: copy from references where they agree with the output so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decoding.drafters.base import SOURCES, Drafter
from decoding.request import Request
from decoding.tree import DraftTree, Int32Array

_SOURCE = SOURCES.index("llma")
_END = -1  # stands after each reference; no token has this id


class ReferenceIndex:
    """Occurrences of tokens in a fixed set of references."""

    def __init__(self, references: Sequence[Int32Array]) -> None:
        parts = [part for reference in references for part in (reference, [_END])]
        self._text = np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)  # [n]
        self._order = np.argsort(self._text, kind="stable")  # [n] positions by token, then by position
        self._sorted = self._text[self._order]  # [n]

    def match(self, query: Int32Array, min_length: int, max_length: int) -> int | None:
        """The position after the occurrence that agrees the longest with the end of ``query``.

        Args:
            query: [m] the tokens to match backwards from the last one.
            min_length: least number of agreeing tokens.
            max_length: agreement is not measured beyond this many tokens.

        Returns:
            A position in the joined references at which a token stands; the first of the longest ones. None without a match.
        """
        if len(query) < min_length:
            return None
        left, right = np.searchsorted(self._sorted, [query[-1], query[-1] + 1])
        ends = self._order[left:right]
        ends = ends[self._text[ends + 1] != _END]  # nothing to copy at the end of a reference
        length = 1 if len(ends) else 0
        while length and length < min(max_length, len(query)):
            longer = ends[(ends >= length) & (self._text[ends - length] == query[-1 - length])]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return int(ends[0]) + 1 if length >= min_length else None

    def copy(self, position: int, count: int) -> Int32Array:
        """Up to ``count`` tokens from ``position``, cut at the end of the reference."""
        span = self._text[position : position + count]
        stops = np.flatnonzero(span == _END)
        return span[: stops[0]] if len(stops) else span


class LlmaDrafter(Drafter):
    """Inference with reference (LLMA, arXiv 2304.04487, sections 2 and 3).

    At each step the last ``match_length`` tokens of the output are looked up in the references; of all occurrences the one whose
    preceding tokens agree the longest with the output is taken, and the ``copy_length`` tokens after it are drafted. References
    are those of the request, then its prompt, which holds its documents and earlier turns.

    Example: reference ``4 5 6 7``, output ``9 5``: ``5`` matches and ``6 7`` is drafted.

    Departures from the paper: ties go to the first occurrence, as in the published code, and not to a random one. From the
    published code: an occurrence at the end of a reference is passed over for the next best, agreement is measured up to
    ``max_context`` tokens instead of 5, and ``copy_length`` does not count the root.
    """

    def __init__(self, match_length: int = 1, copy_length: int = 15, max_context: int = 32, include_prompt: bool = True) -> None:
        """
        Args:
            match_length: n of the paper, at least 1.
            copy_length: k of the paper, tokens to copy, at least 1.
            max_context: tokens over which agreement is measured, at least ``match_length``.
            include_prompt: the prompt is a reference.

        Raises:
            ValueError: a value outside its range.
        """
        if match_length < 1:
            raise ValueError(f"match_length must be at least 1, got {match_length}")
        if copy_length < 1:
            raise ValueError(f"copy_length must be at least 1, got {copy_length}")
        if max_context < match_length:
            raise ValueError(f"max_context must be at least match_length ({match_length}), got {max_context}")
        self._match_length, self._copy_length, self._max_context = match_length, copy_length, max_context
        self._include_prompt = include_prompt
        self._indices: dict[str, ReferenceIndex] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        """One chain per request."""
        return [self._propose(request, budget) for request, budget in zip(requests, budgets, strict=True)]

    def _propose(self, request: Request, budget: int) -> DraftTree:
        index = self._indices.get(request.request_id)
        if index is None:
            prompt = (request.prompt_ids,) if self._include_prompt else ()
            index = self._indices[request.request_id] = ReferenceIndex(request.references + prompt)
        position = index.match(request.output_ids, self._match_length, self._max_context) if budget else None
        if position is None:
            return DraftTree.chain(request.root, ())
        return DraftTree.chain(request.root, index.copy(position, min(self._copy_length, budget)), _SOURCE)

    def finish(self, request: Request) -> None:
        """Drops the index of the request."""
        self._indices.pop(request.request_id, None)
