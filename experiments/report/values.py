"""Tables of text, the formats of their cells, and tables of JSON values of any shape."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

_MIDDLES, _LOWS, _HIGHS = ("median", "p50", "mean"), ("lowest", "min"), ("highest", "max")
_QUANTILE = re.compile(r"p\d+(_\d+)?")
_REPEATS = 8  # longer lists of numbers show their length
_NAMES = 6  # longer lists of names are cut
_WIDE = 12  # largest nested mapping that becomes columns
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """A table; cells may hold `code` in backticks and **bold** text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of(title: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Make a table of any iterables."""
    return Table(title, tuple(header), tuple(map(tuple, rows)))


def markdown(table: Table, aligned: bool = False) -> str:
    """Render a table in GitHub's Markdown; ``aligned`` pads its columns for a terminal.

    >>> print(markdown(table_of("", ("", "speed"), [("`auto`", "2.02")])))
    | | speed |
    |---|---|
    | `auto` | 2.02 |
    """
    rows = [table.header, *([cell.replace("|", r"\|") for cell in row] for row in table.rows)]
    if aligned:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    head, *body = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows]
    return "\n".join([head, "|" + "---|" * len(table.header), *body])


def print_tables(tables: Iterable[Table]) -> None:
    """Print tables with aligned columns."""
    for table in tables:
        print(f"\n{table.title}\n{markdown(table, aligned=True)}".strip("\n"))


def rounded(value: float, digits: int) -> str:
    """Round half away from zero.

    >>> rounded(0.835, 2), rounded(28.495, 1)
    ('0.84', '28.5')
    """
    return str(Decimal(repr(round(value, 9))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def figure(value: float | None, digits: int = 2) -> str:
    """Format a number; empty for None."""
    return "" if value is None else rounded(value, digits)


def repeats(values: Sequence[float], digits: int = 2) -> str:
    """Format the median with the lowest and the highest; 1 if all are 1, as of what others are relative to."""
    low, high = min(values), max(values)
    if low == high:
        return median(values, digits)
    return f"{median(values, digits)} ({rounded(low, digits)}-{rounded(high, digits)})"


def median(values: Sequence[float], digits: int = 2) -> str:
    """Format the median; 1 if all are 1."""
    return "1" if set(values) == {1} else rounded(statistics.median(values), digits)


def number(value: float) -> str:
    """Format with four significant digits, from 1,000 on with one decimal: 0.0125, 1,234.5; integers whole: 72,552."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}".removesuffix(".0") if abs(value) >= 1000 else f"{value:.4g}"


def titled(key: str) -> str:
    """Return a key of a record as a title: ``tokens_per_s`` is "tokens per s"; names with other letters stay."""
    return key.replace("_", " ") if re.fullmatch(r"[a-z0-9_]+", key) else key


def text_of(value: Any) -> str | None:
    """Return the text of a value that fits a cell, else None.

    >>> text_of([1.4, 1.6, 1.5])
    '1.5 (1.4-1.6)'
    """
    if value is None or value == {} or value == []:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str):
        return value
    return _summary(value) if isinstance(value, Mapping) else _listed(value)


def _summary(value: Mapping[str, Any]) -> str | None:
    """Format statistics such as ``{"median": 2, "lowest": 1, "highest": 3}``."""
    if not all(isinstance(item, int | float) for item in value.values()):
        return None
    if value.keys() == {"mean", "spread"}:
        return f"{number(value['mean'])} ± {number(value['spread'])}" if value["spread"] else number(value["mean"])
    middle = next((key for key in _MIDDLES if key in value), None)
    known = {*_MIDDLES, *_LOWS, *_HIGHS}
    if middle is None or not all(key in known or _QUANTILE.fullmatch(key) for key in value):
        return None
    low, high = (next((value[key] for key in keys if key in value), None) for keys in (_LOWS, _HIGHS))
    shown = number(value[middle]) if middle == "median" else f"{middle} {number(value[middle])}"
    if low is not None and high is not None and len(value) == 3:
        return f"{number(value[middle])} ({number(low)}-{number(high)})"
    others = ", ".join(f"{key.replace('_', '.')} {number(item)}" for key, item in value.items() if key != middle)
    return f"{shown} ({others})" if others else shown


def _listed(value: Sequence[Any]) -> str | None:
    if any(item is not None and not isinstance(item, str | int | float) for item in value):
        return None
    if len(set(value)) == 1:
        return text_of(value[0])
    if all(isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item) for item in value):
        shown = f"{number(statistics.median(map(float, value)))} ({number(min(value))}-{number(max(value))})"
        return shown if len(value) <= _REPEATS else f"{shown}, {len(value)} values"
    names = ", ".join(text_of(item) or "" for item in value[:_NAMES])
    return names if len(value) <= _NAMES else f"{names} and {len(value) - _NAMES} more"


def blocks_of(title: str, value: Any) -> list[Table]:
    """Return tables that show a JSON value of any shape; ``title`` is its key in the record.

    Mappings that look alike are the rows of one table. What is nested in them becomes columns if it is small, and else
    tables with the names of the rows in front.
    """
    text = text_of(value)
    if text is not None:
        return [table_of("", ("", ""), [(titled(title), text)])]
    entries = _entries(value)
    if _alike(entries.values()) and (len(entries) > 1 or isinstance(value, list)):
        return _of_rows(title, (titled(title),), [((key,), item) for key, item in entries.items()])
    facts = [(titled(key), text) for key, item in entries.items() if (text := text_of(item)) is not None]
    tables = [table_of(titled(title), ("", ""), facts)] if facts else []
    for key, item in entries.items():
        if text_of(item) is None:
            tables += blocks_of(f"{title}: {key}" if title else key, item)
    return tables


def _of_rows(title: str, keys: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]) -> list[Table]:
    """Return one table of rows, each with its names and values, and tables of what is too large for its cells."""
    cells = [(names, _cells(row)) for names, row in rows]
    columns = list(dict.fromkeys(column for _, row in cells for column in row))
    tables = []
    if columns:
        shown = [(*names, *(row.get(column, "") for column in columns)) for names, row in cells]
        tables.append(table_of(titled(title), (*keys, *columns), shown))
    nested: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for names, row in rows:
        for key, item in row.items():
            if not _cells({key: item}):
                nested.setdefault(key, []).append((names, item))
    for key, held in nested.items():
        name = f"{title}: {key}" if title else key
        below = [((*names, inner), row) for names, item in held for inner, row in _entries(item).items()]
        if _alike([row for _, row in below]):
            tables += _of_rows(name, (*keys, titled(key)), below)
        else:
            tables += [table for names, item in held for table in blocks_of(f"{name}, {', '.join(names)}", item)]
    return tables


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column; what is too large for cells is left out."""
    cells = {}
    for key, item in row.items():
        text = text_of(item)
        if text is not None:
            cells[titled(key)] = text
        elif isinstance(item, Mapping) and len(item) <= _WIDE:
            inner = {f"{titled(key)}: {titled(name)}": text_of(value) for name, value in item.items()}
            if None not in inner.values():
                cells |= {name: text or "" for name, text in inner.items()}
    return cells


def _entries(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {str(at): item for at, item in enumerate(value, start=1)}


def _alike(values: Iterable[Any]) -> bool:
    """Return whether all are mappings with a common key, but not statistics."""
    rows = list(values)
    if not rows or not all(isinstance(row, Mapping) and row and text_of(row) is None for row in rows):
        return False
    return bool(set(rows[0]).intersection(*rows))
