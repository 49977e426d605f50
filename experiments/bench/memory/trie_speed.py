"""Measure the trie with many tokens in it: insertion, memory, and the time of a proposal.

outrider bench replay trie --corpus FOLDER --tokenizer DIR

Outputs of requests fill a trie: most are written whole, the last ones as they are emitted, a few tokens per step. Then requests
with texts that the trie has not seen take turns: the prompt is the first half of a text, the rest is emitted a few tokens per
step. Each proposal is timed as

* ``proposal``: alone, after the step's tokens were written,
* ``step``: as the engine calls it, which writes the last step's tokens and proposes.

Times are of the proposals that fill the budget. Both kinds take turns, with other texts in each of several rounds; a figure is
the median over rounds with the extremes. ``auto`` then makes the steps with as many tokens in its history.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from outrider.cluster.cli.generate.known_texts import TextTokenizer
from outrider.cluster.cli.generate.prompt_file import PromptFileError
from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.auto import AutoDrafter
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.drafters.trie import TrieDrafter
from outrider.decoding.request import Request, SamplingParams
from outrider.experiments.bench.record import spread
from outrider.experiments.bench.run import Bench, Results, Run

STREAMED_SHARE = 0.05  # of the tokens
TARGETS = {"p50_us": 30.0, "p99_us": 150.0, "tokens_per_s": 500_000.0, "bytes_per_token": 100.0}
KINDS = ("proposal", "step")
PIECE = 4  # tokens of a step
LIVE = 16  # requests that take turns
CHUNK = 500_000  # tokens per measurement of insertion
MAX_TOKENS = 512  # of a text; longer ones are cut into several
MIN_HELD_OUT = 64  # tokens of a held-out text
HELD_OUT_EVERY = 20
CHANGED_SHARE = 0.05  # of the tokens, in each further copy of the corpus
_SUFFIXES = (".jsonl", ".jsonl.gz")

Times = list[tuple[int, int]]  # nanoseconds, rows below the root


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts that fill the trie, and held-out ones that it has not seen."""

    fill: list[Int32Array]
    held_out: list[Int32Array]
    about: dict[str, Any]  # for the record


def corpus_texts(paths: Sequence[Path], tokenizer_folder: Path, tokens: int) -> Texts:
    """Tokenize the ``text`` fields of files, or of folders of files.

    A corpus with too few tokens is repeated, each time with some tokens replaced by others of the corpus.

    Raises:
        PromptFileError: an unreadable file or tokenizer, or a corpus too small to hold texts out.
    """
    tokenizer = TextTokenizer(tokenizer_folder)
    files = [file for path in paths for file in _files(path)]
    pieces: list[Int32Array] = []
    texts, total = (text for file in files for text in _read(file)), 0
    while total <= tokens * (1 + 2 / HELD_OUT_EVERY) and (batch := list(itertools.islice(texts, 512))):
        for ids in tokenizer.encode(batch):
            pieces.extend(np.asarray(ids[at : at + MAX_TOKENS], np.int32) for at in range(0, len(ids), MAX_TOKENS))
            total += len(ids)
    pieces = [piece for piece in pieces if len(piece) > 1]
    fill = [piece for number, piece in enumerate(pieces) if number % HELD_OUT_EVERY]
    held_out = [piece for piece in pieces[::HELD_OUT_EVERY] if len(piece) >= MIN_HELD_OUT]
    if not held_out:
        raise PromptFileError(f"the corpus holds {total} tokens, too few to measure on: give more files")
    fill, shown = _repeated(fill, tokens, np.random.default_rng(0))
    return Texts(fill, held_out, {"kind": "corpus", "files": len(files), "shown": round(shown, 2)})


def _repeated(texts: list[Int32Array], tokens: int, rng: np.random.Generator) -> tuple[list[Int32Array], float]:
    """Return exactly ``tokens`` tokens, and how often the texts are repeated in them."""
    given = sum(len(text) for text in texts)
    words, filled, total, at = np.concatenate(texts), [], 0, 0
    while total < tokens:
        text = texts[at % len(texts)][: tokens - total]
        if at >= len(texts):
            changed = rng.random(len(text)) < CHANGED_SHARE
            text = np.where(changed, words[rng.integers(0, len(words), len(text))], text).astype(np.int32)
        filled.append(text)
        total += len(text)
        at += 1
    return filled, total / given


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not found:
        raise PromptFileError(f"corpus {str(path)!r} holds no {', '.join(_SUFFIXES)} file")
    return found


