"""Ten times more requests than a server can answer: do accepted ones keep their latency, is the rest refused at once?

python -m experiments.service overload [--seconds 60] [--factor 10]

``outrider serve`` runs once. At capacity, as many clients as the server may hold ask one request after the other, which gives its
rate and its latency. Then requests arrive at random moments at ``factor`` times that rate, whatever becomes of those before them.
What is not answered has to be a 429 with ``Retry-After``. The memory of all processes is read all the time.
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

from experiments.bench.figure import panel
from experiments.bench.options import add_model, add_settings
from experiments.bench.progress import Progress
from experiments.bench.run import Bench, Results
from experiments.service.asks import Ask, make_asks
from experiments.service.served import Served, conducted, memory_mib, replica_settings, sample_sums, spread, until_whole

_KINDS = ("greedy", "sampled", "text", "whole")
_CALM_S = 2.0  # after a phase, before memory is read


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request."""

    status: int  # 0: no answer
    seconds: float
    first_s: float | None  # of a stream that was accepted
    retry_after: str | None
    whole: bool = True  # an accepted one was answered to its end
    note: str = ""


@dataclass(slots=True)
class Phase:
    """A time of load."""

    name: str
    began_s: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Its figures; the times of accepted requests are those of whole answers."""
        accepted = [one for one in self.outcomes if one.status == 200 and one.whole]
        refused = [one for one in self.outcomes if one.status == 429]
        failed = [one for one in self.outcomes if one not in accepted and one.status != 429]
        return {
            "seconds": round(self.seconds, 1),
            "requests": len(self.outcomes),
            "statuses": Counter(str(one.status) for one in self.outcomes),
            "accepted_per_s": round(len(accepted) / self.seconds, 2),
            "latency_s": spread([one.seconds for one in accepted]),
            "ttft_s": spread([one.first_s for one in accepted if one.first_s is not None]),
            "refused_after_s": spread([one.seconds for one in refused]),
            "without_retry_after": sum(one.retry_after is None for one in refused),
            "retry_after": Counter(one.retry_after for one in refused if one.retry_after is not None),
            "failed": len(failed),
            "failures": Counter(one.note for one in failed).most_common(5),
        }


async def trial(server: Served, model: str, args: argparse.Namespace, progress: Progress) -> Results:
    """Capacity, overload, and what is left of it."""
    rng, held = random.Random(args.seed), args.replicas * (args.max_running + args.max_waiting)
    asks = make_asks(1000, args.max_tokens, args.seed, _KINDS)
    memory: list[tuple[float, dict[str, float]]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        await at_capacity(client, model, asks, held, args.warm_up)
        pids = engine_pids(server)
        watch = asyncio.create_task(read_memory(server, memory))
        capacity = await at_capacity(client, model, asks, held, args.seconds)
        await asyncio.sleep(_CALM_S)
        history = [await history_mib(client)]
        progress.say(f"at capacity: {capacity.summary()['accepted_per_s']} requests a second")
        rate = args.factor * capacity.summary()["accepted_per_s"]
        overload = await open_loop(client, model, asks, rate, args.seconds, rng)
        whole_again_s = await until_whole(client, args.replicas)
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
        "same_processes": pids == engine_pids(server),
        "memory_mib": [(round(at - origin, 1), sizes) for at, sizes in memory],
    }


async def at_capacity(client: httpx.AsyncClient, model: str, asks: Sequence[Ask], clients: int, seconds: float) -> Phase:
    """Clients that ask one request after the other, as many as are held."""
    phase, numbers = Phase("capacity"), iter(range(10**9))

    async def one() -> None:
        while time.monotonic() - phase.began_s < seconds:
            phase.outcomes.append(await try_once(client, model, asks[next(numbers) % len(asks)]))

    await asyncio.gather(*(one() for _ in range(clients)))
    phase.seconds = time.monotonic() - phase.began_s
    return phase


async def open_loop(
    client: httpx.AsyncClient, model: str, asks: Sequence[Ask], rate: float, seconds: float, rng: random.Random
) -> Phase:
    """Requests at random moments, ``rate`` of them a second, whatever becomes of them; returns when all have ended."""
    phase, due = Phase("overload"), time.monotonic()
    tasks: list[asyncio.Task[None]] = []

    async def one(request: Ask) -> None:
        phase.outcomes.append(await try_once(client, model, request))

    while due - phase.began_s < seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(one(asks[len(tasks) % len(asks)])))
    await asyncio.gather(*tasks)
    phase.seconds = time.monotonic() - phase.began_s
    return phase


async def try_once(client: httpx.AsyncClient, model: str, request: Ask, headers: httpx.Headers | None = None) -> Outcome:
    """One request, answered or not."""
    began, first_s, last = time.monotonic(), None, b""
    try:
        body = {"model": model, **request.body}
        async with client.stream("POST", f"/v1/{request.route}", json=body, headers=headers) as response:
            async for part in response.aiter_raw():
                if first_s is None and request.body.get("stream") and response.status_code == 200:
                    first_s = time.monotonic() - began
                last = (last + part)[-400:]
            whole = b"[DONE]" in last or not request.body.get("stream")
            note = (
                "" if response.status_code == 200 and whole else f"{response.status_code} {last[-160:].decode(errors='replace')}"
            )
            seconds = time.monotonic() - began
            return Outcome(response.status_code, seconds, first_s, response.headers.get("retry-after"), whole, note)
    except httpx.HTTPError as error:
        return Outcome(0, time.monotonic() - began, None, None, False, type(error).__name__)


async def history_mib(client: httpx.AsyncClient) -> float:
    """Memory of remembered outputs, which grows with every answer until its bound, as ``/metrics`` tells it."""
    return round(sample_sums((await client.get("/metrics")).text).get("outrider:history_bytes", 0.0) / 2**20, 2)


def engine_pids(server: Served) -> set[int]:
    """All of Serve's processes: whoever ended and was replaced has another one."""
    return {process.pid for process in server.processes("ray::ServeReplica") + server.processes("ray::ProxyActor")}


