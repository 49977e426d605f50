"""Profile the steps of an engine: the model's forward, and the work around it.

  outrider bench profile --batch 1 4 16 --strategy auto autoregressive

Phases of a step in order: ``schedule`` (choose requests), ``propose`` (the drafter), ``pack`` (trees to flat arrays), ``forward``
(the model), ``verify`` (argmax or sampling, the walk, the KV of accepted rows), ``commit`` (text, counters, outputs) and
``observe`` (the drafter learns). Times are medians over steps in which every request of the batch decodes and none is prefilled.
``around`` is everything but the forward and the scheduling. Methods are wrapped from outside, so measuring costs the engine
nothing. On a GPU the forward returns early, and ``verify``, which waits for it, takes the rest.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from outrider.configs.schema import find_model
from outrider.configs.slices import Dtype, EngineOptions, ModelOptions
from outrider.decoding.drafters.registry import LOSSLESS, STRATEGIES, build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.executor import LocalExecutor
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel, load_model
from outrider.engine.target import LocalTarget
from outrider.experiments.bench.engines.phases import PHASES, PhaseClock
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.record import ROOT
from outrider.experiments.bench.run import Bench, Results, Run

_SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 1}  # of requests that are not greedy


@dataclass(frozen=True, slots=True)
class Profiler:
    """A model with its KV slots, and tokens to cut prompts from."""

    loaded: LoadedModel
    runner: ModelRunner
    tokens: list[int]
    args: argparse.Namespace

    def requests(self, batch: int, params: SamplingParams) -> Iterator[list[Request]]:
        """Yield batches of requests without end, each with prompts from other places of the text."""
        context, places = self.args.context, max(1, len(self.tokens) - self.args.context)
        for turn in itertools.count():
            numbers = range(turn * batch, (turn + 1) * batch)
            starts = [number * 997 % places for number in numbers]
            yield [
                Request(str(number), self.tokens[start : start + context], params, tenant="local")
                for number, start in zip(numbers, starts, strict=True)
            ]

    def profile(self, strategy: str, batch: int, sampled: bool) -> dict[str, Any]:
        """Return median milliseconds of each phase, and their shares of the step, with a new drafter."""
        args, info, tokenizer = self.args, self.loaded.info(strategy, strategy in LOSSLESS), self.loaded.tokenizer
        drafter, target = build_drafter(strategy, {}), LocalTarget(self.runner, info, tokenizer)
        drafter.prepare(target)
        options = EngineOptions(max_running=batch)
        engine = Engine(LocalExecutor(self.runner), drafter, options, args.budget, info, tokenizer, target=target)
        clock = PhaseClock(engine)
        params = SamplingParams(args.max_tokens, ignore_eos=True, **(_SAMPLING if sampled else {}))
        found: list[dict[str, float]] = []
        for requests in self.requests(batch, params):
            for request in requests:
                engine.add(request)
            while engine.counts().running + engine.counts().waiting == batch and len(found) < args.steps:
                if (seconds := clock.step(batch)) is not None:
                    found.append(seconds)
            for request in requests:
                engine.abort(request.request_id)
            if len(found) >= args.steps:
                break
        del self.runner.forward  # the wrapper: the runner serves the next case
        return summary(strategy, batch, sampled, found)


def summary(strategy: str, batch: int, sampled: bool, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return medians over steps; the step is the sum of the phases' medians."""
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
        "drafted": round(statistics.fmean(step["drafted"] for step in found) / batch, 2),  # per request and step
        "tokens_per_step": round(statistics.fmean(step["emitted"] for step in found) / batch, 3),
    }


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Profile every strategy with every batch size, greedy and sampled."""
    length = args.context + args.max_tokens
    loaded = load_model(ModelOptions(find_model(args.model), dtype=args.dtype, device=args.device, threads=args.threads))
    if length > loaded.max_model_len:
        raise ValueError(f"--context and --max-tokens need {length} tokens, the model has {loaded.max_model_len}: lower them")
    tokens = loaded.tokenizer.encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False)
    profiler = Profiler(loaded, ModelRunner(loaded.model, max(args.batch), length + args.budget), tokens, args)
    cases = []
    with torch.inference_mode():
        for sampled, strategy, batch in itertools.product([False, True], args.strategy, args.batch):
            if not (sampled and args.greedy):
                run.progress.say(f"{strategy}, batch of {batch}, {'sampled' if sampled else 'greedy'}")
                cases.append(profiler.profile(strategy, batch, sampled))
    return {"cases": cases}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16", get_args(Dtype)[1:])
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", help="file that prompts are cut from")
    parser.add_argument("--strategy", nargs="+", choices=sorted(STRATEGIES), default=["autoregressive", "auto"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--max-tokens", type=int, default=384, help="output tokens, after which other requests begin")
    parser.add_argument("--budget", type=int, default=64, help="maximum draft tokens per request and step")
    parser.add_argument("--steps", type=int, default=150, help="steps to measure in each case")
    parser.add_argument("--greedy", action="store_true", help="skip the sampled requests")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads")
    parser.add_argument("--device", default="cpu")


BENCH = Bench(
    "step-profile", __doc__ or "", measure, options, dict.fromkeys(("context", "max_tokens", "steps", "threads", "batch"), 1)
)
