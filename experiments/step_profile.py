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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from configs.schema import find_model
from configs.slices import Dtype, EngineOptions, ModelOptions
from decoding.drafters import LOSSLESS, STRATEGIES, Drafter, build_drafter
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from engine.executor import LocalExecutor
from engine.forward.batch import Work
from engine.forward.runner import ModelRunner
from engine.loading.model import LoadedModel, load_model, load_tokenizer
from engine.target import LocalTarget
from experiments.guided import SIZES, random_model
from experiments.record import ROOT, write_record
from experiments.run_options import parsed, run_parser
from experiments.waiting_forward import WaitingForward

PHASES = ("schedule", "propose", "pack", "forward", "verify", "commit", "observe")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)  # of requests that are not greedy; max_tokens is set for each
_VOCAB = 50257  # of a random model without a tokenizer: GPT-2's


class PhaseClock:
    """Splits the steps of one engine into phases.

    Example: ``execute`` runs from 10 to 20 ms and the forward in it from 11 to 18: 1 ms packed, 7 ms forward, 2 ms verified.
    """

    def __init__(self, engine: Engine, executor: LocalExecutor, drafter: Drafter, clock: Callable[[], float]) -> None:
        """
        Args:
            engine: whose steps are timed by ``step``.
            executor: the engine's, as the drafter.
            clock: seconds.
        """
        self._engine, self._clock = engine, clock
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._works: Sequence[Work] = ()  # of the step
        for name, piece, method in (
            ("schedule", engine._scheduler, "schedule"),
            ("execute", executor, "execute"),
            ("forward", executor.runner, "forward"),
            ("observe", drafter, "observe"),
        ):
            setattr(piece, method, self._timed(name, getattr(piece, method)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "execute":
                self._works = args[0]
            started = self._clock()
            result = method(*args, **kwargs)
            self._spans.setdefault(name, []).append((started, self._clock()))
            return result

        return timed

    def step(self, batch: int) -> dict[str, float] | None:
        """One step of the engine: seconds of each phase, drafted rows and emitted tokens of all requests.

        None where anything was prefilled, or fewer than ``batch`` requests decoded.
        """
        self._spans.clear()
        self._works = []  # set by ``execute``
        started = self._clock()
        outputs = self._engine.step()
        ended = self._clock()
        works: Sequence[Work] = self._works
        if len(works) != batch or any(work.tree is None or work.end - work.start != 1 for work in works):
            return None
        (execute,), (forward,), (schedule,) = (self._spans[name] for name in ("execute", "forward", "schedule"))
        observe = sum(end - start for start, end in self._spans.get("observe", ()))
        return {
            "schedule": schedule[1] - schedule[0],
            "propose": execute[0] - started - (schedule[1] - schedule[0]),
            "pack": forward[0] - execute[0],
            "forward": forward[1] - forward[0],
            "verify": execute[1] - forward[1],
            "commit": ended - execute[1] - observe,
            "observe": observe,
            "drafted": sum(len(work.tree) - 1 for work in works if work.tree is not None),
            "emitted": sum(len(output.token_ids) for output in outputs),
        }


@dataclass(frozen=True, slots=True)
class Bench:
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
        drafter.prepare(LocalTarget(runner, info, loaded.tokenizer))
        engine = Engine(executor, drafter, EngineOptions(max_running=batch), args.budget, info, loaded.tokenizer)
        if args.waiting_ms is not None:
            rows = EngineOptions().max_step_tokens + batch * args.budget
            waiting = WaitingForward(self.tokens, loaded.vocab_size, rows, args.waiting_ms / 1e3)
            setattr(runner, "forward", waiting)  # noqa: B010 - mypy: a method
        clock = PhaseClock(engine, executor, drafter, time.thread_time if args.cpu_time else time.perf_counter)
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


def load_bench(args: argparse.Namespace) -> Bench:
    """The model and the text of a run.

    Raises:
        ModelLoadError: the model cannot be used.
    """
    length = args.context + args.max_tokens
    if args.random_model is None:
        options = ModelOptions(find_model(args.model), dtype=args.dtype, device=args.device, threads=args.threads)
        loaded = load_model(options)
        tokens = loaded.tokenizer.encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False)
    else:
        torch.set_num_threads(args.threads)
        tokenizer = None if args.tokenizer is None else load_tokenizer(str(args.tokenizer))
        vocab = _VOCAB if tokenizer is None else len(tokenizer)
        model = random_model(args.random_model, vocab, length, getattr(torch, args.dtype), args.seed)
        loaded = LoadedModel(model, tokenizer, f"random-{args.random_model}", length, ())
        if tokenizer is None:
            tokens = np.random.default_rng(args.seed).integers(0, vocab, 20_000).tolist()
        else:
            tokens = tokenizer.encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False)
    if length > loaded.max_model_len:
        raise ValueError(f"--context and --max-tokens need {length} tokens, the model has {loaded.max_model_len}: lower them")
    runner = ModelRunner(loaded.model, max(args.batch), length + args.budget)
    return Bench(loaded, runner, tokens, args.context, args.max_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases, prints a table and writes the record; the exit code."""
    args, started = arguments(argv), datetime.now(UTC)
    bench = load_bench(args)
    cases = []
    print_head()
    with torch.inference_mode():
        for sampled, strategy, batch in itertools.product([False, True], args.strategy, args.batch):
            if sampled and args.greedy:
                continue
            cases.append(bench.profile(strategy, batch, sampled, args))
            print_case(cases[-1])
    path = write_record(
        "step-profile", vars(args), {"cases": cases}, args.seed, started, str(bench.loaded.model.device), args.out
    )
    print(f"record: {path}")
    return 0


def print_head() -> None:
    """The names of the columns."""
    print("milliseconds of a step, medians")
    print(
        f"{'strategy':>16} {'batch':>5} {'':>7}",
        *(f"{phase:>9}" for phase in PHASES),
        f"{'step':>8} {'around':>7} {'tok/step':>8}",
    )


def print_case(case: dict[str, Any]) -> None:
    """One line of the table."""
    kind = "sampled" if case["sampled"] else "greedy"
    times = (f"{case['ms'][phase]:9.3f}" for phase in PHASES)
    print(
        f"{case['strategy']:>16} {case['batch']:>5} {kind:>7}", *times,
        f"{case['step_ms']:8.3f} {case['around']:>7.1%} {case['tokens_per_step']:>8.2f}", flush=True,
    )  # fmt: skip


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = run_parser(__doc__, dtype="bfloat16", dtypes=get_args(Dtype)[1:])
    parser.add_argument("--random-model", choices=sorted(SIZES), help="a Llama of random weights instead")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer of a random model; random tokens when absent")
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", help="prompts are cut from it")
    parser.add_argument("--strategy", nargs="+", choices=sorted(STRATEGIES), default=["autoregressive", "auto"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=384, help="tokens of an output; when one ends, other requests begin")
    parser.add_argument("--budget", type=int, default=64, help="most drafted rows of a request in a step")
    parser.add_argument("--steps", type=int, default=150, help="that are measured in each case")
    parser.add_argument("--greedy", action="store_true", help="leave out the sampled requests")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time of the engine's thread instead of time: on a busy machine, with one thread",
    )
    parser.add_argument(
        "--waiting-ms", type=float, help="the forward waits so long and computes nothing, as the host does beside a GPU"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and tokens")
    return parsed(parser, argv, context=1, max_tokens=1, steps=1, threads=1, batch=1)


if __name__ == "__main__":
    sys.exit(main())
