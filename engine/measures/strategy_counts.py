"""Counters of ended requests by strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from decoding.drafters import LOSSLESS
from decoding.request import PLAIN, Request


@dataclass(slots=True)
class StrategyCounts:
    """Of the requests of one strategy that have ended, however they did."""

    strategy: str
    lossless: bool  # whether they have the distribution of plain decoding
    requests: int = 0
    tokens: int = 0  # emitted by this engine
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    energy_j: float | None = None  # of those that were metered; None: none was

    def add(self, request: Request) -> None:
        """Counts a request that has ended."""
        stats = request.stats
        self.requests += 1
        self.tokens += request.num_output - request.num_given
        self.steps += stats.steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        if stats.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + stats.energy_j

    def merge(self, other: StrategyCounts) -> None:
        """Adds those of another engine."""
        for name in ("requests", "tokens", "steps", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + other.energy_j


class CountsByStrategy:
    """The counts of all strategies that requests may ask for. A request for which nothing may be drafted is of plain decoding."""

    def __init__(self, strategies: Iterable[str]) -> None:
        """The first strategy is that of requests that ask for none."""
        names = dict.fromkeys((*strategies, PLAIN))
        self._default = next(iter(names))
        self._counts = {name: StrategyCounts(name, name in LOSSLESS) for name in names}  # its keys never change: read by threads

    def add(self, request: Request) -> None:
        """Counts a request that has ended."""
        self._counts[PLAIN if request.plain else request.strategy or self._default].add(request)

    def read(self) -> tuple[StrategyCounts, ...]:
        """The counts of this moment; from any thread."""
        return tuple(map(dataclasses.replace, self._counts.values()))


def sum_counts(engines: Iterable[Iterable[StrategyCounts]]) -> list[StrategyCounts]:
    """The counts of several engines together, by strategy in the order of the first."""
    total: dict[str, StrategyCounts] = {}
    for counts in engines:
        for one in counts:
            if one.strategy in total:
                total[one.strategy].merge(one)
            else:
                total[one.strategy] = dataclasses.replace(one)
    return list(total.values())
