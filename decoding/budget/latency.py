"""Latency curve: the time of a step as a function of its rows, sequences and context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.decoding.arrays import Float64Array
from outrider.decoding.request import Request

# [n] rows, [n] seconds with at least that many rows, seconds per row beyond the last; seconds that the load adds per step and per
# row; minimum seconds of a step.
CurveParts = tuple[Float64Array, Float64Array, float, float, float, float]

_FLOOR = 0.25  # minimum step time as a fraction of a one-row step, since the fit for contexts may go below
_FIELDS: dict[str, type] = {
    "rows": int, "rows_s": float, "context": int, "sequence_s": float, "entry_s": float, "row_entry_s": float,
}  # fmt: skip
# Upper bounds, above any real machine; a file with a larger value is rejected.
_MOST = dict.fromkeys(_FIELDS, 1e9) | {"rows": 1 << 20}


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Work of a step besides drafted rows."""

    sequences: int  # requests with rows in the step
    rows: int  # committed tokens to compute: the root of each decoding request, and prefill chunks
    context: int  # KV entries before those rows, summed over the requests
    prefill_rows: int = 0  # rows of prefills, included in ``rows``
    propose_s: float | None = None  # drafting time of the previous step in seconds, if measured

    @classmethod
    def of(cls, requests: Sequence[Request]) -> StepLoad:
        """Return the load of a step in which exactly these requests decode."""
        return cls(len(requests), len(requests), sum(request.num_tokens - 1 for request in requests))


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Seconds of one forward by rows, sequences and context.

    Time is linear between the measured row counts of one sequence under a tree mask, continues with the last slope beyond, and
    never falls. Each further sequence, KV entry, and entry that a row attends to adds its time.

    Raises:
        ValueError: fewer than two measurements, rows not ascending from 1, a time that is not positive, or a negative part.
    """

    rows: tuple[int, ...]  # ascending from 1, at least two
    rows_s: tuple[float, ...]  # seconds of a step with that many rows
    context: int  # KV entries before the measured rows
    sequence_s: float  # seconds that each further sequence adds
    entry_s: float  # seconds that each further KV entry adds
    row_entry_s: float = 0.0  # seconds that each row adds for each further entry that it attends to
    _at: Float64Array = field(init=False, repr=False, compare=False)  # [n] rows
    _least: Float64Array = field(init=False, repr=False, compare=False)  # [n] minimum seconds with at least that many rows
    _slope: float = field(init=False, repr=False, compare=False)  # seconds per row beyond the last
    _floor: float = field(init=False, repr=False, compare=False)  # minimum seconds of a step

    def __post_init__(self) -> None:
        rows, seconds = self.rows, self.rows_s
        if len(rows) < 2 or rows[0] != 1 or list(rows) != sorted(set(rows)):
            raise ValueError(f"rows must be at least two numbers that ascend from 1, got {list(rows)}")
        if len(rows) != len(seconds) or not all(math.isfinite(each) and each > 0 for each in seconds):
            raise ValueError(f"rows_s must be {len(rows)} positive numbers, one for each of rows, got {list(seconds)}")
        for name in ("context", "sequence_s", "entry_s", "row_entry_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must not be negative, got {value}")
        at = np.asarray(rows, np.float64)
        # If more rows measured faster (as in half precision on a CPU), their time applies to fewer rows too.
        least = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]
        object.__setattr__(self, "_at", at)
        object.__setattr__(self, "_least", least)
        # Over the upper half of the rows: a GPU's steps have stairs, and the last two rows may be the two sides of one.
        half = min(int(np.searchsorted(at, at[-1] / 2)), len(at) - 2)
        object.__setattr__(self, "_slope", float((least[-1] - least[half]) / (at[-1] - at[half])))
        object.__setattr__(self, "_floor", float(least[0]) * _FLOOR)

    @property
    def one_row_s(self) -> float:
        """Return the seconds of a step of one row."""
        return float(self._least[0])

    def seconds(self, rows: Float64Array, load: StepLoad) -> Float64Array:
        """Return [n] seconds of steps with [n] total rows (``load.rows`` plus drafted ones), at least 1/4 of a one-row step."""
        at, least, slope, other, row_s, floor = self.parts(load)
        total = np.interp(rows, at, least) + np.maximum(rows - at[-1], 0.0) * slope + rows * row_s + other
        floored: Float64Array = np.maximum(total, floor)
        return floored

    def parts(self, load: StepLoad) -> CurveParts:
        """Return the components of the step time for compiled code."""
        other = self.sequence_s * (load.sequences - 1) + self.entry_s * (load.context - self.context)
        # A context below the measured one does not make rows cheaper. Beyond it, on a CPU, attention is most of the cost of a
        # wide tree.
        farther = max(load.context / max(load.sequences, 1) - self.context, 0.0)
        return self._at, self._least, self._slope, float(other), float(self.row_entry_s * farther), self._floor

    def critical_rows(self, slack: float = 1.2) -> int:
        """Return the most rows that take at most ``slack`` times as long as one: the critical length (arXiv 2312.12728)."""
        assert slack >= 1, slack
        counts = np.arange(1, self.rows[-1] + 1)
        most = slack * self._least[0] * (1 + 1e-12)  # exact equality is within the limit
        return int(np.count_nonzero(np.interp(counts, self._at, self._least) <= most))

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and lists for ``from_json``."""
        values = {name: getattr(self, name) for name in _FIELDS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, data: object) -> LatencyCurve:
        """Return the curve that ``to_json`` wrote. Raise ``ValueError`` if a field is missing, unknown or invalid."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a latency curve must be an object with {', '.join(_FIELDS)}, got {type(data).__name__}")
        if missing := [name for name in _FIELDS if name not in data]:
            raise ValueError(f"{missing[0]} is missing")
        if unknown := [name for name in data if name not in _FIELDS]:
            raise ValueError(f"{unknown[0]} is not a field of a latency curve; known: {', '.join(_FIELDS)}")
        values: dict[str, Any] = {}
        for name, kind in _FIELDS.items():
            value = data[name]
            if name not in ("rows", "rows_s"):
                values[name] = _number(name, value, kind)
            elif isinstance(value, list):
                values[name] = tuple(_number(name, each, kind) for each in value)
            else:
                raise ValueError(f"{name} must be a list of numbers, got {value!r}")
        return cls(**values)


def _number(name: str, value: Any, kind: type) -> Any:
    if type(value) not in (int, kind):  # not isinstance: True is an int
        raise ValueError(f"{name} must hold {'whole numbers' if kind is int else 'numbers'}, got {value!r}")
    if not value <= _MOST[name]:  # False for NaN too
        raise ValueError(f"{name} must hold at most {_MOST[name]:g}, got {value!r:.40}")
    return kind(value)
