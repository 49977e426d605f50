"""Suffix automaton: the longest suffix of a growing text that occurred before, and its position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

MAX_CLASSES = 32  # classes whose last occurrence is updated per token; only long runs nest deeper


class SuffixAutomaton:
    """Suffix automaton of a growing text (Blumer et al. 1985; as a drafter: SAM-Decoding, arXiv 2411.10666).

    A state is a class of substrings with equal end positions; its *link* is the class of its longest suffix that also ends
    elsewhere. The whole text ends at one position only, so its link holds the longest suffix that occurred before.

    Departure from SAM-Decoding: the last occurrence is known as well as the first.
    """

    __slots__ = ("_next", "_whole", "first_end", "last_end", "length", "link", "text")

    def __init__(self) -> None:
        self.text: list[int] = []
        self.link = [-1]  # state -> state; state 0 is the empty string
        self.length = [0]  # tokens of the longest substring of the class
        self.first_end = [0]  # end of the first occurrence, in tokens
        self.last_end = [0]  # end of the last occurrence before the end of the text
        self._next: list[dict[int, int]] = [{}]  # state -> token -> state
        self._whole = 0  # the state of the whole text

    @property
    def match(self) -> int:
        """Return the state of the longest suffix of the text that occurred before; 0 if there is none."""
        return max(self.link[self._whole], 0)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, in amortised constant time each."""
        next_, link, length, last_end = self._next, self.link, self.length, self.last_end
        state, end = self._whole, len(self.text)
        for token in tokens:
            suffix = link[state]
            # If more classes are nested, as after that many equal tokens, the outer ones may know an earlier occurrence instead
            # of the last.
            for _ in range(MAX_CLASSES):  # no longer the end of the text: an ordinary occurrence
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
        """Return the state of a suffix plus ``token``, split from longer substrings that do not end at the end of the text."""
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


class CountedAutomaton(SuffixAutomaton):
    """Suffix automaton with counts of runs of up to ``depth`` tokens: the suffix tree of SuffixDecoding (arXiv 2411.04975)."""

    __slots__ = ("_end", "_end_length", "count", "depth")

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.count = [0]  # by state
        self._end, self._end_length = 0, 0  # state and length of the text's last ``depth`` tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, in up to ``depth`` steps each."""
        for token in tokens:
            super().extend((token,))
            self._end_length = min(self._end_length + 1, self.depth)
            self._end = self._within(self._next[self._end][token], self._end_length)
            state = self._end
            while state > 0:
                self.count[state] += 1
                state = self.link[state]

    def ends(self, context: Sequence[int] | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield (state, most, fewest) tokens of the suffixes of ``context`` (None: this text) that occur, the longest first."""
        state, length = self._end, self._end_length
        if context is not None:
            state = length = 0
            # No run longer than ``depth`` tokens is counted.
            for token in context[-self.depth :]:
                while state > 0 and token not in self._next[state]:
                    state = self.link[state]
                    length = self.length[state]
                if token in self._next[state]:
                    state, length = self._next[state][token], length + 1
        while state > 0:
            link = self.link[state]
            yield state, length, self.length[link] + 1
            state, length = link, self.length[link]

    def following(self, state: int) -> Iterator[tuple[int, int]]:
        """Return (token, state) for each continuation of a state."""
        return iter(self._next[state].items())

    def _within(self, state: int, length: int) -> int:
        """Return the state of the last ``length`` tokens of a state's runs."""
        while self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def _add(self, transitions: dict[int, int], link: int, length: int, first_end: int, last_end: int) -> None:
        super()._add(transitions, link, length, first_end, last_end)
        self.count.append(0)

    def _class(self, state: int, token: int) -> int:
        target, states = self._next[state][token], len(self.length)
        found = super()._class(state, token)
        if len(self.length) > states:  # split: its runs had the same positions as the longer ones
            self.count[found] = self.count[target]
            # The state of the text's end may be the one that was split.
            self._end = self._within(self._end, self._end_length) if self._end else 0
        return found
