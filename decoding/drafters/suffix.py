"""Suffix matching: copy what followed where the longest end of the text stood before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from decoding.drafters.base import CopyDrafter, check_choice, check_least
from decoding.request import Request
from decoding.sources.suffix_automaton import SuffixAutomaton
from decoding.tree import SOURCES

OCCURRENCES = ("mixed", "latest", "earliest")


class _Texts:
    """References, prompt and output of one request, one after the other in one automaton.

    A negative token stands after each reference. No two are the same, so that no match reaches across one.
    """

    def __init__(self, request: Request) -> None:
        self._automaton = SuffixAutomaton()
        for number, reference in enumerate(request.references):
            self._automaton.extend([*reference.tolist(), -1 - number])
        self._prompt = len(self._automaton.text)  # where the prompt begins
        self._output = self._prompt + request.num_prompt

    def update(self, request: Request) -> None:
        """Catches up with the request's tokens."""
        known = len(self._automaton.text) - self._prompt
        self._automaton.extend(request.tokens[known:].tolist())

    def matches(self, min_length: int, occurrence: str) -> Iterator[tuple[int, int]]:
        """(tokens before the copy, tokens that match) where something stands after a match, the longest first.

        Two occurrences of each end of the text are known: the one that ``occurrence`` prefers comes first.
        """
        automaton, state = self._automaton, self._automaton.match
        while state and automaton.length[state] >= min_length:
            last, first = automaton.last_end[state], automaton.first_end[state]
            latest = occurrence == "latest" or (occurrence == "mixed" and last > self._output)
            for end in (last, first) if latest else (first, last):
                if automaton.text[end] >= 0:
                    yield end, automaton.length[state]
            state = automaton.link[state]

    def copy(self, start: int, count: int) -> list[int]:
        """Up to ``count`` tokens from ``start``: cut at the end of a reference, starting again at the end of the text."""
        span = self._automaton.text[start : start + count]
        if start < self._prompt:
            return list(takewhile(lambda token: token >= 0, span))
        return (span * (count // len(span) + 1))[:count]


class SuffixDrafter(CopyDrafter[_Texts]):
    """Longest suffix match with a suffix automaton (SAM-Decoding, arXiv 2411.10666), drafting by match length (SuffixDecoding,
    arXiv 2411.04975, section 4).

    Of all ends of the text that stand elsewhere in the request's references, prompt or output the longest is taken, whatever its
    length, and what followed it is drafted: ``max_spec_factor * match + max_spec_offset`` tokens. It is copied from its latest
    occurrence in the output, and where the output does not hold it, from the first one in references and prompt: a text goes on
    as it last did, but it follows its sources from their beginning. A copy that reaches the end of the text starts again, so that
    a period is drafted in full.

    Example: reference ``7 1 2 3``, prompt ``1 2 4``, output ``5 1 2``: the match ``1 2`` stands in both, the reference comes
    first, and ``3`` is drafted. After the output ``5 1 2 6 1 2`` it is ``6 1 2 6 1 ...``.

    Where ranks share a step, further copies are from the other known occurrence of the longest match, then from shorter matches.

    Departures: one automaton per request and none of other requests' texts. From SAM-Decoding: the latest occurrence in the
    output, and nothing is drafted without a match. From SuffixDecoding: one path, copied, and no frequencies, so that there is no
    ``min_token_prob``; the defaults of the draft length are near SAM-Decoding's instead of 1 and 0, under which a match of one
    token drafts one.
    """

    source = SOURCES.index("suffix")

    def __init__(
        self,
        max_spec_tokens: int = 40,
        max_spec_factor: float = 4.0,
        max_spec_offset: float = 4.0,
        min_match_length: int = 1,
        occurrence: str = "mixed",
    ) -> None:
        """
        Args:
            max_spec_tokens: most tokens of a copy, at least 1; each rank gets one copy.
            max_spec_factor: tokens to copy for each token that matches, at least 0.
            max_spec_offset: tokens to copy on top; may be negative, so that short matches draft nothing.
            min_match_length: least number of tokens that match, at least 1.
            occurrence: which one to copy of those of the longest match, in references, prompt and output in this order: the
                ``latest``, the ``earliest``, or the latest if it is in the output, else the earliest (``mixed``).

        Raises:
            ValueError: a value outside its range.
        """
        super().__init__()
        check_least(1, max_spec_tokens=max_spec_tokens, min_match_length=min_match_length)
        check_choice(OCCURRENCES, occurrence=occurrence)
        if not 0.0 <= max_spec_factor < float("inf"):
            raise ValueError(f"max_spec_factor must be at least 0 and finite, got {max_spec_factor}")
        if not abs(max_spec_offset) < float("inf"):
            raise ValueError(f"max_spec_offset must be finite, got {max_spec_offset}")
        self._max_spec_tokens, self._min_match_length, self._occurrence = max_spec_tokens, min_match_length, occurrence
        self._factor, self._offset = max_spec_factor, max_spec_offset

    def begin(self, request: Request) -> _Texts:
        """An automaton of its texts."""
        return _Texts(request)

    def copies(self, request: Request, state: _Texts, most: int) -> Iterator[list[int]]:
        """See ``CopyDrafter``: the longest match first."""
        state.update(request)
        for start, length in state.matches(self._min_match_length, self._occurrence) if most > 0 else ():
            wanted = int(self._factor * length + self._offset + 1e-6)  # the published rounding, so that 0.1 * 10 is 1
            yield state.copy(start, min(wanted, most, self._max_spec_tokens)) if wanted > 0 else []
