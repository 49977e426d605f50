"""``outrider bench replay``: known outputs without a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.bench.run import run_named

BENCHES = {
    "strategies": "experiments.bench.memory.replay_strategies",
    "sharing": "experiments.bench.memory.sharing",
    "trie": "experiments.bench.memory.trie_speed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named replay."""
    return run_named(BENCHES, "outrider bench replay", argv)


if __name__ == "__main__":
    sys.exit(main())
