"""The terminal: errors of one line and no traceback, progress bars, tables."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table


def fail(message: str) -> NoReturn:
    """Ends the command with exit code 1: something outside the command's input is wrong."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def fail_input(message: str) -> NoReturn:
    """Ends the command with exit code 2: an argument, a file or a configuration is wrong."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def progress(counts_bytes: bool = False) -> Progress:
    """Bars on stderr, which are gone in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = DownloadColumn() if counts_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), done, TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


def print_table(table: Table) -> None:
    """Prints it on stdout; wide where that is no terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_rows(rows: Sequence[Mapping[str, object]], columns: Sequence[str], left: Collection[str], digits: int = 1) -> None:
    """A table, if it has rows. Cells of ``left`` columns begin at the left; fractions have so many digits."""
    from rich.markup import escape
    from rich.table import Column, Table

    def shown(value: object) -> str:
        if value is None or value == "":
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, int | float):
            return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"
        return escape(str(value))

    if rows:
        table = Table(*(Column(name.replace("_", " "), justify="left" if name in left else "right") for name in columns))
        for row in rows:
            table.add_row(*(shown(row.get(name)) for name in columns))
        print_table(table)
