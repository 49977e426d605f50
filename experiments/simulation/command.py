"""Simulation of deployments that do not exist: replicas, GPUs of each, strategies and traffic.

outrider simulate FILE.jsonl... --tokenizer DIR --gpu A100-80 --model llama-2-7b --rate 8 --replicas 1 2 4 8 --find "p99<2"

Requests are the records of the files, with their known outputs (target-guided, LLMA, arXiv 2304.04487, section 3.2): the real
scheduler and the real drafters run along them in simulated time. The time of a step is that of --curve, a file of `outrider
doctor --calibrate`, or the roofline of a GPU: the longest of reading weights and KV, computing, and launching, plus the
all-reduces of tensor parallelism or the exchange of lookahead parallelism. After --lag-ms, other replicas draft from what one
generated. All assumptions are in the results.

Not simulated: sampling, draft models and strategies that need logits (jacobi, recycling; auto runs without that part), groups
over several machines, and replicas that fail or start. `outrider simulate forms|papers|validation --help`: which form of
parallelism is fastest, and comparisons with papers and with the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from outrider.configs.slices import EngineOptions, SpeculationOptions
from outrider.decoding.replay import KnownText
from outrider.engine.emulation.hardware import find_shape
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.simulation.cluster import SimulatedCluster, keyed
from outrider.experiments.simulation.hardware import find_gpu
from outrider.experiments.simulation.replica import KnownTarget, SimulatedReplica
from outrider.experiments.simulation.steps import Host, Mode, Software, StepTimes, fits, read_curve, step_times

Row = Mapping[str, Any]  # of a deployment under some traffic
ROUTER_S = 3e-3  # from the arrival of a request to its replica
_HOST = Host()
_CONDITION = re.compile(r"([a-z0-9_]+)(<=|>=|<|>)([0-9.]+(?:e-?[0-9]+)?)")
QUANTITIES: dict[
    str, tuple[str, ...]
] = {  # name in a goal -> keys of a row: seconds, tokens and requests per second, dollars, GPUs
    "p50": ("e2e_s", "p50"),
    "p99": ("e2e_s", "p99"),
    "mean": ("e2e_s", "mean"),
    "ttft_p50": ("ttft_s", "p50"),
    "ttft_p99": ("ttft_s", "p99"),
    "tpot_p50": ("tpot_s", "p50"),
    "tpot_p99": ("tpot_s", "p99"),
    **{name: (name,) for name in ("tokens_per_s", "requests_per_s", "usd_per_million", "gpus", "busy")},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a goal."""

    text: str
    quantity: str
    below: bool
    bound: float
    or_equal: bool

    def holds(self, row: Row) -> bool:
        """Return whether a row meets it; an unknown value does not."""
        value = quantity(row, self.quantity)
        if value is None:
            return False
        if self.or_equal and value == self.bound:
            return True
        return value < self.bound if self.below else value > self.bound


def read_goal(text: str) -> list[Condition]:
    """Parse comma-separated conditions, all of which must hold.

    Example: ``p99<2,ttft_p99<=0.5`` asks for 99 of 100 answers within 2 s, and 99 of 100 first tokens within half a second.

    Raises:
        ValueError: a condition is invalid, or names no quantity of ``QUANTITIES``.
    """
    conditions = []
    for part in text.replace(" ", "").split(","):
        found = _CONDITION.fullmatch(part)
        if found is None or found[1] not in QUANTITIES:
            raise ValueError(f"--find {part!r} must be such as p99<2.0, of one of {', '.join(QUANTITIES)}")
        name, sign, bound = found.groups()
        conditions.append(Condition(part, name, sign[0] == "<", float(bound), sign.endswith("=")))
    return conditions


def quantity(row: Row, name: str) -> float | None:
    """Return a quantity of a row."""
    value: Any = row
    for key in QUANTITIES[name]:
        value = value[key]
    return None if value is None else float(value)


def usd_per_million(gpus: int, usd_per_hour: float, tokens_per_s: float) -> float:
    """Return the dollars for a million output tokens.

    Example: 8 GPUs at 1.64 $ an hour and 1,000 tokens a second: 3.6 million tokens an hour for 13.12 $, so 3.64 $ a million.
    """
    return gpus * usd_per_hour / 3600 / tokens_per_s * 1e6


