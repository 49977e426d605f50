"""Fault injection while requests run: ``outrider bench faults NAME``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.experiments.bench.run import run_named

FAULTS = {name: f"outrider.experiments.faults.{name}" for name in ("cache", "nodes", "ranks", "replicas")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named fault injection and return its exit code; 2 for an unknown name."""
    return run_named(FAULTS, "outrider bench faults", argv)


if __name__ == "__main__":
    sys.exit(main())
