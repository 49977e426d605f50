"""The options of ``outrider bench``, read before anything heavy is imported.

python -m experiments.bench strategies --prompts FILE.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from configs.slices import Dtype, SpeculationOptions

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
_SIZES = ("110m", "280m", "tiny")  # of experiments.guided
_RESULTS = Path(__file__).resolve().parent / "results"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process with code 2 where options do not go together."""
    command = argparse.ArgumentParser(prog="outrider bench")
    benches = command.add_subparsers(required=True, metavar="BENCH")
    parser = benches.add_parser("strategies", description=_STRATEGIES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo_model", help="folder of the model, or its name on the hub")
    parser.add_argument("--random-model", choices=_SIZES, help="a Llama of random weights; with --guided and --tokenizer")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with id, prompt, references, output")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; several times; all when absent")
    parser.add_argument("--guided", action="store_true", help="follow the known outputs of the prompts")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer of a guided run; the model's own when absent")
    parser.add_argument("--assistant", help="model for transformers' assisted generation, with the same tokenizer")
    parser.add_argument("--early-exit", type=int, help="without --assistant, layers of the model that draft; half when absent")
    parser.add_argument("--records", type=int, help="at most so many of each file")
    parser.add_argument("--max-tokens", type=int, help="of an output; 128 when absent, in a guided run the whole output")
    parser.add_argument("--budget", type=int, default=SpeculationOptions().max_draft_tokens, help="most drafted rows of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0, help="of random weights")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of the record and the figure")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    args = command.parse_args(argv)
    for name in ("records", "max_tokens", "repeats", "threads", "early_exit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.budget < 0:
        parser.error(f"--budget must not be negative, got {args.budget}")
    if args.random_model and (not args.guided or args.tokenizer is None or args.dtype == "auto"):
        parser.error("--random-model needs --guided, --tokenizer and a --dtype")
    if len({path.stem for path in args.prompts}) < len(args.prompts):
        parser.error("two files of --prompts have one name: a workload is called after its file")
    if find_spec("matplotlib") is None:
        parser.error("the figure needs matplotlib: install outrider with the extra `dev`")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a bench; its exit code."""
    args = arguments(argv)
    from experiments.strategies import run  # loads torch and transformers

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
