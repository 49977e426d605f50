"""Measurements of what clients of ``outrider serve`` see: ``outrider bench service NAME``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.bench.run import run_named

TRIALS = {
    "attacks": "experiments.service.attacks.run",
    "clients": "experiments.service.clients",
    "disconnects": "experiments.service.disconnects",
    "first-minutes": "experiments.service.first_minutes",
    "fuzz": "experiments.service.fuzz",
    "overload": "experiments.service.overload",
    "parity": "experiments.service.parity",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named measurement and return its exit code; 2 for an unknown name."""
    return run_named(TRIALS, "outrider bench service", argv)


if __name__ == "__main__":
    sys.exit(main())
