"""``outrider bench replay``: known outputs without a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from outrider.experiments.bench.run import run_named

BENCHES = {
    "strategies": "outrider.experiments.bench.memory.replay_strategies",
    "sharing": "outrider.experiments.bench.memory.sharing",
    "trie": "outrider.experiments.bench.memory.trie_speed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named replay."""
    return run_named(BENCHES, "outrider bench replay", argv)


if __name__ == "__main__":
    sys.exit(main())
