"""``outrider bench load``: strategies under closed and open loops of requests, on one engine in this process."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from outrider.cluster.cli.generate.prompt_file import PromptFileError
from outrider.cluster.cli.generate.strategy_option import chosen_strategies, parse_strategy
from outrider.configs.slices import Dtype, EngineOptions
from outrider.decoding.drafters.registry import LOSSLESS
from outrider.experiments.bench.engines.contestants import Prompt, SharedModel, make_request
from outrider.experiments.bench.engines.models import MAX_TOKENS, Setting, calm, load_setting
from outrider.experiments.bench.engines.traffic import (
    Arrivals,
    ClosedLoop,
    EngineServer,
    drive,
    measured,
    poisson,
    rows_of_a_cell,
)
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.options import check_distinct, check_prompts, numbers
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.bench.strategies import EXACT_DTYPES, add_strategies
from outrider.experiments.bench.workloads import interleaved

TEXT = """Measure strategies under load: many requests at once, on one engine in this process.

Closed loop: each client has one request at a time. Open loop: requests arrive by a Poisson process, at a share of the requests
per second that plain decoding (autoregressive) reached in the closed loop; times count from the arrival. All strategies get the
same interleaved prompts and take turns; each starts without history and without KV to reuse. Ratios are tokens per second over
those of autoregressive in the same repeat, while all clients had a request. p50 and p99 are over the requests of a load.
For transformers, vLLM and llama.cpp under load: outrider bench peers.

example:
  outrider bench load --prompts rag.jsonl code.jsonl chat.jsonl --strategy auto --concurrency 1,8,32 --load 0.5,0.9
"""
BASELINE = "autoregressive"
_LEAST_REQUESTS = 8  # per load
_ROUNDS = 6  # requests per client, since the first and the last ones see a lower load


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_strategies(parser, get_args(Dtype))
    whole, shares = numbers(int, 1), numbers(float, 0.01)
    parser.add_argument(
        "--concurrency", type=whole, default=(1, 2, 4, 8, 16, 32), help="numbers of clients of the closed loop: 1,2,4,..."
    )
    parser.add_argument("--load", type=shares, default=(), help="open loops, as shares of the capacity of plain decoding")
    parser.add_argument("--requests", type=int, help="requests per load; default: six per client")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if options do not go together."""
    check_prompts(args, parser)
    check_distinct(args, parser, "concurrency", "load")


class LoadBench:
    """Strategies that take turns under each load."""

    def __init__(self, setting: Setting, args: argparse.Namespace, progress: Progress) -> None:
        """Prepare a server per strategy. Raises ``PromptFileError`` for too few prompts, or two with one id."""
        self._args, self._progress = args, progress
        self._prompts = list(interleaved([workload.prompts for workload in setting.workloads]))
        clients = max(args.concurrency)
        if len(self._prompts) < max(2, clients):
            raise PromptFileError(f"{len(self._prompts)} prompts fit, {max(2, clients)} are needed: lower --concurrency")
        if len({prompt.id for prompt in self._prompts}) < len(self._prompts):
            raise PromptFileError("two records of --prompts have one id: give each its own")
        step_tokens = max(EngineOptions().max_step_tokens, 2 * clients)
        engine = EngineOptions(max_running=clients, max_step_tokens=step_tokens, max_waiting=len(self._prompts))
        shared = SharedModel(setting.loaded, engine, args.budget)
        choices = [parse_strategy(BASELINE), *(c for c in chosen_strategies(args.strategy) if c.name != BASELINE)]
        request = partial(make_request, max_tokens=args.max_tokens or MAX_TOKENS)
        self.servers = [EngineServer(choice.label, partial(shared.engine, choice), request) for choice in choices]
        self.lossless = [choice.label for choice in choices if choice.name in LOSSLESS]
        self.differing = {server.name: 0 for server in self.servers}  # number of outputs unlike plain decoding's
        for server in self.servers:  # warm-up: compilation, tables
            drive(server, self._prompts[:2], ClosedLoop(1))

    def closed(self) -> dict[str, Any]:
        """Measure each concurrency."""
        cells = {}
        for clients in self._args.concurrency:
            count = max(clients, self._args.requests or max(_LEAST_REQUESTS, _ROUNDS * clients))
            cells[str(clients)] = self._cell(f"{clients} clients", self._prompts[:count], ClosedLoop(clients))
        return cells

    def open(self, capacity: float) -> dict[str, Any]:
        """Measure each share of ``capacity`` requests per second."""
        cells = {}
        for load in self._args.load:
            rate = load * capacity
            prompts = self._prompts[: self._args.requests or max(_LEAST_REQUESTS, math.ceil(_LEAST_REQUESTS * rate))]
            cell = self._cell(f"{100 * load:.0f} % load", prompts, poisson(rate, len(prompts), self._args.seed))
            cells[f"{load:g}"] = cell | {"requests_per_s": round(rate, 3)}
        return cells

    def _cell(self, name: str, prompts: Sequence[Prompt], arrivals: Arrivals) -> dict[str, Any]:
        """Measure one load in turns, every other repeat in reverse, so that a drift of the machine hits all alike."""
        runs: dict[str, list[dict[str, Any]]] = {server.name: [] for server in self.servers}
        expected: dict[str, list[int]] = {}
        for repeat in range(self._args.repeats):
            for server in self.servers[:: -1 if repeat % 2 else 1]:
                self._progress.say(f"{name}, repeat {repeat + 1}: {server.name}")
                journeys, counts = drive(server, prompts, arrivals)
                if server.name == BASELINE and not repeat:
                    expected = {journey.key: journey.output for journey in journeys}
                self.differing[server.name] += sum(each.output != expected[each.key] for each in journeys)
                runs[server.name].append(measured(journeys, counts, closed=isinstance(arrivals, ClosedLoop)))
        return {"requests": len(prompts), "servers": rows_of_a_cell(runs, BASELINE)}


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Measure all loads. Raises ``PromptFileError`` for too few prompts."""
    calm(args.threads)
    bench = LoadBench(load_setting(args), args, run.progress)
    results: dict[str, Any] = {"baseline": BASELINE, "closed": bench.closed()}
    results["capacity"] = max(row["servers"][BASELINE]["requests_per_s"] for row in results["closed"].values())
    if args.load:
        results["open"] = bench.open(results["capacity"])
    names = [server.name for server in bench.servers]
    speed = {name: {key: cell["servers"][name]["ratio"] for key, cell in results["closed"].items()} for name in names}
    figures = {"closed loop": panel("lines", f"tokens a second against {BASELINE}", "clients", "times as fast", speed)}
    if args.load:
        late = {name: {key: cell["servers"][name]["e2e_ms"]["p50"] for key, cell in results["open"].items()} for name in names}
        figures["open loop"] = panel("lines", "from arrival to end, p50", "share of the capacity", "ms", late)
    return results | {"differing": bench.differing, "lossless": bench.lossless, "figures": figures}


def unfaithful(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the lossless strategies with wrong outputs; none in dtypes whose rounding may change them."""
    if args.dtype not in EXACT_DTYPES:
        return []
    differing = results["differing"]
    return [f"{name}: {differing[name]} outputs differ" for name in results["lossless"] if differing[name]]


BENCH = Bench(
    "bench-load",
    TEXT,
    measure,
    options,
    dict.fromkeys(("records", "max_tokens", "repeats", "threads", "requests"), 1) | {"budget": 0},
    check,
    unfaithful,
)
