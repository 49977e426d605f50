"""What ranks that share one machine cost each other: the time of a step by its rows, alone and several at once.

python -m experiments.rank_contention --size 110m

Ranks on one CPU share its memory bandwidth, last cache and clock, which a GPU each would not. So this is the bound of what
lookahead parallelism can gain on such a machine: with r(n) the time of n rows alone and c(n) the time of n rows beside another
rank, a tree of n rows costs r(n) on one rank and at least c(n / 2) on two.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoding.request import Request, SamplingParams
from decoding.sampling.ranking import argmax_rows
from decoding.tree import DraftTree
from engine.forward.batch import Batch, Work, pack
from engine.forward.runner import ModelRunner
from experiments.guided import SIZES, random_model
from experiments.record import RESULTS, write_record

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_VOCAB = 50257  # of GPT-2's tokenizer: the output layer is a good part of a small model's step
_START_S = 300.0  # to make the models


class StepTimer:
    """Forwards of a model over so many rows of one request, a root and branches below it."""

    def __init__(self, runner: ModelRunner, context: int) -> None:
        """
        Args:
            runner: of the model, without requests; its first slot is taken.
            context: tokens before the rows.
        """
        self.runner = runner
        self._request = Request("timed", np.zeros(context, np.int32), SamplingParams(1))
        self._request.slot = 0
        self.runner.forward(pack([Work(self._request, 0, context, DraftTree.chain(0, ()), frozenset())]))

    def seconds(self, rows: int, repeats: int, spine: int = 1, argmax: bool = True) -> list[float]:
        """Each of ``repeats`` forwards over ``rows`` rows, ``spine`` of them committed tokens that end in the root.

        With ``argmax`` the likeliest token of each row is found as well, as a step does.
        """
        batch = self._batch(rows, spine)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            logits = self.runner.forward(batch)
            if argmax:
                argmax_rows(logits)
            times.append(time.perf_counter() - started)
        return times

    def _batch(self, rows: int, spine: int) -> Batch:
        below = rows - spine + 1
        parents = np.minimum(np.arange(-1, below - 1, dtype=np.int32), 0)
        tree = DraftTree(np.zeros(below, np.int32), parents, np.zeros(below, np.int8), below)
        end = self._request.num_tokens
        return pack([Work(self._request, end - spine, end, tree, frozenset())])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="110m")
    parser.add_argument("--vocab-size", type=int, default=_VOCAB)
    parser.add_argument("--context", type=int, default=512, help="tokens before the rows")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--ranks", type=int, default=2, help="processes at once, one thread each")
    parser.add_argument("--wide-threads", type=int, default=2, help="of one process that is timed beside them; 1: none")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5, help="forwards of each count in a round")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    args = parser.parse_args(argv)
    started = datetime.now(UTC)
    results = run(args)
    print_table(results)
    print(write_record("rank-contention", vars(args), results, 0, started, "cpu", args.out).name)
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The ways take turns, round by round and row count by row count.

    Returns:
        ``ms``: by way (``alone``, ``together``, ``together pinned``, ``N threads``) and rows, the median of a step and the lowest
        and highest median of a round; and ``together_over_alone`` by rows, the median over rounds.
    """
    cores = sorted(os.sched_getaffinity(0))
    workers = [Worker(args, 1) for _ in range(args.ranks)]
    wide = [Worker(args, args.wide_threads)] if args.wide_threads > 1 else []
    medians: dict[str, dict[int, list[float]]] = {}
    try:
        for worker in (*workers, *wide):
            worker.wait_until_ready()
        ways: list[tuple[str, list[Worker], bool]] = [
            ("alone", workers[:1], False),
            ("together", workers, False),
            ("together pinned", workers, True),
        ]
        if wide:
            ways.append((f"{args.wide_threads} threads", wide, False))
        for number in range(args.rounds + 1):
            for rows in args.rows:
                for name, group, pinned in ways:
                    for place, worker in enumerate(group):
                        worker.start(rows, args.repeats, {cores[place % len(cores)]} if pinned else set(cores))
                    times = [statistics.median(worker.finish()) for worker in group]
                    if number:  # the first round warms up
                        medians.setdefault(name, {}).setdefault(rows, []).append(statistics.fmean(times))
    finally:
        for worker in (*workers, *wide):
            worker.close()
    return {"ms": {name: {rows: _ms(of) for rows, of in row.items()} for name, row in medians.items()}} | {
        "together_over_alone": {
            rows: round(statistics.median(b / a for a, b in zip(medians["alone"][rows], of, strict=True)), 3)
            for rows, of in medians["together"].items()
        }
    }


def _ms(times: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 3) for value in (statistics.median(times), min(times), max(times))]


class Worker:
    """A process that times steps when told to."""

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        setting = (args.size, args.vocab_size, args.context, max(args.rows), getattr(torch, args.dtype))
        self._process = context.Process(target=_serve, args=(theirs, threads, setting), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Returns when the model is made. Raises ``RuntimeError`` when that takes too long."""
        if not self._pipe.poll(_START_S):
            raise RuntimeError(f"a worker was not ready within {_START_S:.0f} s")
        self._pipe.recv()

    def start(self, rows: int, repeats: int, cores: set[int]) -> None:
        """Begins to time, on some cores."""
        self._pipe.send((rows, repeats, cores))

    def finish(self) -> list[float]:
        """Seconds of the steps begun by ``start``."""
        times: list[float] = self._pipe.recv()
        return times

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, threads: int, setting: tuple[str, int, int, int, torch.dtype]) -> None:
    torch.set_num_threads(threads)
    size, vocab_size, tokens, most_rows, dtype = setting
    model = random_model(size, vocab_size, tokens + most_rows + 1, dtype, 0)
    timer = StepTimer(ModelRunner(model, 1, tokens + most_rows), tokens)
    pipe.send(None)
    while True:
        try:
            rows, repeats, cores = pipe.recv()
        except EOFError:
            return
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
        pipe.send(timer.seconds(rows, repeats))


def print_table(results: dict[str, Any]) -> None:
    """Milliseconds by rows, a line a way."""
    ms = results["ms"]
    counts = list(next(iter(ms.values())))
    print(f"{'rows':>18}", *(f"{rows:>7}" for rows in counts))
    for name, row in ms.items():
        print(f"{name:>18}", *(f"{row[rows][0]:7.1f}" for rows in counts))
    print(f"{'together / alone':>18}", *(f"{value:7.2f}" for value in results["together_over_alone"].values()))
    least = math.floor(min(results["together_over_alone"].values()) * 100) / 100
    print(f"ranks at once cost at least {least:.2f} times one alone")


if __name__ == "__main__":
    sys.exit(main())
