"""``outrider bench draft-models``: strategies with a draft model, their quality and their energy, beside a paper's numbers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, get_args

from configs.slices import Dtype, SpeculationOptions
from experiments.bench.engines.models import calm
from experiments.bench.figure import panel
from experiments.bench.options import add_engine, add_model, add_prompts, check_prompts
from experiments.bench.run import Bench, Results, Run
from experiments.bench.strategies import EXACT_DTYPES
from experiments.papers.draft_models.measure import rows_of, take_turns
from experiments.papers.draft_models.methods import BASELINE, BEAMS, THRESHOLDS, Runner, load_setting, methods_of, mjsd_text

TEXT = """Strategies that draft with a second model, as in the paper on multi-token joint speculative decoding (MJSD, arXiv
2407.09722): speed, joules per token and perplexity, on any two models with one tokenizer. The paper's own tables, with its
numbers and statements beside them: outrider bench paper mjsd.

All methods take turns on the same prompts, one prompt at a time, --turn prompts a turn. `sampled` is plain decoding with
--temperature, --top-k and --top-p, the paper's "greedy" and what speed-ups are relative to; `greedy` takes the likeliest token
instead; `mjgd` is a beam search with the target itself, run once, the reference of quality. Other names are strategies with their
options; greedy=true among them takes the likeliest token wherever the target chooses one. Seeds differ from repeat to repeat, so
that spreads are those of sampling, too. bild and mjsd change the output.

Perplexity is that of the generated tokens by the target's raw law. Energy is told by the device's counter, with and without idle
power, or is n/a. With --ablations mjsd also runs with other numbers of beams and
thresholds (the paper's table 3 and figure 4).

a quick look:
  outrider bench draft-models --prompts chat.jsonl --requests 4 --repeats 1 --max-tokens 64 --draft-free auto
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_prompts(parser)
    parser.add_argument("--strategy", action="append", help="a method; several times; those of the paper when absent")
    parser.add_argument("--budget", type=int, default=SpeculationOptions().most_draft_tokens, help="most drafted rows of a step")
    add_model(parser, "bfloat16", get_args(Dtype))
    add_engine(parser)
    parser.add_argument("--draft-model", default="demo_draft_model", help="folder of the small model, or its name on the hub")
    parser.add_argument("--draft-free", nargs="*", metavar="STRATEGY", help="beside them; all when absent, none without a name")
    parser.add_argument("--requests", type=int, help="at most so many prompts in all, files mixed")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens of a chain; of bild they are 10, as in the paper")
    parser.add_argument("--beams", type=int, default=8, help="of mjsd and mjgd")
    parser.add_argument("--threshold", type=float, default=0.1, help="of mjsd")
    parser.add_argument("--turn", type=int, default=4, help="prompts of a turn: counters of energy are too slow for single ones")
    parser.add_argument("--ablations", action="store_true", help=f"mjsd: beams {BEAMS}; thresholds {THRESHOLDS}")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with code 2 where a value is outside its range."""
    check_prompts(args, parser)
    if args.temperature <= 0.0:
        parser.error(f"--temperature must be above 0, got {args.temperature:g}: the method `greedy` draws nothing")


def measure(args: argparse.Namespace, run: Run) -> Results:
    """All methods."""
    calm(args.threads)
    methods = methods_of(args)
    setting = load_setting(args, methods)
    runners = [Runner(setting, method, args) for method in methods]
    laps = take_turns(runners, setting.prompts, args, run)
    rows = rows_of(setting, methods, laps)
    told = {"prompts": len(setting.prompts), "too_long": setting.too_long}
    results: Results = {"baseline": BASELINE, "prompts": told, "energy_source": run.meter.source, "methods": rows}
    results["parameters"] = {"target": setting.loaded.model.num_parameters()}
    if setting.draft is not None:
        results["parameters"]["draft"] = setting.draft.runner.model.num_parameters()
    results["ablations"] = ablations(rows, args) if args.ablations else {}
    variants = {label for part in results["ablations"].values() for label in part.values() if label != "mjsd"}
    shown = {label: row for label, row in rows.items() if label not in variants}
    results["figures"] = {
        key: panel("bars", title, "", y, {key: {label: row[key] for label, row in shown.items()}})
        for key, title, y in (
            ("speedup", f"tokens per second against {BASELINE}", "times as fast"),
            ("perplexity", "by the target", "perplexity"),
        )
    }
    return results


def ablations(rows: Mapping[str, Any], args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """``beams`` and ``thresholds``: by value, the label of the method that has it."""
    by_text = {row["strategy"]: label for label, row in rows.items()}
    return {
        "beams": {str(beams): by_text[mjsd_text(args.gamma, beams, args.threshold)] for beams in BEAMS},
        "thresholds": {str(value): by_text[mjsd_text(args.gamma, args.beams, value)] for value in THRESHOLDS},
    }


def unfaithful(results: Results, args: argparse.Namespace) -> list[str]:
    """The methods whose texts must be those of plain decoding and are not; none where the type's rounding excuses it."""
    same = {label: row["identical"] for label, row in results["methods"].items() if row["identical"] is not None}
    exact = args.dtype in EXACT_DTYPES
    return [
        f"{label}: {of['same']} of {of['of']} texts as plain" for label, of in same.items() if exact and of["same"] < of["of"]
    ]


BENCH = Bench(
    "bench-draft-models",
    TEXT,
    measure,
    options,
    dict.fromkeys(("records", "max_tokens", "repeats", "threads", "requests", "gamma", "beams", "turn"), 1) | {"budget": 0},
    check,
    unfaithful,
)
