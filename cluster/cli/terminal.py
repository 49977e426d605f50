"""Errors on the command line: one line, no traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    import httpx


def fail(message: str) -> NoReturn:
    """Ends the command with exit code 1: something outside the command's input is wrong."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def fail_input(message: str) -> NoReturn:
    """Ends the command with exit code 2: an argument, a file or a configuration is wrong."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def server_message(response: httpx.Response) -> str:
    """What a server says about an error; its status when it says nothing in OpenAI's shape."""
    try:
        message: str = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status_code} {response.reason_phrase}"
    return message
