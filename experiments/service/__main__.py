"""Measurements of what clients of ``outrider serve`` see: ``outrider bench service NAME``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.experiments.bench.run import run_named

TRIALS = {
    "attacks": "outrider.experiments.service.attacks.run",
    "clients": "outrider.experiments.service.clients",
    "disconnects": "outrider.experiments.service.disconnects",
    "first-minutes": "outrider.experiments.service.first_minutes",
    "fuzz": "outrider.experiments.service.fuzz",
    "overload": "outrider.experiments.service.overload",
    "parity": "outrider.experiments.service.parity",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named measurement and return its exit code; 2 for an unknown name."""
    return run_named(TRIALS, "outrider bench service", argv)


if __name__ == "__main__":
    sys.exit(main())
