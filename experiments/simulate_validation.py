"""What ``outrider simulate`` predicts beside what the engine then does: closed and open loops on this machine.

python -m experiments.simulate_validation --random-model 110m --tokenizer DIR --prompts FILE.jsonl...

The engine computes real forwards along known outputs (see ``experiments.guided``), and the simulation gets the same requests at
the same times. All that it is told of this machine is found before, on other prompts: the latency curve, as ``outrider doctor
--calibrate`` finds it, and how much longer than a forward a step takes. A prediction holds where it is within --tolerance of the
median of the repeats. How far the repeats are from each other is told as well: nothing can be predicted more closely than that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from cluster.cli.generate.prompt_file import PromptFileError
from cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from configs.slices import Dtype, EngineOptions
from decoding.replay import KnownText
from engine.errors import ModelLoadError
from engine.measures.latency import fit, measure
from engine.target import LocalTarget
from experiments.bench_models import Setting, calm, load_setting
from experiments.competition import progress_bar
from experiments.contestants import Prompt
from experiments.guided import SIZES, GuidedExecutor
from experiments.load_measures import measured
from experiments.load_servers import EngineServer
from experiments.load_traffic import Arrivals, ClosedLoop, OpenLoop, drive, poisson
from experiments.record import RESULTS, write_record
from experiments.run_options import refused
from experiments.shared_model import SharedModel
from experiments.simulation.cluster import SimulatedCluster
from experiments.simulation.replica import SimulatedReplica
from experiments.simulation.steps import StepTimes
from experiments.simulation.target import KnownTarget
from experiments.simulation.timing import TimedStep, fitted, timed_steps
from experiments.workloads import interleaved

_FIGURES = (("tokens_per_s", None), ("e2e_ms", "mean"), ("ttft_ms", "p50"), ("tpot_ms", "p50"))


class Validation:
    """The engine and its simulation on one model."""

    def __init__(self, setting: Setting, args: argparse.Namespace) -> None:
        """
        Args:
            setting: the model and its workloads, all outputs known.
            args: see ``main``.

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
        assert isinstance(self._shared.executor, GuidedExecutor)
        self._guide = self._shared.executor
        info = setting.loaded.info("", True)
        self._drafters_curve = LocalTarget(self._guide.runner, info, setting.loaded.tokenizer).latency()  # as the engine's
        timings = measure(self._guide.runner, info.max_model_len)  # now: the machine may have been busier when that was kept
        self.curve, self.spread = fit(timings.seconds), timings.spread
        self._vocab_size, self._end = info.vocab_size, (info.eos_token_ids or (info.vocab_size,))[0]

    def times(self, choice: StrategyChoice) -> StepTimes:
        """What steps take with a strategy, learned from the calibration prompts, one at a time and all at once."""
        steps: list[TimedStep] = []
        for together in (1, len(self.calibration)):
            engine = self._shared.engine(choice)
            for first in range(0, len(self.calibration), together):
                steps += timed_steps(engine, self.calibration[first : first + together], self._guide)
        return fitted(self.curve, steps)

    def run(self, choice: StrategyChoice, arrivals: Arrivals) -> dict[str, Any]:
        """One run of the engine."""
        server = EngineServer(choice.label, partial(self._shared.engine, choice), 1, self._guide)
        return measured(*drive(server, self.prompts, arrivals), closed=isinstance(arrivals, ClosedLoop))

    def predict(self, choice: StrategyChoice, arrivals: Arrivals, times: StepTimes) -> dict[str, Any]:
        """The same run, simulated."""
        target = KnownTarget(self._vocab_size, self._end, self._loaded.max_model_len, self._drafters_curve)
        replica = SimulatedReplica(choice, times, target, self._options, self._args.budget, adaptive=False)
        cluster = SimulatedCluster([replica], None, 0.0, 0)
        texts = [(prompt.id, _known(prompt)) for prompt in self.prompts]
        if isinstance(arrivals, ClosedLoop):
            return cluster.closed_loop(texts, arrivals.concurrency)
        assert isinstance(arrivals, OpenLoop)
        return cluster.open_loop(texts, arrivals.times_s)


