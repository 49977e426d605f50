"""The options of ``outrider bench``, read before anything heavy is imported.

python -m experiments.bench strategies --prompts FILE.jsonl
python -m experiments.bench load --prompts FILE.jsonl FILE.jsonl
python -m experiments.bench draft-models --prompts FILE.jsonl FILE.jsonl
python -m experiments.bench paper llma --prompts retrieval=FILE.jsonl cache=FILE.jsonl
python -m experiments.bench scaling --prompts FILE.jsonl FILE.jsonl
python -m experiments.bench report --all --out report.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from configs.slices import Dtype, SpeculationOptions
from experiments import report, scaling_options
from experiments.draft_models_options import DESCRIPTION, add_options, check_options
from experiments.papers.options import ELSEWHERE, add_parsers, check

_STRATEGIES = """Every strategy on the same prompts with a real model, beside transformers, in one run.

Beside them run transformers' greedy generate, its prompt lookup and its assisted generation (--assistant, or else by early
exit from the model's own first layers). All take turns on each prompt, one prompt at a time, and give token ids; a strategy
starts each workload and each repeat without history. Ratios are seconds of greedy generate over a contestant's own, prefill
included, as the mean over the workloads, with the lowest and the highest of the repeats; "decode" leaves out the prefill,
which no drafting shortens.

With --guided the forwards are real and the committed tokens are a workload's known outputs (LLMA, arXiv 2304.04487, section
3.2), so that speed on real text is measured with any weights, random ones included. Assisted generation then has no place:
the assistant would be guided too, or draft for another text.
"""
_LOAD = """Strategies under load: many requests at once, on one engine in this process, beside transformers in the same run.

Closed loop: so many clients, each with one request at a time. Open loop: requests come by a Poisson process, at a share of the
requests a second that plain decoding (autoregressive) reached in the closed loop; times count from the arrival. Load step: the
number of clients changes at once; clients that are too many hang up, and the first phase's prompts come again for another tenant.
Beside them run transformers' continuous batching (generate_batch), and with one client its generate and prompt lookup.

All get the same prompts in a cell, files mixed, and take turns; each starts without history and without KV to reuse. `auto` and
`autoregressive` run --repeats times, the others --single-repeats times. Ratios are tokens a second over those of autoregressive
in the same repeat, while all clients had a request. p50 and p99 are over the requests of a cell; --guided is as in bench
strategies, but generate_batch then writes as many tokens of its own: what it costs does not depend on which.

example, half an hour on two cores:
  outrider bench load --guided --prompts rag.jsonl code.jsonl chat.jsonl --per-workload --json > load.json
a quick look:
  outrider bench load --prompts rag.jsonl --concurrency 1,8 --load none --step none --strategy auto --repeats 1 --no-stock
"""
_SIZES = ("110m", "280m", "tiny")  # of experiments.guided
_RESULTS = Path(__file__).resolve().parent / "results"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process with code 2 where options do not go together."""
    command = argparse.ArgumentParser(prog="outrider bench")
    benches = command.add_subparsers(required=True, metavar="BENCH", dest="bench")
    raw = argparse.RawDescriptionHelpFormatter
    strategies = benches.add_parser("strategies", description=_STRATEGIES, formatter_class=raw)
    _common(strategies)
    _guided(strategies)
    strategies.add_argument("--assistant", help="model for transformers' assisted generation, with the same tokenizer")
    strategies.add_argument(
        "--early-exit", type=int, help="without --assistant, layers of the model that draft; half when absent"
    )
    load = benches.add_parser("load", description=_LOAD, formatter_class=raw)
    _common(load)
    _guided(load)
    _load_options(load)
    drafts = benches.add_parser("draft-models", description=DESCRIPTION, formatter_class=raw)
    _common(drafts)
    add_options(drafts)
    batches = partial(_numbers, int, 1)
    drafts.add_argument("--batch-sizes", type=batches, default=(), help="requests at once of plain decoding: 1,2,4,...")
    paper = benches.add_parser("paper", description="The tables of a paper beside its own numbers; PAPER --help says more.")
    add_parsers(paper, _run_options)
    scaling = benches.add_parser("scaling", description=scaling_options.DESCRIPTION, formatter_class=raw)
    scaling_options.add_options(scaling, _run_options, _numbers)
    page = benches.add_parser("report", description=report.DESCRIPTION, formatter_class=raw)
    report.add_options(page, _RESULTS)
    args = command.parse_args(argv)
    parsers = {"strategies": strategies, "load": load, "draft-models": drafts, "paper": paper, "scaling": scaling, "report": page}
    _check(args, parsers[args.bench])
    return args


