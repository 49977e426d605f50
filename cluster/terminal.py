"""How the command line ends when something is wrong: one line, no traceback."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Ends the command with exit code 1: something outside the command's input is wrong."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def fail_input(message: str) -> NoReturn:
    """Ends the command with exit code 2: an argument, a file or a configuration is wrong."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
