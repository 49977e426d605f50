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
from pathlib import Path
from typing import Any, get_args

from cluster.cli.generate.strategy_option import chosen_strategies
from configs.slices import EngineOptions, SpeculationOptions
from experiments.bench.figure import panel
from experiments.bench.run import Bench, Results, Run
from experiments.simulation.search import cheapest, nearest, read_goal
from experiments.simulation.steps import EXCHANGE_S, Host, Mode, Software
from experiments.simulation.sweep import Simulation

_HOST = Host()
_SOFTWARE = Software()


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
            why = _why(best, [row for row in results["rows"] if row["traffic"] == traffic])
            lines.append(f"{traffic}: {best['deployment']} with {best['strategy']} meets {goal}: {cost}; {why}")
    return lines


def _why(best: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Why a deployment was chosen among those under the same traffic."""
    fewer = "no fewer GPUs do" if best["gpus"] > min(row["gpus"] for row in rows) else "no fewer were tried"
    others = [row for row in rows if row["gpus"] == best["gpus"] and row["deployment"] != best["deployment"]]
    if not others:
        return fewer
    other = min(others, key=lambda row: float(row["e2e_s"]["p99"]))
    ratio = other["e2e_s"]["p99"] / best["e2e_s"]["p99"]
    return f"{fewer}, and {other['deployment']} with {other['strategy']} has {ratio:.2f} times its p99"


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


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and, if wanted, references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    _add_times(parser)
    _add_deployments(parser)
    _add_traffic(parser)
    parser.add_argument("--find", help="the cheapest that meets a goal: p99<2 or ttft_p99<0.5,usd_per_million<3")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and the router")


def _add_times(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("how long a step takes")
    times.add_argument("--gpu", help="A100-80, A100-40, H100, V100-32; with --model")
    times.add_argument("--model", help="llama-2-7b, ... or a folder with a config.json")
    times.add_argument("--curve", type=Path, help="instead of both: a file that outrider doctor --calibrate kept or printed")
    times.add_argument("--bandwidth-share", type=float, default=_SOFTWARE.bandwidth_share, help="of the peak that is reached")
    times.add_argument("--flops-share", type=float, default=_SOFTWARE.flops_share, help="of the peak that is reached")
    times.add_argument("--launch-us", type=float, default=0.0, help="a layer on the host, where kernels are launched one by one")
    times.add_argument(
        "--host-ms", type=float, nargs=3, default=[1e3 * each for each in (_HOST.step_s, _HOST.request_s, _HOST.propose_s)],
        metavar=("STEP", "REQUEST", "DRAFT"), help="beside the forward: a step, each request in it, each that is drafted for",
    )  # fmt: skip
    times.add_argument(
        "--prefill-share", type=float, default=1.0, help="with --curve: what a row without logits takes of one with"
    )
    times.add_argument("--exchange-ms", type=float, default=1e3 * EXCHANGE_S, help="of a shared step, for each rank")


def _add_deployments(parser: argparse.ArgumentParser) -> None:
    many = parser.add_argument_group("deployments: all combinations")
    many.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    many.add_argument("--width", type=int, nargs="+", default=[1, 2, 4, 8], help="GPUs of a replica")
    many.add_argument("--mode", choices=get_args(Mode), nargs="+", default=["lookahead"], help="how they work together")
    many.add_argument("--max-gpus", type=int, default=8, help="in all; larger deployments are left out")
    many.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times; auto when absent")
    many.add_argument("--max-running", type=int, default=EngineOptions().max_running, help="requests in one step")
    many.add_argument(
        "--budget", type=int, default=SpeculationOptions().most_draft_tokens, help="drafted rows of a request and rank"
    )
    many.add_argument(
        "--always-share", dest="adaptive", action="store_false", help="lookahead: every step, also where that was slower of late"
    )
    many.add_argument(
        "--lag-ms", type=_lag, default=25.0, help="until others draft from what a replica said; none: they never do"
    )
    many.add_argument("--router-ms", type=float, default=3.0, help="from the arrival of a request to its replica")
    many.add_argument("--usd-per-hour", type=float, help="of a GPU; of the table of GPUs when absent")


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic: at least one")
    traffic.add_argument("--rate", type=float, nargs="+", default=[], help="requests a second, however many are under way")
    traffic.add_argument("--burstiness", type=float, default=1.0, help="of --rate; 1: a Poisson process, below: more in bursts")
    traffic.add_argument("--clients", type=int, nargs="+", default=[], help="that ask one request after the other")
    traffic.add_argument("--requests", type=int, help="so many of the records, files in turns; all when absent")
    traffic.add_argument("--max-tokens", type=int, help="cut outputs to so many tokens")


def _lag(text: str) -> float | None:
    return None if text == "none" else float(text)


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with code 2 where options do not go together."""
    if (args.curve is None) == (args.gpu is None or args.model is None):
        parser.error("give --gpu and --model, or --curve")
    if args.curve is not None and {*args.mode} - {"lookahead"}:
        parser.error("--mode tensor and pipeline split a model over GPUs: give --gpu and --model, a curve is of one device")
    if not args.rate and not args.clients:
        parser.error("say what traffic comes: --rate or --clients")
    for name in ("replicas", "width", "rate", "clients", "requests", "max_tokens", "max_running", "max_gpus"):
        values = getattr(args, name)
        least = 0 if name == "rate" else 1
        for value in values if isinstance(values, list) else [values]:
            if value is not None and (value <= least if name == "rate" else value < least):
                parser.error(f"--{name.replace('_', '-')} must be {'above 0' if name == 'rate' else 'at least 1'}, got {value}")
    if not 0 < args.burstiness < float("inf"):
        parser.error(f"--burstiness must be above 0, got {args.burstiness}")
    for name in ("bandwidth_share", "flops_share", "prefill_share"):
        if not 0 < getattr(args, name) <= 1:
            parser.error(f"--{name.replace('_', '-')} must be above 0 and at most 1, got {getattr(args, name)}")
    if min(*args.host_ms, args.launch_us, args.exchange_ms, args.router_ms, args.lag_ms or 0.0, args.budget) < 0:
        parser.error("times and --budget must not be negative")
    if len({path.stem for path in args.workloads}) < len(args.workloads):
        parser.error("two files have one name: a workload is called after its file")
    args.strategy = args.strategy or ["auto"]


BENCH = Bench("simulate", __doc__ or "", simulate, options, check=check, wrong=unmet, recorded=False)