async def read_memory(server: Served, memory: list[tuple[float, dict[str, float]]]) -> None:
    """Appends the memory of all processes every few seconds, until it is cancelled."""
    while True:
        memory.append((time.monotonic(), memory_mib(server)))
        await asyncio.sleep(2.0)


def settings(args: argparse.Namespace) -> list[str]:
    """Of the server."""
    held = [f"engine.max_running={args.max_running}", f"engine.max_waiting={args.max_waiting}"]
    return [*replica_settings(args), *held, *args.set]


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds at capacity that are not counted")
    parser.add_argument("--factor", type=float, default=10.0, help="requests offered, relative to what is answered at capacity")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--max-running", type=int, default=8, help="engine.max_running")
    parser.add_argument("--max-waiting", type=int, default=8, help="engine.max_waiting")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and moments")
    add_settings(parser)


def not_well(results: Results, args: argparse.Namespace) -> list[str]:
    """Requests that failed otherwise than by a 429 with ``Retry-After``, and a server that is not as it was."""
    over, calm = results["phases"]["overload"], results["phases"]["capacity"]
    counts = {
        "failed under load": over["failed"],
        "429 without Retry-After": over["without_retry_after"],
        "failed": calm["failed"],
    }
    found = [f"{count} requests {words}" for words, count in counts.items() if count]
    found += ["the server is not whole again"] if results["whole_again_s"] is None else []
    return found + ([] if results["same_processes"] else ["a process was replaced"])


BENCH = Bench(
    "service-overload", __doc__ or "", conducted(trial, settings), options,
    {"seconds": 1, "factor": 1, "replicas": 1, "max_running": 1, "max_waiting": 1}, wrong=not_well,
)  # fmt: skip
