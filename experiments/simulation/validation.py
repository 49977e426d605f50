"""Comparison of the simulation with the engine: closed and open loops on this machine.

outrider simulate validation --random-model 110m --tokenizer DIR --prompts FILE.jsonl...

The engine computes real forwards along known outputs, and the simulation gets the same requests at the same times. Its input is
measured before on other prompts: the latency curve, as by `outrider doctor --calibrate`, and how much longer than a forward a
step takes. A prediction holds if it is within 15 % of the median of the repeats, whose spread is recorded too.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np

from outrider.cluster.cli.generate.prompt_file import PromptFileError
from outrider.cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from outrider.configs.slices import Dtype, EngineOptions
from outrider.decoding.budget.latency import LatencyCurve
from outrider.engine.engine import Engine
from outrider.engine.measures.latency import fit
from outrider.engine.measures.latency import measure as time_curve
from outrider.experiments.bench.engines.contestants import Prompt, SharedModel, make_request
from outrider.experiments.bench.engines.guided import GuidedExecutor
from outrider.experiments.bench.engines.models import Setting, calm, load_setting
from outrider.experiments.bench.engines.traffic import Arrivals, ClosedLoop, EngineServer, OpenLoop, drive, measured, poisson
from outrider.experiments.bench.options import add_engine, add_model, add_prompts, add_random_model, check_random_model
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.bench.workloads import interleaved
from outrider.experiments.simulation.cluster import SimulatedCluster
from outrider.experiments.simulation.replica import KnownTarget, SimulatedReplica
from outrider.experiments.simulation.steps import Host, RankLoad, StepTimes

TOLERANCE = 0.15
_BARE_ROWS = 64  # least rows of a prefill whose time is used
_FIGURES = (("tokens_per_s", None), ("e2e_ms", "mean"), ("ttft_ms", "p50"), ("tpot_ms", "p50"))


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in which all requests decode, or in which one prefills."""

    load: RankLoad
    seconds: float
    propose_s: float


def timed_steps(engine: Engine, prompts: Sequence[Prompt], guide: GuidedExecutor | None) -> list[TimedStep]:
    """Time the steps of requests that begin at once, without those that mix decoding and prefill."""
    requests = {prompt.id: make_request(prompt, 1, guide) for prompt in prompts}
    for request in requests.values():
        engine.add(request)
    steps = []
    while engine.has_work:
        live = [request for request in requests.values() if request.remaining]
        before = [(request.num_computed, request.stats.drafted, request.stats.propose_s) for request in live]
        decoding = all(request.num_output for request in live)
        began = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - began
        propose_s = max(request.stats.propose_s - was[2] for request, was in zip(live, before, strict=True))
        context = sum(was[0] for was in before)
        if decoding and len(outputs) == len(live):
            drafted = sum(request.stats.drafted - was[1] for request, was in zip(live, before, strict=True))
            steps.append(TimedStep(RankLoad(len(live), len(live) + drafted, context), seconds, propose_s))
        elif len(requests) == 1:
            found = context or live[0].stats.cached_tokens
            rows = live[0].num_computed - found
            steps.append(TimedStep(RankLoad(1, rows, found, rows - len(outputs)), seconds, propose_s))
    return steps


def fitted(curve: LatencyCurve, steps: Sequence[TimedStep]) -> StepTimes:
    """Fit the median times beside the forward, and of a row without logits relative to one with logits.

    Example: steps of one request take 0.5 ms longer than the curve and their drafting, steps of four 1.4 ms: 0.35 ms a request,
    and 0.15 ms a step. A prefill of 301 rows that takes as long as 241 drafted rows would: four fifths.
    """
    bare = StepTimes("lookahead", 1, curve, Host(0.0, 0.0, 0.0))
    decodes = [step for step in steps if not step.load.bare]
    left = np.array([step.seconds - step.propose_s - bare.forward_s(step.load) for step in decodes])
    together = np.array([step.load.sequences for step in decodes])
    alone = max(float(np.median(left[together == 1])), 0.0)
    many = [max(float(np.median(left[together == count])), 0.0) / count for count in {*together.tolist()} if count > 1]
    request_s = min(statistics.median(many), alone) if many else alone
    propose_s = sum(step.propose_s for step in decodes) / int(together.sum())
    shares, grid = [], np.linspace(0.0, 1.5, 61)
    for step in steps:
        if step.load.bare >= _BARE_ROWS:
            guesses = [dataclasses.replace(bare, bare_share=share).forward_s(step.load) for share in grid.tolist()]
            shares.append(float(np.interp(step.seconds - alone, guesses, grid)))
    share = statistics.median(shares) if shares else 1.0
    return dataclasses.replace(bare, host=Host(alone - request_s, request_s, propose_s), bare_share=share)


