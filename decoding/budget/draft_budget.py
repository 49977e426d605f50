"""Draft budgets: joint selection of rows over all requests of a step, with backoff; row limit of other strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.decoding.arrays import Float64Array
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.budget.row_pricing import RowPricing
from outrider.decoding.budget.tree_builder import TreeRows
from outrider.decoding.request import BudgetCounts
from outrider.decoding.tree import Acceptance, DraftTree

_MOST_STEPS = 16  # longest pause, in steps
_WORTH_GAIN = 0.25  # smoothing factor of a request's expected savings
_EXPLORE_EVERY = 16  # proposals
EXPLORED_ROWS = 2  # rows drafted by an explored request
_NEAR = 0.9  # rows below this fraction of the least paying chance are not grown
_ASKING_GAIN = 0.05  # smoothing factor of the seconds per asked request
_EASED = 0.75  # the load has fallen if at most this share of the requests is left
_RATE = 0.08  # smoothing factor of the expected gains
_PRIOR = 0.4  # prior: accepted tokens that each doubling of the rows adds
_SLACK = 1.5  # maximum time of a step with guesses for later steps, relative to one without
_FURTHER = 2  # rows drafted beyond the best number (or half as many again, if more), to see whether more pay off
# Grows the rows of a request, given its index and [n] the minimum chance of each row (see ``RowPricing.least_chances``).
Grow = Callable[[int, Float64Array], TreeRows]
_NO_ROWS, ANY_CHANCE = TreeRows.empty(0), np.zeros(1)


class Backoff:
    """Exponential backoff of one request, because proposing costs time too."""

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
        # The pause grows up to the number of other requests, which share the cost of asking. The exponent is bounded because the
        # count of fruitless answers is not.
        if self._fruitless > 1:
            self._left = min(1 << min(self._fruitless - 2, 8), requests - 1, _MOST_STEPS)


class Explorer:
    """Occasional drafts that are not expected to pay off, to notice requests whose drafts would: the longest idle one in turn."""

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


class DraftBudget:
    """Selection of the rows that pay off in a step, by their chances and the latency curve (``Backoff``, ``Explorer``)."""

    def __init__(self, latency: Callable[[], LatencyCurve]) -> None:
        self._latency = latency
        self._pricing, self._explorer = RowPricing(latency()), Explorer()
        self._number, self._busiest, self._asked = 0, 1, 0
        self._asking_s = 0.0  # seconds to ask one request
        self._requests_asked = self._offered = self._granted = 0  # since the start, see ``BudgetCounts``
        self._least_chance = 0.0

    def rows(
        self, load: StepLoad, ranks: int, backoffs: Sequence[Backoff], everyone: Sequence[Backoff], accepted: int, grow: Grow
    ) -> list[TreeRows]:
        """Return the rows of each request, empty if none pays off.

        Args:
            backoffs, everyone: backoffs of the requests that may draft, at least one, and of all live requests.
            accepted: tokens that the last step of all of them accepted.
        """
        count = len(backoffs)
        self._number += 1
        self._busiest = max(self._busiest, count)
        # With a quarter fewer requests further rows may pay off, so that all of them draft in this step.
        if count <= _EASED * self._busiest:
            self._busiest = count
            for backoff in everyone:
                backoff.end_step()
        self._pricing.curve = self._latency()  # a better curve may have been measured
        self._pricing.plan(load, ranks)
        explored = self._explorer.pick(backoffs, self._number)
        asked = [at for at, backoff in enumerate(backoffs) if backoff.should_draft() or at == explored]
        rows = [_NO_ROWS] * count
        self._asked = len(asked) if 2 * len(asked) >= count else 0  # with few asked, most of the time is overhead
        if not asked:
            return rows
        least = self._pricing.least_chances()
        self._least_chance = float(least[0])
        least *= _NEAR
        grown = [grow(at, ANY_CHANCE if at == explored else least) for at in asked]
        depths = [one.depths[1:] for one in grown] if ranks > 1 else ()
        self._requests_asked += len(asked)
        counts, saved = self._pricing.rows_to_draft([one.chances for one in grown], depths, accepted)
        for at, one, paying, saved_s in zip(asked, grown, counts, saved, strict=True):
            backoffs[at].drafted(paying, count, self._number, saved_s, self._asking_s)
            drafted = max(paying, EXPLORED_ROWS) if at == explored else paying
            found = len(one.chances)
            self._offered += found
            self._granted += min(drafted, found)
            rows[at] = one.first(drafted) if drafted < found else one
        return rows

    def counts(self) -> BudgetCounts:
        """Return the decisions so far. Callable from any thread."""
        return BudgetCounts(self._requests_asked, self._offered, self._granted, self._least_chance)

    def timed(self, seconds: float) -> None:
        """Count the seconds that the previous proposal took."""
        if self._asked:
            self._asking_s += (seconds / self._asked - self._asking_s) * _ASKING_GAIN
            self._asked = 0

    def emitted(self, tokens: int) -> None:
        """Count the tokens that a request got from the step."""
        self._pricing.emitted(tokens)


class RowBudget:
    """Row limit of a drafter that would otherwise draft as many rows as allowed, at most ``most`` per request and rank.

    The limit maximizes expected tokens over step time. With ``Drafter.looks_ahead`` it is the number of rows that cost little.
    """

    def __init__(self, most: int, looks_ahead: bool) -> None:
        self._counts, self._looks_ahead = np.arange(most + 1), looks_ahead
        self._gains = _PRIOR * np.log2(1.0 + self._counts)  # [most + 1] expected accepted tokens by number of rows

    def rows(self, curve: LatencyCurve, load: StepLoad, requests: int, ranks: int) -> int:
        """Return the rows to draft for each of ``requests`` requests, on all ranks together."""
        seconds = curve.seconds(load.rows + requests * self._counts.astype(np.float64), load)
        if self._looks_ahead:
            # The time never falls with the rows, so the rows that cost little are a prefix; the entry of no rows does not count.
            return int(np.count_nonzero(seconds <= _SLACK * seconds[0]) - 1) * ranks
        best = int(np.argmax((1.0 + self._gains) / seconds))
        # A few more rows than the best number are drafted, so that it can grow.
        return min(best + max(_FURTHER, best // 2), len(self._counts) - 1) * ranks

    def observe(self, tree: DraftTree, acceptance: Acceptance, ranks: int) -> None:
        """Update the expected gains from a verified tree."""
        drafted = min(-(-(tree.num_candidates - 1) // ranks), len(self._counts) - 1)
        if drafted > 0:
            # Strategies put their best guesses first. So a step shows how many tokens every smaller number of rows would have
            # given: the accepted rows among the first n. Beyond the drafted rows the curve keeps its shape.
            known, further = self._gains[: drafted + 1], self._gains[drafted + 1 :] - self._gains[drafted]
            found = np.searchsorted(np.array(acceptance.rows), self._counts[: drafted + 1] * ranks, side="right")
            known += _RATE * (found - known)
            self._gains[drafted + 1 :] = known[-1] + further
