"""Where the time of a decoding step goes: the model's forward, and everything around it.

python -m experiments.step_profile --batch 1 4 16 --strategy auto autoregressive

Phases of one step of the engine, in their order: ``schedule`` (who runs), ``propose`` (the drafter, and its trees made valid),
``pack`` (trees to flat arrays), ``forward`` (the model), ``verify`` (argmax or draw, the walk, the KV of accepted rows),
``commit`` (text, counters, what the caller gets) and ``observe`` (what the drafter learns). Times are medians over steps in which
every request of the batch decodes and nothing is prefilled. ``around`` is all but the forward and the scheduling: what serving
costs beside the model.

Methods of the pieces are wrapped from outside, so that the engine pays nothing for being measured. On a GPU the forward returns
before it is done, and ``verify``, which waits for it, has the rest.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from configs.schema import find_model
from configs.slices import Dtype, EngineOptions, ModelOptions
from decoding.drafters import LOSSLESS, STRATEGIES, build_drafter
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from engine.executor import LocalExecutor
from engine.forward.runner import ModelRunner
from engine.loading.model import LoadedModel, load_model
from engine.target import LocalTarget
from experiments.bench.engines.phases import PHASES, PhaseClock, WaitingForward
from experiments.bench.options import add_model
from experiments.bench.record import ROOT
from experiments.bench.run import Bench, Results, Run, run

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)  # of requests that are not greedy; max_tokens is set for each


@dataclass(frozen=True, slots=True)
class Profiled:
    """A model with its KV slots, and tokens to cut prompts from."""

    loaded: LoadedModel
    runner: ModelRunner
    tokens: list[int]
    context: int  # tokens of a prompt
    max_tokens: int  # of an output

    def requests(self, batch: int, params: SamplingParams) -> Iterator[list[Request]]:
        """Batches of requests without end, each with prompts from other places of the text."""
        for turn in itertools.count():
            ids = [f"{turn * batch + one}" for one in range(batch)]
            starts = [self.place(number) for number in ids]
            yield [
                Request(number, self.tokens[start : start + self.context], params, tenant="local")
                for number, start in zip(ids, starts, strict=True)
            ]

    def place(self, number: str) -> int:
        """Where in the text the prompt of a request begins, by its id."""
        return int(number) * 997 % max(1, len(self.tokens) - self.context)

    def profile(self, strategy: str, batch: int, sampled: bool, args: argparse.Namespace) -> dict[str, Any]:
        """Median milliseconds of each phase, and their share of the step, with a fresh drafter."""
        loaded, runner = self.loaded, self.runner
        drafter = build_drafter(strategy, {})
        executor = LocalExecutor(runner)
        info = loaded.info(strategy, strategy in LOSSLESS)
        target = LocalTarget(runner, info, loaded.tokenizer)
        drafter.prepare(target)
        engine = Engine(executor, drafter, EngineOptions(max_running=batch), args.budget, info, loaded.tokenizer, target=target)
        if args.waiting_ms is not None:
            rows = EngineOptions().max_step_tokens + batch * args.budget
            waiting = WaitingForward(self.tokens, loaded.vocab_size, rows, args.waiting_ms / 1e3)
            setattr(runner, "forward", waiting)  # noqa: B010 - mypy: a method
        clock = PhaseClock(engine)
        shape = SAMPLED if sampled else SamplingParams()
        params = SamplingParams(self.max_tokens, shape.temperature, top_p=shape.top_p, seed=shape.seed, ignore_eos=True)
        found: list[dict[str, float]] = []
        for requests in self.requests(batch, params):
            for request in requests:
                engine.add(request)
            if args.waiting_ms is not None:
                waiting.live = [(request, self.place(request.request_id)) for request in requests]
            while engine.counts().running + engine.counts().waiting == batch and len(found) < args.steps:
                if (seconds := clock.step(batch)) is not None:
                    found.append(seconds)
            for request in requests:
                engine.abort(request.request_id)
            if len(found) >= args.steps:
                break
        del runner.forward  # the wrapper: the runner serves the next case
        return summary(strategy, batch, sampled, found)


def summary(strategy: str, batch: int, sampled: bool, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians over steps; the step is the sum of the phases' medians."""
    medians = {phase: statistics.median(step[phase] for step in found) for phase in PHASES}
    whole = sum(medians.values())
    around = whole - medians["forward"] - medians["schedule"]
    return {
        "strategy": strategy,
        "batch": batch,
        "sampled": sampled,
        "steps": len(found),
        "ms": {phase: round(1e3 * seconds, 4) for phase, seconds in medians.items()},
        "step_ms": round(1e3 * whole, 4),
        "share": {phase: round(seconds / whole, 4) for phase, seconds in medians.items()},
        "around": round(around / whole, 4),
        "drafted": round(statistics.fmean(step["drafted"] for step in found) / batch, 2),  # of a request in a step
        "tokens_per_step": round(statistics.fmean(step["emitted"] for step in found) / batch, 3),
    }


def load_bench(args: argparse.Namespace) -> Profiled:
    """The model and the text of a run.

    Raises:
        ModelLoadError: the model cannot be used.
    """
    length = args.context + args.max_tokens
    loaded = load_model(ModelOptions(find_model(args.model), dtype=args.dtype, device=args.device, threads=args.threads))
    tokens = loaded.tokenizer.encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False)
    if length > loaded.max_model_len:
        raise ValueError(f"--context and --max-tokens need {length} tokens, the model has {loaded.max_model_len}: lower them")
    runner = ModelRunner(loaded.model, max(args.batch), length + args.budget)
    return Profiled(loaded, runner, tokens, args.context, args.max_tokens)


def measure(args: argparse.Namespace, run: Run) -> Results:
    """All cases."""
    bench = load_bench(args)
    cases = []
    with torch.inference_mode():
        for sampled, strategy, batch in itertools.product([False, True], args.strategy, args.batch):
            if not (sampled and args.greedy):
                run.progress.say(f"{strategy}, {batch} at once, {'sampled' if sampled else 'greedy'}")
                cases.append(bench.profile(strategy, batch, sampled, args))
    return {"cases": cases}


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "bfloat16", get_args(Dtype)[1:])
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", help="prompts are cut from it")
    parser.add_argument("--strategy", nargs="+", choices=sorted(STRATEGIES), default=["autoregressive", "auto"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=384, help="tokens of an output; when one ends, other requests begin")
    parser.add_argument("--budget", type=int, default=64, help="most drafted rows of a request in a step")
    parser.add_argument("--steps", type=int, default=150, help="that are measured in each case")
    parser.add_argument("--greedy", action="store_true", help="leave out the sampled requests")
    waiting = "the forward waits so long and computes nothing, as the host does beside a GPU"
    parser.add_argument("--waiting-ms", type=float, help=waiting)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--device", default="cpu")


BENCH = Bench(
    "step-profile", __doc__ or "", measure, options, dict.fromkeys(("context", "max_tokens", "steps", "threads", "batch"), 1)
)

if __name__ == "__main__":
    sys.exit(run(BENCH))
