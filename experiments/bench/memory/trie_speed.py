"""How fast the trie is with much in it: insertion, memory, and the time of a proposal.

    python -m experiments.bench.memory trie-speed --corpus FOLDER --tokenizer DIR

The outputs of requests fill a trie: most are written whole, the last ones as they are emitted, a few tokens a step. Then
requests with texts that the trie never saw take turns: the prompt is the first half of a text, the rest is emitted a few tokens a
step. Each proposal is timed

* ``proposal``: on its own, after what the step emitted was written,
* ``step``: as the engine calls it, which writes what the last step emitted and proposes.

Times are of the proposals that fill the budget. Each kind has its own texts in each of several rounds, and the kinds take turns;
a figure is the median over rounds, with the lowest and highest. ``auto`` then does the steps with as much in its history.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from decoding.drafters.auto import AutoDrafter
from decoding.drafters.base import Drafter
from decoding.drafters.trie import TrieDrafter
from decoding.request import Request, SamplingParams
from decoding.tree import Int32Array
from experiments.bench.memory.trie_texts import Texts, corpus_texts
from experiments.bench.record import spread
from experiments.bench.run import Bench, Results, Run

STREAMED_SHARE = 0.05  # of the tokens
TARGETS = {"p50_us": 30.0, "p99_us": 150.0, "tokens_per_s": 500_000.0, "bytes_per_token": 100.0}
KINDS = ("proposal", "step")
LIVE = 16  # requests that take turns
CHUNK = 500_000  # tokens of one measurement of insertion

Times = list[tuple[int, int]]  # nanoseconds, rows below the root


@contextmanager
def quiet() -> Iterator[None]:
    """On one core where that can be asked for, without garbage collections."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if cores:
            os.sched_setaffinity(0, cores)


def request_for(name: str, prompt: Sequence[int] | Int32Array, output: Int32Array) -> Request:
    """A request that has room for an output, and some more, so that drafts are not cut at its end."""
    return Request(name, prompt, SamplingParams(max_tokens=len(output) + 64), tenant="local")


def insert_whole(drafter: Drafter, texts: Sequence[Int32Array]) -> list[float]:
    """Outputs written at once when their requests end; tokens/s of each chunk."""
    rates = []
    ends = np.cumsum([len(text) for text in texts])
    chunks = np.split(np.arange(len(texts)), np.searchsorted(ends, np.arange(CHUNK, ends[-1], CHUNK)))
    for chunk in chunks:
        requests = [request_for(f"whole {number}", [0], texts[number]) for number in chunk]
        for request, number in zip(requests, chunk, strict=True):
            request.commit(texts[number].tolist())
        start = time.perf_counter()
        for request in requests:
            drafter.propose([request], [0])
            drafter.finish(request)
        rates.append(sum(request.num_output for request in requests) / (time.perf_counter() - start))
    return rates


def insert_streamed(drafter: Drafter, texts: Sequence[Int32Array], piece: int) -> list[float]:
    """Outputs written as they are emitted, some requests in turns; tokens/s of each group of requests."""
    rates = []
    for first in range(0, len(texts), LIVE):
        group = texts[first : first + LIVE]
        requests = [request_for(f"streamed {first + number}", [0], text) for number, text in enumerate(group)]
        seconds = 0.0
        for at in range(0, max(map(len, group)), piece):
            growing = [(request, text[at : at + piece].tolist()) for request, text in zip(requests, group, strict=True)]
            for request, new in growing:
                request.commit(new)
            start = time.perf_counter()
            for request, new in growing:
                if new:
                    drafter.propose([request], [0])
            seconds += time.perf_counter() - start
        for request in requests:
            drafter.finish(request)
        rates.append(sum(map(len, group)) / seconds)
    return rates


def run_steps(drafter: Drafter, texts: Sequence[Int32Array], budget: int, piece: int, written: bool) -> Times:
    """Times every proposal of some requests; with ``written`` what a step emitted is written before its proposal is timed."""
    times: Times = []
    for first in range(0, len(texts), LIVE):
        halves = [np.split(text, [len(text) // 2]) for text in texts[first : first + LIVE]]
        requests = [request_for(f"live {number}", *half) for number, half in enumerate(halves)]
        for request in requests:
            drafter.propose([request], [0])
        for at in range(0, max(len(output) for _, output in halves), piece):
            growing = [request for request, (_, output) in zip(requests, halves, strict=True) if at < len(output)]
            for request, (_, output) in zip(requests, halves, strict=True):
                request.commit(output[at : at + piece].tolist())
                if written and at < len(output):
                    drafter.propose([request], [0])
            for request in growing:
                start = time.perf_counter_ns()
                (tree,) = drafter.propose([request], [budget])
                times.append((time.perf_counter_ns() - start, len(tree) - 1))
        for request in requests:
            drafter.finish(request)
    return times


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
        result[name] = spread(values, 2)
    return result


def fill(drafter: Drafter, texts: Texts, piece: int) -> dict[str, Any]:
    """Fills a drafter; returns its rates of insertion."""
    streamed = max(1, round(len(texts.fill) * STREAMED_SHARE))
    with quiet():
        whole = insert_whole(drafter, texts.fill[:-streamed])
        return {"whole": spread(whole, 0), "streamed": spread(insert_streamed(drafter, texts.fill[-streamed:], piece), 0)}


def measure_proposals(drafter: Drafter, held_out: Sequence[Int32Array], args: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of times, in turns."""
    parts = [held_out[number :: args.rounds * len(KINDS)] for number in range(args.rounds * len(KINDS))]
    rounds: dict[str, list[Times]] = {kind: [] for kind in KINDS}
    with quiet():
        for alone, stepped in zip(parts[0::2], parts[1::2], strict=True):
            rounds["proposal"].append(run_steps(drafter, alone, args.budget, args.piece, True))
            rounds["step"].append(run_steps(drafter, stepped, args.budget, args.piece, False))
    return {kind: summary(times, args.budget) for kind, times in rounds.items()}


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
    del drafter
    return results | {"auto_step": measure_auto(texts, tokens, args)}


def measure_texts(args: argparse.Namespace, run: Run) -> Results:
    """The texts are read, then everything is measured."""
    texts = corpus_texts(args.corpus, args.tokenizer, args.tokens, args.seed)
    run.progress.say(f"{sum(map(len, texts.fill))} tokens in {len(texts.fill)} texts")
    return measure(args, texts)


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument(
        "--corpus", type=Path, nargs="+", required=True, help=".jsonl, .jsonl.gz and .txt files, or folders of them"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="that fill the trie")
    parser.add_argument("--capacity", type=int, help="tokens of the trie; a quarter more than fill it when absent")
    parser.add_argument("--budget", type=int, default=63, help="rows of a proposal, below the root")
    parser.add_argument("--piece", type=int, default=4, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)


BENCH = Bench("trie-speed", __doc__ or "", measure_texts, options, dict.fromkeys(("tokens", "budget", "piece", "rounds"), 1))
