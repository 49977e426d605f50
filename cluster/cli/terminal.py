"""Terminal output: one-line errors, progress bars, tables, streamed Markdown."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.progress import Progress
    from rich.table import Table

_REDRAW_S = 0.1


def fail(message: str) -> NoReturn:
    """End the command with exit code 1: something other than the command's input is wrong."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def fail_input(message: str) -> NoReturn:
    """End the command with exit code 2: an argument, a file or a configuration is wrong."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def progress(counts_bytes: bool = False) -> Progress:
    """Return progress bars on stderr that disappear at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = DownloadColumn() if counts_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), done, TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


def print_table(table: Table) -> None:
    """Print a table on stdout, 160 columns wide if that is no terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_rows(rows: Sequence[Mapping[str, object]], columns: Sequence[str], left: Collection[str], digits: int = 1) -> None:
    """Print a table if it has rows. Columns in ``left`` are left-aligned; floats have ``digits`` decimals."""
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


class MarkdownStream:
    """Answer on stdout as it arrives: as Markdown, redrawn per block, on a terminal without coloured tokens; else plain text."""

    def __init__(self, marks_drafts: bool) -> None:
        redraws = sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
        self._plain = marks_drafts or not redraws
        self._block, self._drawn_s = "", 0.0
        self._live: Live | None = None
        self._thinks = False

    def __enter__(self) -> MarkdownStream:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._plain:
            typer.echo("")
        else:
            self._end_block()

    def write(self, text: str, drafted: bool = False, thought: bool = False) -> None:
        """Write a piece of the answer; reasoning is dimmed and set apart from it."""
        if thought or self._thinks:
            typer.echo(typer.style(text, dim=True) if thought else "\n", nl=not thought)
            self._thinks = thought
        if thought:
            return
        if self._plain:
            typer.echo(typer.style(text, fg="green") if drafted else text, nl=False)
            return
        self._block += text
        while "\n\n" in self._block:
            end = self._block.index("\n\n")
            if self._block.count("```", 0, end) % 2:  # a blank line within code
                end = self._block.find("\n```", self._block.rindex("```", 0, end) + 3) + len("\n```")
                if end < len("\n```"):
                    break
            self._block, rest = self._block[:end], self._block[end:].lstrip("\n")
            self._end_block()
            self._block = rest
        self._draw()

    def _draw(self, whole: bool = False) -> None:
        """Draw the block; while incomplete, only the end that fits, and at most every ``_REDRAW_S`` seconds."""
        now = time.monotonic()
        if not self._block.strip() or (not whole and now - self._drawn_s < _REDRAW_S):
            return
        from rich.console import Console
        from rich.live import Live
        from rich.segment import Segment, Segments

        console = Console()
        lines = console.render_lines(_markdown(self._block), pad=False)
        if not whole:
            # Lines that have scrolled off the screen cannot be redrawn.
            lines = lines[-max(console.height - 2, 1) :]
        if self._live is None:
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")
            self._live.start()
        self._live.update(Segments([each for line in lines for each in (*line, Segment.line())]), refresh=True)
        self._drawn_s = now

    def _end_block(self) -> None:
        self._draw(whole=True)
        if self._live is not None:
            self._live.stop()
        self._live, self._block, self._drawn_s = None, "", 0.0


def _markdown(text: str) -> Markdown:
    """Parse Markdown without HTML, so that text that looks like a tag is shown as written."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    shown = Markdown(text)
    shown.parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(text)
    return shown
