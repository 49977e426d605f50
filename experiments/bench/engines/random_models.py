"""Random models of several families in turns on the same prompts: each strategy's gain beside that of the first model."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.configs.slices import EngineOptions
from outrider.decoding.drafters.registry import StrategyChoice
from outrider.decoding.request import PLAIN
from outrider.engine.measures.latency import Case, time_steps
from outrider.experiments.bench.engines.competition import Tally, compete, decode_ratios, where_time_goes
from outrider.experiments.bench.engines.contestants import EngineContestant, SharedModel
from outrider.experiments.bench.engines.models import Setting, load_setting
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.run import Results, Run

_ROWS = (1, 8, 16)  # rows of one request in a timed step
_CONTEXT = 256  # tokens before those rows


def measure_models(args: argparse.Namespace, choices: Sequence[StrategyChoice], run: Run) -> Results:
    """Run plain decoding and strategies with each of ``--random-model`` in turns along known outputs.

    Returns:
        ``models`` with parameters and step times; ``workloads`` with a row per model and strategy; ``gains`` of each pair:
        ``speedup`` over plain decoding with the same model per repeat, as the mean over workloads, ``of_first``, its ratio to the
        first model's, and ``gain_of_first``, the same ratio of the speed-ups' excess over 1.

    Raises:
        PromptFileError, ModelLoadError: an unusable file or model.
        ValueError: no strategy besides plain decoding.
    """
    wanted = [StrategyChoice(PLAIN, PLAIN, {}), *(choice for choice in choices if choice.name != PLAIN)]
    if len(wanted) == 1:
        raise ValueError(f"--random-model needs a --strategy besides {PLAIN}, which all are compared with")
    settings: dict[str, Setting] = {}
    models: dict[str, dict[str, Any]] = {}
    contestants: list[EngineContestant] = []
    for name in args.random_model:
        run.progress.say(f"{name}: made and its steps timed")
        setting = settings[name] = load_setting(argparse.Namespace(**vars(args) | {"random_model": name}), guided=True)
        rows = max(EngineOptions().max_step_tokens, args.budget + 1)
        options = EngineOptions(max_running=1, max_step_tokens=rows, prefix_caching=False)
        shared = SharedModel(setting.loaded, options, args.budget, guided=True)
        models[name] = {"parameters": setting.loaded.model.num_parameters(), "step_ms": _step_ms(shared, setting)}
        for choice in wanted:
            contestant = shared.contestant(choice, args.max_tokens)
            contestant.name = _label(name, choice)
            contestants.append(contestant)
    workloads: dict[str, Any] = {}
    speedups: dict[str, list[list[float]]] = {}
    for workload in settings[args.random_model[0]].workloads:
        outputs = {prompt.id: prompt.known for prompt in workload.prompts if prompt.known is not None}
        _, tallies = compete(contestants, workload.prompts, args.repeats, 1, run.progress, outputs, run.meter)
        rows = {}
        for name in args.random_model:
            for choice in wanted:
                label = _label(name, choice)
                rows[label] = _row(tallies[label], tallies[_label(name, wanted[0])], len(workload.prompts), args.repeats)
                speedups.setdefault(label, []).append(rows[label]["speedup"])
        lengths = {"records": len(workload.prompts), "prompt_tokens": sum(len(prompt.ids) for prompt in workload.prompts)}
        workloads[workload.name] = lengths | {"output_tokens": sum(map(len, outputs.values())), "contestants": rows}
    gains = _gains(args.random_model, wanted[1:], speedups)
    return {"models": models, "workloads": workloads, "gains": gains, "figures": _figures(gains)}


def differing(results: Mapping[str, Any]) -> list[str]:
    """Return the contestants with outputs other than the known ones."""
    return [
        f"{label} on {name} is not the known output"
        for name, workload in results["workloads"].items()
        for label, row in workload["contestants"].items()
        if row["differing"]
    ]


def _label(model: str, choice: StrategyChoice) -> str:
    return f"{model}, {'plain' if choice.name == PLAIN else choice.label}"


def _step_ms(shared: SharedModel, setting: Setting) -> dict[str, float]:
    """Return the shortest step of one request by its number of rows."""
    most = shared.runner.cache.capacity - max(_ROWS)
    cases = [Case(1, rows, min(_CONTEXT, most, setting.loaded.max_model_len - 2)) for rows in _ROWS if rows <= most]
    return {str(case.rows): round(1e3 * seconds, 3) for case, seconds in time_steps(shared.runner, cases).seconds.items()}


def _row(tally: Tally, plain: Tally, prompts: int, repeats: int) -> dict[str, Any]:
    return {
        "speedup": [round(ratio, 3) for ratio in decode_ratios(tally, plain)],
        "tokens_per_step": round(tally.tokens / tally.steps, 3),
        "drafted_per_step": round((tally.drafted or 0) / tally.steps, 2),
        "ms": where_time_goes(tally, prompts * repeats),
        "differing": len(tally.differing),
    }


def _gains(
    models: Sequence[str], choices: Sequence[StrategyChoice], speedups: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, dict[str, dict[str, list[float]]]]:
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in models:
        for choice in choices:
            own, first = (
                [statistics.fmean(repeat) for repeat in zip(*speedups[_label(model, choice)], strict=True)]
                for model in (name, models[0])
            )
            found.setdefault(name, {})[choice.label] = {
                "speedup": [round(value, 3) for value in own],
                "of_first": [round(one / other, 3) for one, other in zip(own, first, strict=True)],
                "gain_of_first": [
                    round((one - 1) / (other - 1), 3) if other != 1 else 0.0 for one, other in zip(own, first, strict=True)
                ],
            }
    return found


def _figures(gains: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> dict[str, Any]:
    series: dict[str, dict[str, list[float]]] = {}
    for model, rows in gains.items():
        for strategy, row in rows.items():
            series.setdefault(strategy, {})[model] = row["speedup"]
    return {"speed": panel("bars", "against plain decoding with the same model", "", "times as fast", series)}