def cheapest(rows: Sequence[Row], goal: Sequence[Condition]) -> list[Row]:
    """Return the rows that meet a goal, the fewest GPUs first, then the lowest cost and p99."""
    met = [row for row in rows if all(condition.holds(row) for condition in goal)]
    return sorted(met, key=lambda row: (row["gpus"], row["usd_per_million"], quantity(row, "p99") or 0.0))


def nearest(rows: Sequence[Row], goal: Sequence[Condition]) -> list[str]:
    """Return a line with the best value of each condition."""
    lines = []
    for condition in goal:
        known = [value for row in rows if (value := quantity(row, condition.quantity)) is not None]
        if known:
            lines.append(f"{condition.text}: the best is {min(known) if condition.below else max(known):.4g}")
    return lines


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """A use of GPUs."""

    mode: Mode
    replicas: int
    width: int  # GPUs of a replica
    strategy: StrategyChoice

    @property
    def gpus(self) -> int:
        """Return the GPUs of all replicas."""
        return self.replicas * self.width

    @property
    def label(self) -> str:
        """Return the name in tables."""
        one = "1 GPU" if self.width == 1 else f"{self.width} GPUs {self.mode}"
        return f"{self.replicas} x {one}"


class Simulation:
    """Traffic and its possible deployments."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Read the workloads. Raises ``ValueError`` for an unusable file, strategy, GPU or model."""
        self._args = args
        cutter = TextTokenizer(args.tokenizer)
        texts = {path.stem: read_known_texts(path, cutter, args.max_tokens) for path in args.workloads}
        self.texts: list[tuple[str, KnownText]] = keyed(texts, args.requests or sum(map(len, texts.values())))
        self._context = max(len(text.prompt_ids) + len(text.output_ids) for _, text in self.texts)
        self._vocab_size, self._end_token = cutter.vocab_size, cutter.end_token_id
        self._gpu = None if args.gpu is None else find_gpu(args.gpu)
        self._model = None if args.model is None else find_shape(args.model)
        self._curve = None if args.curve is None else read_curve(args.curve)
        self._software = Software(launch_s=args.launch_us / 1e6, fixed_rows=args.rows_a_forward)
        self._host = Host(*(value / 1e3 for value in args.host_ms))
        self._options = EngineOptions(max_running=args.max_running, max_waiting=len(self.texts))
        self.usd_per_hour = self._price(args.usd_per_hour)

    def _price(self, asked: float | None) -> float:
        """Return the dollars of a GPU and hour; 0 for a measured curve without a price."""
        if asked is not None or self._gpu is None:
            return asked or 0.0
        if self._gpu.usd_per_hour is None:
            raise ValueError(f"no price of {self._gpu.name} is known: give --usd-per-hour")
        return self._gpu.usd_per_hour

    def deployments(self, choices: Sequence[StrategyChoice]) -> tuple[list[Deployment], list[str]]:
        """Return all combinations up to ``--max-gpus``, and the names of those that do not fit a GPU's memory."""
        found, too_large = [], []
        args = self._args
        for choice, mode, width, replicas in itertools.product(choices, args.mode, args.width, args.replicas):
            one = Deployment(mode if width > 1 else "lookahead", replicas, width, choice)
            if one.gpus > args.max_gpus or one in found:
                continue
            slots, capacity = args.max_running, self._context + args.budget * width
            if self._gpu and self._model and not fits(one.mode, width, self._gpu, self._model, slots, capacity):
                too_large.append(one.label)
                continue
            found.append(one)
        return found, list(dict.fromkeys(too_large))

    def run(self, one: Deployment, rate: float | None, clients: int | None) -> dict[str, Any]:
        """Simulate a deployment under ``rate`` requests per second, or with clients, and return its row; times are seconds."""
        args, times = self._args, self._times(one)
        target = KnownTarget(self._vocab_size, self._end_token, self._context, times.curve)
        replicas = [
            SimulatedReplica(one.strategy, times, target, self._options, args.budget, adaptive=True) for _ in range(one.replicas)
        ]
        cluster = SimulatedCluster(replicas, None if args.lag_ms is None else args.lag_ms / 1e3, ROUTER_S, args.seed)
        if clients is None:
            assert rate is not None, "no traffic"
            found = cluster.open_loop(self.texts, arrivals(rate, len(self.texts), args.burstiness, args.seed))
        else:
            found = cluster.closed_loop(self.texts, clients)
        cost = usd_per_million(one.gpus, self.usd_per_hour, found["tokens_per_s"])
        seconds = {name: _seconds(found[f"{name[:-2]}_ms"]) for name in ("e2e_s", "ttft_s", "tpot_s")}
        shown = ("tokens_per_s", "requests_per_s", "tokens_per_step", "drafted_per_request_step", "busy")
        return {
            "traffic": f"{rate:g} a second" if clients is None else f"{clients} clients",
            "deployment": one.label,
            "strategy": one.strategy.label,
            "gpus": one.gpus,
            **seconds,
            **{name: found[name] for name in shown},
            "usd_per_million": round(cost, 4),
            "requests": found["requests"],
        }

    def _times(self, one: Deployment) -> StepTimes:
        if self._curve is not None:
            return StepTimes(one.mode, one.width, self._curve, self._host)
        assert self._gpu is not None and self._model is not None, "neither a curve nor a GPU"
        return step_times(one.mode, one.width, self._gpu, self._model, self._software, self._host)

    def assumptions(self) -> dict[str, Any]:
        """Return all numbers that the times are computed from."""
        known = {"gpu": self._gpu, "model": self._model, "software": self._software, "host": self._host}
        told: dict[str, Any] = {
            name: dataclasses.asdict(value)
            for name, value in known.items()
            if value is not None and not (self._curve is not None and name == "software")
        }
        if self._curve is not None:
            told["curve"] = self._curve.to_json()
        return told | {"usd_per_hour": self.usd_per_hour, "context": self._context}


