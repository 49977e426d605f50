"""``outrider simulate``: deployments under traffic, or with a name first ``forms`` and ``validation``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from outrider.experiments.bench.run import run

NAMES = ("forms", "validation")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulation that the command line names, and return its exit code."""
    rest = list(sys.argv[1:] if argv is None else argv)
    name = rest.pop(0) if rest and rest[0] in NAMES else ""
    module = import_module(f"outrider.experiments.simulation.{name or 'command'}")
    return run(module.BENCH, rest, f"outrider simulate {name}".strip())


if __name__ == "__main__":
    sys.exit(main())
