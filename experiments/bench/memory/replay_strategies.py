"""Measure tokens per step of strategies on known outputs, without a model.

outrider bench replay strategies FILE.jsonl... --tokenizer DIR [--strategy S ...] [--corpus DIR]

This is the measurement of ``outrider replay`` with a record. Strategies that remember outputs may draft from a corpus as from
public texts. REST (arXiv 2311.08252) is then ``trie`` with suffixes of up to 16 tokens, 10 tokens after up to 1,024 occurrences
(published: 5,000), of which the 64 most frequent are drafted:
``trie:max_query_length=16,branch_length=10,max_occurrences=1024,frequencies=output,similar_requests=0,capacity=16777216``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from outrider.cluster.cli.generate.known_texts import TextTokenizer, read_known_texts
from outrider.cluster.cli.generate.strategy_option import StrategyChoice, chosen_strategies
from outrider.cluster.cli.replay import figures
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.replay import replay_workload
from outrider.decoding.sources.text_keys import output_key
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.training.data import read_records


def _with_public(choice: StrategyChoice, texts: Sequence[Sequence[int]]) -> Drafter:
    """Return a new drafter that may draft from public texts, if it remembers outputs."""
    drafter = choice.build()
    if drafter.histories is not None:
        for number, text in enumerate(texts):
            key = output_key(number + 1, 0)
            drafter.histories.public.start(key)
            drafter.histories.public.extend(key, 0, text, final=True)
    return drafter


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Replay all workloads with each strategy and number of ranks."""
    choices = [choice for choice in chosen_strategies(args.strategy) if not choice.build().needs_logits]
    cutter = TextTokenizer(args.tokenizer)
    texts = {path.stem: read_known_texts(path, cutter, None) for path in args.workloads}
    shards = [] if args.corpus is None else sorted(args.corpus.glob("train-*.jsonl.gz"))
    public = cutter.encode([record["text"] for record in read_records(shards)])
    results: Results = {}
    for choice, ranks in itertools.product(choices, args.world_size):
        label = choice.label if args.world_size == [1] else f"{choice.label}, {ranks} ranks"
        rows, reached = {}, []
        for name, known in texts.items():
            build = functools.partial(_with_public, choice, public)
            counts = replay_workload(known, build, args.budget, cutter.vocab_size, time.perf_counter, ranks=ranks)
            rows[name] = figures(counts)
            reached.append(counts.tokens_per_step)
            run.progress.note(f"{label} {name} {counts.tokens_per_step:.3f}")
        results[label] = {"mean_tokens_per_step": round(statistics.fmean(reached), 4), "workloads": rows}
    return results


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("workloads", type=Path, nargs="+", help="JSON lines with prompt, output and optional references")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--corpus", type=Path, help="folder of train-*.jsonl.gz files, whose records have a text")
    parser.add_argument("--strategy", action="append", help="NAME or NAME:option=value,...; default: all that can be replayed")
    parser.add_argument("--budget", type=int, default=64, help="maximum draft tokens per rank and step")
    parser.add_argument("--world-size", type=int, nargs="+", default=[1], help="numbers of ranks that share each step")


BENCH = Bench("replay-strategies", __doc__ or "", measure, options, {"world_size": 1})
