"""Per-request backoff: requests whose drafts have not paid off are asked for drafts less often."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_STEPS = 16  # longest pause, in steps
_WORTH_GAIN = 0.25  # smoothing factor of a request's expected savings
_EXPLORE_EVERY = 16  # proposals
EXPLORED_ROWS = 2  # rows drafted by an explored request


class Backoff:
    """Exponential backoff of one request.

    Proposing costs time too. From the second fruitless answer in a row, the pause grows up to the number of other requests in the
    step, because they share the cost of asking. A request alone is always asked.

    Example: eight requests decode. One of them drafts nothing in two steps in a row: it is left alone for one step, after the
    third such step for two, after the fourth for four, then for seven, the number of the others.
    """

    __slots__ = ("_fruitless", "_left", "_worth_s", "drafted_at")

    def __init__(self) -> None:
        self._fruitless = self._left = 0
        self._worth_s = 0.0
        self.drafted_at = 0  # number of the last proposal in which it drafted

    def should_draft(self) -> bool:
        """Return whether the request is asked in this step. A False counts down its pause."""
        if self._left > 0:
            self._left -= 1
            return False
        return True

    def end_step(self) -> None:
        """End the pause and reset the backoff."""
        self._fruitless = self._left = 0

    def drafted(self, rows: int, requests: int, number: int, saved_s: float, asking_s: float) -> None:
        """Record the answer to proposal ``number``: rows drafted, seconds that they are expected to save, seconds of asking."""
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
    """Occasional drafts that are not expected to pay off, to notice requests whose drafts would pay off again.

    Once per ``_EXPLORE_EVERY`` proposals in which some request drafted nothing before, the request without a draft for longest is
    chosen.
    """

    def __init__(self) -> None:
        self._without = 0

    def pick(self, backoffs: Sequence[Backoff], number: int) -> int | None:
        """Return the index of the request that drafts ``EXPLORED_ROWS`` rows regardless of cost, or None."""
        if all(backoff.drafted_at >= number - 1 for backoff in backoffs):
            return None
        self._without += 1
        if self._without < _EXPLORE_EVERY:
            return None
        self._without = 0
        return min(range(len(backoffs)), key=lambda at: backoffs[at].drafted_at)
