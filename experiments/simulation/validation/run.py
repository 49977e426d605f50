"""What ``outrider simulate`` predicts beside what the engine then does: closed and open loops on this machine.

python -m experiments.simulation.validation.run --random-model 110m --tokenizer DIR --prompts FILE.jsonl...

The engine computes real forwards along known outputs (``bench/engines/guided.py``), and the simulation gets the same requests at
the same times. All that it is told of this machine is found before, on other prompts: the latency curve, as ``outrider doctor
--calibrate`` finds it, and how much longer than a forward a step takes. A prediction holds where it is within --tolerance of the
median of the repeats. How far the repeats are from each other is told as well: nothing can be predicted more closely than that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from cluster.cli.generate.prompt_file import PromptFileError
from cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from configs.slices import Dtype, EngineOptions
from engine.measures.latency import fit
from engine.measures.latency import measure as time_curve
from experiments.bench.engines.contestants import make_request
from experiments.bench.engines.measures import measured
from experiments.bench.engines.models import Setting, calm, load_setting
from experiments.bench.engines.shared_model import SharedModel
from experiments.bench.engines.traffic import Arrivals, ClosedLoop, EngineServer, OpenLoop, drive, poisson
from experiments.bench.options import add_engine, add_model, add_prompts, add_random_model, check_random_model
from experiments.bench.progress import Progress
from experiments.bench.run import Bench, Results, Run, run
from experiments.bench.workloads import interleaved
from experiments.simulation.cluster import SimulatedCluster
from experiments.simulation.replica import KnownTarget, SimulatedReplica
from experiments.simulation.steps import StepTimes
from experiments.simulation.validation.timing import TimedStep, fitted, timed_steps

_FIGURES = (("tokens_per_s", None), ("e2e_ms", "mean"), ("ttft_ms", "p50"), ("tpot_ms", "p50"))


class Validation:
    """The engine and its simulation on one model."""

    def __init__(self, setting: Setting, args: argparse.Namespace) -> None:
        """
        Args:
            setting: the model and its workloads, all outputs known.
            args: see ``options``.

        Raises:
            PromptFileError: too few prompts.
        """
        self._args, self._loaded = args, setting.loaded
        prompts = list(interleaved([workload.prompts for workload in setting.workloads]))
        self.calibration, self.prompts = prompts[: args.calibration], prompts[args.calibration :]
        if len(self.prompts) < max(args.concurrency):
            raise PromptFileError(f"{len(self.prompts)} prompts are left to measure with: give more, or lower --concurrency")
        self._options = EngineOptions(max_running=max(args.concurrency), max_waiting=len(prompts))
        self._shared = SharedModel(setting.loaded, self._options, args.budget, guided=True)
        info = setting.loaded.info("", True)
        timings = time_curve(self._shared.runner, info.max_model_len)  # now: the machine may have been busier when that was kept
        self.curve, self.spread = fit(timings.seconds), timings.spread
        self._vocab_size, self._end = info.vocab_size, (info.eos_token_ids or (info.vocab_size,))[0]

    def times(self, choice: StrategyChoice) -> StepTimes:
        """What steps take with a strategy, learned from the calibration prompts, one at a time and all at once."""
        steps: list[TimedStep] = []
        for together in (1, len(self.calibration)):
            engine = self._shared.engine(choice)
            for first in range(0, len(self.calibration), together):
                steps += timed_steps(engine, self.calibration[first : first + together], self._shared.guide)
        return fitted(self.curve, steps)

    def run(self, choice: StrategyChoice, arrivals: Arrivals) -> dict[str, Any]:
        """One run of the engine."""
        request = partial(make_request, max_tokens=1, guide=self._shared.guide)
        server = EngineServer(choice.label, partial(self._shared.engine, choice), request)
        return measured(*drive(server, self.prompts, arrivals), closed=isinstance(arrivals, ClosedLoop))

    def predict(self, choice: StrategyChoice, arrivals: Arrivals, times: StepTimes) -> dict[str, Any]:
        """The same run, simulated."""
        curve = self._shared.target.latency()  # as the steps before have changed it: drafters are told no other
        target = KnownTarget(self._vocab_size, self._end, self._loaded.max_model_len, curve)
        replica = SimulatedReplica(choice, times, target, self._options, self._args.budget, adaptive=False)
        cluster = SimulatedCluster([replica], None, 0.0, 0)
        texts = [(prompt.id, prompt.text()) for prompt in self.prompts]
        if isinstance(arrivals, ClosedLoop):
            return cluster.closed_loop(texts, arrivals.concurrency)
        assert isinstance(arrivals, OpenLoop)
        return cluster.open_loop(texts, arrivals.times_s)


def beside(runs: Sequence[dict[str, Any]], predicted: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Each figure as measured, in the middle of the repeats, and as predicted; whether the prediction is near enough.

    Example: 100, 104 and 98 tokens/s measured and 109 predicted are an error of 0.09 with a spread of 0.06.
    """
    rows: dict[str, Any] = {}
    for name, part in _FIGURES:
        found = [run[name] if part is None else run[name][part] for run in runs]
        guess = predicted[name] if part is None else predicted[name][part]
        if guess is None or not all(found):
            continue
        middle = statistics.median(found)
        rows[name if part is None else f"{name} {part}"] = {
            "measured": middle,
            "spread": round((max(found) - min(found)) / middle, 3),
            "predicted": guess,
            "error": round(guess / middle - 1, 3),
            "holds": abs(guess / middle - 1) <= tolerance,
        }
    return rows


