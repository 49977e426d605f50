"""Every strategy on the same prompts with a real model, beside transformers, in one run: see ``experiments.bench``."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from rich.table import Column, Table

from cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from decoding.drafters import LOSSLESS
from engine.errors import ModelLoadError
from engine.measures.energy import EnergyMeter
from experiments.bench_models import Setting, Workload, calm, contestants, load_setting
from experiments.bench_run import conclude, metered, show
from experiments.competition import (
    Tally,
    compete,
    decode_ratios,
    divergence,
    joules_per_token,
    progress_bar,
    summary,
    where_time_goes,
)
from experiments.contestants import Contestant
from experiments.plots import strategy_bars
from experiments.record import write_record
from experiments.run_options import refused
from experiments.stock_generate import LOOKUP_TOKENS, StockPromptLookup

EXACT_DTYPES = (torch.float32, torch.float64)


def measure(setting: Setting, runners: Sequence[Contestant], repeats: int, meter: EnergyMeter | None = None) -> dict[str, Any]:
    """Lets all run over all workloads; energy is told by ``meter``.

    Returns:
        ``workloads`` by name, each with its counts and a row a contestant, and ``overall`` with a row a contestant.
    """
    workloads, tallies = {}, []
    with progress_bar() as progress:
        for workload in setting.workloads:
            known = {prompt.id: prompt.known for prompt in workload.prompts if prompt.known is not None}
            expected, counted = compete(runners, workload.prompts, repeats, 1, progress, known or None, meter)
            rows = {}
            for name, tally in counted.items():
                rows[name] = _row(setting, workload, tally, counted[runners[0].name], expected, repeats)
            lengths = {"records": len(workload.prompts), "too_long": workload.too_long}
            lengths["prompt_tokens"] = sum(len(prompt.ids) for prompt in workload.prompts)
            workloads[workload.name] = lengths | {"contestants": rows}
            tallies.append(counted)
    overall = {runner.name: _overall(runner.name, runners[0].name, tallies, workloads) for runner in runners}
    return {"workloads": workloads, "overall": overall}


def _row(
    setting: Setting, workload: Workload, tally: Tally, baseline: Tally, expected: Mapping[str, list[int]], repeats: int
) -> dict[str, Any]:
    """What a contestant did on one workload."""
    by_id = {prompt.id: prompt for prompt in workload.prompts}
    guided = workload.prompts[0].known is not None  # where outputs part says nothing of a model whose word is not taken
    differing = {} if guided else tally.differing
    parted = [divergence(setting.stock, by_id[key], expected[key], output) for key, output in differing.items()]
    row = summary(tally, baseline, parted, len(by_id), repeats)
    row["decode_ratio"] = [round(ratio, 3) for ratio in decode_ratios(tally, baseline)]
    row["drafted_per_step"] = None if tally.drafted is None else round(tally.drafted / tally.steps, 2)
    row["accepted_by_source"] = dict(sorted(tally.accepted_by_source.items()))
    row["ms"] = where_time_goes(tally, len(by_id) * repeats)
    row["energy"] = tally.energy()
    return row


def _overall(name: str, baseline: str, tallies: Sequence[Mapping[str, Tally]], workloads: Mapping[str, Any]) -> dict[str, Any]:
    """A contestant over all workloads; ratios are means over them, repeat by repeat."""
    own = [counted[name] for counted in tallies]
    rows = [workload["contestants"][name] for workload in workloads.values()]
    steps, tokens = sum(tally.steps for tally in own), sum(tally.tokens for tally in own)
    accepted: dict[str, int] = {}
    for tally in own:
        for source, count in tally.accepted_by_source.items():
            accepted[source] = accepted.get(source, 0) + count

    def ratios(to: str) -> list[float]:
        pairs = [(counted[to].wall_s, counted[name].wall_s) for counted in tallies]
        return [round(statistics.fmean(a[r] / b[r] for a, b in pairs), 3) for r in range(len(pairs[0][0]))]

    decode = [decode_ratios(counted[name], counted[baseline]) for counted in tallies]
    gaps = [row["largest_gap"] for row in rows if row["largest_gap"] is not None]
    return {
        "ratio": ratios(baseline),
        "ratio_median": statistics.median(ratios(baseline)),
        "ratio_to_lookup": ratios(StockPromptLookup.name),
        "decode_ratio": [round(statistics.fmean(repeat), 3) for repeat in zip(*decode, strict=True)],
        "tokens_per_step": round(statistics.fmean(row["tokens_per_step"] for row in rows), 3),
        "tokens_per_s": round(tokens / sum(sum(tally.wall_s) for tally in own), 1),
        "identical": sum(row["identical"] for row in rows),
        "records": sum(workload["records"] for workload in workloads.values()),
        "largest_gap": max(gaps, default=None),
        "energy": joules_per_token(own),
        "accepted_per_step": {source: round(count / steps, 4) for source, count in sorted(accepted.items())},
        "ms": {key: _mean([row["ms"][key] for row in rows]) for key in ("propose", "forward", "rest", "prefill")},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 3) if len(known) == len(values) else None


def table(results: Mapping[str, Any]) -> Table:
    """A row a contestant, over all workloads."""
    titles = (
        "ratio",
        "min-max",
        "to lookup",
        "decode",
        "tok/step",
        "tok/s",
        "J/token",
        "identical",
        "gap",
        "ms: propose + forward + rest",
    )
    shown = Table(Column("contestant", overflow="fold"), *(Column(title, justify="right") for title in titles))
    for name, row in results["overall"].items():
        ms = row["ms"]
        propose = "?" if ms["propose"] is None else f"{ms['propose']:.2f}"
        shown.add_row(
            name,
            f"{row['ratio_median']:.2f}",
            f"{min(row['ratio']):.2f}-{max(row['ratio']):.2f}",
            f"{statistics.median(row['ratio_to_lookup']):.2f}",
            f"{statistics.median(row['decode_ratio']):.2f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            str(row["energy"]["j_per_token"]),
            f"{row['identical']}/{row['records']}",
            "" if row["largest_gap"] is None else f"{row['largest_gap']:.3g}",
            f"{propose} + {ms['forward']:.2f} + {ms['rest']:.2f}",
        )
    return shown


def unfaithful(results: Mapping[str, Any], choices: Sequence[StrategyChoice], exact: bool) -> list[str]:
    """The lossless strategies whose outputs are not what they must be; none where the type's rounding excuses it."""
    overall = results["overall"]
    wrong = [choice.label for choice in choices if overall[choice.label]["identical"] < overall[choice.label]["records"]]
    lossless = {choice.label for choice in choices if choice.name in LOSSLESS}
    return [label for label in wrong if exact and label in lossless]


