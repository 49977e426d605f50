"""Requests while Redis is killed, stopped or full: exactness of outputs, speed, and the return of sharing after the repair.

outrider bench faults cache --prompts FILE.jsonl [--requests 50]

Two replicas share a Redis and a third one decodes plainly, all in this process and in turns, so that none slows another down. In
each phase replica A streams all requests of a new tenant, and the fault begins when half of them are done. Then replica B streams
the same requests during the fault. After the repair both do so for another tenant. Plain decoding runs twice: its difference from
itself is noise. With --concurrency 1 a request is compared with itself; otherwise it also waits for the prefills of requests
beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.actors.replica import Replica
from outrider.cache_service.access import CacheAccess
from outrider.configs.schema import find_model
from outrider.configs.slices import CacheOptions, EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.text.tokenizer import load_tokenizer
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.engines.models import chat_workload, fitting
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.record import spread
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.bench.strategies import EXACT_DTYPES
from outrider.experiments.faults.redis_process import RedisProcess

Act = Callable[[RedisProcess], None]
FAULTS: dict[str, tuple[Act, Act]] = {  # fault and repair
    "killed": (RedisProcess.kill, RedisProcess.start),
    "stopped": (RedisProcess.pause, RedisProcess.resume),
    "full": (RedisProcess.fill, RedisProcess.make_room),
}
_REPAIRED_S = 60.0
_CONTEXT = 2048  # tokens of prompt and output


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request."""

    output: list[int]
    tokens: int
    steps: int
    shared: int  # accepted tokens from other requests' outputs
    seconds: float
    place: int  # 1 for the first request that finished


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests once, in the order of their prompts."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Number of emitted tokens."""
        return sum(answer.tokens for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a pass."""

    prompts: Sequence[Prompt]
    max_tokens: int
    concurrency: int

    async def stream(
        self, replica: Replica, name: str, tenant: str | None = None, at_half: Callable[[], None] = lambda: None
    ) -> Pass:
        """Stream all requests from a replica; ``name`` makes their ids unique, ``at_half`` is called when half are done."""
        free, done = asyncio.Semaphore(self.concurrency), 0

        async def one(number: int, prompt: Prompt) -> Answer:
            nonlocal done
            request = Request(f"{name}-{number}", prompt.ids, SamplingParams(max_tokens=self.max_tokens), tenant=tenant)
            async with free:
                began = time.perf_counter()
                async for output in replica.generate(request):
                    last = output
                seconds = time.perf_counter() - began
            if last.stats is None or last.error is not None:
                raise RuntimeError(f"request {number} of {name} failed: {last.error}")
            done += 1
            if done == len(self.prompts) // 2:
                at_half()
            shared = sum(last.stats.accepted_by_source.get(source, 0) for source in ("history", "similar"))
            return Answer(request.output_ids.tolist(), request.num_output, last.stats.steps, shared, seconds, done)

        began = time.perf_counter()
        answers = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(self.prompts)))
        return Pass(tuple(answers), time.perf_counter() - began)


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Run all phases with each number of concurrent requests."""
    model = ModelOptions(find_model(args.model), dtype=args.dtype, threads=1)
    workload = fitting(chat_workload(args.prompts, load_tokenizer(model.path), None), args.max_tokens, _CONTEXT)
    if len(workload.prompts) < args.requests:
        raise ValueError(f"{args.prompts} has {len(workload.prompts)} prompts that fit, --requests is {args.requests}")
    loads = [Load(workload.prompts[: args.requests], args.max_tokens, number) for number in args.concurrency]
    return {f"{load.concurrency} at a time": measure_load(model, load, args.repeats, run.progress) for load in loads}


def measure_load(model: ModelOptions, load: Load, repeats: int, progress: Progress) -> dict[str, Any]:
    """Run all phases ``repeats`` times on the same replicas."""
    phases = ["warm-up", "healthy", *(name for fault in FAULTS for name in (fault, f"after {fault}"))]
    tenants = tuple(f"{phase} {repeat}" for phase in phases for repeat in range(repeats))
    engine = EngineOptions(max_running=load.concurrency)
    with RedisProcess() as redis, ExitStack() as started:
        access = CacheAccess(CacheOptions(timeout_s=0.5), redis.url, secrets.token_bytes(32), tenants)

        def replica(*arguments: Any) -> Replica:
            made = Replica(model, engine, *arguments)
            started.callback(made.stop)
            return made

        a, b = (replica(SpeculationOptions(), access) for _ in range(2))
        plain = replica(SpeculationOptions(strategy="autoregressive"))
        for each in (a, b, plain):
            asyncio.run(load.stream(each, "warm-up", "warm-up 0"))
        passes: dict[str, list[Pass]] = {}
        repaired_s: dict[str, list[float]] = {fault: [] for fault in FAULTS}
        for repeat in range(repeats):
            for name, done in _repeat(a, b, plain, redis, load, repeat, repaired_s):
                passes.setdefault(name, []).append(done)
                speed = f"{done.tokens / done.seconds:.0f} tokens/s, {tokens_per_step(done.answers)} tokens per step"
                progress.say(f"repeat {repeat}, {name}: {speed}")
        counts = [each.describe().cache for each in (a, b)]
    fields = ("opened", "failures", "dropped_tokens", "lost_records")
    return {
        "phases": {name: compared(done, passes["plain"]) for name, done in passes.items()},
        "tokens_per_step_of_b": {f"{fault}, B": halves(passes[f"{fault}, A"], passes[f"{fault}, B"]) for fault in FAULTS},
        "mended_s": {fault: [round(seconds, 3) for seconds in times] for fault, times in repaired_s.items()},
        "mirrors": [{name: getattr(count, name) for name in fields} for count in counts],
    }


def _repeat(
    a: Replica, b: Replica, plain: Replica, redis: RedisProcess, load: Load, repeat: int, repaired_s: Mapping[str, list[float]]
) -> Iterator[tuple[str, Pass]]:
    """Yield the passes of a repeat with their names."""

    def both(phase: str, fault: Act | None = None) -> Iterator[tuple[str, Pass]]:
        tenant = f"{phase} {repeat}"
        at_half = (lambda: None) if fault is None else (lambda: fault(redis))
        yield f"{phase}, A", asyncio.run(load.stream(a, tenant, tenant, at_half))
        if fault is None:
            wait_until_repaired(a, b)
        yield f"{phase}, B", asyncio.run(load.stream(b, tenant, tenant))

    for name in ("plain", "plain again"):
        yield name, asyncio.run(load.stream(plain, f"{name} {repeat}"))
    yield from both("healthy")
    for name, (fault, repair) in FAULTS.items():
        yield from both(name, fault)
        repair(redis)
        repaired_s[name].append(wait_until_repaired(a, b))
        yield from both(f"after {name}")


def wait_until_repaired(*replicas: Replica) -> float:
    """Return the seconds until all replicas are connected to Redis and have written everything; ``TimeoutError`` after 60."""
    began = time.monotonic()
    for replica in replicas:
        while (counts := replica.describe().cache) is None or not counts.connected or counts.outbox_bytes:
            if time.monotonic() > began + _REPAIRED_S:
                raise TimeoutError(f"a replica did not connect to Redis within {_REPAIRED_S:.0f} s")
            time.sleep(0.01)
    return time.monotonic() - began


def tokens_per_step(answers: Sequence[Answer]) -> float | None:
    """Return emitted tokens per forward; None without forwards."""
    steps = sum(answer.steps for answer in answers)
    return round(sum(answer.tokens for answer in answers) / steps, 3) if steps else None


def compared(passes: Sequence[Pass], plain: Sequence[Pass]) -> dict[str, Any]:
    """Compare the repeats of a phase with plain decoding of the same requests.

    Returns:
        Numbers of requests, identical outputs and tokens; ``ratio``, the speed of all requests relative to plain decoding, over
        the repeats; ``request_ratio``, the same of single requests: percentiles, and the lowest one.

    Example: requests of 2 s and 4 s in plain decoding that took 1 s and 5 s in the phase have the request ratios 2.0 and 0.8.
    """
    pairs = [pair for one, other in zip(passes, plain, strict=True) for pair in zip(one.answers, other.answers, strict=True)]
    own, single = [one for one, _ in pairs], np.array([other.seconds / one.seconds for one, other in pairs])
    percentiles = {f"p{percent}": round(float(np.percentile(single, percent)), 3) for percent in (50, 5)}
    return {
        "requests": len(own),
        "identical": sum(one.output == other.output for one, other in pairs),
        "tokens": sum(one.tokens for one in own),
        "tokens_per_step": tokens_per_step(own),
        "shared_tokens": sum(one.shared for one in own),
        "tokens_per_s": spread([one.tokens / one.seconds for one in passes]),
        "ratio": spread([other.seconds / one.seconds for one, other in zip(passes, plain, strict=True)]),
        "request_ratio": percentiles | {"lowest": round(float(single.min()), 3)},
    }


def halves(first: Sequence[Pass], second: Sequence[Pass]) -> dict[str, float | None]:
    """Return B's tokens per step for requests that A answered before the fault and after it.

    Args:
        first: repeats of A; the fault began when half of the requests were done.
        second: repeats of B, with the same requests.
    """
    parts: dict[str, list[Answer]] = {"answered_before": [], "answered_after": []}
    for one, other in zip(first, second, strict=True):
        for answered, answer in zip(one.answers, other.answers, strict=True):
            before = answered.place <= len(one.answers) // 2
            parts["answered_before" if before else "answered_after"].append(answer)
    return {name: tokens_per_step(answers) for name, answers in parts.items()}


def differing(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the phases with outputs that differ from plain decoding, if the type is exact."""
    return [
        f"{run}: {name} ({row['identical']} of {row['requests']})"
        for run, part in results.items()
        for name, row in part["phases"].items()
        if args.dtype in EXACT_DTYPES and row["identical"] < row["requests"]
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt")
    parser.add_argument("--requests", type=int, default=50, help="prompts, from the beginning of the file")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens per output")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 1], help="requests at a time; one run for each number")
    parser.add_argument("--repeats", type=int, default=3)


BENCH = Bench(
    "cache-faults", __doc__ or "", measure, options,
    dict.fromkeys(("requests", "max_tokens", "repeats", "concurrency"), 1), wrong=differing,
)  # fmt: skip
