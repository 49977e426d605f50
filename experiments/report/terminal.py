"""Tables of a report on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable

from experiments.report.values import Block, Facts, Group, Table

WIDTH = 200  # columns where stdout is no terminal


def print_blocks(blocks: Sequence[Block]) -> None:
    """All of them, one below the other."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for block in blocks:
        if isinstance(block, Group):
            console.print(f"\n{block.title}", markup=False)
            print_blocks(block.blocks)
        else:
            console.print(_facts(block) if isinstance(block, Facts) else _table(block))


def _table(table: Table) -> RichTable:
    columns = (
        Column(f"{group} {title}".strip(), justify="right" if number else "left", overflow="fold")
        for (group, title), number in zip(table.header, table.numeric, strict=True)
    )
    shown = RichTable(*columns, title=table.title or None)
    for row in table.rows:
        shown.add_row(*(cell.text for cell in row))
    return shown


def _facts(facts: Facts) -> RichTable:
    shown = RichTable("", "", title=facts.title or None, show_header=False)
    for name, cell in facts.pairs:
        shown.add_row(name, cell.text)
    return shown
