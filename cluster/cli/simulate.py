"""``outrider simulate``: what a cluster would do, without one."""

from __future__ import annotations

import typer

from cluster.cli.bench import become_experiment


def simulate(context: typer.Context) -> None:
    """What replicas, GPUs and strategies would make of some traffic: a simulation, no measurement; --help says more."""
    become_experiment("simulate", context.args)
