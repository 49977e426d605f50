"""Does an elastic group pay? One request alone and eight at once, on replicas that share steps and on as many that do not.

python -m experiments.elastic_load --prompts FILE.jsonl [--replicas 2] [--repeats 5]

Two sets of replicas, each in a process of its own with one thread, take turns round by round, so that what else the machine does
falls on both alike. In each round one replica answers all prompts one after another (``alone``); then all are asked at once, each
replica for its share of them (``at once``). The elastic set's width is looked at whenever tokens come.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from cluster.cli.generate.prompt_file import PromptFileError
from configs.schema import find_model
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from engine.errors import ModelLoadError
from engine.loading.model import load_tokenizer
from experiments.bench_models import chat_workload, fitting
from experiments.contestants import Prompt
from experiments.record import write_record
from experiments.replica_process import Answered, ReplicaProcess, ReplicaSetting
from experiments.run_options import parsed, refused, run_parser

KINDS = ("elastic", "independent")
_SETTLE_S = 1.0  # before each part: replicas follow others once they have had nothing to do for a moment
_LEAST = 0.95  # of the throughput of independent replicas, at eight at once


class ReplicaSet:
    """Replicas of one kind."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        """Starts and loads them; those of an elastic set know each other then."""
        model = ModelOptions(find_model(args.model), dtype=args.dtype, max_model_len=args.context, threads=1)
        engine, speculation = EngineOptions(max_running=args.requests), SpeculationOptions(args.strategy)
        parallelism = ParallelismOptions("lookahead") if kind == "elastic" else None
        setting = ReplicaSetting(model, engine, speculation, parallelism, secrets.token_bytes(32), args.replicas)
        self._replicas = [ReplicaProcess(setting) for _ in range(args.replicas)]
        self._max_tokens = args.max_tokens
        if parallelism is not None:
            addresses = dict(enumerate(replica.address for replica in self._replicas))
            for rank, replica in enumerate(self._replicas):
                replica.meet(rank, {other: address for other, address in addresses.items() if other != rank})

    def alone(self, prompts: Sequence[Prompt]) -> tuple[float, list[Answered]]:
        """Seconds, and the answers of the first replica, one after another."""
        began = time.perf_counter()
        self._replicas[0].ask(prompts, self._max_tokens, at_once=False)
        answers = self._replicas[0].answers()
        return time.perf_counter() - began, answers

    def at_once(self, prompts: Sequence[Prompt]) -> tuple[float, list[Answered]]:
        """Seconds, and the answers of all replicas, in the order of the prompts."""
        count = len(self._replicas)
        began = time.perf_counter()
        for at, replica in enumerate(self._replicas):
            replica.ask(prompts[at::count], self._max_tokens, at_once=True)
        parts = [replica.answers() for replica in self._replicas]
        seconds = time.perf_counter() - began
        return seconds, [parts[at % count][at // count] for at in range(len(prompts))]

    def close(self) -> None:
        """Ends the processes."""
        for replica in self._replicas:
            replica.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the record; 1 where an output of an exact model is wrong, 2 for what cannot be used."""
    args = arguments(argv)
    started = datetime.now(UTC)
    try:
        tokenizer = load_tokenizer(find_model(args.model))
        workload = fitting(chat_workload(args.prompts, tokenizer, None), args.max_tokens, args.context)
    except (PromptFileError, ModelLoadError) as error:
        return refused(error)
    if len(workload.prompts) < args.requests:
        print(f"error: {args.prompts} has {len(workload.prompts)} prompts that fit, {args.requests} are needed", file=sys.stderr)
        return 2
    results = measure(args, workload.prompts[: args.requests])
    print(write_record("elastic-load", vars(args), results, None, started, "cpu", args.out).name)
    print(told(results), file=sys.stderr)
    exact = args.dtype in ("float32", "float64")
    return 1 if exact and any(results[part]["identical"] < results[part]["requests"] for part in ("alone", "at_once")) else 0