def _read(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.name.endswith(".gz") else path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise PromptFileError(f"{path} could not be read as JSON lines with a 'text': {error!r}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Run on one core, if the system allows it, and without garbage collection."""
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
    """Return a request with room for more than its output, so that drafts are not cut at its end."""
    return Request(name, prompt, SamplingParams(max_tokens=len(output) + 64), tenant="local")


def insert_whole(drafter: Drafter, texts: Sequence[Int32Array]) -> list[float]:
    """Insert outputs at the end of their requests; return tokens/s per chunk."""
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


def insert_streamed(drafter: Drafter, texts: Sequence[Int32Array]) -> list[float]:
    """Insert outputs as they are emitted by ``LIVE`` requests in turns; return tokens/s per group of requests."""
    rates = []
    for first in range(0, len(texts), LIVE):
        group = texts[first : first + LIVE]
        requests = [request_for(f"streamed {first + number}", [0], text) for number, text in enumerate(group)]
        seconds = 0.0
        for at in range(0, max(map(len, group)), PIECE):
            growing = [(request, text[at : at + PIECE].tolist()) for request, text in zip(requests, group, strict=True)]
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


def run_steps(drafter: Drafter, texts: Sequence[Int32Array], budget: int, written: bool) -> Times:
    """Time every proposal of some requests; ``written``: the step's tokens are written before."""
    times: Times = []
    for first in range(0, len(texts), LIVE):
        halves = [np.split(text, [len(text) // 2]) for text in texts[first : first + LIVE]]
        requests = [request_for(f"live {number}", *half) for number, half in enumerate(halves)]
        for request in requests:
            drafter.propose([request], [0])
        for at in range(0, max(len(output) for _, output in halves), PIECE):
            growing = [request for request, (_, output) in zip(requests, halves, strict=True) if at < len(output)]
            for request, (_, output) in zip(requests, halves, strict=True):
                request.commit(output[at : at + PIECE].tolist())
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
    """Return percentiles in microseconds of the proposals that fill the budget, as median and extremes over rounds."""
    full = [[ns / 1000 for ns, rows in times if rows == budget] for times in rounds]
    everything = [rows for times in rounds for _, rows in times]
    result: dict[str, Any] = {
        "proposals": len(everything),
        "full": sum(map(len, full)),
        "rows_mean": round(float(np.mean(everything)), 2),
    }
    for name, percentile in (("p50_us", 50), ("p99_us", 99), ("p99_9_us", 99.9)):
        result[name] = spread([float(np.percentile(times, percentile)) for times in full if times], 2)
    return result


def fill(drafter: Drafter, texts: Texts) -> dict[str, Any]:
    """Fill a drafter and return its rates of insertion."""
    streamed = max(1, round(len(texts.fill) * STREAMED_SHARE))
    with quiet():
        whole = insert_whole(drafter, texts.fill[:-streamed])
        return {"whole": spread(whole, 0), "streamed": spread(insert_streamed(drafter, texts.fill[-streamed:]), 0)}


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Measure the trie, then the steps of ``auto`` with the same texts."""
    texts = corpus_texts(args.corpus, args.tokenizer, args.tokens)
    tokens = sum(map(len, texts.fill))
    run.progress.say(f"{tokens} tokens in {len(texts.fill)} texts")
    before = psutil.Process().memory_info().rss
    drafter = TrieDrafter(decoding_length=args.budget + 1, capacity=tokens * 5 // 4)
    run_steps(drafter, texts.fill[:1], args.budget, False)  # compiles
    insertion = fill(drafter, texts)
    grown = psutil.Process().memory_info().rss - before
    parts = [texts.held_out[number :: args.rounds * len(KINDS)] for number in range(args.rounds * len(KINDS))]
    rounds: dict[str, list[Times]] = {kind: [] for kind in KINDS}
    with quiet():
        for alone, stepped in zip(parts[0::2], parts[1::2], strict=True):
            rounds["proposal"].append(run_steps(drafter, alone, args.budget, True))
            rounds["step"].append(run_steps(drafter, stepped, args.budget, False))
    results = {
        "tokens": tokens,
        "outputs": len(texts.fill),
        "held_out": len(texts.held_out),
        "text": texts.about,
        "insertion_tokens_per_s": insertion,
        "bytes_per_token": {"arrays": round(drafter.nbytes / tokens, 1), "process": round(grown / tokens, 1)},
        **{kind: summary(times, args.budget) for kind, times in rounds.items()},
        "targets": TARGETS,
    }
    del drafter  # its memory, before that of ``auto``
    run.progress.say("auto")
    auto = AutoDrafter(history_tokens=tokens * 5 // 4, all_rows=True)
    insertion = fill(auto, texts)
    with quiet():
        run_steps(auto, parts[1][:1], args.budget, False)
        steps = [run_steps(auto, part, args.budget, False) for part in parts[1::2]]
    return results | {"auto_step": summary(steps, args.budget) | {"insertion_tokens_per_s": insertion}}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, help=".jsonl and .jsonl.gz files, or folders of them")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="number of tokens in the trie")
    parser.add_argument("--budget", type=int, default=63, help="maximum rows of a proposal below the root")
    parser.add_argument("--rounds", type=int, default=5)


BENCH = Bench("trie-speed", __doc__ or "", measure, options, dict.fromkeys(("tokens", "budget", "rounds"), 1))
