"""Requests of every kind while engine replicas are killed: answers compared with the undisturbed run, and pauses of streams.

outrider bench faults replicas [--requests 100] [--kills 12] [--replicas 3]

``outrider serve`` runs once. All requests are answered without a fault, then again while a random replica gets SIGKILL at random
moments. Text, finish reason, tokens, log-probabilities and usage have to be the same, streamed or not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil

from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.run import Bench, Results
from outrider.experiments.service.asks import make_asks, play
from outrider.experiments.service.served import Served, conducted, memory_mib, replica_settings, spread, until_whole

ENGINE = "ray::ServeReplica:outrider:engine"  # title of the replicas' processes
_CONCURRENCY, _POLL_S, _SEED = 12, 0.25, 0


@dataclass(slots=True)
class Killer:
    """Kills random replicas at given shares of the text of all answers."""

    server: Served
    moments: list[float]  # shares, ascending
    rng: random.Random
    total: int  # expected characters
    come: int = 0
    at_s: list[float] = field(default_factory=list)  # time.monotonic of each kill

    def came(self, text: str) -> None:
        """Count a piece of text, and kill a replica if a moment has come."""
        self.come += len(text)
        if self.moments and self.come >= self.moments[0] * self.total:
            starting = {process.pid for process in self.server.processes(f"{ENGINE}.initialize")}  # holds no request yet
            victims = [process for process in self.server.processes(ENGINE) if process.pid not in starting]
            if victims:
                self.moments.pop(0)
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    self.rng.choice(victims).send_signal(signal.SIGKILL)
                    self.at_s.append(time.monotonic())


async def trial(server: Served, model: str, args: argparse.Namespace, progress: Progress) -> Results:
    """Run both passes, and wait until all replicas are ready again."""
    rng, asks = random.Random(_SEED), make_asks(args.requests, args.max_tokens, _SEED)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        right, calm_s = await play(client, model, asks, _CONCURRENCY)
        failed = [told.error for told in right if told.error]
        if failed:
            raise RuntimeError(f"the undisturbed run failed: {failed[0]}")
        total = sum(len(text) for told in right for text in told.texts.values())
        moments = sorted(rng.uniform(0.02, 0.95) for _ in range(args.kills))
        killer = Killer(server, moments, rng, total)
        before, began, seen = memory_mib(server), time.monotonic(), list[tuple[float, int]]()
        watch = asyncio.create_task(count_replicas(client, seen))
        answers, under_fire_s = await play(client, model, asks, _CONCURRENCY, killer.came)
        whole_again_s = await until_whole(client, args.replicas)
        watch.cancel()
    wrong = [
        {"kind": request.kind, "differs": found, "error": told.error}
        for request, told, good in zip(asks, answers, right, strict=True)
        if (found := told.differs(good))
    ]
    for entry in wrong:
        progress.say(f"not the undisturbed answer: {entry}")
    streamed = [(told, good) for request, told, good in zip(asks, answers, right, strict=True) if request.body.get("stream")]
    pauses = [max((told.pause_s(at) for at in killer.at_s if at < told.times[-1]), default=0.0) for told, _ in streamed]
    return {
        "requests": len(asks), "identical": len(asks) - len(wrong), "wrong": wrong, "kills": len(killer.at_s),
        "kinds": Counter(request.kind for request in asks),
        "seconds": {"undisturbed": round(calm_s, 2), "disturbed": round(under_fire_s, 2)},
        "pause_s": {"undisturbed": spread([good.pause_s(0.0) for _, good in streamed]), "disturbed": spread(pauses)},
        "pauses_s": sorted(round(pause, 3) for pause in pauses),
        "kills_s": [round(at - began, 2) for at in killer.at_s],
        "replicas_seen": [(round(at - began, 2), count) for at, count in seen],
        "whole_again_s": whole_again_s,
        "memory_mib": {"before": before, "after": memory_mib(server)},
    }  # fmt: skip


async def count_replicas(client: httpx.AsyncClient, seen: list[tuple[float, int]]) -> None:
    """Append time and number whenever the number of replicas in ``/health`` changes, until cancelled."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            replicas = (await client.get("/health")).json().get("replicas", 0)
            if not seen or seen[-1][1] != replicas:
                seen.append((time.monotonic(), replicas))
        await asyncio.sleep(_POLL_S)


def settings(args: argparse.Namespace) -> list[str]:
    """Return the settings of the server; clients without a key are one tenant, so that replicas share outputs."""
    return [*replica_settings(args.dtype, args.replicas), "tenancy.anonymous=local"]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "float32")
    parser.add_argument("--requests", type=int, default=100, help="of all kinds in turns")
    parser.add_argument("--kills", type=int, default=12, help="at random shares of the text")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=300, help="tokens per answer")


def other(results: Results, args: argparse.Namespace) -> list[str]:
    """Return the number of answers that differ from the undisturbed ones, and whether replicas are missing."""
    same, of = results["identical"], results["requests"]
    found = [f"{same} of {of} answers as undisturbed, under {results['kills']} kills"] if same < of else []
    return found + (["not all replicas are ready again"] if results["whole_again_s"] is None else [])


BENCH = Bench(
    "service-faults", __doc__ or "", conducted(trial, settings), options,
    {"requests": 1, "kills": 0, "replicas": 1, "max_tokens": 1}, wrong=other, refuses=(RuntimeError,),
)  # fmt: skip