def run(args: argparse.Namespace) -> int:
    """Runs the comparison with the options that ``experiments.bench`` read.

    Returns:
        The exit code: 1 where outputs are not what they must be, 2 for a file, a model or a strategy that cannot be used.
    """
    started = datetime.now(UTC)
    calm(args.threads)
    try:
        choices = chosen_strategies(args.strategy)
        setting = load_setting(args)
        runners, skipped = contestants(setting, choices, args)
    except (ValueError, ModelLoadError) as error:
        return refused(error)
    for name, reason in skipped.items():
        print(f"{name} does not run: {reason}", file=sys.stderr)
    device = str(setting.loaded.model.device)
    with metered(device) as (meter, energy):
        results = measure(setting, runners, args.repeats, meter) | {"skipped": skipped, "lossless": sorted(LOSSLESS)}
    config = vars(args) | {"prompt_lookup_num_tokens": LOOKUP_TOKENS, "num_parameters": setting.loaded.model.num_parameters()}
    seed = args.seed if args.random_model else None
    path = write_record("bench-strategies", config, results, seed, started, device, args.out, energy)
    picture = path.with_suffix(".svg")
    strategy_bars(results, picture)
    show(args.json, results, [table(results)])
    return conclude(path, [picture], unfaithful(results, choices, args.guided or setting.stock.dtype in EXACT_DTYPES))
