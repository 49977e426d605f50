"""A replay of known outputs with a record: tokens per step of strategies on workloads, without a model.

python -m experiments.bench.memory replay FILE.jsonl... --tokenizer DIR [--strategy S ...]

The same measurement as ``outrider replay``, which prints it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from cluster.cli.generate.strategy_option import chosen_strategies
from cluster.cli.replay import figures
from decoding.replay import replay_workload
from experiments.bench.run import Bench, Results, Run


def measure(args: argparse.Namespace, run: Run) -> Results:
    """All strategies on all workloads."""
    choices = [choice for choice in chosen_strategies(args.strategy) if not choice.build().needs_logits]
    cutter = TextTokenizer(args.tokenizer)
    texts = {path.stem: read_known_texts(path, cutter, None) for path in args.workloads}
    results: Results = {}
    for choice, ranks in itertools.product(choices, args.world_size):
        label = choice.label if args.world_size == [1] else f"{choice.label}, {ranks} ranks"
        rows, reached = {}, []
        for name, known in texts.items():
            counts = replay_workload(known, choice.build, args.budget, cutter.vocab_size, time.perf_counter, ranks=ranks)
            rows[name] = figures(counts)
            reached.append(counts.tokens_per_step)
            run.progress.note(f"{label} {name} {counts.tokens_per_step:.3f}")
        results[label] = {"mean_tokens_per_step": round(statistics.fmean(reached), 4), "workloads": rows}
    return results


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and, if wanted, references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; all that can be replayed when absent")
    parser.add_argument("--budget", type=int, default=64, help="most drafted tokens of a rank in a step")
    parser.add_argument("--world-size", type=int, nargs="+", default=[1], help="draft as for so many ranks that share each step")


BENCH = Bench("replay-strategies", __doc__ or "", measure, options, {"world_size": 1})
