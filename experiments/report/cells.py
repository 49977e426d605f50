"""Values of a record as what stands in the field of a table."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

_MIDDLES = ("median", "p50", "mean")  # of a summary, the first that it has
_LOWS, _HIGHS = ("lowest", "min"), ("highest", "max")
_QUANTILE = re.compile(r"p\d+(_\d+)?")
_UNIT = re.compile(r"(.+)_(ms|us|s|w|j|mib)$")
_UNITS = {"us": "µs", "mib": "MiB", "w": "W", "j": "J"}
_REPEATS = 8  # numbers that are shown as a median with its range; more are a series
_FACTS = 6  # short lists of names up to here stand in a cell
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table's field."""

    text: str  # with `code` between backticks and **bold**
    value: float | None = None  # of a number, a median
    low: float | None = None
    high: float | None = None
    series: tuple[float, ...] = ()  # of a course over time or requests


def cell_of(value: Any) -> Cell | None:
    """A value that fits a field; None for one that does not.

    >>> cell_of([1.4, 1.6, 1.5]).text
    '1.5 (1.4-1.6)'
    """
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if value is None:
        return Cell(NOTHING)
    if isinstance(value, int | float):
        return Cell(number(value), float(value))
    if isinstance(value, str):
        return Cell(value)
    if isinstance(value, Mapping):
        return _summary(value)
    return _listed(value)


def number(value: float) -> str:
    """Four significant digits, one behind the point of thousands, and all of a whole number: 0.0125; 1,234.5; 72,552."""
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.1f}".removesuffix(".0")
    return f"{value:.4g}"


def titled(key: str) -> str:
    """A key of a record as a title: ``request_ms`` is "request, ms", ``tokens_per_s`` "tokens per s"; other texts stay."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        return key
    unit = _UNIT.fullmatch(key)
    if unit and not unit[1].endswith("_per"):
        return f"{unit[1].replace('_', ' ')}, {_UNITS.get(unit[2], unit[2])}"
    return key.replace("_", " ")


def _summary(value: Mapping[str, Any]) -> Cell | None:
    """A mapping such as ``{"median": 2, "lowest": 1, "highest": 3}``."""
    if value.keys() == {"mean", "spread"} and isinstance(value["mean"], int | float):
        return Cell(
            f"{number(value['mean'])} ± {number(value['spread'])}" if value["spread"] else number(value["mean"]), value["mean"]
        )
    known = {*_MIDDLES, *_LOWS, *_HIGHS}
    if not value or not all(key in known or _QUANTILE.fullmatch(key) for key in value):
        return None
    if not all(isinstance(item, int | float) for item in value.values()):
        return None
    middle = next((key for key in _MIDDLES if key in value), None)
    if middle is None:
        return None
    low, high = (next((value[key] for key in keys if key in value), None) for keys in (_LOWS, _HIGHS))
    if low is not None and high is not None and len(value) == 3:
        return Cell(f"{number(value[middle])} ({number(low)}-{number(high)})", value[middle], low, high)
    others = ", ".join(f"{key.replace('_', '.')} {number(item)}" for key, item in value.items() if key != middle)
    prefix = "" if middle == "median" else f"{middle} "
    return Cell(f"{prefix}{number(value[middle])}" + (f" ({others})" if others else ""), value[middle])


def _listed(value: Sequence[Any]) -> Cell | None:
    if not value:
        return Cell(NOTHING)
    known = [float(item) for item in value if isinstance(item, int | float) and not isinstance(item, bool)]
    if len(known) == len(value) and all(map(math.isfinite, known)):
        middle, low, high = statistics.median(known), min(known), max(known)
        if len(known) > _REPEATS:
            return Cell(f"{number(middle)} ({number(low)}-{number(high)}), {len(known)} values", middle, series=tuple(known))
        if low == high:
            return Cell(number(value[0]), middle, low, high)
        return Cell(f"{number(middle)} ({number(low)}-{number(high)})", middle, low, high)
    if all(item is None or isinstance(item, str | int | float) for item in value):
        if len(set(value)) == 1:
            return cell_of(value[0])
        shown = ", ".join(cell.text for item in value[:_FACTS] if (cell := cell_of(item)))
        return Cell(shown + (f" and {len(value) - _FACTS} more" if len(value) > _FACTS else ""))
    return None


def rounded(value: float, digits: int) -> str:
    """A number with so many digits behind the point.

    >>> rounded(0.835, 2), rounded(28.495, 1)
    ('0.84', '28.5')
    """
    return str(Decimal(repr(round(value, 9))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def figure(value: float | None, digits: int = 2) -> Cell:
    """A number; an empty field for None."""
    return Cell("") if value is None else Cell(rounded(value, digits), value)


def repeats(values: Sequence[float], digits: int = 2) -> Cell:
    """Median, lowest and highest; a single number where all are the same, and 1 for what others are relative to."""
    middle, low, high = statistics.median(values), min(values), max(values)
    if low == high:
        return Cell("1" if middle == 1 else rounded(middle, digits), middle, low, high)
    return Cell(f"{rounded(middle, digits)} ({rounded(low, digits)}-{rounded(high, digits)})", middle, low, high)


def median(values: Sequence[float], digits: int = 2) -> Cell:
    """The median alone."""
    middle = statistics.median(values)
    return Cell("1", 1.0) if set(values) == {1} else Cell(rounded(middle, digits), middle)
