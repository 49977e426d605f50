"""The options that experiments share, and how a command line that cannot be is refused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.record import RESULTS

DTYPES = ("bfloat16", "float32", "float64")


def run_parser(text: str | None, dtype: str, dtypes: Sequence[str] = DTYPES) -> argparse.ArgumentParser:
    """A parser with ``--model`` and ``--dtype``.

    Args:
        text: what ``--help`` says, the docstring of the script.
        dtype: where none is named.
        dtypes: that can be.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_model", help="folder of the model, or its name on the hub")
    parser.add_argument("--dtype", choices=dtypes, default=dtype)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds ``--set``, for who starts a server."""
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of the server")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None, **least: float) -> argparse.Namespace:
    """The command line, with ``--out`` for the record.

    Args:
        parser: with all other options.
        argv: the process's own when None.
        least: by option, the lowest value that can be; of an option with several, each.

    Raises:
        SystemExit: with code 2; a value is lower, or not one at all.
    """
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    for name, bound in least.items():
        value = getattr(args, name)
        lowest = min(value) if isinstance(value, list) else value
        if lowest < bound:
            parser.error(f"--{name.replace('_', '-')} must be at least {bound:g}, got {lowest}")
    return args


def refused(error: Exception) -> int:
    """Says why a run cannot be made; the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return 2
