"""``outrider bench`` and ``outrider simulate``: each experiment is a separate process that drives the system from outside."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import typer

from outrider.cluster.cli.terminal import fail
from outrider.engine.child_process import python_module

bench = typer.Typer(help="Run a benchmark or an experiment, and write a record of it.", no_args_is_help=True)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}  # the experiment parses them
BENCHES = {
    "strategies": "Benchmark all strategies and transformers' generate on the same prompts.",
    "load": "Benchmark strategies under load: concurrent clients and Poisson arrivals.",
    "scaling": "Benchmark lookahead, tensor and pipeline parallelism and replicas against one worker.",
    "paper": "Reproduce the tables and figures of a paper: llma, trie, ngrammys, jacobi or mjsd.",
    "papers": "Print what five papers say beside what is measured here, from the newest records.",
    "replay": "Replay known outputs without a model: strategies or sharing.",
    "rag": "Benchmark a day of enterprise requests about documents.",
    "peers": "Benchmark against transformers, vLLM and llama.cpp.",
    "service": "Test a server from outside: attacks, clients, first minutes, fuzz or parity.",
    "faults": "Inject faults: cache, nodes or ranks.",
    "gpu": "Run all checks and measurements of a GPU.",
    "outputs": "Count the outputs that equal plain decoding's, and measure the cost of exactness.",
    "profile": "Profile the phases of an engine step.",
    "report": "Print records as tables.",
}


def _start(name: str) -> Callable[[typer.Context], None]:
    def start(context: typer.Context) -> None:
        become_experiment("bench", [name, *context.args])

    return start


for _name, _words in BENCHES.items():
    bench.command(_name, help=_words, context_settings=PASS_ON, add_help_option=False)(_start(_name))


def simulate(context: typer.Context) -> None:
    """Simulate latency, throughput and cost of deployments."""
    become_experiment("simulation", context.args)


def become_experiment(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by a module of ``experiments``; exit with code 1 if that package is not installed."""
    if find_spec("outrider.experiments") is None:
        fail("the package `experiments` is not installed: run this in the repository, or install outrider from it")
    # execv drops what Python has not written yet.
    sys.stdout.flush()
    os.execv(sys.executable, python_module(f"outrider.experiments.{module}", *arguments))
