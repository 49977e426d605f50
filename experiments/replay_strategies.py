"""A replay of known outputs with a record: tokens per step of strategies on workloads, without a model.

python -m experiments.replay_strategies FILE.jsonl... --tokenizer DIR [--strategy S ...]

The same measurement as ``outrider replay``, which prints it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from cluster.cli.generate.strategy_option import chosen_strategies
from cluster.cli.replay import figures
from decoding.replay import replay_workload
from experiments.record import RESULTS, write_record
from experiments.run_options import refused


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the replay and writes the record; 2 for a file or a strategy that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and, if wanted, references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; all that can be replayed when absent")
    parser.add_argument("--budget", type=int, default=64, help="most drafted tokens of a rank in a step")
    parser.add_argument("--world-size", type=int, nargs="+", default=[1], help="draft as for so many ranks that share each step")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    if min(args.world_size) < 1:
        parser.error(f"--world-size must be at least 1, got {min(args.world_size)}")
    started = datetime.now(UTC)
    try:
        choices = [choice for choice in chosen_strategies(args.strategy) if not choice.build().needs_logits]
        cutter = TextTokenizer(args.tokenizer)
        texts = {path.stem: read_known_texts(path, cutter, None) for path in args.workloads}
    except ValueError as error:
        return refused(error)
    results: dict[str, dict[str, object]] = {}
    for choice, ranks in itertools.product(choices, args.world_size):
        label = choice.label if args.world_size == [1] else f"{choice.label}, {ranks} ranks"
        rows, reached = {}, []
        for name, known in texts.items():
            counts = replay_workload(known, choice.build, args.budget, cutter.vocab_size, time.perf_counter, ranks=ranks)
            rows[name] = figures(counts)
            reached.append(counts.tokens_per_step)
            print(f"{label} {name} {counts.tokens_per_step:.3f}", file=sys.stderr)
        results[label] = {"mean_tokens_per_step": round(statistics.fmean(reached), 4), "workloads": rows}
    print(write_record("replay-strategies", vars(args), results, None, started, "cpu", args.out).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
