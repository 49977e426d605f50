"""What replicas remember and share: python -m experiments.bench.memory NAME; NAME --help says more of each."""

from __future__ import annotations

import sys

from experiments.bench.run import run_named

BENCHES = {
    "figures": "experiments.bench.memory.figures",
    "replay": "experiments.bench.memory.replay_strategies",
    "sharing": "experiments.bench.memory.sharing",
    "trie-speed": "experiments.bench.memory.trie_speed",
}

if __name__ == "__main__":
    sys.exit(run_named(BENCHES, "python -m experiments.bench.memory"))
