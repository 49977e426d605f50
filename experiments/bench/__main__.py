"""``outrider bench``: python -m experiments.bench NAME; NAME --help says more of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from experiments.bench.run import run, run_named

BENCHES = {
    "strategies": "experiments.bench.strategies",
    "load": "experiments.bench.load",
    "draft-models": "experiments.papers.draft_models.bench",
    "paper": "experiments.papers.commands",
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
        from experiments.papers.commands import chosen

        bench, rest = chosen(rest)
        return 2 if bench is None else run(bench, rest, f"outrider bench paper {bench.name.removeprefix('bench-paper-')}")
    return run_named(BENCHES, "outrider bench", [name, *rest])


if __name__ == "__main__":
    sys.exit(main())
