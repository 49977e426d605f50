"""Strong scaling of lookahead parallelism on one machine: one request, one rank against several, each at its own best budget.

python -m experiments.lookahead_scaling --random-model 110m --tokenizer DIR --prompts FILE.jsonl...
python -m experiments.lookahead_scaling --model demo_model --strategy jacobi --prompts FILE.jsonl...

The ranks beside the leader are processes with a copy of the model and one thread each. With --random-model the forwards are real
and the committed tokens are the known outputs of the prompts (LLMA, arXiv 2304.04487, section 3.2), so weights do not matter; a
strategy that drafts from the target's own guesses, such as jacobi, needs a real model.

First a sweep over the first records of each file finds each contestant's best budget, by tokens per second after the first token.
Then the best of each take turns on other records: plain decoding on one thread and on as many threads as there are ranks; each
strategy on one rank with one thread, on one rank with as many threads, and on the ranks with one thread each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from actors.heap import spare_collector
from cluster.strategy_option import StrategyChoice, chosen_strategies, parse_strategy
from engine.errors import ModelLoadError
from experiments.bench_models import Workload
from experiments.competition import Tally, compete, progress_bar
from experiments.guided_ranks import FollowerGroup, executor_over
from experiments.record import write_record
from experiments.scaling_bench import (
    Entry,
    ScalingBench,
    ScalingContestant,
    decode_rates,
    ratios,
    step_split,
    total_rates,
)
from experiments.scaling_figures import PARTS, scaling_bars
from experiments.scaling_setting import add_options, check_options, load_setting

_PLAIN = "autoregressive"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement, writes the record and the figure; 2 for a file, a model or a strategy that cannot be used."""
    args = _arguments(argv)
    started = datetime.now(UTC)
    try:
        choices = chosen_strategies(args.strategy)
        results = run(args, choices)
    except (ValueError, ModelLoadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seed = args.seed if args.random_model else None
    path = write_record("lookahead-scaling", vars(args), results, seed, started, "cpu", args.out)
    scaling_bars(results, path.with_suffix(".svg"))
    Console(width=None if sys.stdout.isatty() else 160).print(table(results))
    print(f"record: {path.name}, figure: {path.stem}.svg", file=sys.stderr)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--sweep-records", type=int, default=2, help="of each file, to find the budgets")
    parser.add_argument("--pin", action="store_true", help="while a group works, each rank stays on a core of its own")
    parser.add_argument(
        "--wide-threads", type=int, help="of the wide contestants; the ranks of the largest group when absent, 1: none"
    )
    parser.set_defaults(ranks=[2], records=6, repeats=3)
    args = parser.parse_args(argv)
    args.wide_threads = args.wide_threads or max(args.ranks)
    check_options(parser, args)
    if min(args.ranks) < 2:
        parser.error(f"--ranks must be at least 2, got {min(args.ranks)}: one rank always competes")
    return args


def run(args: argparse.Namespace, choices: Sequence[StrategyChoice]) -> dict[str, Any]:
    """The sweep and the measurement.

    Returns:
        ``curve_ms`` by rows, ``sweep`` (tokens per second by way and budget), and ``workloads`` and ``overall`` with a row a way.

    Raises:
        ValueError, ModelLoadError: a file or a model that cannot be used.
    """
    torch.set_num_threads(1)
    loaded, texts, model = load_setting(args)
    known = {prompt.id: prompt.known for prompt in texts.prompts() if prompt.known is not None} or None
    with ExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0)) if args.pin else None
        group = stack.enter_context(FollowerGroup(model, known, max(args.ranks), cores))
        spare_collector()  # as in every process of a service
        bench = ScalingBench(loaded, executor_over(model.runner(loaded.model), known), group, args.pin)
        progress = stack.enter_context(progress_bar())
        chosen, sweep = _sweep(bench, args, choices, texts.sweep, known, progress)
        results = _measure(bench, args, chosen, texts.measured, known, progress)
        curve = bench.curve()
    curve_ms = {count: round(1e3 * value, 2) for count, value in zip(curve.rows, curve.rows_s, strict=True)}
    return {"curve_ms": curve_ms, "sweep": sweep, "num_parameters": loaded.model.num_parameters()} | results


def _sweep(
    bench: ScalingBench,
    args: argparse.Namespace,
    choices: Sequence[StrategyChoice],
    workloads: Sequence[Workload],
    known: Mapping[str, list[int]] | None,
    progress: Progress,
) -> tuple[list[Entry], dict[str, dict[int, float]]]:
    """Plain decoding, and the best budget of each strategy on each number of ranks; tokens per second by way and budget."""
    plain = parse_strategy(_PLAIN)
    threads = sorted({1, args.wide_threads})
    ways = [*((1, count) for count in threads), *((ranks, 1) for ranks in args.ranks)]
    entries = [
        Entry(choice, ranks, threads, budget)
        for choice, (ranks, threads), budget in itertools.product(choices, ways, args.budgets)
    ]
    prompts = [prompt for workload in workloads for prompt in workload.prompts]
    contestants = [ScalingContestant(bench, entry, args.max_tokens) for entry in entries]
    _, tallies = compete(contestants, prompts, 1, 1, progress, known)
    rates: dict[str, dict[int, float]] = {}
    best: dict[str, Entry] = {}
    for entry in entries:
        (rate,) = decode_rates(tallies[entry.label], 1, len(prompts))
        rates.setdefault(entry.way, {})[entry.budget] = rate
        if rate == max(rates[entry.way].values()):
            best[entry.way] = entry
    shown = {way: {budget: round(rate, 2) for budget, rate in of.items()} for way, of in rates.items()}
    return [*(Entry(plain, 1, count, 0) for count in threads), *best.values()], shown


