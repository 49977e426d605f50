"""A suffix automaton: the longest end of a growing text that stands elsewhere in it, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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


class CountedAutomaton(SuffixAutomaton):
    """A suffix automaton that also knows how often each run of up to ``depth`` tokens stands in the text, its end included.

    So it is the suffix tree of SuffixDecoding (arXiv 2411.04975), in which a node is a run and has a count.

    Example: in ``1 2 3 1 2`` the run ``1 2`` stands twice and ``1 2 3`` once: 3 follows with probability 1/2.
    """

    __slots__ = ("_end", "_end_length", "count", "depth")

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.count = [0]  # by state
        self._end, self._end_length = 0, 0  # the state of the text's last ``depth`` tokens, and how many they are

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens, in up to ``depth`` steps for each."""
        for token in tokens:
            super().extend((token,))
            self._end_length = min(self._end_length + 1, self.depth)
            self._end = self._within(self._next[self._end][token], self._end_length)
            state = self._end
            while state > 0:
                self.count[state] += 1
                state = self.link[state]

    def ends(self, context: Sequence[int] | None = None) -> Iterator[tuple[int, int, int]]:
        """(state, most, fewest) tokens of the ends of a text that stand in this one, state by state, the longest first.

        Args:
            context: the text, of which the last ``depth`` tokens count; this one when absent.
        """
        state, length = self._end, self._end_length
        if context is not None:
            state = length = 0
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
        """(token, state) of what stands behind the runs of a state."""
        return iter(self._next[state].items())

    def _within(self, state: int, length: int) -> int:
        """The state of the last ``length`` tokens of a state's runs."""
        while self.length[self.link[state]] >= length:
            state = self.link[state]
        return state

    def _add(self, transitions: dict[int, int], link: int, length: int, first_end: int, last_end: int) -> None:
        super()._add(transitions, link, length, first_end, last_end)
        self.count.append(0)

    def _class(self, state: int, token: int) -> int:
        target, states = self._next[state][token], len(self.length)
        found = super()._class(state, token)
        if len(self.length) > states:  # split: so far its runs stood where those of the longer ones do
            self.count[found] = self.count[target]
            self._end = self._within(self._end, self._end_length) if self._end else 0
        return found