def measure(args: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """All rounds. Each part begins with the other kind from round to round; the first round warms up and does not count."""
    rounds: dict[tuple[str, str], list[tuple[float, list[Answered]]]] = {}
    sets: dict[str, ReplicaSet] = {}
    try:
        for kind in KINDS:
            sets[kind] = ReplicaSet(kind, args)
        for number in range(args.repeats + 1):
            for part in ("alone", "at_once"):
                for kind in KINDS if number % 2 else KINDS[::-1]:
                    time.sleep(_SETTLE_S)
                    seconds, answers = getattr(sets[kind], part)(prompts)
                    if number:
                        rounds.setdefault((part, kind), []).append((seconds, answers))
                        tokens = sum(len(answer.output) for answer in answers)
                        print(f"round {number}, {part}, {kind}: {tokens / seconds:.0f} tokens/s", file=sys.stderr)
    finally:
        for replicas in sets.values():
            replicas.close()
    return {part: compared(rounds[part, "elastic"], rounds[part, "independent"], args.replicas) for part in ("alone", "at_once")}


def compared(
    elastic: Sequence[tuple[float, Sequence[Answered]]], independent: Sequence[tuple[float, Sequence[Answered]]], world: int
) -> dict[str, Any]:
    """One part on both kinds, round by round.

    Args:
        elastic: [rounds] seconds, and the answers.
        independent: likewise.
        world: replicas of the elastic set.

    Returns:
        ``ratio``: tokens per second of the elastic set over the independent one's of the same round. ``starved``: the longest
        time of a request over the median of its round, the worst of all rounds, of each kind. ``full_width``: the share of the
        elastic set's outputs that came while all ranks shared the steps. ``tokens_per_step`` of each kind.
    """
    pairs = list(zip(elastic, independent, strict=True))
    same = sum(one.output == other.output for (_, ours), (_, theirs) in pairs for one, other in zip(ours, theirs, strict=True))
    widths = [width for _, answers in elastic for answer in answers for width in answer.widths]
    kinds = {"elastic": elastic, "independent": independent}
    return {
        "requests": sum(len(answers) for _, answers in elastic),
        "identical": same,
        "ratio": spread([rate(one) / rate(other) for one, other in pairs]),
        "tokens_per_s": {kind: spread([rate(one) for one in rounds]) for kind, rounds in kinds.items()},
        "tokens_per_step": {kind: tokens_per_step(rounds) for kind, rounds in kinds.items()},
        "starved": {kind: round(max(longest(answers) for _, answers in rounds), 3) for kind, rounds in kinds.items()},
        "full_width": round(sum(width == world for width in widths) / len(widths), 3),
        "mean_width": round(float(np.mean(widths)), 3),
    }


def rate(one: tuple[float, Sequence[Answered]]) -> float:
    """Tokens per second of a round."""
    seconds, answers = one
    return sum(len(answer.output) for answer in answers) / seconds


def tokens_per_step(rounds: Sequence[tuple[float, Sequence[Answered]]]) -> float:
    """Emitted tokens per forward that emitted any."""
    answers = [answer for _, answered in rounds for answer in answered]
    return round(sum(len(answer.output) for answer in answers) / sum(answer.steps for answer in answers), 3)


def longest(answers: Sequence[Answered]) -> float:
    """The longest time of a request over the median."""
    seconds = [answer.seconds for answer in answers]
    return max(seconds) / float(np.median(seconds))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": round(float(np.median(values)), 3), "lowest": round(min(values), 3), "highest": round(max(values), 3)}


def told(results: dict[str, Any]) -> str:
    """The lines that matter."""
    alone, at_once = results["alone"], results["at_once"]
    enough = "enough" if at_once["ratio"]["median"] >= _LEAST else f"less than {_LEAST:g}"
    starved = at_once["starved"]
    return (
        f"alone: {alone['ratio']['median']} times as fast; {alone['full_width']:.0%} of the outputs came with all ranks\n"
        f"at once: {at_once['ratio']['median']} times the throughput ({enough}); the longest request takes "
        f"{starved['elastic']} times the median, on independent replicas {starved['independent']} times"
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process with code 2 where an option cannot be."""
    parser = run_parser(__doc__, dtype="bfloat16")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt")
    parser.add_argument("--replicas", type=int, default=2, help="of each kind")
    parser.add_argument("--requests", type=int, default=8, help="prompts, from the beginning of the file")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--max-tokens", type=int, default=96, help="of every output")
    parser.add_argument("--context", type=int, default=2048, help="of the model; longer prompts are left out")
    parser.add_argument("--strategy", default="auto")
    return parsed(parser, argv, replicas=2, requests=2, repeats=1, max_tokens=1)


if __name__ == "__main__":
    sys.exit(main())