def compare(bench: Validation, choices: Sequence[StrategyChoice], args: argparse.Namespace, progress: Progress) -> Results:
    """All loads and strategies; every load of a strategy is simulated before it is run.

    Returns:
        ``curve``, ``curve_spread`` (see ``engine.measures.latency.Timings``); ``beside_forward`` by strategy; ``cells``: by load
        and strategy the rows of ``beside`` and tokens per step; ``held`` of ``told`` figures.
    """
    times = {choice.label: bench.times(choice) for choice in choices}
    capacity = bench.run(choices[0], ClosedLoop(max(args.concurrency)))["requests_per_s"]
    loads: dict[str, Arrivals] = {f"{count} clients": ClosedLoop(count) for count in args.concurrency}
    loads |= {f"Poisson {share:g}": poisson(share * capacity, len(bench.prompts), args.seed) for share in args.load}
    cells: dict[str, Any] = {}
    for name, arrivals in loads.items():
        progress.say(name)
        predicted = {choice.label: bench.predict(choice, arrivals, times[choice.label]) for choice in choices}
        runs: dict[str, list[dict[str, Any]]] = {choice.label: [] for choice in choices}
        for _ in range(args.repeats):
            for choice in choices:
                runs[choice.label].append(bench.run(choice, arrivals))
        for label, own in runs.items():
            steps = {"measured": own[0]["tokens_per_step"], "predicted": predicted[label]["tokens_per_step"]}
            rows = beside(own, predicted[label], args.tolerance)
            cells[f"{name}, {label}"] = {"figures": rows, "tokens_per_step": steps}
    told = [row["holds"] for cell in cells.values() for row in cell["figures"].values()]
    return {
        "curve": bench.curve.to_json(),
        "curve_spread": round(bench.spread, 3),
        "beside_forward": {label: _beside(own) for label, own in times.items()},
        "capacity": capacity,
        "cells": cells,
        "held": sum(told),
        "told": len(told),
    }


def _beside(times: StepTimes) -> dict[str, float]:
    host = times.host
    found = {"step_ms": 1e3 * host.step_s, "request_ms": 1e3 * host.request_s, "propose_ms": 1e3 * host.propose_s}
    return {name: round(value, 4) for name, value in (found | {"bare_share": times.bare_share}).items()}


def measure(args: argparse.Namespace, run: Run) -> Results:
    """The comparison; see ``compare``."""
    calm(args.threads)
    choices = chosen_strategies(args.strategy or ["autoregressive", "auto", "llma"])
    return compare(Validation(load_setting(args, guided=True), args), choices, args, run.progress)


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_prompts(parser)
    add_model(parser, "bfloat16", get_args(Dtype)[1:])
    add_engine(parser)
    parser.set_defaults(records=16, max_tokens=96)
    add_random_model(parser)
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times")
    parser.add_argument("--calibration", type=int, default=8, help="prompts of these that only tell what a step takes")
    parser.add_argument("--budget", type=int, default=64, help="most drafted rows of a request in a step")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="clients of the closed loops")
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.8], help="of the closed loop's requests a second")
    parser.add_argument("--tolerance", type=float, default=0.15)


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with code 2 where options do not go together."""
    check_random_model(args, parser)
    if min(args.load, default=1.0) <= 0:
        parser.error("--load must be positive")


BENCH = Bench(
    "simulate-validation", __doc__ or "", measure, options,
    dict.fromkeys(("records", "calibration", "repeats", "threads", "concurrency"), 1), check,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(run(BENCH))
