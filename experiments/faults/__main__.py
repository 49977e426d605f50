"""What answers come to while something fails: python -m experiments.faults NAME; NAME --help says more of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.bench.run import run_named

FAULTS = {
    "cache": "experiments.faults.cache",
    "nodes": "experiments.faults.nodes",
    "ranks": "experiments.faults.ranks",
    "replicas": "experiments.faults.replicas",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named fault trial."""
    return run_named(FAULTS, "outrider bench faults", argv)


if __name__ == "__main__":
    sys.exit(main())
