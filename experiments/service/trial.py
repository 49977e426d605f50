"""What the trials of a running service share: the server, the record, and what is read of the server meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from configs.schema import find_model
from experiments.bench.progress import Progress
from experiments.bench.run import Results, Run
from experiments.service.served import Served, served

Trial = Callable[[Served, str, argparse.Namespace, Progress], Coroutine[Any, Any, Results]]
_BACK_S = 120.0


def conducted(
    trial: Trial, settings: Callable[[argparse.Namespace], Sequence[str]]
) -> Callable[[argparse.Namespace, Run], Results]:
    """What measures by a trial on a server of its own.

    Args:
        trial: given the server, the name of its model, the command line and the progress; returns the results.
        settings: of the server, by the command line.
    """

    def measure(args: argparse.Namespace, run: Run) -> Results:
        model = find_model(args.model)
        with served(model, settings(args)) as server:
            return asyncio.run(trial(server, Path(model).name, args, run.progress))

    return measure


def replica_settings(args: argparse.Namespace) -> list[str]:
    """Settings of a server with small replicas, which share a core."""
    return [
        f"model.dtype={args.dtype}",
        "model.threads=1",
        f"server.replicas={args.replicas}",
        f"server.cpus_per_replica={1 / args.replicas:.2f}",
    ]


async def until_whole(client: httpx.AsyncClient, replicas: int, timeout_s: float = _BACK_S) -> float | None:
    """Seconds until ``/health`` says that all replicas are there and none has work; None when that does not come about."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        with contextlib.suppress(httpx.TransportError):  # a slow answer is one that does not say so
            health = (await client.get("/health")).json()
            if health.get("status") == "ok" and health.get("replicas") == replicas and not health["running"] + health["waiting"]:
                return round(time.monotonic() - began, 2)
        await asyncio.sleep(0.1)
    return None


def give_way() -> None:
    """Puts this process behind all others: Linux weighs sessions as wholes, so that a low priority counts within one alone."""
    os.setsid()
    os.nice(19)
    with contextlib.suppress(OSError):  # no such groups here
        Path("/proc/self/autogroup").write_text("19")


@contextlib.contextmanager
def apart(clients: Callable[..., Coroutine[Any, Any, Counter[str]]], *arguments: object) -> Iterator[Counter[str]]:
    """Clients in a process that gives way, as if on another machine; what they counted, filled at the end.

    Args:
        clients: given the arguments, and what is set when they are to end.
    """
    spawn = multiprocessing.get_context("spawn")
    ends, found = spawn.Event(), spawn.SimpleQueue()
    process = spawn.Process(target=_apart, args=(clients, arguments, ends, found))
    process.start()
    counted: Counter[str] = Counter()
    try:
        yield counted
    finally:
        ends.set()
        counted.update(found.get())
        process.join()


def _apart(
    clients: Callable[..., Coroutine[Any, Any, Counter[str]]],
    arguments: Sequence[object],
    ends: Event,
    found: SimpleQueue[Counter[str]],
) -> None:
    give_way()

    async def run() -> Counter[str]:
        ended = asyncio.Event()
        counting = asyncio.create_task(clients(*arguments, ended))
        await asyncio.to_thread(ends.wait)
        ended.set()
        return await counting

    found.put(asyncio.run(run()))


def memory_mib(server: Served) -> dict[str, float]:
    """Resident memory of the server's processes by title, the command itself as ``serve``; those of one title together."""
    found = {"serve": server.process.memory_info().rss / 2**20}
    for child in server.process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            title = (child.cmdline() or [child.name()])[0]
            ray = title.startswith("ray::")  # what follows a dot is what it does at the moment
            name = title.removeprefix("ray::").partition(".")[0] if ray else Path(title.split()[0]).name
            found[name] = found.get(name, 0.0) + child.memory_info().rss / 2**20
    return {name: round(size, 1) for name, size in sorted(found.items())}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile and maximum; empty of nothing."""
    if not values:
        return {}
    found = {f"p{share}": round(float(np.percentile(values, share)), 4) for share in (50, 95, 99)}
    return found | {"max": round(max(values), 4)}
