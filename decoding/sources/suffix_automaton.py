"""A suffix automaton: the longest end of a growing text that stands elsewhere in it, and where."""

from __future__ import annotations

from collections.abc import Iterable

MAX_CLASSES = 32  # classes whose last occurrence is brought up to date with each token; only long runs nest deeper


class SuffixAutomaton:
    """Suffix automaton of a text that grows at its end (Blumer et al. 1985; as a drafter: SAM-Decoding, arXiv 2411.10666).

    A state is a class of substrings that end at the same positions; its *link* is the class of its longest suffix that also ends
    elsewhere. The whole text ends at one position only, so that its link holds the longest end of the text that occurred before.

    Example: after ``1 2 3 1 2`` the longest repeated end is ``1 2``: its state has length 2 and its last occurrence before ends
    at 2, counted in tokens, where ``3`` follows.

    Departures from SAM-Decoding: the last occurrence is known beside the first. Where more than 32 classes are nested, as after
    that many equal tokens, the outer ones may know an earlier occurrence instead of the last.
    """

    __slots__ = ("_next", "_whole", "first_end", "last_end", "length", "link", "text")

    def __init__(self) -> None:
        self.text: list[int] = []
        self.link = [-1]  # state -> state; state 0 is the empty string
        self.length = [0]  # tokens of the longest substring of the class
        self.first_end = [0]  # tokens of the text up to the end of the first occurrence
        self.last_end = [0]  # and of the last one that ends before the text does
        self._next: list[dict[int, int]] = [{}]  # state -> token -> state
        self._whole = 0  # the state of the whole text

    @property
    def match(self) -> int:
        """The state of the longest end of the text that occurred before; 0 where none did."""
        return max(self.link[self._whole], 0)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens, in amortised constant time for each."""
        next_, link, length, last_end = self._next, self.link, self.length, self.last_end
        state, end = self._whole, len(self.text)
        for token in tokens:
            suffix = link[state]
            for _ in range(MAX_CLASSES):  # the text ends here no more: an occurrence like others
                if suffix <= 0:
                    break
                last_end[suffix] = end
                suffix = link[suffix]
            end += 1
            new = len(length)
            self._add({}, 0, end, end, end)
            while state >= 0 and token not in next_[state]:
                next_[state][token] = new
                state = link[state]
            if state >= 0:
                link[new] = self._class(state, token)
            self.text.append(token)
            state = new
        self._whole = state

    def _add(self, transitions: dict[int, int], link: int, length: int, first_end: int, last_end: int) -> None:
        self._next.append(transitions)
        self.link.append(link)
        self.length.append(length)
        self.first_end.append(first_end)
        self.last_end.append(last_end)

    def _class(self, state: int, token: int) -> int:
        """The state of an end of the text and ``token``, split from longer substrings that do not end where the text ends now."""
        target = self._next[state][token]
        if self.length[target] == self.length[state] + 1:
            return target
        split = len(self.length)
        transitions = dict(self._next[target])
        self._add(transitions, self.link[target], self.length[state] + 1, self.first_end[target], self.last_end[target])
        self.link[target] = split
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self.link[state]
        return split
