"""Command line of the experiments: ``outrider bench NAME``, also ``python -m experiments.bench NAME``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from outrider.experiments.bench.run import HINT, run

COMMANDS = {  # name -> module with ``BENCH``, or with ``main(argv) -> int``
    "strategies": "outrider.experiments.bench.strategies",
    "load": "outrider.experiments.bench.load",
    "scaling": "outrider.experiments.bench.scaling.command",
    "paper": "outrider.experiments.papers.__main__",
    "replay": "outrider.experiments.bench.memory.__main__",
    "rag": "outrider.experiments.rag.bench",
    "peers": "outrider.experiments.peers.__main__",
    "service": "outrider.experiments.service.__main__",
    "faults": "outrider.experiments.faults.__main__",
    "gpu": "outrider.experiments.gpu_suite.__main__",
    "outputs": "outrider.experiments.bench.outputs",
    "profile": "outrider.experiments.bench.profile",
    "report": "outrider.experiments.report.page",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named experiment and return its exit code; 2 for an unknown name."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if name not in COMMANDS:
        print(f"usage: outrider bench {{{','.join(COMMANDS)}}} ...\n{HINT}", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    module = import_module(COMMANDS[name])
    if hasattr(module, "main"):
        code: int = module.main(rest)
        return code
    return run(module.BENCH, rest, f"outrider bench {name}")


if __name__ == "__main__":
    sys.exit(main())
