"""JSON values as cells, tables and groups that a page can show: for results of any shape, known or not.

A mapping of mappings that look alike is a table, a row a key; what is nested in its rows becomes columns where it is small, and a
table of its own, with the rows' names in front, where it is not. So ``{"1": {"servers": {"auto": {"ratio": [1.4, 1.6]}}}}`` under
the name ``closed`` is one table with the columns ``closed``, ``servers`` and ``ratio``, and one row: 1, auto, 1.50 (1.40-1.60).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MIDDLES = ("median", "p50", "mean")  # of a summary, the first that it has
_LOWS, _HIGHS = ("lowest", "min"), ("highest", "max")
_QUANTILE = re.compile(r"p\d+(_\d+)?")
_UNIT = re.compile(r"(.+)_(ms|us|s|w|j|mib|hz|kv)$")
_UNITS = {"us": "µs", "mib": "MiB", "w": "W", "j": "J"}
_REPEATS = 8  # numbers that are shown as a median with its range; more are a series
_WIDE = 12  # entries of a nested mapping that may become columns
_FACTS = 6  # short lists of names up to here stand in a cell
_ROWS = 40  # rows of a table that is shown at once
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a table's field."""

    text: str  # with `code` between backticks and **bold**
    value: float | None = None  # of a number, a median
    low: float | None = None
    high: float | None = None
    series: tuple[float, ...] = ()  # of a course over time or requests


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first ``keys`` columns name the row."""

    title: str
    header: tuple[tuple[str, str], ...]  # group of the column ("" without) and its title
    rows: tuple[tuple[Cell, ...], ...]
    keys: int = 1
    kind: str = "table"

    @property
    def long(self) -> bool:
        """Whether it is better folded at first."""
        return len(self.rows) > _ROWS


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with a value each."""

    title: str
    pairs: tuple[tuple[str, Cell], ...]
    kind: str = "facts"


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks below a heading."""

    title: str
    blocks: tuple[Block, ...]
    kind: str = "group"


Block = Table | Facts | Group
_Entry = tuple[tuple[str, ...], Mapping[str, Any]]  # the names of a row, and what it holds


def blocks_of(title: str, value: Any) -> list[Block]:
    """Whatever there is to show of a value.

    Args:
        title: its key in the record.
        value: any JSON value.
    """
    if isinstance(value, Mapping) and value and cell_of(value) is None:
        if len(value) > 1 and _alike(value.values()):
            return _tables(title, (titled(title),), [((key,), item) for key, item in value.items()])
        return _grouped(title, value)
    if _rows_of(value):
        return _tables(title, ("#",), [((str(place),), row) for place, row in enumerate(value, start=1)])
    cell = cell_of(value)
    if cell is not None:
        return [Facts(title, ((titled(title), cell),))]
    entries = {str(place): item for place, item in enumerate(value, start=1)} if isinstance(value, list) else value
    return _grouped(title, entries) if entries else []


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
    """Four significant digits at least, all of a whole number: 72,552; 1,234.5; 0.0125."""
    if isinstance(value, int) or (abs(value) >= 1000 and value == int(value)):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.1f}"
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
    if len(known) == len(value):
        middle, low, high = statistics.median(known), min(known), max(known)
        if len(known) > _REPEATS:
            return Cell(f"{number(middle)} ({number(low)}-{number(high)}), {len(known)} values", middle, series=tuple(known))
        if low == high:
            return Cell(number(value[0]), middle)
        return Cell(f"{number(middle)} ({number(low)}-{number(high)})", middle, low, high)
    if all(item is None or isinstance(item, str | int | float) for item in value):
        if len(set(value)) == 1:
            return cell_of(value[0])
        shown = ", ".join(NOTHING if item is None else str(item) for item in value[:_FACTS])
        return Cell(shown + (f" and {len(value) - _FACTS} more" if len(value) > _FACTS else ""))
    return None


def _grouped(title: str, value: Mapping[str, Any]) -> list[Block]:
    """A mapping of unlike things: what fits a field first, the others below it."""
    facts = tuple((titled(key), cell) for key, item in value.items() if (cell := cell_of(item)) is not None)
    within: list[Block] = [Facts("", facts)] if facts else []
    large = {key: item for key, item in value.items() if cell_of(item) is None}
    if len(large) > 1 and _alike(large.values()):
        within += _tables("", (titled(title),), [((key,), item) for key, item in large.items()])
    else:
        within += [block for key, item in large.items() for block in blocks_of(key, item)]
    return [Group(titled(title), tuple(within))] if within else []


def _tables(title: str, keys: tuple[str, ...], entries: Sequence[_Entry]) -> list[Block]:
    """Entries as one table, and as further ones what does not fit its fields."""
    while all(_alike(value.values()) for _, value in entries):
        entries = [((*names, key), item) for names, value in entries for key, item in value.items()]
        keys = (*keys, "")
    flat = [(names, *_flattened(value)) for names, value in entries]
    columns = list(dict.fromkeys(column for _, cells, _ in flat for column in cells))
    shown: list[Block] = []
    if columns:
        rows = tuple((*map(Cell, names), *(cells.get(column, Cell("")) for column in columns)) for names, cells, _ in flat)
        header = (*(("", key) for key in keys), *columns)
        shown.append(Table(titled(title), header, rows, len(keys)))
    for left in dict.fromkeys(key for _, _, others in flat for key in others):
        shown += _nested(f"{title}: {titled(left)}" if title else left, left, keys, flat)
    return shown


def _nested(
    title: str, left: str, keys: tuple[str, ...], flat: Sequence[tuple[tuple[str, ...], Any, Mapping[str, Any]]]
) -> list[Block]:
    """What several rows hold under one key, as one table where that can be."""
    held = [(names, others[left]) for names, _, others in flat if left in others]
    if all(isinstance(item, Mapping) and _alike(item.values()) for _, item in held):
        return _tables(title, (*keys, titled(left)), [((*n, key), row) for n, item in held for key, row in item.items()])
    if all(_rows_of(item) for _, item in held):
        return _tables(
            title, (*keys, "#"), [((*n, str(at)), row) for n, item in held for at, row in enumerate(item, start=1)]
        )
    if all(isinstance(item, Mapping) for _, item in held):
        return _tables(title, keys, held)
    within = [block for names, item in held for block in blocks_of(", ".join(names), item)]
    return [Group(title, tuple(within))] if within else []


def _flattened(value: Mapping[str, Any]) -> tuple[dict[tuple[str, str], Cell], dict[str, Any]]:
    """The fields of a row by column, and what is too large for one."""
    cells: dict[tuple[str, str], Cell] = {}
    others: dict[str, Any] = {}
    for key, item in value.items():
        cell = cell_of(item)
        if cell is not None:
            cells["", titled(key)] = cell
        elif isinstance(item, Mapping) and not item:
            continue
        elif isinstance(item, Mapping) and len(item) <= _WIDE and all(cell_of(within) for within in item.values()):
            for name, within in item.items():
                cells[titled(key), titled(name)] = cell_of(within) or Cell("")
        else:
            others[key] = item
    return cells, others


def _rows_of(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) and item for item in value)


def _alike(values: Iterable[Any]) -> bool:
    """Whether these are mappings with about the same keys, and no summaries: rows of one table."""
    rows = list(values)
    if not rows or not all(isinstance(row, Mapping) and row and cell_of(row) is None for row in rows):
        return False
    every, common = set().union(*rows), set(rows[0]).intersection(*rows)
    return bool(common) and all(len(row) >= len(every) / 3 for row in rows)


def numbers_of(table: Table, column: int) -> Iterator[Cell]:
    """The cells of a column that hold a number."""
    return (row[column] for row in table.rows if row[column].value is not None)
