"""Strong scaling: lookahead, tensor and pipeline parallelism and one worker on the same work. See ``scaling_options``."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import torch
from rich.progress import Progress

from cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies, parse_strategy
from engine.errors import ModelLoadError
from engine.measures.energy import EnergyMeter
from experiments.bench_models import Workload, calm
from experiments.bench_run import conclude, metered, show
from experiments.competition import Tally, compete, progress_bar
from experiments.record import write_record
from experiments.run_options import refused
from experiments.scaling_figures import scaling_bars, step_bars
from experiments.scaling_options import PLAIN, forms_of
from experiments.scaling_paper import beside_figures
from experiments.scaling_process import Entry, FormContestant, FormError, FormProcess, Setting
from experiments.scaling_setting import Texts, read_setting
from experiments.scaling_sums import Lap, overall, row
from experiments.scaling_tables import printed, tables

_EXACT = ("float32", "float64")  # types in which every form must say what plain decoding says


def run(args: argparse.Namespace) -> int:
    """Runs what the options ask for.

    Returns:
        The exit code: 1 where an output is not that of plain decoding though it must be, 2 for a file, a model or a strategy that
        cannot be used.
    """
    started = datetime.now(UTC)
    calm(1)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # in the forms' processes, too
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    gpus = torch.cuda.device_count() if cuda else None
    devices = [f"cuda:{rank}" for rank in range(min(gpus, max(args.workers)))] if gpus else ["cpu"]
    try:
        if gpus == 0:
            raise ValueError("--device cuda: torch finds no GPU here")
        choices = [choice for choice in chosen_strategies(args.strategy) if choice.name != PLAIN]
        with metered(*devices) as (meter, energy):
            results = measure(args, choices, gpus, meter)
    except (ValueError, ModelLoadError, FormError) as error:
        return refused(error)
    seed = args.seed if args.random_model else None
    path = write_record("bench-scaling", vars(args), results, seed, started, devices[0], args.out, energy)
    pictures = [scaling_bars(results, path.with_suffix(".svg")), step_bars(results, path.with_name(f"{path.stem}-steps.svg"))]
    skipped = [f"left out: {name}: {reason}" for name, reason in results["skipped"].items()]
    lines = [f"{results['agree']} of {results['told']} statements of {results['paper']['source']} hold here", *skipped]
    show(args.json, results, [printed(table) for table in tables(results)], lines)
    if results["parted"] and args.dtype not in _EXACT:
        print(f"rounding of {args.dtype} parted: {', '.join(results['parted'])}", file=sys.stderr)
    return conclude(path, pictures, results["parted"], fails=args.dtype in _EXACT)


def measure(args: argparse.Namespace, choices: Sequence[StrategyChoice], gpus: int | None, meter: EnergyMeter) -> dict[str, Any]:
    """All forms and strategies in turns.

    Args:
        args: of the command.
        choices: strategies beside plain decoding.
        gpus: to compute on; None to compute on the processor.
        meter: of all devices.

    Returns:
        ``forms`` with memory and step times, ``skipped`` with reasons, ``sweep`` (tokens per second by way and budget),
        ``workloads`` and ``overall`` with a row an entry, ``parted``, the entries whose outputs are not all plain decoding's, and
        what ``beside_figures`` tells of the paper.

    Raises:
        ValueError, ModelLoadError: a file or a model that cannot be used.
        FormError: a form was lost, or one worker cannot be started.
    """
    sweep_records = args.sweep_records if len(args.budgets) > 1 else 0
    texts, model = read_setting(args, sweep_records, max(args.workers) * max(args.budgets))
    known = texts.known()
    forms, skipped = forms_of(args.form, args.workers, args.threads, gpus)
    device = "cpu" if gpus is None else "cuda"
    setting = Setting(model, known, device, args.pin, args.max_tokens)
    with ExitStack() as stack:
        started = [stack.enter_context(FormProcess(form, setting)) for form in forms]
        processes = _ready(started, skipped)
        progress = stack.enter_context(progress_bar())
        tried = _possible(processes, choices, args.budgets, skipped)
        best, sweep = _swept(processes, tried, texts, known, progress)
        plain = [Entry(process.form, parse_strategy(PLAIN), 0) for process in processes]
        entries = [entry for first in plain for entry in (first, *(one for one in best if one.form == first.form))]
        laps = _laps(processes, entries, texts.measured, args.repeats, known, progress, meter)
        facts = {process.form.label: process.facts() for process in processes}
    rows = {entry.label: overall(entry, entries, laps) for entry in entries}
    workloads = {
        workload.name: {
            "records": len(workload.prompts),
            "output_tokens": laps[entries[0].label][workload.name].output_tokens,
            "entries": {entry.label: row(laps[entry.label][workload.name]) for entry in entries},
        }
        for workload in texts.measured
    }
    parted = [label for label, of in rows.items() if of["identical"] < of["records"]]
    own = {"forms": facts, "skipped": skipped, "sweep": sweep, "workloads": workloads, "overall": rows, "parted": parted}
    return own | beside_figures(own, args.dtype, device)


def _ready(started: Sequence[FormProcess], skipped: dict[str, str]) -> list[FormProcess]:
    """Those that could be started; ``skipped`` is told why others could not. Raises ``FormError`` for one worker."""
    ready = []
    for process in started:
        try:
            process.wait()
        except FormError as error:
            if process.form.kind == "one":
                raise
            skipped[process.form.label] = str(error)
        else:
            ready.append(process)
    return ready


def _possible(
    processes: Sequence[FormProcess], choices: Sequence[StrategyChoice], budgets: Sequence[int], skipped: dict[str, str]
) -> list[list[Entry]]:
    """Every strategy in every form, with all budgets; ``skipped`` is told why others cannot be.

    Engines are made one after the other: what one worker computes of a model, such as a table, the others find.
    """
    found = []
    for process, choice in itertools.product(processes, choices):
        entries = [Entry(process.form, choice, budget) for budget in budgets]
        reason = process.prepare(entries[0])
        if reason is None:
            found.append(entries)
        else:
            skipped[entries[0].way] = reason
    return found


def _swept(
    processes: Sequence[FormProcess],
    tried: Sequence[Sequence[Entry]],
    texts: Texts,
    known: Mapping[str, list[int]] | None,
    progress: Progress,
) -> tuple[list[Entry], dict[str, dict[int, float]]]:
    """Each strategy in each form with its best budget; and tokens per second by way and budget, where there is a choice."""
    prompts = [prompt for workload in texts.sweep for prompt in workload.prompts]
    if not prompts:
        return [entries[0] for entries in tried], {}
    by_form = {process.form: process for process in processes}
    contestants = [FormContestant(by_form[entry.form], entry) for entries in tried for entry in entries]
    _, tallies = compete(contestants, prompts, 1, 1, progress, known)
    best, sweep = [], {}
    for entries in tried:
        rates = {entry.budget: _sweep_rate(tallies[entry.label], len(prompts)) for entry in entries}
        sweep[entries[0].way] = {budget: round(rate, 2) for budget, rate in rates.items()}
        best.append(max(entries, key=lambda entry: rates[entry.budget]))
    return best, sweep


def _sweep_rate(tally: Tally, prompts: int) -> float:
    return (tally.tokens - prompts) / (tally.wall_s[0] - tally.prefill_s[0])


def _laps(
    processes: Sequence[FormProcess],
    entries: Sequence[Entry],
    workloads: Sequence[Workload],
    repeats: int,
    known: Mapping[str, list[int]] | None,
    progress: Progress,
    meter: EnergyMeter,
) -> dict[str, dict[str, Lap]]:
    """The entries in turns over all workloads."""
    by_form = {process.form: process for process in processes}
    laps: dict[str, dict[str, Lap]] = {entry.label: {} for entry in entries}
    for workload in workloads:
        contestants = [FormContestant(by_form[entry.form], entry) for entry in entries]
        expected, tallies = compete(contestants, workload.prompts, repeats, 1, progress, known, meter)
        tokens = sum(len(expected[prompt.id]) for prompt in workload.prompts)
        for each in contestants:
            lap = Lap(tallies[each.name], len(workload.prompts), each.spent, each.steps, tokens)
            laps[each.name][workload.name] = lap
    return laps
