"""What clients of ``outrider serve`` see: python -m experiments.service NAME; NAME --help says more of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.bench.run import run_named

TRIALS = {
    "attacks": "experiments.service.attacks.run",
    "clients": "experiments.service.clients",
    "disconnects": "experiments.service.disconnects",
    "fairness": "experiments.service.fairness",
    "first-minutes": "experiments.service.first_minutes",
    "fuzz": "experiments.service.fuzz",
    "overhead": "experiments.service.overhead",
    "overload": "experiments.service.overload",
    "parity": "experiments.service.parity.run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named trial."""
    return run_named(TRIALS, "outrider bench service", argv)


if __name__ == "__main__":
    sys.exit(main())
