"""How many rows pay: expected tokens against the measured time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from decoding.candidates import Float64Array
from decoding.tree import Int32Array

if TYPE_CHECKING:  # the drafters import this file
    from decoding.drafters.base import Target

_TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)
_START, _DECAY = 10.0, 0.998  # steps that the first guess counts for, and how fast old steps are forgotten


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a step is shared by ranks that hold the model each, and what that makes of its rows.

    The step takes as long as its largest part. Trees are dealt as runs of leaves with their ancestors (``DraftTree.partition``):
    no part is smaller than the longest path, and the first rows of a run repeat a path that begins at the root. Of a path of the
    tree's depth half is assumed to be repeated, on each rank but one. On trees of the merged drafter, for 2 to 8 ranks and 5 to
    500 rows, that is within 2 to 11 % of the largest part on average. Every rank computes the root of each tree, and what was
    accepted on another rank in the step before.

    Example: 60 drafted rows of depth 8 are 60 rows of one rank, 15 + 8 * 3/4 / 2 = 18 rows of each of four. A chain of 60 is 60
    rows of one of them.
    """

    ranks: int = 1
    spine: int = 0  # tokens of all requests that the step before accepted, computed again where that was elsewhere

    def rows(self, requests: int, drafted: Float64Array, deepest: Float64Array) -> Float64Array:
        """[n] rows of the rank that computes the most.

        Args:
            requests: trees.
            drafted: [n] rows of all trees, roots not counted.
            deepest: [n] depths of all trees, added.
        """
        if self.ranks == 1:
            return drafted + requests
        repeated = deepest * ((self.ranks - 1) / self.ranks / 2)
        dealt: Float64Array = np.maximum(deepest, drafted / self.ranks + repeated) + (requests + self.spine)
        return dealt


_ALONE = Sharing()


class RowCosts:
    """Time of one step by its rows, relative to a step of one row.

    Between measurements it is linear, beyond the last one it goes on with the last slope. It never falls: where more rows take
    less time, as may be in half precision on a CPU, their time stands for fewer rows as well.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """
        Args:
            rows: ascending numbers of rows, the first is 1; at least two.
            seconds: of a step with each.

        Raises:
            ValueError: fewer than two measurements, rows out of order, or a time that is not positive.
        """
        if len(rows) < 2 or len(rows) != len(seconds) or rows[0] != 1 or list(rows) != sorted(set(rows)):
            raise ValueError(f"rows must be ascending from 1 and have a time each, got {list(rows)} and {list(seconds)}")
        if min(seconds) <= 0:
            raise ValueError(f"seconds must be positive, got {list(seconds)}")
        self._rows = np.asarray(rows, np.float64)
        least = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]  # of so many rows or more
        self._costs = least / least[0]
        self._slope = (self._costs[-1] - self._costs[-2]) / (self._rows[-1] - self._rows[-2])

    @classmethod
    def measured(cls, target: Target, most: int) -> RowCosts:
        """Times the target for up to ``most`` rows of a step."""
        rows = [1, *(count for count in _TIMED_ROWS[1:] if count < most), max(2, most)]
        return cls(rows, target.step_seconds(rows))

    def of(self, rows: Float64Array) -> Float64Array:
        """[n] cost of steps with so many rows in all."""
        beyond = np.maximum(rows - self._rows[-1], 0.0)
        costs: Float64Array = np.interp(rows, self._rows, self._costs) + beyond * self._slope
        return costs

    def rows_to_draft(
        self,
        chances: Sequence[Float64Array],
        rate: float,
        depths: Sequence[Int32Array] | None = None,
        sharing: Sharing = _ALONE,
    ) -> tuple[list[int], float]:
        """How many rows pay for each request of a step, and what the step then costs.

        With the rows of all requests in order of their chance, the first n are expected to add the sum of their chances to the
        one token that each request gets anyway, and cost what a step of n more rows takes longer. Time has a price: the tokens
        that it brings elsewhere. The n with the highest gain after that price is taken; 0 is among the answers.

        Example: costs 1.0, 1.1 and 1.8 for one, two and three rows, chances 0.5 and 0.4, and 1.3 tokens per time: one row gains
        0.5 and costs 0.1 * 1.3, the second gains 0.4 and costs 0.7 * 1.3 more, so one row is drafted, and the step costs 1.1.
        With two ranks and both rows below the root, one rank computes either: the second row costs nothing, and both are drafted.

        Args:
            chances: of the rows of each request, non-increasing; of at least one request.
            rate: tokens that steps bring in the time of a step of one row, on average.
            depths: of the same rows, each behind its parent; needed where ranks share the step.
            sharing: of the step.
        """
        joined = np.concatenate(chances)
        order = np.argsort(-joined, kind="stable")
        drafted, deepest = np.arange(len(joined) + 1, dtype=np.float64), np.zeros(len(joined) + 1)
        if sharing.ranks > 1:
            assert depths is not None, "what ranks share depends on the depths"
            deeper = np.concatenate([np.diff(np.maximum.accumulate(each), prepend=0) for each in depths])
            deepest[1:] = np.cumsum(deeper[order])
        costs = self.of(sharing.rows(len(chances), drafted, deepest))
        gain = np.concatenate(([0.0], np.cumsum(joined[order]))) - rate * costs
        taken, best = np.zeros(len(joined), np.bool_), int(np.argmax(gain))
        taken[order[:best]] = True
        ends = np.cumsum([len(part) for part in chances])[:-1]
        return [int(part.sum()) for part in np.split(taken, ends)], float(costs[best])


class Throughput:
    """Tokens per time of late, in the units of ``RowCosts``."""

    def __init__(self) -> None:
        self._tokens = self._cost = _START

    @property
    def rate(self) -> float:
        """Tokens that steps bring in the time of a step of one row."""
        return self._tokens / self._cost

    def add(self, tokens: float, cost: float) -> None:
        """Counts a step, or a request's part of one."""
        self._tokens = self._tokens * _DECAY + tokens
        self._cost = self._cost * _DECAY + cost


class Pricing:
    """Which rows are worth their time in each step, with a price of time that is learned while serving.

    The price is that of steps that as many ranks share: how fast others were says nothing about these.
    """

    def __init__(self, costs: RowCosts) -> None:
        """
        Args:
            costs: of the steps of one rank.
        """
        self._costs, self._ranks, self._throughputs = costs, 1, {1: Throughput()}
        self._cost = 1.0  # of the last step, for each of its requests

    def scale(self, ranks: int) -> None:
        """From now on so many ranks share each step."""
        self._ranks = ranks
        self._throughputs.setdefault(ranks, Throughput())

    def rows_to_draft(self, chances: Sequence[Float64Array], depths: Sequence[Int32Array], spine: int) -> list[int]:
        """How many rows pay for each request; see ``RowCosts.rows_to_draft`` and ``Sharing``."""
        rate, sharing = self._throughputs[self._ranks].rate, Sharing(self._ranks, spine)
        counts, cost = self._costs.rows_to_draft(chances, rate, depths, sharing)
        self._cost = cost / len(chances)
        return counts

    def emitted(self, tokens: int) -> None:
        """Counts what a request got of the last step: also of one without a draft, else the price would never fall."""
        self._throughputs[self._ranks].add(tokens, self._cost)
