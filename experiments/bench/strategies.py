"""``outrider bench strategies``: strategies and transformers on the same prompts with a real model."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from outrider.cluster.cli.generate.strategy_option import chosen_strategies
from outrider.configs.slices import Dtype, SpeculationOptions
from outrider.decoding.drafters.registry import LOSSLESS
from outrider.experiments.bench.engines.competition import (
    Tally,
    compete,
    decode_ratios,
    joules_per_token,
    summary,
    where_time_goes,
)
from outrider.experiments.bench.engines.models import Workload, calm, contestants, load_setting
from outrider.experiments.bench.engines.random_models import differing, measure_models
from outrider.experiments.bench.engines.stock_generate import StockPromptLookup
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.options import (
    add_engine,
    add_model,
    add_prompts,
    add_random_model,
    check_prompts,
    check_random_model,
)
from outrider.experiments.bench.run import Bench, Results, Run

TEXT = """Compare strategies with transformers on the same prompts with a real model.

Transformers runs greedy generate and its prompt lookup. All take turns on each prompt, one prompt at a time, and return token
ids; a strategy starts each workload and each repeat without history. Ratios are the seconds of greedy generate over the
contestant's, prefill included, as the mean over workloads with the extremes of the repeats; "decode" excludes the prefill, which
drafting does not shorten.

With --random-model, models with random weights follow the known outputs of the files in turns: each strategy is compared with
plain decoding with the same model, and its speed-up with that of the first model.

example, four model families of one size:
  outrider bench strategies --random-model 110m lfm2-110m qwen3.5-140m granite4-120m --tokenizer DIR --prompts FILE.jsonl
      --strategy auto --strategy llma
"""
EXACT_DTYPES = ("float32", "float64")


def add_strategies(parser: argparse.ArgumentParser, dtypes: Sequence[str]) -> None:
    """Add the options of benches in which strategies compete on one model."""
    add_prompts(parser)
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; repeatable; default: all")
    parser.add_argument(
        "--budget", type=int, default=SpeculationOptions().most_draft_tokens, help="maximum draft tokens per step"
    )
    add_model(parser, "bfloat16", dtypes)
    add_engine(parser)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_strategies(parser, get_args(Dtype))
    parser.add_argument("--paying", action="store_true", help="run each strategy also with the rows that pay off, the default")
    add_random_model(parser, several=True)


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Return rows per workload and contestant and over all workloads.

    ``lossless`` names the strategies whose outputs must equal ``generate``. With ``--random-model`` see ``measure_models``.
    """
    calm(args.threads)
    choices = chosen_strategies(args.strategy)
    if args.random_model:
        return measure_models(args, choices, run)
    setting = load_setting(args)
    runners = contestants(setting, choices, args)
    workloads, tallies = {}, []
    for workload in setting.workloads:
        run.progress.say(f"{workload.name}: {len(workload.prompts)} prompts")
        _, counted = compete(runners, workload.prompts, args.repeats, 1, run.progress, meter=run.meter)
        rows = {name: _row(workload, tally, counted[runners[0].name], args.repeats) for name, tally in counted.items()}
        lengths = {"records": len(workload.prompts), "too_long": workload.too_long}
        lengths["prompt_tokens"] = sum(len(prompt.ids) for prompt in workload.prompts)
        workloads[workload.name] = lengths | {"contestants": rows}
        tallies.append(counted)
    overall = {runner.name: _overall(runner.name, runners[0].name, tallies, workloads) for runner in runners}
    names = {choice.label for choice in choices if choice.name in LOSSLESS}
    lossless = [name for name in overall if name.removesuffix(" (rows that pay)") in names]
    return {"workloads": workloads, "overall": overall, "lossless": lossless, "figures": figures(overall)}


def _row(workload: Workload, tally: Tally, baseline: Tally, repeats: int) -> dict[str, Any]:
    """Return the row of a contestant on one workload."""
    row = summary(tally, len(workload.prompts))
    row["decode_ratio"] = [round(ratio, 3) for ratio in decode_ratios(tally, baseline)]
    row["drafted_per_step"] = None if tally.drafted is None else round(tally.drafted / tally.steps, 2)
    row["accepted_by_source"] = dict(sorted(tally.accepted_by_source.items()))
    row["ms"] = where_time_goes(tally, len(workload.prompts) * repeats)
    row["energy"] = joules_per_token([tally])
    return row


def _overall(name: str, baseline: str, tallies: Sequence[Mapping[str, Tally]], workloads: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a contestant over all workloads; ratios are means over them for each repeat."""
    own = [counted[name] for counted in tallies]
    rows = [workload["contestants"][name] for workload in workloads.values()]
    steps, tokens = sum(tally.steps for tally in own), sum(tally.tokens for tally in own)
    accepted: Counter[str] = Counter()
    for tally in own:
        accepted.update(tally.accepted_by_source)

    def ratios(to: str) -> list[float]:
        pairs = [(counted[to].wall_s, counted[name].wall_s) for counted in tallies]
        return [round(statistics.fmean(a[r] / b[r] for a, b in pairs), 3) for r in range(len(pairs[0][0]))]

    decode = [decode_ratios(counted[name], counted[baseline]) for counted in tallies]
    return {
        "ratio": ratios(baseline),
        "ratio_to_lookup": ratios(StockPromptLookup.name),
        "decode_ratio": [round(statistics.fmean(repeat), 3) for repeat in zip(*decode, strict=True)],
        "tokens_per_step": round(statistics.fmean(row["tokens_per_step"] for row in rows), 3),
        "drafted_per_step": None if own[0].drafted is None else round(sum(tally.drafted or 0 for tally in own) / steps, 1),
        "tokens_per_s": round(tokens / sum(sum(tally.wall_s) for tally in own), 1),
        "identical": sum(row["identical"] for row in rows),
        "records": sum(workload["records"] for workload in workloads.values()),
        "energy": joules_per_token(own),
        "accepted_per_step": {source: round(count / steps, 4) for source, count in sorted(accepted.items())},
        "ms": {key: _mean([row["ms"][key] for row in rows]) for key in ("propose", "forward", "rest", "prefill")},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 3) if len(known) == len(values) else None


def figures(overall: Mapping[str, Any]) -> dict[str, Any]:
    """Return the panels: speed with its spread, and accepted tokens by source."""
    sources = sorted({source for row in overall.values() for source in row["accepted_per_step"]})
    stack: dict[str, dict[str, float]] = {"target": dict.fromkeys(overall, 1.0)}  # the token of the target itself
    stack |= {source: {name: row["accepted_per_step"].get(source, 0.0) for name, row in overall.items()} for source in sources}
    speed = {"speed": {name: row["ratio"] for name, row in overall.items()}}
    return {
        "speed": panel("bars", "against greedy generate", "", "times as fast", speed),
        "tokens per step": panel("stack", "by source", "", "tokens", stack),
    }


def unfaithful(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the lossless strategies with wrong outputs; none in dtypes whose rounding may change them."""
    if "gains" in results:
        return differing(results)
    if args.dtype not in EXACT_DTYPES:
        return []
    rows = results["overall"]
    wrong = [name for name in results["lossless"] if rows[name]["identical"] < rows[name]["records"]]
    return [f"{name} is not identical to plain decoding" for name in wrong]


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 for two files of one name, or random models without a tokenizer."""
    check_prompts(args, parser)
    check_random_model(args, parser)


BENCH = Bench(
    "bench-strategies",
    TEXT,
    measure,
    options,
    dict.fromkeys(("records", "max_tokens", "repeats", "threads"), 1) | {"budget": 0},
    check,
    unfaithful,
)
