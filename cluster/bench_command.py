"""``outrider bench``: starts experiments. They drive the system from outside, so each is a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import typer

from cluster.terminal import fail

bench = typer.Typer(help="Measure strategies beside transformers.", no_args_is_help=True)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}  # the experiment reads them


@bench.command("strategies", context_settings=PASS_ON, add_help_option=False)
def strategies(context: typer.Context) -> None:
    """Every strategy on the same prompts, beside generate, its prompt lookup and its assisted generation; --help says more."""
    _start("strategies", context.args)


@bench.command("load", context_settings=PASS_ON, add_help_option=False)
def load(context: typer.Context) -> None:
    """Strategies under load: 1 to 32 clients, Poisson arrivals, a load step, beside transformers' batching; --help says more."""
    _start("load", context.args)


@bench.command("draft-models", context_settings=PASS_ON, add_help_option=False)
def draft_models(context: typer.Context) -> None:
    """Strategies with a draft model: speed, J/token, perplexity, beside the numbers of a paper; --help says more."""
    _start("draft-models", context.args)


@bench.command("paper", context_settings=PASS_ON, add_help_option=False)
def paper(context: typer.Context) -> None:
    """The tables and figures of a paper (llma, trie, ngrammys, jacobi, mjsd) beside its own numbers; --help says more."""
    _start("paper", context.args)


@bench.command("report", context_settings=PASS_ON, add_help_option=False)
def report(context: typer.Context) -> None:
    """Records as one HTML page that needs nothing else: figures, tables, and papers' numbers beside ours; --help says more."""
    _start("report", context.args)


def _start(name: str, arguments: Sequence[str]) -> None:
    become_experiment("bench", [name, *arguments])


def become_experiment(module: str, arguments: Sequence[str]) -> None:
    """Becomes the process of an experiment, a module of that package; ends with code 1 where there is none."""
    if find_spec("experiments") is None:
        fail("the package `experiments` is not installed: run this in the repository, or install outrider from it")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"experiments.{module}", *arguments])
