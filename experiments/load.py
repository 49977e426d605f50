"""``outrider bench load``: every strategy and transformers' batching under closed, open and changing loads, in one run."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Column, Table

from cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies, parse_strategy
from decoding.drafters import LOSSLESS
from engine.errors import ModelLoadError
from experiments.bench_models import Setting, calm, load_setting
from experiments.bench_run import conclude, metered, show
from experiments.competition import progress_bar
from experiments.load_bench import BASELINE, LoadBench
from experiments.load_figures import load_figures
from experiments.load_step import back_after_text
from experiments.record import write_record
from experiments.run_options import refused
from experiments.strategies import EXACT_DTYPES


def strategies_of(texts: list[str] | None) -> list[StrategyChoice]:
    """The chosen strategies, all when none is named, with the baseline first. Raises ``ValueError``."""
    others = [choice for choice in chosen_strategies(texts) if choice.name != BASELINE]
    return [parse_strategy(BASELINE), *others]


def measure(setting: Setting, choices: Sequence[StrategyChoice], args: argparse.Namespace) -> dict[str, Any]:
    """All parts of the run. Raises ``PromptFileError``: too few prompts."""
    with progress_bar() as bar:
        bench = LoadBench(setting, choices, args, bar)
        bench.warm_up()
        results: dict[str, Any] = {"baseline": BASELINE, "closed": bench.closed()}
        if args.per_workload:
            results["workloads"] = bench.workloads(args.per_workload)
        if args.load:
            results["capacity"] = max(row["servers"][BASELINE]["requests_per_s"] for row in results["closed"].values())
            results["open"] = bench.open(results["capacity"])
        if args.step:
            results["step"] = bench.steps()
    return results | {"skipped": bench.skipped, "differing": bench.differing}


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Tokens a second and ratio by concurrency; and milliseconds to the first token and by token by load."""
    shown = []
    for part, title in (("closed", "clients"), ("open", "load")):
        cells = results.get(part, {})
        names = list(dict.fromkeys(name for cell in cells.values() for name in cell["servers"]))
        table = Table(Column(f"{part} loop", overflow="fold"), *(Column(f"{title} {key}", justify="right") for key in cells))
        for name in names:
            table.add_row(name, *(_cell_text(cell["servers"].get(name), part) for cell in cells.values()))
        shown += [table] if cells else []
    return shown


def _cell_text(row: Mapping[str, Any] | None, part: str) -> str:
    if row is None:
        return ""
    if part == "closed":
        return f"{row['tokens_per_s']:.0f} tok/s, {row['ratio_median']:.2f}x"
    return f"TTFT {row['ttft_ms']['p50']:.0f} ms, TPOT {row['tpot_ms']['p50'] or 0:.1f} ms"


def _spread(ratios: Sequence[float]) -> str:
    """The median, the lowest and the highest."""
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "no time"


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What was to be shown, in a line each: the lowest ratio of ``auto``, and when it was back after a load step."""
    lines = []
    for name in [name for name in next(iter(results["closed"].values()))["servers"] if name.partition(":")[0] == "auto"]:
        ratios = {key: cell["servers"][name]["ratio_median"] for key, cell in results["closed"].items()}
        worst = min(ratios, key=lambda key: ratios[key])
        lines.append(f"{name}: at least {ratios[worst]:.2f} x {BASELINE} (with {worst} at once)")
    for name, runs in results.get("step", {}).get("runs", {}).items():
        lines += [f"{name}, load step: {back_after_text(run['back_after'])}" for run in runs if run["back_after"]]
    for name, cell in results.get("workloads", {}).items():
        for key, row in cell["servers"].items():
            if key != BASELINE:
                lines.append(
                    f"{name}, one client, {key}: {_spread(row['ratio'])}, decoding {_spread(row.get('decode_ratio', ()))}"
                )
    return lines


def run(args: argparse.Namespace) -> int:
    """Runs the bench with the options that ``experiments.bench`` read.

    Returns:
        The exit code: 1 where outputs are not what they must be, 2 for a file, a model or a strategy that cannot be used.
    """
    started = datetime.now(UTC)
    calm(args.threads)
    try:
        choices = strategies_of(args.strategy)
        setting = load_setting(args)
        with metered(str(setting.loaded.model.device)) as (_, energy):
            results = measure(setting, choices, args)
    except (ValueError, ModelLoadError) as error:
        return refused(error)
    for name, reason in results["skipped"].items():
        print(f"{name} does not run: {reason}", file=sys.stderr)
    config = vars(args) | {"num_parameters": setting.loaded.model.num_parameters()}
    path = write_record("bench-load", config, results, args.seed, started, str(setting.loaded.model.device), args.out, energy)
    pictures = load_figures(results, path.with_suffix(".svg"))
    show(args.json, results, tables(results), verdict(results))
    exact = args.guided or setting.stock.dtype in EXACT_DTYPES
    lossless = {choice.label for choice in choices if choice.name in LOSSLESS}
    wrong = [name for name, count in results["differing"].items() if count and name in lossless and exact]
    return conclude(path, pictures, wrong)
