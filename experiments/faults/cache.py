"""Requests while Redis dies, hangs or is full: is every output right, how fast are they, and does sharing come back?

python -m experiments.faults cache --prompts FILE.jsonl [--requests 50]

Two replicas share a Redis, a third decodes plainly, all in this process; they take turns, so that none slows another down. In
each phase replica A streams all requests for a tenant that nobody has answered before, and the fault comes when half of them
are done; then replica B streams the same requests, while the fault lasts. After the repair both do it once more for another
tenant. Plain decoding runs twice: what it differs by from itself is noise. With one request at a time (--concurrency 1) a request
is compared with itself; with several it also waits for the prefills of whoever runs beside it, and shorter decoding means more
of those.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.replica import Replica
from cache_service.access import CacheAccess
from configs.schema import find_model
from configs.slices import CacheOptions, EngineOptions, ModelOptions, SpeculationOptions
from decoding.request import Request, SamplingParams
from engine.text.tokenizer import load_tokenizer
from experiments.bench.engines.contestants import Prompt
from experiments.bench.engines.models import chat_workload, fitting
from experiments.bench.options import add_model
from experiments.bench.progress import Progress
from experiments.bench.run import Bench, Results, Run
from experiments.bench.strategies import EXACT_DTYPES
from experiments.faults.figures import Answer, Pass, compared, halves, ratios
from experiments.faults.redis_process import RedisProcess

Act = Callable[[RedisProcess], None]
FAULTS: dict[str, tuple[Act, Act]] = {  # what breaks it, what mends it
    "killed": (RedisProcess.kill, RedisProcess.start),
    "stopped": (RedisProcess.pause, RedisProcess.resume),
    "full": (RedisProcess.fill, RedisProcess.make_room),
}
_MENDED_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked, and how."""

    prompts: Sequence[Prompt]
    max_tokens: int
    concurrency: int

    def stream(self, replica: Replica, name: str, tenant: str | None, at_half: Callable[[], None] | None = None) -> Pass:
        """All requests, so many at a time.

        Args:
            replica: that answers.
            name: makes the ids unique.
            tenant: whose the requests are.
            at_half: called when half of them have been answered, while others stream.
        """
        return asyncio.run(self._stream(replica, name, tenant, at_half))

    async def _stream(self, replica: Replica, name: str, tenant: str | None, at_half: Callable[[], None] | None) -> Pass:
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
            if done == len(self.prompts) // 2 and at_half is not None:
                at_half()
            shared = sum(last.stats.accepted_by_source.get(source, 0) for source in ("history", "similar"))
            return Answer(
                request.output_ids.tolist(), request.num_output, last.stats.steps, shared, seconds, last.stats.decode_s, done
            )

        began = time.perf_counter()
        answers = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(self.prompts)))
        return Pass(tuple(answers), time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Two that share, and one that decodes plainly."""

    a: Replica
    b: Replica
    plain: Replica

    def wait_until_mended(self) -> float:
        """Seconds until both talk to Redis again and nothing waits to be written.

        Raises:
            TimeoutError: they do not within a minute.
        """
        began = time.monotonic()
        for replica in (self.a, self.b):
            while not _mended(replica):
                if time.monotonic() > began + _MENDED_S:
                    raise TimeoutError(f"a replica did not find back to Redis within {_MENDED_S:.0f} s")
                time.sleep(0.01)
        return time.monotonic() - began

    def stop(self) -> None:
        """Ends all three."""
        for replica in (self.a, self.b, self.plain):
            replica.stop()


def run_loads(args: argparse.Namespace, run: Run) -> Results:
    """All phases with each number of requests at a time."""
    model = ModelOptions(find_model(args.model), dtype=args.dtype, threads=args.threads)
    tokenizer = load_tokenizer(model.path)
    workload = fitting(chat_workload(args.prompts, tokenizer, None), args.max_tokens, args.context)
    if len(workload.prompts) < args.requests:
        raise ValueError(f"{args.prompts} has {len(workload.prompts)} prompts that fit, --requests is {args.requests}")
    loads = [Load(workload.prompts[: args.requests], args.max_tokens, number) for number in args.concurrency]
    return {f"{load.concurrency} at a time": measure(model, load, args.repeats, run.progress) for load in loads}


def differing(results: Results, args: argparse.Namespace) -> list[str]:
    """Outputs that are not plain decoding's; none where the type's rounding excuses it."""
    return [
        f"{run}: {name} ({row['identical']} of {row['requests']})"
        for run, part in results.items()
        for name, row in part["phases"].items()
        if args.dtype in EXACT_DTYPES and row["identical"] < row["requests"]
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt")
    parser.add_argument("--requests", type=int, default=50, help="prompts, from the beginning of the file")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an output")
    parser.add_argument("--context", type=int, default=2048, help="of the model; longer prompts are left out")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 1], help="requests at a time; several: one run each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a replica")


def measure(model: ModelOptions, load: Load, repeats: int, progress: Progress) -> dict[str, Any]:
    """All phases, ``repeats`` times, in replicas that live through all of it."""
    phases = ["healthy", *(name for fault in FAULTS for name in (fault, f"after {fault}"))]
    tenants = tuple(f"{phase} {repeat}" for phase in ("warm-up", *phases) for repeat in range(repeats))
    with RedisProcess() as redis:
        access = CacheAccess(CacheOptions(timeout_s=0.5, retry_s=0.5), redis.url, secrets.token_bytes(32), tenants)
        engine = EngineOptions(max_running=load.concurrency)
        auto, plain = SpeculationOptions(), SpeculationOptions(strategy="autoregressive")
        a, b = (Replica(model, engine, auto, access) for _ in range(2))
        replicas = Replicas(a, b, Replica(model, engine, plain))
        try:
            for replica in (replicas.a, replicas.b, replicas.plain):
                load.stream(replica, "warm-up", "warm-up 0")
            passes: dict[str, list[Pass]] = {}
            mended_s: dict[str, list[float]] = {fault: [] for fault in FAULTS}
            for repeat in range(repeats):
                for name, done in _repeat(replicas, redis, load, repeat, mended_s):
                    passes.setdefault(name, []).append(done)
                    progress.say(f"repeat {repeat}, {name}: {done.summary}")
            counts = [replica.describe().cache for replica in (replicas.a, replicas.b)]
        finally:
            replicas.stop()
    return _results(passes) | {
        "mended_s": {fault: [round(seconds, 3) for seconds in times] for fault, times in mended_s.items()},
        "mirrors": [
            {name: getattr(count, name) for name in ("opened", "failures", "dropped_tokens", "lost_records")} for count in counts
        ],
    }


def _repeat(replicas: Replicas, redis: RedisProcess, load: Load, repeat: int, mended_s: Mapping[str, list[float]]) -> Any:
    """Passes by name, as they are done."""

    def both(phase: str, breaks: Act | None = None) -> Any:
        tenant = f"{phase} {repeat}"
        yield f"{phase}, A", load.stream(replicas.a, tenant, tenant, None if breaks is None else lambda: breaks(redis))
        if breaks is None:
            replicas.wait_until_mended()
        yield f"{phase}, B", load.stream(replicas.b, tenant, tenant)

    yield "plain", load.stream(replicas.plain, f"plain {repeat}", None)
    yield "plain again", load.stream(replicas.plain, f"plain again {repeat}", None)
    yield from both("healthy")
    for fault, (breaks, mends) in FAULTS.items():
        yield from both(fault, breaks)
        mends(redis)
        mended_s[fault].append(replicas.wait_until_mended())
        yield from both(f"after {fault}")


def _results(passes: Mapping[str, Sequence[Pass]]) -> dict[str, Any]:
    """A row for each phase, those of a fault also beside the same replica's without one; of B what A had answered before it."""
    rows = {name: compared(done, passes["plain"]) for name, done in passes.items()}
    for fault in FAULTS:
        for name in "AB":
            rows[f"{fault}, {name}"]["beside_healthy"] = ratios(passes[f"{fault}, {name}"], passes[f"healthy, {name}"])
    parts = {f"{fault}, B": halves(passes[f"{fault}, A"], passes[f"{fault}, B"]) for fault in FAULTS}
    return {"phases": rows, "tokens_per_step_of_b": parts}


def _mended(replica: Replica) -> bool:
    counts = replica.describe().cache
    assert counts is not None
    return counts.connected and counts.outbox_bytes == 0


BENCH = Bench(
    "cache-faults", __doc__ or "", run_loads, options,
    dict.fromkeys(("requests", "max_tokens", "repeats", "threads", "concurrency"), 1), wrong=differing,
)  # fmt: skip