def _known(prompt: Prompt) -> KnownText:
    references = tuple(np.asarray(ids, np.int32) for ids in prompt.references)
    return KnownText(prompt.id, np.asarray(prompt.ids, np.int32), references, np.asarray(prompt.known, np.int32))


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison and writes its record; 2 for a file, a model or a strategy that cannot be used."""
    args = _arguments(argv)
    calm(args.threads)
    started = datetime.now(UTC)
    try:
        results = compare(Validation(load_setting(args), args), chosen_strategies(args.strategy), args)
    except (ValueError, ModelLoadError) as error:
        return refused(error)
    Console(width=None if sys.stdout.isatty() else 160).print(table(results))
    print(write_record("simulate-validation", vars(args), results, args.seed, started, "cpu", args.out).name)
    return 0


def compare(bench: Validation, choices: Sequence[StrategyChoice], args: argparse.Namespace) -> dict[str, Any]:
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
    with progress_bar() as bar:
        task = bar.add_task("loads", total=len(loads) * len(choices))
        for name, arrivals in loads.items():
            predicted = {choice.label: bench.predict(choice, arrivals, times[choice.label]) for choice in choices}
            runs: dict[str, list[dict[str, Any]]] = {choice.label: [] for choice in choices}
            for _ in range(args.repeats):
                for choice in choices:
                    runs[choice.label].append(bench.run(choice, arrivals))
            for choice in choices:
                label = choice.label
                steps = {"measured": runs[label][0]["tokens_per_step"], "predicted": predicted[label]["tokens_per_step"]}
                rows = beside(runs[label], predicted[label], args.tolerance)
                cells[f"{name}, {label}"] = {"figures": rows, "tokens_per_step": steps}
                bar.advance(task)
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


def table(results: dict[str, Any]) -> Table:
    """A row a load and strategy: measured, predicted and the error of each figure."""
    names = list(dict.fromkeys(name for cell in results["cells"].values() for name in cell["figures"]))
    shown = Table(
        Column("load", overflow="fold"), *(Column(name, justify="right") for name in names), Column("tok/step", justify="right"),
        caption=f"measured, predicted, error; {results['held']} of {results['told']} within the tolerance",
    )  # fmt: skip
    for load, cell in results["cells"].items():
        texts = []
        for name in names:
            row = cell["figures"].get(name)
            mark = "" if row is None or row["holds"] else " !"
            texts.append("" if row is None else f"{row['measured']:.1f} {row['predicted']:.1f} {100 * row['error']:+.0f} %{mark}")
        steps = cell["tokens_per_step"]
        shown.add_row(load, *texts, f"{steps['measured']:.2f} {steps['predicted']:.2f}")
    return shown


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_model", help="folder of the model, or its name on the hub")
    parser.add_argument("--random-model", choices=tuple(SIZES), help="a Llama of random weights instead; needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer; the model's own when absent")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with id, prompt and output")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times")
    parser.add_argument("--records", type=int, default=16, help="of each file")
    parser.add_argument("--calibration", type=int, default=8, help="prompts of these that only tell what a step takes")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an output")
    parser.add_argument("--budget", type=int, default=64, help="most drafted rows of a request in a step")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="clients of the closed loops")
    parser.add_argument("--load", type=float, nargs="*", default=[0.5, 0.8], help="of the closed loop's requests a second")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--dtype", choices=tuple(kind for kind in get_args(Dtype) if kind != "auto"), default="bfloat16")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and arrivals")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    if args.random_model and args.tokenizer is None:
        parser.error("--random-model needs --tokenizer")
    for name in ("records", "calibration", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if min(args.concurrency) < 1 or min(args.load, default=1.0) <= 0:
        parser.error("--concurrency and --load must be positive")
    args.strategy, args.guided = args.strategy or ["autoregressive", "auto", "llma"], True
    return args


if __name__ == "__main__":
    sys.exit(main())
