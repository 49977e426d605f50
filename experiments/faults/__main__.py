"""What answers come to while something fails: python -m experiments.faults NAME; NAME --help says more of each."""

from __future__ import annotations

import sys

from experiments.bench.run import run_named

FAULTS = {
    "cache": "experiments.faults.cache",
    "nodes": "experiments.faults.nodes",
    "ranks": "experiments.faults.ranks",
    "replicas": "experiments.faults.replicas",
}

if __name__ == "__main__":
    sys.exit(run_named(FAULTS, "python -m experiments.faults"))
