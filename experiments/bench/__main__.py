"""``outrider bench``: python -m experiments.bench NAME; NAME --help says more of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.bench.run import run_named

BENCHES = {
    "strategies": "experiments.bench.strategies",
    "load": "experiments.bench.load",
    "paper": "experiments.papers.__main__",
    "scaling": "experiments.bench.scaling.command",
    "rag": "experiments.rag.bench",
    "report": "experiments.report.page",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a bench, or shows what benches recorded; its exit code, 2 for a name that is not known."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or [""]
    if name == "report":
        from experiments.report.page import main as report

        return report(rest)
    if name == "paper":
        from experiments.papers.__main__ import main as paper

        return paper(rest)
    return run_named(BENCHES, "outrider bench", [name, *rest])


if __name__ == "__main__":
    sys.exit(main())
