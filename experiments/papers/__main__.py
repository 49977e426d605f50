"""``outrider bench paper``: the tables and figures of a paper."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.experiments.bench.run import run
from outrider.experiments.papers.commands import chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench of the paper that the command line names first."""
    argv = sys.argv[1:] if argv is None else argv
    bench, rest = chosen(argv)
    if bench is None:
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    return run(bench, rest, f"outrider bench paper {bench.name.removeprefix('bench-paper-')}")


if __name__ == "__main__":
    sys.exit(main())
