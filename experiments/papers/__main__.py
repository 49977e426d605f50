"""``outrider bench paper``: the tables and figures of a paper."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.bench.run import run
from experiments.papers.commands import chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench of the paper that the command line names first."""
    bench, rest = chosen(sys.argv[1:] if argv is None else argv)
    return 2 if bench is None else run(bench, rest, f"outrider bench paper {bench.name.removeprefix('bench-paper-')}")


if __name__ == "__main__":
    sys.exit(main())
