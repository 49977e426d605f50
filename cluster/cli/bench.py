"""``outrider bench`` and ``outrider simulate``: experiments, each a separate process that drives the system from outside."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import typer

from cluster.cli.terminal import fail
from engine.child_process import python_module

bench = typer.Typer(help="Compare strategies with transformers.", no_args_is_help=True)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}  # the experiment parses them
_BENCHES = {
    "strategies": "Every strategy on the same prompts, compared with generate, its prompt lookup and its assisted generation",
    "load": "Strategies under load: 1 to 32 clients, and Poisson arrivals",
    "paper": "Tables and figures of a paper (llma, trie, ngrammys, jacobi, mjsd), compared with its own numbers",
    "scaling": "One worker compared with lookahead, tensor and pipeline parallelism and replicas, for one and for many requests",
    "rag": "A day of enterprise requests about documents: replicas, sharing, routing, cold and warm, compared with vLLM",
    "report": "Self-contained HTML report of the records: figures, tables, and papers' numbers compared with ours",
}


def _start(name: str) -> Callable[[typer.Context], None]:
    def start(context: typer.Context) -> None:
        become_experiment("bench", [name, *context.args])

    return start


for _name, _words in _BENCHES.items():
    bench.command(_name, help=f"{_words}; --help says more.", context_settings=PASS_ON, add_help_option=False)(_start(_name))


def simulate(context: typer.Context) -> None:
    """Simulate how replicas, GPUs and strategies would serve some traffic, without measuring; --help lists the options."""
    become_experiment("simulation", context.args)


def become_experiment(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by a module of ``experiments``; exit with code 1 if that package is not installed."""
    if find_spec("experiments") is None:
        fail("the package `experiments` is not installed: run this in the repository, or install outrider from it")
    sys.stdout.flush()
    os.execv(sys.executable, python_module(f"experiments.{module}", *arguments))
