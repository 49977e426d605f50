"""Ten times more requests than a server can hold: do accepted ones keep their latency, and are the others refused at once?

outrider bench service overload [--seconds 60] [--factor 10]

At capacity, as many clients as the server may hold ask one request after the other, which measures its rate and latency. Then
requests arrive at random moments at ``factor`` times that rate, independently of earlier ones. Every request has to be answered
or refused by a 429 with ``Retry-After``. The memory of all processes is sampled throughout.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.run import Bench, Results
from outrider.experiments.service.asks import Answer, Ask, ask, make_asks
from outrider.experiments.service.served import Served, conducted, memory_mib, replica_settings, sample_sums, spread, until_whole

_KINDS = ("greedy", "sampled", "text", "whole")
_CALM_S, _SAMPLE_S = 2.0, 2.0  # before memory is read after a phase; between two samples
_WARM_UP_S = 10.0  # at capacity, not counted
_MAX_TOKENS = 200
_RUNNING, _WAITING, _SEED = 8, 8, 0


@dataclass(slots=True)
class Phase:
    """A time of load."""

    name: str
    began_s: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the phase; times of accepted requests are those of complete answers."""
        accepted = [one for one in self.answers if one.status == 200 and one.error is None]
        refused = [one for one in self.answers if one.status == 429]
        failed = [one for one in self.answers if one.error is not None and one.status != 429]
        return {
            "seconds": round(self.seconds, 1),
            "requests": len(self.answers),
            "statuses": Counter(str(one.status) for one in self.answers),
            "accepted_per_s": round(len(accepted) / self.seconds, 2),
            "latency_s": spread([one.seconds for one in accepted]),
            "ttft_s": spread([one.first_s for one in accepted if one.first_s is not None]),
            "refused_after_s": spread([one.seconds for one in refused]),
            "without_retry_after": sum(one.retry_after is None for one in refused),
            "retry_after": Counter(one.retry_after for one in refused if one.retry_after is not None),
            "failed": len(failed),
            "failures": Counter(one.error for one in failed).most_common(5),
        }


async def trial(server: Served, model: str, args: argparse.Namespace, progress: Progress) -> Results:
    """Measure capacity, overload and the state afterwards."""
    rng, held = random.Random(_SEED), _RUNNING + _WAITING
    asks = make_asks(1000, _MAX_TOKENS, _SEED, _KINDS)
    memory: list[tuple[float, dict[str, float]]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        await at_capacity(client, model, asks, held, _WARM_UP_S)
        pids = server.serve_pids()
        watch = asyncio.create_task(sample_memory(server, memory))
        capacity = await at_capacity(client, model, asks, held, args.seconds)
        await asyncio.sleep(_CALM_S)
        history = [await history_mib(client)]
        rate = args.factor * capacity.summary()["accepted_per_s"]
        progress.say(f"at capacity: {rate / args.factor:.2f} requests per second")
        overload = await open_loop(client, model, asks, rate, args.seconds, rng)
        whole_again_s = await until_whole(client, 1)
        history.append(await history_mib(client))
        await asyncio.sleep(_CALM_S)
        watch.cancel()
    origin = capacity.began_s
    names = [name for name in memory[-1][1] if name.startswith(("ServeReplica", "ProxyActor", "redis"))]
    sizes = {name: {f"{at - origin:.1f}": found.get(name, 0.0) for at, found in memory} for name in names}
    return {
        "figures": {"resident memory": panel("curves", "", "seconds", "MiB", sizes)},
        "held": held,
        "offered_per_s": round(rate, 2),
        "phases": {phase.name: phase.summary() for phase in (capacity, overload)},
        "overload_at_s": round(overload.began_s - origin, 1),
        "whole_again_s": whole_again_s,
        "history_mib": {"before": history[0], "after": history[1]},
        "same_processes": pids == server.serve_pids(),
        "memory_mib": [(round(at - origin, 1), found) for at, found in memory],
    }


async def at_capacity(client: httpx.AsyncClient, model: str, asks: Sequence[Ask], clients: int, seconds: float) -> Phase:
    """Run clients that each send one request after the other."""
    phase, numbers = Phase("capacity"), iter(range(10**9))

    async def one() -> None:
        while time.monotonic() - phase.began_s < seconds:
            phase.answers.append(await ask(client, model, asks[next(numbers) % len(asks)]))

    await asyncio.gather(*(one() for _ in range(clients)))
    phase.seconds = time.monotonic() - phase.began_s
    return phase


async def open_loop(
    client: httpx.AsyncClient, model: str, asks: Sequence[Ask], rate: float, seconds: float, rng: random.Random
) -> Phase:
    """Send ``rate`` requests per second at random moments, and return once all have ended."""
    phase, due = Phase("overload"), time.monotonic()
    tasks: list[asyncio.Task[Answer]] = []
    while due - phase.began_s < seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(client, model, asks[len(tasks) % len(asks)])))
    phase.answers += await asyncio.gather(*tasks)
    phase.seconds = time.monotonic() - phase.began_s
    return phase


async def history_mib(client: httpx.AsyncClient) -> float:
    """Return the memory of past outputs, which grows with every answer up to its bound."""
    return round(sample_sums((await client.get("/metrics")).text).get("outrider:history_bytes", 0.0) / 2**20, 2)


async def sample_memory(server: Served, memory: list[tuple[float, dict[str, float]]]) -> None:
    """Append the memory of all processes every few seconds, until cancelled."""
    while True:
        memory.append((time.monotonic(), memory_mib(server)))
        await asyncio.sleep(_SAMPLE_S)


def settings(args: argparse.Namespace) -> list[str]:
    """Return the settings of the server."""
    return [*replica_settings(args.dtype, 1), f"engine.max_running={_RUNNING}", f"engine.max_waiting={_WAITING}"]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each phase")
    parser.add_argument("--factor", type=float, default=10.0, help="offered requests relative to the rate at capacity")


def not_well(results: Results, args: argparse.Namespace) -> list[str]:
    """Return failed requests, a 429 without ``Retry-After``, and a server that is not as before."""
    over, calm = results["phases"]["overload"], results["phases"]["capacity"]
    counts = {
        "failed under load": over["failed"],
        "429 without Retry-After": over["without_retry_after"],
        "failed at capacity": calm["failed"],
    }
    found = [f"{count} requests: {words}" for words, count in counts.items() if count]
    found += ["the server is not whole again"] if results["whole_again_s"] is None else []
    return found + ([] if results["same_processes"] else ["a process was replaced"])


BENCH = Bench(
    "service-overload", __doc__ or "", conducted(trial, settings), options,
    {"seconds": 1, "factor": 1}, wrong=not_well,
)  # fmt: skip