def arrivals(rate: float, count: int, burstiness: float, seed: int) -> list[float]:
    """Return arrival times in seconds with gamma-distributed gaps; the rate only stretches the times of a seed.

    Example: a burstiness of 1 is a Poisson process, whose gaps vary as much as they are long; at 0.25 they vary twice as much, so
    that many come at once and then none for long; at 100 requests come nearly evenly. It is the shape of the distribution, as in
    vLLM's ``bench serve``.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def _seconds(milliseconds: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value / 1e3, 5) for name, value in milliseconds.items()}


def simulate(args: argparse.Namespace, run: Run) -> Results:
    """Simulate all deployments under all traffic.

    Returns:
        ``prediction``: true; ``assumed``; ``rows``; ``too_large``; with --find ``found``, the rows that meet the goal, the
        cheapest first, and ``nearest`` if there is none.

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
    results: Results = {"prediction": True, "assumed": simulation.assumptions(), "rows": rows, "too_large": too_large}
    if goal:
        met = cheapest(rows, goal)
        results |= {"found": met, "nearest": [] if met else nearest(rows, goal)}
        results["answer"] = answer(results, args.find)
    return results | {"figures": figures(rows)}


def answer(results: Results, goal: str) -> list[str]:
    """Return the lines of what --find found."""
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


