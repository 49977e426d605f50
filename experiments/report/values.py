"""JSON values as tables and groups that a page can show: for results of any shape, known or not.

A mapping of mappings that look alike is a table, a row a key; what is nested in its rows becomes columns where it is small, and a
table of its own, with the rows' names in front, where it is not. So ``{"1": {"servers": {"auto": {"ratio": [1.4, 1.6]}}}}`` under
the name ``closed`` is one table with the columns ``closed``, ``servers`` and ``ratio``, and one row: 1, auto, 1.50 (1.40-1.60).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from experiments.report.cells import Cell, cell_of, titled

_WIDE = 12  # entries of a nested mapping that may become columns
_ROWS = 40  # rows of a table that is shown at once
_RATIO = re.compile(r"ratio|speed-?up|^speed$|^decode$|beside")
_VERDICTS = ("agree", "agrees", "reached", "holds", "identical")


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

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The row above the titles: names of groups, and over how many columns each goes."""
        return [(name, len(list(columns))) for name, columns in groupby(group for group, _ in self.header)]

    @property
    def grouped(self) -> bool:
        """Whether any column is in a group."""
        return any(group for group, _ in self.header)

    @property
    def numeric(self) -> list[bool]:
        """By column, whether numbers stand in it."""
        return [at >= self.keys and any(row[at].value is not None for row in self.rows) for at in range(len(self.header))]

    @property
    def scales(self) -> list[float]:
        """By column, the highest end of its ranges; 0 for a column without."""
        return [max((row[at].high or 0.0 for row in self.rows), default=0.0) for at in range(len(self.header))]

    @property
    def ratios(self) -> list[bool]:
        """By column, whether its numbers are relative to something: 1 is a mark there."""
        return [any(_RATIO.search(part) for part in column) for column in self.header]

    @property
    def verdicts(self) -> list[bool]:
        """By column, whether "yes" in it is good and "no" bad."""
        return [title in _VERDICTS for _, title in self.header]


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
        return _tables(title, (), [((), row) for row in value])
    cell = cell_of(value)
    if cell is not None:
        return [Facts(title, ((titled(title), cell),))]
    entries = {str(place): item for place, item in enumerate(value, start=1)} if isinstance(value, list) else value
    return _grouped(title, entries) if entries else []


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
    columns = _together(list(dict.fromkeys(column for _, cells, _ in flat for column in cells)))
    shown: list[Block] = []
    if columns:
        rows = tuple((*map(Cell, names), *(cells.get(column, Cell("")) for column in columns)) for names, cells, _ in flat)
        header = (*(("", key) for key in keys), *columns)
        shown.append(Table(titled(title), header, rows, len(keys)))
    for left in dict.fromkeys(key for _, _, others in flat for key in others):
        shown += _nested(f"{title}: {titled(left)}" if title else left, left, keys, flat)
    return shown


def _together(columns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Columns with those of each group side by side, where the first of them was."""
    groups = [column[:1] if column[0] else column for column in columns]
    return sorted(columns, key=lambda column: groups.index(column[:1] if column[0] else column))


def _nested(
    title: str, left: str, keys: tuple[str, ...], flat: Sequence[tuple[tuple[str, ...], Any, Mapping[str, Any]]]
) -> list[Block]:
    """What several rows hold under one key, as one table where that can be."""
    held = [(names, others[left]) for names, _, others in flat if left in others]
    if all(isinstance(item, Mapping) and _alike(item.values()) for _, item in held):
        return _tables(title, (*keys, titled(left)), [((*n, key), row) for n, item in held for key, row in item.items()])
    if all(_rows_of(item) for _, item in held):
        return _tables(title, (*keys, "#"), [((*n, str(at)), row) for n, item in held for at, row in enumerate(item, start=1)])
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
    every, common = set[str]().union(*rows), set(rows[0]).intersection(*rows)
    return bool(common) and all(len(row) >= len(every) / 3 for row in rows)


def table_of(title: str, titles: Sequence[str], rows: Sequence[Sequence[Cell]], keys: int = 1) -> Table:
    """A table without groups of columns."""
    return Table(title, tuple(("", name) for name in titles), tuple(tuple(row) for row in rows), keys)
