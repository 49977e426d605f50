"""Latency curve: the time of a step as a function of its rows, its sequences and their context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # that file imports numba, and a curve is read without it
    from decoding.budget.candidates import Float64Array
    from decoding.request import Request

    # Rows and the seconds of so many or more, [n] each, seconds a row beyond the last; of a load what it adds and what it adds to
    # each row; the least that a step takes.
    CurveParts = tuple[Float64Array, Float64Array, float, float, float, float]

_FLOOR = 0.25  # of a step of one row: the least that any step is said to take, as the fit for contexts may go below
_FIELDS: dict[str, type] = {
    "rows": int, "rows_s": float, "context": int, "sequence_s": float, "entry_s": float, "row_entry_s": float,
}  # fmt: skip
# More than any machine has: of a file that says more nothing is believed.
_MOST = dict.fromkeys(_FIELDS, 1e9) | {"rows": 1 << 20}


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes besides drafted rows."""

    sequences: int  # requests with rows in the step
    rows: int  # committed tokens that it computes: the root of each request that decodes, and the chunks of prefills
    context: int  # KV entries that lie before those rows, added over the requests
    prefill_rows: int = 0  # of ``rows``, those of prefills
    propose_s: float | None = None  # seconds that it took to draft for the step before; None where nobody knows

    @classmethod
    def of(cls, requests: Sequence[Request]) -> StepLoad:
        """Of a step in which these requests decode, and no others."""
        return cls(len(requests), len(requests), sum(request.num_tokens - 1 for request in requests))


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Seconds of one forward by rows, sequences and context.

    The rows are those of one sequence under a tree mask: between what was timed the time is linear in them, beyond the last it
    goes on with the last slope. It never falls: where more rows take less time, as may be in half precision on a CPU, their time
    stands for fewer rows as well. Further sequences and KV entries add their part each, and so does each entry that a row looks
    at, which on a CPU is most of what a long context costs a wide tree; behind less than what was timed rows cost no less, so
    that none is ever said to save time.

    Example: 10 ms for one row, 12 ms for five, 22 ms for nine, behind 256 entries; 0.1 ms a sequence, 1 us an entry, 0.5 us for
    a row to look at one. A step of two requests with 300 entries each, a root each and one drafted row takes 11 ms for its three
    rows, 0.1 ms for the second sequence, 0.344 ms for the 344 entries more, and 3 * (300 - 256) * 0.5 us = 0.066 ms for looking.

    Raises:
        ValueError: fewer than two measurements, rows out of order, a time that is not positive, or a part that is negative.
    """

    rows: tuple[int, ...]  # ascending from 1, at least two
    rows_s: tuple[float, ...]  # seconds of a step with each
    context: int  # entries before the rows that were timed
    sequence_s: float  # seconds that each further sequence adds
    entry_s: float  # seconds that each KV entry more adds
    row_entry_s: float = 0.0  # seconds that each row adds for each entry more that it looks at
    _at: Float64Array = field(init=False, repr=False, compare=False)  # [n] rows
    _least: Float64Array = field(init=False, repr=False, compare=False)  # [n] seconds of so many rows or more
    _slope: float = field(init=False, repr=False, compare=False)  # seconds a row beyond the last
    _floor: float = field(init=False, repr=False, compare=False)  # seconds: the least

    def __post_init__(self) -> None:
        """Checks the fields."""
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
        least = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]
        object.__setattr__(self, "_at", at)
        object.__setattr__(self, "_least", least)
        object.__setattr__(self, "_slope", float((least[-1] - least[-2]) / (at[-1] - at[-2])))
        object.__setattr__(self, "_floor", float(least[0]) * _FLOOR)

    @property
    def one_row_s(self) -> float:
        """Seconds of a step of one row."""
        return float(self._least[0])

    def seconds(self, rows: Float64Array, load: StepLoad) -> Float64Array:
        """[n] seconds of steps.

        Args:
            rows: [n] of each step in all: ``load.rows`` and what is drafted.
            load: of the step. A quarter of a step of one row is the least that it is said to take.
        """
        at, least, slope, other, row_s, floor = self.parts(load)
        total = np.interp(rows, at, least) + np.maximum(rows - at[-1], 0.0) * slope + rows * row_s + other
        floored: Float64Array = np.maximum(total, floor)
        return floored

    def parts(self, load: StepLoad) -> CurveParts:
        """What the seconds of a step are made of, for compiled code."""
        other = self.sequence_s * (load.sequences - 1) + self.entry_s * (load.context - self.context)
        farther = max(load.context / max(load.sequences, 1) - self.context, 0.0)
        return self._at, self._least, self._slope, float(other), float(self.row_entry_s * farther), self._floor

    def critical_rows(self, slack: float = 1.2) -> int:
        """The critical decoding length: up to so many rows a step takes about as long as one of a single row.

        Lookahead (arXiv 2312.12728) configures it for each device; here it is found. The most rows that take at most ``slack``
        times as long as one, no more than were timed.

        Example: 10, 11 and 16 ms for 1, 8 and 16 rows: 12 ms are reached a fifth of the way from 8 to 16, so 9 rows.

        Args:
            slack: at least 1.
        """
        assert slack >= 1, slack
        counts = np.arange(1, self.rows[-1] + 1)
        most = slack * self._least[0] * (1 + 1e-12)  # what is exactly on the line is within
        return int(np.count_nonzero(np.interp(counts, self._at, self._least) <= most))

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and lists; ``from_json`` reads them."""
        values = {name: getattr(self, name) for name in _FIELDS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, data: object) -> LatencyCurve:
        """The curve that ``to_json`` wrote.

        Raises:
            ValueError: a field is missing, unknown, or not what it must be.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a latency curve must be an object with {', '.join(_FIELDS)}, got {type(data).__name__}")
        if missing := [name for name in _FIELDS if name not in data]:
            raise ValueError(f"{missing[0]} is missing")
        if unknown := [name for name in data if name not in _FIELDS]:
            raise ValueError(f"{unknown[0]} is no field of a latency curve: those are {', '.join(_FIELDS)}")
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
    if type(value) not in (int, kind):  # not isinstance: True is an int to it
        raise ValueError(f"{name} must hold {'whole numbers' if kind is int else 'numbers'}, got {value!r}")
    if not value <= _MOST[name]:  # NaN is not, either
        raise ValueError(f"{name} must hold at most {_MOST[name]:g}, got {value!r:.40}")
    return kind(value)
