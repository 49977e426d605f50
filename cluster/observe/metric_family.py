"""Definition of a metric of ``/metrics``: name, help, labels, and where its value is in an engine replica's counts.

Names of counters are without the ``_total`` that the text form adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from actors.replica import Description
from engine.measures.metrics import MetricsCounts


@dataclass(frozen=True, slots=True)
class Told:
    """What one engine replica says of itself, with its counters."""

    replica: Description
    metrics: MetricsCounts


Samples = Iterable[tuple[tuple[str, ...], float]]  # values of the labels, value


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of every engine."""

    kind: Literal["counter", "gauge"]
    name: str
    help: str
    labels: tuple[str, ...]  # beside ``model_name`` and ``engine``
    samples: Callable[[Told], Samples]


def counter(name: str, help: str, value: Callable[[Told], float | None]) -> Family:
    """A counter without labels of its own; ``value`` is None where there is none."""
    return Family("counter", name, help, (), _single(value))


def gauge(name: str, help: str, value: Callable[[Told], float | None]) -> Family:
    """A gauge, likewise."""
    return Family("gauge", name, help, (), _single(value))


def _single(value: Callable[[Told], float | None]) -> Callable[[Told], Samples]:
    """One sample without labels; none where there is no value."""

    def samples(told: Told) -> Samples:
        found = value(told)
        return () if found is None else (((), found),)

    return samples
