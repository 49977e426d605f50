"""Backoff of drafting: a request whose drafts did not pay of late is asked for them less often."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_STEPS = 16  # that a request is left alone at a time
_WORTH_GAIN = 0.25  # how fast the worth of asking a request follows what its drafts are expected to save
_EXPLORE_EVERY = 16  # proposals
EXPLORED_ROWS = 2  # that a request drafts then, whatever they cost


class Backoff:
    """Of one request. Asking costs time as well: one whose drafts save less than that is asked less often.

    How long it is left alone grows, from its second such answer on, with the others of its steps, which pay for the asking
    together: a request alone is always asked. When the load falls, all are asked at once.

    Example: eight requests decode. One of them drafts nothing in two steps in a row: it is left alone for one step, after the
    third such step for two, after the fourth for four, then for seven, the number of the others.
    """

    __slots__ = ("_fruitless", "_left", "_worth_s", "drafted_at")

    def __init__(self) -> None:
        self._fruitless = self._left = 0
        self._worth_s = 0.0
        self.drafted_at = 0  # number of the proposal in which it drafted last

    def asked(self) -> bool:
        """Whether it is asked in this step; one that is not has one step less to wait."""
        if self._left > 0:
            self._left -= 1
            return False
        return True

    def end(self) -> None:
        """It is asked in the next step, and what came before is forgotten."""
        self._fruitless = self._left = 0

    def drafted(self, rows: int, requests: int, number: int, saved_s: float, asking_s: float) -> None:
        """It was asked.

        Args:
            rows: that it drafts.
            requests: of the proposal.
            number: of the proposal.
            saved_s: seconds that these rows are expected to save.
            asking_s: seconds that asking took.
        """
        self._worth_s += (saved_s - self._worth_s) * _WORTH_GAIN
        if rows:
            self.drafted_at = number
        if rows and max(saved_s, self._worth_s) > asking_s:
            self._fruitless = 0
            return
        self._fruitless += 1
        if self._fruitless > 1:
            self._left = min(1 << min(self._fruitless - 2, 8), requests - 1, _MOST_STEPS)


class Explorer:
    """Now and then lets a request draft a little that is not expected to pay: what is never drafted is never known to pay again.

    It is one proposal of ``_EXPLORE_EVERY`` in which some request had drafted nothing before, and of those the request that
    drafted nothing for longest: a fraction of a row a step, and no matter of chance.
    """

    def __init__(self) -> None:
        self._without = 0

    def pick(self, backoffs: Sequence[Backoff], number: int) -> int | None:
        """The request, by its place, that is to draft ``EXPLORED_ROWS`` rows all the same.

        Args:
            backoffs: of the requests of a proposal.
            number: of the proposal.
        """
        if all(backoff.drafted_at >= number - 1 for backoff in backoffs):
            return None
        self._without += 1
        if self._without < _EXPLORE_EVERY:
            return None
        self._without = 0
        return min(range(len(backoffs)), key=lambda at: backoffs[at].drafted_at)
