"""``outrider simulate``: python -m experiments.simulation."""

import sys

from experiments.bench.run import run
from experiments.simulation.command import BENCH

if __name__ == "__main__":
    sys.exit(run(BENCH, prog="outrider simulate"))