def _measure(
    bench: ScalingBench,
    args: argparse.Namespace,
    entries: Sequence[Entry],
    workloads: Sequence[Workload],
    known: Mapping[str, list[int]] | None,
    progress: Progress,
) -> dict[str, Any]:
    """The entries in turns over all workloads: a row a way for each, and over all of them."""
    decode: dict[str, dict[str, list[float]]] = {entry.label: {} for entry in entries}
    total: dict[str, dict[str, list[float]]] = {entry.label: {} for entry in entries}
    rows: dict[str, Any] = {}
    splits: dict[str, list[dict[str, Any]]] = {entry.label: [] for entry in entries}
    curve = bench.curve()
    for workload in workloads:
        contestants = [ScalingContestant(bench, entry, args.max_tokens) for entry in entries]
        expected, tallies = compete(contestants, workload.prompts, args.repeats, 1, progress, known)
        prompts = len(workload.prompts)
        named = {}
        for contestant in contestants:
            label, tally = contestant.name, tallies[contestant.name]
            decode[label][workload.name] = decode_rates(tally, args.repeats, prompts)
            total[label][workload.name] = total_rates(tally, args.repeats)
            split = step_split(tally, prompts * args.repeats, contestant.steps, curve)
            splits[label].append(split)
            named[label] = _row(tally, decode[label][workload.name], prompts) | {"ms": split}
        rows[workload.name] = {"records": prompts, "entries": named, "output_tokens": sum(map(len, expected.values()))}
    overall = {entry.label: _overall(entry, entries, decode, total, rows, splits) for entry in entries}
    return {"workloads": rows, "overall": overall}


def _row(tally: Tally, rates: Sequence[float], prompts: int) -> dict[str, Any]:
    """An entry on one workload."""
    return {
        "tokens_per_step": round(tally.tokens / tally.steps, 3),
        "decode_tokens_per_s": [round(rate, 2) for rate in rates],
        "identical": prompts - len(tally.differing),
    }


def _overall(
    entry: Entry,
    entries: Sequence[Entry],
    decode: Mapping[str, Mapping[str, list[float]]],
    total: Mapping[str, Mapping[str, list[float]]],
    rows: Mapping[str, Any],
    splits: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """An entry over all workloads; each ratio is the mean over them, repeat by repeat."""
    label = entry.label
    one = next((e for e in entries if e.strategy == entry.strategy and (e.ranks, e.threads) == (1, 1)), entry)
    wide = max((e for e in entries if e.strategy.label == _PLAIN), key=lambda e: e.threads)
    against = {"plain": entries[0], "plain_wide": wide, "one_rank": one}
    own = splits[label]
    return {
        "ranks": entry.ranks,
        "threads": entry.threads,
        "budget": entry.budget,
        "strategy": entry.strategy.label,
        "tokens_per_step": round(statistics.fmean(row["entries"][label]["tokens_per_step"] for row in rows.values()), 3),
        "identical": sum(row["entries"][label]["identical"] for row in rows.values()),
        "records": sum(row["records"] for row in rows.values()),
        "decode_ratio": {name: ratios(decode[label], decode[other.label]) for name, other in against.items()},
        "total_ratio": {name: ratios(total[label], total[other.label]) for name, other in against.items()},
        "ms": {name: round(statistics.fmean(split[name] for split in own), 4) for name in own[0]},
    }


def table(results: Mapping[str, Any]) -> Table:
    """A row an entry, over all workloads."""
    titles = ("tok/step", "x plain", "spread", "x plain wide", "x one rank", "spread", "with prefill", "ms a step", "exchange")
    columns = (Column(title, justify="right") for title in titles)
    shown = Table(Column("strategy, ranks x threads, budget", overflow="fold"), *columns)
    for label, row in results["overall"].items():
        ratio, ms = row["decode_ratio"], row["ms"]
        parts = " + ".join(f"{ms[name]:.1f}" for name in PARTS)
        share = f"{100 * ms['exchange_share']:.1f} %" if "exchange_share" in ms else ""
        shown.add_row(
            label, f"{row['tokens_per_step']:.2f}", f"{statistics.median(ratio['plain']):.2f}", _spread(ratio["plain"]),
            f"{statistics.median(ratio['plain_wide']):.2f}", f"{statistics.median(ratio['one_rank']):.2f}",
            _spread(ratio["one_rank"]), f"{statistics.median(row['total_ratio']['one_rank']):.2f}", parts, share,
        )  # fmt: skip
    shown.caption = f"ms a step: {' + '.join(PARTS)}; plain wide: plain decoding on as many threads as there are ranks"
    return shown


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


if __name__ == "__main__":
    sys.exit(main())
