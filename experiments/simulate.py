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
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from cluster.cli.generate.strategy_option import chosen_strategies
from experiments.competition import progress_bar
from experiments.record import write_record
from experiments.run_options import refused
from experiments.simulation.options import arguments
from experiments.simulation.search import cheapest, nearest, read_goal
from experiments.simulation.sweep import Simulation


def simulate(args: argparse.Namespace) -> dict[str, Any]:
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
    with progress_bar() as bar:
        task = bar.add_task("simulating", total=len(deployments) * len(traffic))
        for (rate, clients), one in itertools.product(traffic, deployments):
            bar.update(task, description=f"{one.label}, {one.strategy.label}")
            rows.append(simulation.run(one, rate, clients))
            bar.advance(task)
    results: dict[str, Any] = {
        "prediction": True,
        "assumed": simulation.assumptions(),
        "rows": rows,
        "too_large": too_large,
    }
    if goal:
        met = cheapest(rows, goal)
        results |= {"found": met, "nearest": [] if met else nearest(rows, goal)}
    return results


def table(results: dict[str, Any]) -> Table:
    """A row a deployment and traffic."""
    titles = ("GPUs", "p50 s", "p99 s", "TTFT p50 s", "p99 s", "TPOT p50 ms", "tok/s", "tok/step", "busy", "$/M tokens")
    shown = Table(
        "traffic", "deployment", Column("strategy", overflow="fold"), *(Column(title, justify="right") for title in titles),
        caption="a simulation, no measurement: see --help",
    )  # fmt: skip
    for row in results["rows"]:
        e2e, ttft, tpot = row["e2e_s"], row["ttft_s"], row["tpot_s"]["p50"]
        shown.add_row(
            row["traffic"], row["deployment"], row["strategy"], str(row["gpus"]), f"{e2e['p50']:.3f}", f"{e2e['p99']:.3f}",
            f"{ttft['p50']:.3f}", f"{ttft['p99']:.3f}", "" if tpot is None else f"{1e3 * tpot:.2f}", f"{row['tokens_per_s']:.0f}",
            f"{row['tokens_per_step']:.2f}", f"{row['busy']:.0%}", f"{row['usd_per_million']:.2f}",
        )  # fmt: skip
    return shown


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


def _draw(results: dict[str, Any], out: Path) -> str:
    """Draws the figure; what to say of it."""
    if find_spec("matplotlib") is None:
        return ", no figure: it needs matplotlib, which the extra `dev` has"
    from experiments.simulation.figures import latency_against_cost

    return f", figure: {latency_against_cost(results, out).name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates, writes the record and prints the table; 2 for what cannot be used, 1 where nothing meets --find."""
    args = arguments(argv, __doc__ or "")
    started = datetime.now(UTC)
    try:
        results = simulate(args)
    except ValueError as error:
        return refused(error)
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 170).print(table(results))
        if results["too_large"]:
            print(f"left out, as memory is too small: {', '.join(results['too_large'])}")
        if args.find:
            print(*answer(results, args.find), sep="\n")
    if args.out is not None:
        path = write_record("simulate", vars(args), results, args.seed, started, "cpu", args.out)
        print(f"record: {path.name}{_draw(results, path.with_suffix('.svg'))}", file=sys.stderr)
    return 1 if args.find and not results["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
