"""How fast the trie is with much in it: insertion, memory, and the time of a proposal.

    python -m experiments.trie_speed --corpus FOLDER --tokenizer DIR

The outputs of requests fill a trie: most are written whole, the last ones as they are emitted, a few tokens a step. Then
requests with texts that the trie never saw take turns: the prompt is the first half of a text, the rest is emitted a few tokens a
step. Each proposal is timed

* ``proposal``: on its own, after what the step emitted was written,
* ``step``: as the engine calls it, which writes what the last step emitted and proposes,
* ``compiled``: the compiled part of a proposal, and of that what it takes to pass its arguments.

Times are of the proposals that fill the budget. Each kind has its own texts in each of several rounds, and the kinds take turns;
a figure is the median over rounds, with the lowest and highest. ``auto`` then does the steps with as much in its history.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from cluster.cli.generate.prompt_file import PromptFileError
from decoding.drafters.auto import AutoDrafter
from decoding.drafters.base import Drafter
from decoding.drafters.trie import TrieDrafter
from decoding.tree import Int32Array
from experiments.record import RESULTS, write_record
from experiments.trie_texts import Texts, corpus_texts, synthetic_texts
from experiments.trie_timing import LIVE, Times, insert_streamed, insert_whole, quiet, run_compiled, run_steps

STREAMED_SHARE = 0.05  # of the tokens
TARGETS = {"p50_us": 30.0, "p99_us": 150.0, "tokens_per_s": 500_000.0, "bytes_per_token": 100.0}
KINDS = ("proposal", "step", "compiled")


def summary(rounds: Sequence[Times], budget: int) -> dict[str, Any]:
    """Percentiles of the proposals that fill the budget, in microseconds: median over rounds, with the lowest and highest."""
    full = [[ns / 1000 for ns, rows in times if rows == budget] for times in rounds]
    everything = [rows for times in rounds for _, rows in times]
    result: dict[str, Any] = {
        "proposals": len(everything),
        "full": sum(map(len, full)),
        "rows_mean": round(float(np.mean(everything)), 2),
    }
    for name, percentile in (("p50_us", 50), ("p99_us", 99), ("p99_9_us", 99.9)):
        values = [float(np.percentile(times, percentile)) for times in full if times]
        result[name] = spread(values, 2) if values else None
    return result


def spread(values: Sequence[float], digits: int = 0) -> dict[str, float]:
    """Median, lowest and highest."""
    median, low, high = float(np.median(values)), min(values), max(values)
    return {"median": round(median, digits), "min": round(low, digits), "max": round(high, digits)}


def fill(drafter: Drafter, texts: Texts, piece: int) -> dict[str, Any]:
    """Fills a drafter; returns its rates of insertion."""
    streamed = max(1, round(len(texts.fill) * STREAMED_SHARE))
    with quiet():
        whole = insert_whole(drafter, texts.fill[:-streamed])
        return {"whole": spread(whole), "streamed": spread(insert_streamed(drafter, texts.fill[-streamed:], piece))}


def measure_proposals(drafter: Drafter, held_out: Sequence[Int32Array], args: argparse.Namespace) -> dict[str, Any]:
    """The three kinds of times, in turns."""
    parts = [held_out[number :: args.rounds * len(KINDS)] for number in range(args.rounds * len(KINDS))]
    rounds: dict[str, list[Times]] = {kind: [] for kind in KINDS}
    passing: list[float] = []
    with quiet():
        for alone, stepped, inside in zip(parts[0::3], parts[1::3], parts[2::3], strict=True):
            rounds["proposal"].append(run_steps(drafter, alone, args.budget, args.piece, True))
            rounds["step"].append(run_steps(drafter, stepped, args.budget, args.piece, False))
            times, passing_ns = run_compiled(drafter, inside, args.budget, args.piece)
            rounds["compiled"].append(times)
            passing.append(float(np.median(passing_ns)) / 1000)
    kinds: dict[str, Any] = {kind: summary(times, args.budget) for kind, times in rounds.items()}
    kinds["compiled"]["passing_p50_us"] = spread(passing, 2)
    return kinds


def measure_auto(texts: Texts, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """The steps of ``auto`` with as many past outputs and the same contexts, all rows asked for."""
    drafter = AutoDrafter(history_tokens=args.capacity or tokens * 5 // 4, all_rows=True)
    insertion = fill(drafter, texts, args.piece)
    parts = [texts.held_out[number :: args.rounds * len(KINDS)] for number in range(1, args.rounds * len(KINDS), len(KINDS))]
    with quiet():
        run_steps(drafter, parts[0][:1], args.budget, args.piece, False)
        rounds = [run_steps(drafter, part, args.budget, args.piece, False) for part in parts]
    return summary(rounds, args.budget) | {"insertion_tokens_per_s": insertion}


def measure(args: argparse.Namespace, texts: Texts) -> dict[str, Any]:
    """Everything that goes into the record."""
    tokens = sum(map(len, texts.fill))
    before = psutil.Process().memory_info().rss
    drafter = TrieDrafter(decoding_length=args.budget + 1, capacity=args.capacity or tokens * 5 // 4)
    run_steps(drafter, texts.fill[:1], args.budget, args.piece, False)  # compiles
    insertion = fill(drafter, texts, args.piece)
    grown = psutil.Process().memory_info().rss - before
    results = {
        "tokens": tokens,
        "outputs": len(texts.fill),
        "held_out": len(texts.held_out),
        "text": texts.about,
        "insertion_tokens_per_s": insertion,
        "bytes_per_token": {"arrays": round(drafter.nbytes / tokens, 1), "process": round(grown / tokens, 1)},
        **measure_proposals(drafter, texts.held_out, args),
        "targets": TARGETS,
    }
    if args.auto:
        del drafter
        results["auto_step"] = measure_auto(texts, tokens, args)
    return results


def table(results: dict[str, Any]) -> Table:
    """A row a figure."""
    shown = Table("figure", "median", "min-max", "target")
    for name, row in results["insertion_tokens_per_s"].items():
        shown.add_row(f"insertion, {name}", f"{row['median']:,.0f} tok/s", f"{row['min']:,.0f}-{row['max']:,.0f}", ">= 500,000")
    size = results["bytes_per_token"]
    shown.add_row("memory", f"{size['arrays']} B/token", f"process: {size['process']}", "<= 100")
    for kind in (*KINDS, "auto_step"):
        for name, target in (("p50_us", "<= 30"), ("p99_us", "<= 150"), ("p99_9_us", "")):
            row = results.get(kind, {}).get(name)
            if row:
                target = target if kind in ("proposal", "step") else ""
                shown.add_row(f"{kind} {name}", f"{row['median']:.1f}", f"{row['min']:.1f}-{row['max']:.1f}", target)
    return shown


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", type=Path, nargs="+", help="files or folders of .jsonl, .jsonl.gz (their 'text') and .txt")
    source.add_argument("--synthetic", action="store_true", help="texts of phrases drawn by Zipf's law")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json; with --corpus")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--capacity", type=int, help="of the trie, in tokens; a quarter more than --tokens when absent")
    parser.add_argument("--budget", type=int, default=63, help="rows below the root")
    parser.add_argument("--piece", type=int, default=4, help="tokens that a step emits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--auto", action=argparse.BooleanOptionalAction, default=True, help="time the drafter auto as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    if args.corpus and not args.tokenizer:
        parser.error("--corpus needs --tokenizer")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the record, prints the table."""
    args, started, console = arguments(argv), datetime.now(UTC), Console()
    try:
        if args.synthetic:
            texts = synthetic_texts(args.tokens, args.seed)
        else:
            texts = corpus_texts(args.corpus, args.tokenizer, args.tokens, args.seed)
    except PromptFileError as error:
        console.print(f"trie_speed: {error}", markup=False)
        return 2
    results = measure(args, texts)
    path = write_record("trie-speed", vars(args) | {"live": LIVE}, results, args.seed, started, folder=args.out)
    console.print(table(results))
    console.print(f"of {results['proposal']['proposals']} proposals {results['proposal']['full']} are full; record: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