def _why(best: Row, rows: Sequence[Row]) -> str:
    """Return the reason of a choice among rows under the same traffic."""
    fewer = "no fewer GPUs do" if best["gpus"] > min(row["gpus"] for row in rows) else "no fewer were tried"
    others = [row for row in rows if row["gpus"] == best["gpus"] and row["deployment"] != best["deployment"]]
    if not others:
        return fewer
    other = min(others, key=lambda row: float(row["e2e_s"]["p99"]))
    ratio = other["e2e_s"]["p99"] / best["e2e_s"]["p99"]
    return f"{fewer}, and {other['deployment']} with {other['strategy']} has {ratio:.2f} times its p99"


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a panel per traffic: p99 of the latency by deployment and strategy."""
    panels = {}
    for traffic in dict.fromkeys(row["traffic"] for row in rows):
        series: dict[str, dict[str, float]] = {}
        for row in (row for row in rows if row["traffic"] == traffic):
            series.setdefault(row["strategy"], {})[row["deployment"]] = row["e2e_s"]["p99"]
        panels[traffic] = panel("bars", "a simulation, no measurement", "", "p99 of the latency (s)", series)
    return panels


def unmet(results: Results, args: argparse.Namespace) -> list[str]:
    """Return a line if nothing meets ``--find``."""
    return [f"no deployment meets {args.find}"] if args.find and not results["found"] else []


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and, if wanted, references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--find", help="the cheapest deployment that meets a goal: p99<2 or ttft_p99<0.5,usd_per_million<3")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and the router")
    add = parser.add_argument_group("time of a step").add_argument
    add("--gpu", help="A100-80, A100-40, H100, V100-32; with --model")
    add("--model", help="llama-2-7b, ... or a folder with a config.json")
    add("--curve", type=Path, help="instead of both: a file that outrider doctor --calibrate kept or printed")
    add("--launch-us", type=float, default=0.0, help="a layer on the host, if kernels are launched one by one")
    fixed = "rows of each forward: 64 as the engine computes on a GPU by default; default: any, as with engine.exact=rounding"
    add("--rows-a-forward", type=int, help=fixed)
    host_ms = [1e3 * each for each in (_HOST.step_s, _HOST.request_s, _HOST.propose_s)]
    text = "besides the forward: a step, each request in it, each request that is drafted for"
    add("--host-ms", type=float, nargs=3, default=host_ms, metavar=("STEP", "REQUEST", "DRAFT"), help=text)
    add = parser.add_argument_group("deployments: all combinations").add_argument
    add("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--width", type=int, nargs="+", default=[1, 2, 4, 8], help="GPUs of a replica")
    add("--mode", choices=get_args(Mode), nargs="+", default=["lookahead"], help="parallelism of a replica's GPUs")
    add("--max-gpus", type=int, default=8, help="in all; larger deployments are left out")
    add("--strategy", action="append", help="NAME or NAME:option=value,...; repeatable; default: auto")
    add("--max-running", type=int, default=EngineOptions().max_running, help="requests in one step")
    most = SpeculationOptions().most_draft_tokens
    add("--budget", type=int, default=most, help="maximum draft tokens of a request and rank")
    add("--lag-ms", type=_lag, default=25.0, help="until other replicas draft from generated tokens; none: they never do")
    add("--usd-per-hour", type=float, help="of a GPU; default: of the table of GPUs")
    add = parser.add_argument_group("traffic: at least one of --rate and --clients").add_argument
    add("--rate", type=float, nargs="+", default=[], help="requests a second, however many are running")
    add("--burstiness", type=float, default=1.0, help="of --rate; 1: a Poisson process, below: more in bursts")
    add("--clients", type=int, nargs="+", default=[], help="each with one request at a time")
    add("--requests", type=int, help="number of records, files in turns; default: all")
    add("--max-tokens", type=int, help="cut outputs to so many tokens")


def _lag(text: str) -> float | None:
    return None if text == "none" else float(text)


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if options do not go together."""
    if (args.curve is None) == (args.gpu is None or args.model is None):
        parser.error("give --gpu and --model, or --curve")
    if args.curve is not None and {*args.mode} - {"lookahead"}:
        parser.error("--mode tensor and pipeline split a model over GPUs: give --gpu and --model, a curve is of one device")
    if not args.rate and not args.clients:
        parser.error("say what traffic comes: --rate or --clients")
    if args.rate and min(args.rate) <= 0:
        parser.error(f"--rate must be above 0, got {min(args.rate)}")
    if not 0 < args.burstiness < float("inf"):
        parser.error(f"--burstiness must be above 0, got {args.burstiness}")
    if min(*args.host_ms, args.launch_us, args.lag_ms or 0.0, args.budget) < 0:
        parser.error("times and --budget must not be negative")
    if args.rows_a_forward is not None and args.rows_a_forward < 1:
        parser.error(f"--rows-a-forward must be at least 1, got {args.rows_a_forward}")
    if len({path.stem for path in args.workloads}) < len(args.workloads):
        parser.error("two files have one name: a workload is called after its file")
    args.strategy = args.strategy or ["auto"]


_LEAST = dict.fromkeys(("replicas", "width", "clients", "requests", "max_tokens", "max_running", "max_gpus"), 1)
BENCH = Bench("simulate", __doc__ or "", simulate, options, _LEAST, check, unmet, recorded=False)
