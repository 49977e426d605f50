"""What a cluster that nobody has would do: replicas, GPUs of each, strategies and traffic, simulated.

outrider simulate FILE.jsonl... --tokenizer DIR --gpu A100-80 --model llama-2-7b --rate 8 --replicas 1 2 4 8 --find "p99<2"

Requests are the records of the files, and answer what the records say (target-guided, LLMA, arXiv 2304.04487, section 3.2): the
real scheduler and the real drafters run along them in simulated time. How long a step takes is what --curve says, a file of
`outrider doctor --calibrate`, or the roofline of a GPU: the time to read weights and KV, to compute, or to launch, whichever is
longest, and the all-reduces of tensor parallelism or the exchange of lookahead parallelism. What one replica generates, the
others draft from after --lag-ms. Everything that is assumed stands in the results.

Not simulated: sampling, draft models and strategies that need logits (jacobi, recycling; auto runs without that part), several
machines in one group, replicas that fail or start.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from cluster.cli.generate.strategy_option import chosen_strategies
from experiments.bench.figure import panel
from experiments.bench.run import Bench, Results, Run
from experiments.simulation.options import check, options
from experiments.simulation.search import cheapest, nearest, read_goal
from experiments.simulation.sweep import Simulation


def simulate(args: argparse.Namespace, run: Run) -> Results:
    """All deployments under all traffic.

    Returns:
        ``prediction``: true; ``assumed``; ``rows``; ``too_large``; with --find ``found``, the rows that meet the goal, the
        cheapest first, and ``nearest`` where there is none.

    Raises:
        ValueError: see ``Simulation`` and ``SimulatedReplica``.
    """
    goal = [] if args.find is None else read_goal(args.find)
    simulation = Simulation(args)
    deployments, too_large = simulation.deployments(chosen_strategies(args.strategy))
    if not deployments:
        raise ValueError("no deployment is left: raise --max-gpus, or choose GPUs with more memory")
    traffic = [(rate, None) for rate in args.rate] + [(None, clients) for clients in args.clients]
    rows = []
    for (rate, clients), one in itertools.product(traffic, deployments):
        run.progress.note(f"{one.label}, {one.strategy.label}")
        rows.append(simulation.run(one, rate, clients))
    results: dict[str, Any] = {
        "prediction": True,
        "assumed": simulation.assumptions(),
        "rows": rows,
        "too_large": too_large,
    }
    if goal:
        met = cheapest(rows, goal)
        results |= {"found": met, "nearest": [] if met else nearest(rows, goal)}
        results["answer"] = answer(results, args.find)
    return results | {"figures": figures(rows)}


def answer(results: dict[str, Any], goal: str) -> list[str]:
    """What --find found, in lines."""
    if not results["found"]:
        return [f"no deployment meets {goal}", *(f"  {line}" for line in results["nearest"])]
    lines = []
    for traffic in dict.fromkeys(row["traffic"] for row in results["rows"]):
        best = next((row for row in results["found"] if row["traffic"] == traffic), None)
        if best is None:
            lines.append(f"{traffic}: no deployment meets {goal}")
        else:
            cost = f"{best['gpus']} GPU{'s' * (best['gpus'] > 1)}, {best['usd_per_million']:.2f} $ a million tokens"
            lines.append(f"{traffic}: {best['deployment']} with {best['strategy']} meets {goal}: {cost}")
    return lines


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """p99 of the latency of each deployment and strategy, a panel a traffic."""
    panels = {}
    for traffic in dict.fromkeys(row["traffic"] for row in rows):
        series: dict[str, dict[str, float]] = {}
        for row in (row for row in rows if row["traffic"] == traffic):
            series.setdefault(row["strategy"], {})[row["deployment"]] = row["e2e_s"]["p99"]
        panels[traffic] = panel("bars", "a simulation, no measurement", "", "p99 of the latency (s)", series)
    return panels


def unmet(results: Results, args: argparse.Namespace) -> list[str]:
    """Where nothing meets ``--find``."""
    return [f"no deployment meets {args.find}"] if args.find and not results["found"] else []


BENCH = Bench("simulate", __doc__ or "", simulate, options, check=check, wrong=unmet, recorded=False)
