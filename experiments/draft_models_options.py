"""The options of ``outrider bench draft-models``, read before anything heavy is imported."""

from __future__ import annotations

import argparse

DESCRIPTION = """Strategies that draft with a second model, as in the paper on multi-token joint speculative decoding (MJSD, arXiv
2407.09722): speed, joules per token and perplexity, each beside the paper's numbers, on any two models with one tokenizer.

All methods take turns on the same prompts, one prompt at a time, --turn prompts a turn. `sampled` is plain decoding with
--temperature, --top-k and --top-p, the paper's "greedy" and what speed-ups are relative to; `greedy` takes the likeliest token
instead; `mjgd` is a beam search with the target itself, run once, the reference of quality. Other names are strategies with their
options; greedy=true among them takes the likeliest token wherever the target chooses one. Seeds differ from repeat to repeat, so
that spreads are those of sampling, too. bild and mjsd change the output.

Perplexity is that of the generated tokens by the target's raw law, over the prompts that all methods finished. Energy is told by
the device's counter, with and without idle power, or is n/a. With --batch-sizes plain decoding is run with as many requests at
once (the paper's Table 1); with --ablations also mjsd with other numbers of beams and thresholds (Table 3, Figure 4).

example:
  outrider bench draft-models --prompts chat.jsonl code.jsonl --requests 40 --ablations --batch-sizes 1,2,4,8,16
a quick look:
  outrider bench draft-models --prompts chat.jsonl --requests 4 --repeats 1 --max-tokens 64 --draft-free auto
"""
BEAMS = (1, 2, 4, 8, 16)  # of the ablation
THRESHOLDS = (0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that the other benches do not have."""
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
    parser.add_argument("--limit", type=float, help="seconds after which a method begins no prompt of a repeat any more")
    parser.add_argument("--runs", type=int, default=256, help="forwards of each batch size and repeat")
    parser.add_argument(
        "--ablations", action="store_true", help=f"mjsd: beams {_listed(BEAMS)}; thresholds {_listed(THRESHOLDS)}"
    )


def check_options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with code 2 where a value is outside its range."""
    for name in ("gamma", "beams", "turn", "runs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.temperature <= 0.0:
        parser.error(f"--temperature must be above 0, got {args.temperature:g}: the method `greedy` draws nothing")
    if args.limit is not None and args.limit <= 0.0:
        parser.error(f"--limit must be above 0 seconds, got {args.limit:g}")
    if len(set(args.batch_sizes)) < len(args.batch_sizes):
        parser.error("--batch-sizes names a number twice")


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
