"""Requests while ranks of a lookahead-parallel group die or stop: is every output right, how long is the pause, when is all well?

python -m experiments.rank_faults --prompts FILE.jsonl [--runs 20] [--signal KILL STOP]

``outrider serve`` runs twice: first with plain decoding, for the texts that are right, greedy and seeded ones by turns; then as
one group of ranks. In each run four requests stream at once, and when a random share of their text has come, a random rank, the
leader among them, gets the signal. The next run begins when ``/health`` says again that all ranks are there.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from cluster.cli.generate.prompt_file import PromptFileError, read_prompts
from configs.schema import find_model
from engine.errors import ModelLoadError
from engine.loading.model import load_tokenizer
from experiments.disturbed import SIGNALS, Ask, Run, Trial, ask_all
from experiments.record import write_record
from experiments.run_options import parsed, refused, run_parser
from experiments.served import served
from experiments.workloads import fits, prompt_ids

TOGETHER = 4  # requests in flight
_TEMPERATURE = 0.8


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the record; 1 where an output is wrong, 2 for what cannot be used."""
    args = arguments(argv)
    started = datetime.now(UTC)
    model = find_model(args.model)
    try:
        asks = read_asks(model, args)
    except (PromptFileError, ModelLoadError) as error:
        return refused(error)
    common = [
        f"model.dtype={args.dtype}",
        f"model.max_model_len={args.context}",
        "model.threads=1",
        "server.cpus_per_replica=0.5",
    ]
    right = right_texts(model, [*common, "speculation.strategy=autoregressive", "cache.enabled=false"], asks, args)
    group = [
        *common, "tenancy.anonymous=local", "parallelism.mode=lookahead", f"parallelism.world_size={args.world_size}",
        f"parallelism.rank_timeout_s={args.rank_timeout}",
    ]  # fmt: skip
    rng, runs = random.Random(args.seed), []
    with served(model, group) as server:
        trial = Trial(server, Path(model).name, args.world_size, args.max_tokens, args.timeout)
        calm_s, same = undisturbed(trial, asks[:TOGETHER], right)
        for at, name in enumerate(name for name in args.signal for _ in range(args.runs)):
            part = slice(at % args.runs * TOGETHER, (at % args.runs + 1) * TOGETHER)
            runs.append(trial.disturb(asks[part], right[part], name, rng))
            print(f"{name} {at % args.runs + 1} of {args.runs}: {shown(runs[-1])}", file=sys.stderr)
    results = {
        "undisturbed": {"identical": same, "of": TOGETHER, "pause_s": round(calm_s, 3)},
        "summary": {name: summary([run for run in runs if run.signal == name]) for name in args.signal},
        "runs": [asdict(run) for run in runs],
    }
    print(write_record("rank-faults", vars(args), results, args.seed, started, "cpu", args.out).name)
    wrong = sum(TOGETHER - run.identical for run in runs) + TOGETHER - same
    print(f"outputs that are not plain decoding's: {wrong} of {(len(runs) + 1) * TOGETHER}", file=sys.stderr)
    return 1 if wrong else 0


def read_asks(model: str, args: argparse.Namespace) -> list[Ask]:
    """Four requests a run, every second one sampled; prompts come again where the file has too few.

    Raises:
        PromptFileError: the file cannot be read, or has fewer than four prompts that fit.
        ModelLoadError: the model has no tokenizer.
    """
    tokenizer = load_tokenizer(model)
    prompts = [
        record.prompt
        for record in read_prompts(args.prompts)
        if fits(len(prompt_ids(record, tokenizer)), args.max_tokens, args.context)
    ]
    if len(prompts) < TOGETHER:
        raise PromptFileError(f"{args.prompts} has {len(prompts)} prompts that fit, {TOGETHER} are needed")
    return [Ask(prompts[at % len(prompts)], _TEMPERATURE * (at % 2), at) for at in range(args.runs * TOGETHER)]


def right_texts(model: str, settings: Sequence[str], asks: Sequence[Ask], args: argparse.Namespace) -> list[str]:
    """The texts of plain decoding on one replica. Raises RuntimeError when a request fails."""
    texts: list[str] = []
    with served(model, settings) as server:
        for at in range(0, len(asks), TOGETHER):
            part = asks[at : at + TOGETHER]
            answers = asyncio.run(ask_all(server.url, Path(model).name, part, args.max_tokens, lambda text: None))
            failed = [answer.error for answer in answers if answer.error is not None]
            if failed:
                raise RuntimeError(f"plain decoding failed: {failed[0]}")
            texts += [answer.text for answer in answers]
    print(f"plain decoding: {len(texts)} texts, {sum(map(len, texts))} characters", file=sys.stderr)
    return texts


def undisturbed(trial: Trial, asks: Sequence[Ask], right: Sequence[str]) -> tuple[float, int]:
    """The longest pause of any request while nothing is wrong, and how many texts are right."""
    answers = asyncio.run(ask_all(trial.server.url, trial.model, asks, trial.max_tokens, lambda text: None))
    same = sum(answer.text == text for answer, text in zip(answers, right, strict=False))
    return max(answer.pause_s(0.0) for answer in answers), same


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Outputs that are right, and medians and maxima of the times, for the followers, the leader and both together."""
    parts = {"all": runs} | {role: [run for run in runs if run.victim == role] for role in ("follower", "leader")}
    return {
        name: {
            "runs": len(part),
            "identical": sum(run.identical for run in part),
            "of": len(part) * TOGETHER,
            **{key: spread([getattr(run, key) for run in part]) for key in ("pause_s", "noticed_s", "recovered_s")},
        }
        for name, part in parts.items()
        if part
    }


def spread(values: Sequence[float | None]) -> dict[str, float]:
    """Median and maximum of what there is."""
    known = [value for value in values if value is not None]
    return {"median": round(float(np.median(known)), 3), "max": round(max(known), 3)} if known else {}


def shown(run: Run) -> str:
    """A line of progress."""
    times = f"pause {run.pause_s:.2f} s, noticed after {run.noticed_s} s, all there after {run.recovered_s} s"
    return f"{run.victim} at {run.share:.0%}, {run.identical} of {TOGETHER} right, {times}{'; '.join(('', *run.errors))}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process with code 2 where an option cannot be."""
    parser = run_parser(__doc__, dtype="float32")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt")
    parser.add_argument("--runs", type=int, default=20, help="of each signal, with four requests in flight")
    parser.add_argument("--signal", nargs="+", choices=sorted(SIGNALS), default=["KILL", "STOP"])
    parser.add_argument("--world-size", type=int, default=3, help="ranks of the group, the leader among them")
    parser.add_argument("--rank-timeout", type=float, default=2.0, help="seconds after which a silent rank is lost")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an output")
    parser.add_argument("--context", type=int, default=2048, help="of the model; longer prompts are left out")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds after which a run is taken for a hang")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    return parsed(parser, argv, runs=1, world_size=2, max_tokens=1)


if __name__ == "__main__":
    sys.exit(main())
