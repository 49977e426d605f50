"""Command line of the experiments: ``outrider bench NAME``, also ``python -m experiments.bench NAME``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from outrider.experiments.bench.run import run

# Name -> module of ``outrider.experiments`` with ``BENCH`` or with ``main(argv) -> int``, or such modules by name.
COMMANDS: dict[str, str | Mapping[str, str]] = {
    "strategies": "bench.strategies",
    "load": "bench.load",
    "scaling": "bench.scaling.command",
    "paper": "papers.commands",
    "papers": "papers.screen",
    "replay": {"strategies": "bench.memory.replay_strategies", "sharing": "bench.memory.sharing"},
    "rag": "rag.bench",
    "peers": "peers.__main__",
    "service": {
        "attacks": "service.attacks.run",
        "clients": "service.clients",
        "first-minutes": "service.first_minutes",
        "fuzz": "service.fuzz",
        "parity": "service.parity",
    },
    "faults": {"cache": "faults.cache", "nodes": "faults.nodes", "ranks": "faults.ranks"},
    "gpu": "gpu_suite.__main__",
    "outputs": "bench.outputs",
    "profile": "bench.profile",
    "report": "report.page",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named experiment and return its exit code; 2 for an unknown name."""
    return _start(COMMANDS, "outrider bench", sys.argv[1:] if argv is None else argv)


def _start(commands: Mapping[str, str | Mapping[str, str]], prog: str, argv: Sequence[str]) -> int:
    name, *rest = argv or [""]
    found = commands.get(name)
    if found is None:
        hint = "Run NAME --help for the options of a command."
        print(f"usage: {prog} {{{','.join(commands)}}} ...\n{hint}", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    if not isinstance(found, str):
        return _start(found, f"{prog} {name}", rest)
    module = import_module(f"outrider.experiments.{found}")
    if hasattr(module, "main"):
        code: int = module.main(rest)
        return code
    return run(module.BENCH, rest, f"{prog} {name}")


if __name__ == "__main__":
    sys.exit(main())
