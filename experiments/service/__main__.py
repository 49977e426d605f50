"""What clients of ``outrider serve`` see: python -m experiments.service NAME; NAME --help says more of each."""

from __future__ import annotations

import sys

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

if __name__ == "__main__":
    sys.exit(run_named(TRIALS, "python -m experiments.service"))
