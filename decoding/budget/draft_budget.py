"""Joint selection of drafted rows over all requests of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.decoding.budget.backoff import EXPLORED_ROWS, Backoff, Explorer
from outrider.decoding.budget.candidates import Float64Array
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.budget.row_pricing import RowPricing
from outrider.decoding.budget.tree_builder import TreeRows
from outrider.decoding.step_output import BudgetCounts

_NEAR = 0.9  # rows below this fraction of the least paying chance are not grown
_ASKING_GAIN = 0.05  # smoothing factor of the seconds per asked request
_EASED = 0.75  # the load has fallen if at most this share of the requests is left

# Grows the rows of a request, given its index and [n] the minimum chance of each row (see ``RowPricing.least_chances``).
Grow = Callable[[int, Float64Array], TreeRows]
_NO_ROWS, ANY_CHANCE = TreeRows.empty(0), np.zeros(1)


class DraftBudget:
    """Selection of the rows that pay off in a step, by their chances and the device's latency curve.

    Rows that cannot pay off are not grown (``RowPricing.least_chances``). Requests whose rows save less time than drafting costs
    draft less often (``Backoff``), and occasionally one drafts regardless (``Explorer``). When the number of requests falls by a
    quarter, all of them draft in the next step.
    """

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
