"""``outrider bench draft-models``: strategies with a draft model, their quality and their energy, beside a paper's numbers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from engine.errors import ModelLoadError
from engine.measures.energy import EnergyMeter
from experiments.bench_models import MAX_TOKENS, calm
from experiments.bench_run import conclude, metered, show
from experiments.competition import progress_bar
from experiments.draft_models_agreement import beside_paper, figure
from experiments.draft_models_batches import BatchRuns, measure_batches
from experiments.draft_models_figures import draft_models_figures
from experiments.draft_models_measure import rows_of, take_turns
from experiments.draft_models_methods import BASELINE, Method, Runner, Setting, load_setting, methods_of, mjsd_text
from experiments.draft_models_options import BEAMS, THRESHOLDS
from experiments.draft_models_paper import Figure
from experiments.draft_models_tables import lines, tables
from experiments.record import NOT_METERED, write_record
from experiments.run_options import refused
from experiments.strategies import EXACT_DTYPES

Figures = dict[str, Figure | None]  # by metric


def measure(setting: Setting, methods: Sequence[Method], args: argparse.Namespace, meter: EnergyMeter) -> dict[str, Any]:
    """All parts of a run. Raises ``ValueError``: no prompt was finished by all methods."""
    runners = [Runner(setting, method, args) for method in methods]
    with progress_bar() as bar:
        laps = take_turns(runners, setting.prompts, args.repeats, args.turn, args.seed, args.limit, meter, bar)
        rows, told = rows_of(setting, methods, laps)
        batches = {}
        if args.batch_sizes:
            max_tokens = max(2, args.max_tokens or MAX_TOKENS)
            sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
            runs = BatchRuns(setting.loaded, setting.prompts, max(args.batch_sizes), max_tokens)
            batches = measure_batches(runs, args.batch_sizes, args.runs, args.repeats, sampling, args.seed, meter, bar)
    results: dict[str, Any] = {"baseline": BASELINE, "prompts": told, "energy_source": meter.source, "methods": rows}
    results["parameters"] = {"target": setting.loaded.model.num_parameters()}
    if setting.draft is not None:
        results["parameters"]["draft"] = setting.draft.runner.model.num_parameters()
    results["ablations"] = ablations(rows, args) if args.ablations else {}
    results["batches"] = batches
    results["paper"] = _beside_paper(results)
    return results


def ablations(rows: Mapping[str, Any], args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """``beams`` and ``thresholds``: by value, the label of the method that has it."""
    by_text = {row["strategy"]: label for label, row in rows.items()}
    return {
        "beams": {str(beams): by_text[mjsd_text(args.gamma, beams, args.threshold)] for beams in BEAMS},
        "thresholds": {str(value): by_text[mjsd_text(args.gamma, args.beams, value)] for value in THRESHOLDS},
    }


def figures_of(row: Mapping[str, Any]) -> Figures:
    """What the paper's metrics are of a method in this run. Speed is relative to plain decoding in the same repeat, so that its
    spread has no drift of the machine in it."""
    joules = [None if value == NOT_METERED else value for value in row["energy"]["j_per_token"]]
    return {"speed": figure(row["speedup"]), "energy": figure(joules), "perplexity": figure(row["perplexity"])}


def _beside_paper(results: Mapping[str, Any]) -> dict[str, Any]:
    rows = results["methods"]
    named: dict[str, Figures] = {}
    for row in rows.values():
        if row["paper"] is not None:
            named.setdefault(row["paper"], figures_of(row))  # the first: variants of the ablations come last
    methods = {metric: {name: row[metric] for name, row in named.items()} for metric in ("speed", "energy", "perplexity")}
    beams, thresholds = (results["ablations"].get(part, {}) for part in ("beams", "thresholds"))
    return beside_paper(
        methods,
        {int(value): figures_of(rows[label]) for value, label in beams.items()},
        {float(value): figures_of(rows[label]) for value, label in thresholds.items()},
        {int(size): {name: figure(values) for name, values in row.items()} for size, row in results["batches"].items()},
    )


def unfaithful(results: Mapping[str, Any]) -> list[str]:
    """The methods whose texts must be those of plain decoding and are not."""
    rows = results["methods"].items()
    return [label for label, row in rows if row["identical"] is not None and row["identical"]["same"] < row["identical"]["of"]]


def run(args: argparse.Namespace) -> int:
    """Runs the bench with the options that ``experiments.bench`` read.

    Returns:
        The exit code: 1 where outputs are not what they must be, 2 for a file, a model or a strategy that cannot be used.
    """
    started = datetime.now(UTC)
    calm(args.threads)
    try:
        methods = methods_of(args)
        setting = load_setting(args, methods)
        with metered(str(setting.loaded.model.device)) as (meter, energy):
            results = measure(setting, methods, args, meter)
    except (ValueError, ModelLoadError) as error:
        return refused(error)
    device = str(setting.loaded.model.device)
    path = write_record("bench-draft-models", vars(args), results, args.seed, started, device, args.out, energy)
    pictures = draft_models_figures(results, path.with_suffix(".svg"))
    show(args.json, results, tables(results), lines(results))
    return conclude(path, pictures, unfaithful(results), fails=setting.loaded.model.dtype in EXACT_DTYPES)