class Validation:
    """The engine and its simulation on one model."""

    def __init__(self, setting: Setting, args: argparse.Namespace) -> None:
        """Measure the latency curve. Raises ``PromptFileError`` if too few prompts are left."""
        self._budget, self._loaded = args.budget, setting.loaded
        prompts = list(interleaved([workload.prompts for workload in setting.workloads]))
        self.calibration, self.prompts = prompts[: args.calibration], prompts[args.calibration :]
        if len(self.prompts) < max(args.concurrency):
            raise PromptFileError(f"{len(self.prompts)} prompts are left to measure with: give more, or lower --concurrency")
        self._options = EngineOptions(max_running=max(args.concurrency), max_waiting=len(prompts))
        self._shared = SharedModel(setting.loaded, self._options, args.budget, guided=True)
        info = setting.loaded.info("", True)
        timings = time_curve(self._shared.runner, info.max_model_len)  # the kept one may be of a busier machine
        self.curve, self.spread = fit(timings.seconds), timings.spread
        self._vocab_size, self._end = info.vocab_size, (info.eos_token_ids or (info.vocab_size,))[0]

    def times(self, choice: StrategyChoice) -> StepTimes:
        """Fit the step times of a strategy on the calibration prompts, one at a time and all at once."""
        steps: list[TimedStep] = []
        for together in (1, len(self.calibration)):
            engine = self._shared.engine(choice)
            for first in range(0, len(self.calibration), together):
                steps += timed_steps(engine, self.calibration[first : first + together], self._shared.guide)
        return fitted(self.curve, steps)

    def run(self, choice: StrategyChoice, arrivals: Arrivals) -> dict[str, Any]:
        """Run the engine once."""
        request = partial(make_request, max_tokens=1, guide=self._shared.guide)
        server = EngineServer(choice.label, partial(self._shared.engine, choice), request)
        return measured(*drive(server, self.prompts, arrivals), closed=isinstance(arrivals, ClosedLoop))

    def predict(self, choice: StrategyChoice, arrivals: Arrivals, times: StepTimes) -> dict[str, Any]:
        """Simulate the same run."""
        curve = self._shared.target.latency()  # as updated by the steps before, like the drafter's
        target = KnownTarget(self._vocab_size, self._end, self._loaded.max_model_len, curve)
        replica = SimulatedReplica(choice, times, target, self._options, self._budget, adaptive=False)
        cluster = SimulatedCluster([replica], None, 0.0, 0)
        texts = [(prompt.id, prompt.text()) for prompt in self.prompts]
        if isinstance(arrivals, ClosedLoop):
            return cluster.closed_loop(texts, arrivals.concurrency)
        assert isinstance(arrivals, OpenLoop)
        return cluster.open_loop(texts, arrivals.times_s)


def beside(runs: Sequence[dict[str, Any]], predicted: dict[str, Any]) -> dict[str, Any]:
    """Return each figure as measured, the median of the repeats, and as predicted, and whether the prediction holds.

    Example: 100, 104 and 98 tokens/s measured and 109 predicted are an error of 0.09 with a spread of 0.06.
    """
    rows: dict[str, Any] = {}
    for name, part in _FIGURES:
        found = [run[name] if part is None else run[name][part] for run in runs]
        guess = predicted[name] if part is None else predicted[name][part]
        if guess is None or not all(found):
            continue
        middle = statistics.median(found)
        error = guess / middle - 1
        rows[name if part is None else f"{name} {part}"] = {
            "measured": middle,
            "spread": round((max(found) - min(found)) / middle, 3),
            "predicted": guess,
            "error": round(error, 3),
            "holds": abs(error) <= TOLERANCE,
        }
    return rows


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Compare all loads and strategies; each load is simulated before it is run.

    Returns:
        ``curve``, ``curve_spread`` (see ``engine.measures.latency.Timings``); ``beside_forward`` by strategy; ``cells``: by load
        and strategy the rows of ``beside`` and tokens per step; ``held`` of ``told`` figures.
    """
    calm(args.threads)
    choices = chosen_strategies(args.strategy or ["autoregressive", "auto", "llma"])
    bench = Validation(load_setting(args, guided=True), args)
    times = {choice.label: bench.times(choice) for choice in choices}
    capacity = bench.run(choices[0], ClosedLoop(max(args.concurrency)))["requests_per_s"]
    loads: dict[str, Arrivals] = {f"{count} clients": ClosedLoop(count) for count in args.concurrency}
    loads |= {f"Poisson {share:g}": poisson(share * capacity, len(bench.prompts), args.seed) for share in args.load}
    cells: dict[str, Any] = {}
    for name, arrivals in loads.items():
        run.progress.say(name)
        predicted = {choice.label: bench.predict(choice, arrivals, times[choice.label]) for choice in choices}
        runs: dict[str, list[dict[str, Any]]] = {choice.label: [] for choice in choices}
        for _ in range(args.repeats):
            for choice in choices:
                runs[choice.label].append(bench.run(choice, arrivals))
        for label, own in runs.items():
            steps = {"measured": own[0]["tokens_per_step"], "predicted": predicted[label]["tokens_per_step"]}
            cells[f"{name}, {label}"] = {"figures": beside(own, predicted[label]), "tokens_per_step": steps}
    told = [row["holds"] for cell in cells.values() for row in cell["figures"].values()]
    return {
        "curve": bench.curve.to_json(),
        "curve_spread": round(bench.spread, 3),
        "beside_forward": {label: _beside_forward(own) for label, own in times.items()},
        "capacity": capacity,
        "cells": cells,
        "held": sum(told),
        "told": len(told),
    }


def _beside_forward(times: StepTimes) -> dict[str, float]:
    host = times.host
    found = {"step_ms": 1e3 * host.step_s, "request_ms": 1e3 * host.request_s, "propose_ms": 1e3 * host.propose_s}
    return {name: round(value, 4) for name, value in (found | {"bare_share": times.bare_share}).items()}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_prompts(parser)
    add_model(parser, "bfloat16", get_args(Dtype)[1:])
    add_engine(parser)
    parser.set_defaults(records=16, max_tokens=96)
    add_random_model(parser)
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; repeatable")
    parser.add_argument("--calibration", type=int, default=8, help="prompts of these that only calibrate")
    parser.add_argument("--budget", type=int, default=64, help="maximum draft tokens of a request in a step")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="clients of the closed loops")
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.8], help="of the closed loop's requests a second")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if options do not go together."""
    check_random_model(args, parser)
    if min(args.load, default=1.0) <= 0:
        parser.error("--load must be positive")


_LEAST = dict.fromkeys(("records", "calibration", "repeats", "threads", "concurrency"), 1)
BENCH = Bench("simulate-validation", __doc__ or "", measure, options, _LEAST, check)
