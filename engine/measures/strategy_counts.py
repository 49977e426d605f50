"""Counters of ended requests by strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.decoding.drafters.registry import LOSSLESS
from outrider.decoding.request import PLAIN, Request


@dataclass(slots=True)
class StrategyCounts:
    """Counters of the ended requests of one strategy."""

    strategy: str
    lossless: bool  # whether outputs have the distribution of plain decoding
    requests: int = 0
    tokens: int = 0  # tokens emitted by this engine
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    energy_j: float | None = None  # energy of the metered requests; None if none was metered

    def add(self, request: Request) -> None:
        """Count an ended request."""
        stats = request.stats
        self.requests += 1
        self.tokens += request.num_output - request.num_given
        self.steps += stats.steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        if stats.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + stats.energy_j

    def merge(self, other: StrategyCounts) -> None:
        """Add the counts of another engine."""
        for name in ("requests", "tokens", "steps", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + other.energy_j


class CountsByStrategy:
    """Counters of all allowed strategies, the default one first; requests without drafts count as plain decoding."""

    def __init__(self, strategies: Iterable[str]) -> None:
        names = dict.fromkeys((*strategies, PLAIN))
        self._default = next(iter(names))
        self._counts = {name: StrategyCounts(name, name in LOSSLESS) for name in names}  # fixed keys: threads may read it

    def add(self, request: Request) -> None:
        """Count an ended request."""
        self._counts[PLAIN if request.plain else request.strategy or self._default].add(request)

    def read(self) -> tuple[StrategyCounts, ...]:
        """Return the current counts; callable from any thread."""
        return tuple(map(dataclasses.replace, self._counts.values()))


def sum_counts(engines: Iterable[Iterable[StrategyCounts]]) -> list[StrategyCounts]:
    """Sum the counts of several engines by strategy, in order of first appearance."""
    total: dict[str, StrategyCounts] = {}
    for counts in engines:
        for one in counts:
            if one.strategy in total:
                total[one.strategy].merge(one)
            else:
                total[one.strategy] = dataclasses.replace(one)
    return list(total.values())