def _common(parser: argparse.ArgumentParser) -> None:
    """The options of all benches."""
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with id, prompt, references, output")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times; all when absent")
    parser.add_argument("--budget", type=int, default=SpeculationOptions().most_draft_tokens, help="most drafted rows of a step")
    _run_options(parser)


def _run_options(parser: argparse.ArgumentParser) -> None:
    """The options of all runs, those of papers included."""
    parser.add_argument("--model", default="demo_model", help="folder of the model, or its name on the hub")
    parser.add_argument("--records", type=int, help="at most so many of each file")
    parser.add_argument("--max-tokens", type=int, help="of an output; 128 when absent, in a guided run the whole output")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and arrivals")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of the record and the figures")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")


def _guided(parser: argparse.ArgumentParser) -> None:
    """The options of benches that can follow known outputs."""
    parser.add_argument("--random-model", choices=_SIZES, help="a Llama of random weights; with --guided and --tokenizer")
    parser.add_argument("--guided", action="store_true", help="follow the known outputs of the prompts")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer of a guided run; the model's own when absent")


def _load_options(parser: argparse.ArgumentParser) -> None:
    whole, shares = partial(_numbers, int, 1), partial(_numbers, float, 0.01)
    parser.add_argument("--concurrency", type=whole, default=(1, 2, 4, 8, 16, 32), help="clients of the closed loop: 1,2,4,...")
    parser.add_argument(
        "--load", type=shares, default=(0.5, 0.7, 0.9, 1.1, 1.2), help="shares of the capacity of plain decoding, or none"
    )
    parser.add_argument("--step", type=whole, default=(1, 32, 1), help="clients of the phases of the load step, or none")
    parser.add_argument("--phase", type=float, default=10.0, help="seconds of each phase of the load step")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds that plain decoding takes for a cell, about")
    parser.add_argument("--requests", type=int, help="requests of a cell, instead of --duration; at least one for each client")
    parser.add_argument("--single-repeats", type=int, default=1, help="repeats of all but auto and autoregressive")
    parser.add_argument(
        "--per-workload", type=int, nargs="?", const=6, metavar="N", help="each file alone too, N records of it (6), one client"
    )
    parser.add_argument("--no-stock", action="store_true", help="without transformers beside")


def _numbers(kind: Callable[[str], float], least: float, text: str) -> tuple[float, ...]:
    """Reads ``1,2,4`` or ``none``."""
    if text == "none":
        return ()
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be numbers with commas between them, such as 1,2,4, or none: got {text!r}"
        ) from None
    if not all(least <= number < float("inf") for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers from {least:g} on, got {text!r}")
    return numbers


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name in ("records", "max_tokens", "repeats", "threads", "early_exit", "requests", "single_repeats", "per_workload"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.bench == "paper":
        check(args, parser)
        return
    if args.bench in ("report", "scaling"):
        (report if args.bench == "report" else scaling_options).check_options(args, parser)
        return
    if args.budget < 0:
        parser.error(f"--budget must not be negative, got {args.budget}")
    if getattr(args, "random_model", None) and (not args.guided or args.tokenizer is None or args.dtype == "auto"):
        parser.error("--random-model needs --guided, --tokenizer and a --dtype")
    if len({path.stem for path in args.prompts}) < len(args.prompts):
        parser.error("two files of --prompts have one name: a workload is called after its file")
    if find_spec("matplotlib") is None:
        parser.error("the figure needs matplotlib: install outrider with the extra `dev`")
    if args.bench == "load":
        _check_load(args, parser)
    if args.bench == "draft-models":
        check_options(args, parser)


def _check_load(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name, least in (("phase", 2.0), ("duration", 0.1)):
        if not least <= getattr(args, name) < float("inf"):
            parser.error(f"--{name} must be at least {least:g} seconds, got {getattr(args, name):g}")
    if not args.concurrency:
        parser.error("--concurrency must name a number of clients: ratios and the capacity come from the closed loop")
    for name in ("concurrency", "load"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"--{name} names a number twice")
    if len(args.step) == 1:
        parser.error("--step needs two phases at least, such as 1,32,1, or none")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a bench, or shows what benches recorded; its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = arguments(["draft-models", *given[2:]] if given[:2] == ["paper", ELSEWHERE] else given)
    if args.bench == "load":
        from experiments.load import run  # loads torch and transformers
    elif args.bench == "draft-models":
        from experiments.draft_models import run
    elif args.bench == "paper":
        from experiments.papers.run import run
    elif args.bench == "scaling":
        from experiments.scaling import run
    elif args.bench == "report":
        from experiments.report import run
    else:
        from experiments.strategies import run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
