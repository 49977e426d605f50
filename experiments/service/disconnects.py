"""Clients that leave in the middle of a request: how soon are all slots free, and are later answers as before?

outrider bench service disconnects [--clients 1000] [--waves 10]

In waves, clients ask for long answers and close their sockets: some at once, some in the middle of a stream, some while a whole
answer is computed. After each wave the time is measured until ``/health`` counts no request. Before the first wave and
after the last one some requests are answered to their end, and have to have the same answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from urllib.parse import urlsplit

import httpx

from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.run import Bench, Results
from outrider.experiments.service.asks import Ask, make_asks, play
from outrider.experiments.service.attacks.shots import Target, fire, post
from outrider.experiments.service.served import Served, conducted, memory_mib, replica_settings, spread, until_whole

_STREAMS = ("greedy", "sampled", "two choices", "text", "references")
_WHOLES = ("whole", "whole, two choices")
_WHOLE_SHARE = 0.3  # of requests without streaming
_AT_ONCE = 0.15  # share of clients that leave before any answer
_MAX_TOKENS = 1500  # of an answer nobody waits for
_POLL_S, _GIVEN_UP_S = 0.02, 30.0
_WITHIN_S = 1.0  # goal for free slots
_CHECKS = 12  # requests answered to their end
_REPLICAS, _SEED = 2, 0


async def trial(server: Served, model: str, args: argparse.Namespace, progress: Progress) -> Results:
    """Run all waves between two passes of undisturbed requests."""
    rng, checks = random.Random(_SEED), make_asks(_CHECKS, 64, _SEED)
    left: Counter[str] = Counter()
    frees: list[float] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        before, _ = await play(client, model, checks, len(checks))
        memory = [memory_mib(server)]
        for wave in range(args.waves):
            count = args.clients // args.waves + (wave < args.clients % args.waves)
            kinds = [rng.choice(_WHOLES if rng.random() < _WHOLE_SHARE else _STREAMS) for _ in range(count)]
            asks = [make_asks(1, _MAX_TOKENS, wave * args.clients + at, [kind])[0] for at, kind in enumerate(kinds)]
            left.update(await asyncio.gather(*(leave(server.url, model, request, rng) for request in asks)))
            frees.append(await until_free(client))
            memory.append(memory_mib(server))
            progress.say(f"wave {wave + 1} of {args.waves}: free after {frees[-1]} s")
        whole_again_s = await until_whole(client, _REPLICAS)
        after, _ = await play(client, model, checks, len(checks))
    return {
        "clients": sum(left.values()),
        "left": left,
        "frees_s": frees,
        "free_s": spread(frees),
        "whole_again_s": whole_again_s,
        "checked": len(checks),
        "identical": sum(not told.differs(right) for told, right in zip(after, before, strict=True)),
        "errors": [told.error for told in (*before, *after) if told.error],
        "memory_mib": memory,
    }


async def leave(url: str, model: str, request: Ask, rng: random.Random) -> str:
    """Send a request, close the socket at a random moment and return the state of the answer.

    Returns:
        ``at once``, ``mid-stream``, ``while it was computed``, ``refused``, or ``too late`` if the answer was complete.
    """
    at = urlsplit(url)
    await asyncio.sleep(rng.uniform(0, 0.5))
    stay_s = 0.0 if rng.random() < _AT_ONCE else rng.uniform(0.0, 3.0)
    shot = post(f"/v1/{request.route}", {"model": model, **request.body}, None, stay_s=stay_s)
    reply = await fire(shot, Target(str(at.hostname), int(at.port or 80), model))
    if reply.status not in (0, 200):
        return f"refused: {reply.status}"
    if reply.has_ended:
        return "too late"
    return "mid-stream" if reply.status else "while it was computed" if stay_s else "at once"


async def until_free(client: httpx.AsyncClient) -> float:
    """Return the seconds until ``/health`` counts no request. Raises TimeoutError."""
    began = time.monotonic()
    while time.monotonic() - began < _GIVEN_UP_S:
        health = (await client.get("/health")).json()
        if health.get("running", 1) + health.get("waiting", 1) == 0:
            return round(time.monotonic() - began, 3)
        await asyncio.sleep(_POLL_S)
    raise TimeoutError(f"slots are in use {_GIVEN_UP_S:g} s after the last client left: {health}")


def settings(args: argparse.Namespace) -> list[str]:
    """Return the settings of the server."""
    return [*replica_settings(args.dtype, _REPLICAS), "tenancy.anonymous=local"]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "float32")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--waves", type=int, default=10, help="number of times the slots have to become free")


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 if there are more waves than clients."""
    if args.waves > args.clients:
        parser.error(f"--waves must be between 1 and --clients, got {args.waves}")


def late_or_other(results: Results, args: argparse.Namespace) -> list[str]:
    """Return slots that were in use too long, and answers that changed."""
    late = [f"slots were free after {max(results['frees_s'])} s"] if max(results["frees_s"]) > _WITHIN_S else []
    same, checked = results["identical"], results["checked"]
    return late + ([f"{same} of {checked} answers are as before"] if same < checked else [])


BENCH = Bench("service-disconnects", __doc__ or "", conducted(trial, settings), options, {"waves": 1}, check, late_or_other)
