"""A server process for experiments: started on a free port, ended with everything it started; and what can be read from it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.cli.launch.preflight import SECRET_VARIABLE
from outrider.cluster.serving.shared_answer import FRESH_S
from outrider.configs.schema import find_model
from outrider.experiments.bench.progress import Progress
from outrider.experiments.bench.record import ROOT
from outrider.experiments.bench.run import Results, Run

_START_S, _STOP_S, _POLL_S = 300.0, 60.0, 0.1
_BACK_S = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    url: str
    process: psutil.Process  # of the command line

    def processes(self, title: str) -> list[psutil.Process]:
        """Return Ray's processes whose title begins so (``ray::RankActor``), the oldest first."""
        found = []
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if " ".join(child.cmdline()).startswith(title):
                    found.append(child)
        return sorted(found, key=lambda child: child.create_time())

    def serve_pids(self) -> set[int]:
        """Return the ids of Ray Serve's processes; a replaced process has a new one."""
        return {process.pid for process in self.processes("ray::ServeReplica") + self.processes("ray::ProxyActor")}


Trial = Callable[[Served, str, argparse.Namespace, Progress], Coroutine[Any, Any, Results]]


@contextlib.contextmanager
def served(model: str, settings: Sequence[str]) -> Iterator[Served]:
    """Run ``outrider serve --model MODEL key=value ...`` on a free loopback port until the block ends.

    Raises:
        RuntimeError: it does not start; the message ends with its last output.
    """
    port = free_port()
    command = [sys.executable, "-m", "outrider.cluster.cli.main", "serve", "--model", model, f"server.port={port}", *settings]
    environment = os.environ | {"PYTHONPATH": str(ROOT), SECRET_VARIABLE: secrets.token_hex(32)}
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory() as folder,
        running("outrider serve", command, ROOT, environment, f"{url}/ready", Path(folder) / "serve.log") as process,
    ):
        yield Served(url, psutil.Process(process.pid))


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str], ready: str, log: Path,
    within_s: float = _START_S,
) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    """Run a serving command until the block ends, then interrupt it together with its children.

    The URL ``ready`` answers 200 once the command serves; ``environment`` is the complete one.

    Raises:
        RuntimeError: it does not start; the message ends with its last output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + within_s
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-500:]}")
            time.sleep(_POLL_S)
        yield process
    finally:
        _stop(process)


@contextlib.contextmanager
def server_at(url: str | None, model: str, settings: Sequence[str]) -> Iterator[str]:
    """Yield the address of the named server without ``/v1``, or of a started one if ``url`` is None."""
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    with served(find_model(model), settings) as started:
        yield started.url


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port without a listener, below the ports that Linux assigns to other processes (from 32768)."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port


def sample_sums(metrics: str) -> dict[str, float]:
    """Return the sums of the samples of ``/metrics`` by name, over all labels.

    Example:
        >>> sample_sums('# TYPE steps counter\nsteps_total{replica="a"} 2\nsteps_total{replica="b"} 3\n')
        {'steps_total': 5.0}
    """
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def fresh_sums(connection: http.client.HTTPConnection) -> dict[str, float]:
    """Return ``sample_sums`` of ``/metrics`` after the API's copy of the engines' figures has expired."""
    time.sleep(FRESH_S)
    connection.request("GET", "/metrics")
    return sample_sums(connection.getresponse().read().decode())


def conducted(
    trial: Trial, settings: Callable[[argparse.Namespace], Sequence[str]]
) -> Callable[[argparse.Namespace, Run], Results]:
    """Return the ``measure`` of a bench that runs a trial on its own server with these settings.

    The trial is called with the server, the name of its model, the command line and the progress.
    """

    def measure(args: argparse.Namespace, run: Run) -> Results:
        model = find_model(args.model)
        with served(model, settings(args)) as server:
            return asyncio.run(trial(server, Path(model).name, args, run.progress))

    return measure


def replica_settings(dtype: str, replicas: int) -> list[str]:
    """Return the settings of a server whose replicas share one core."""
    shared = [f"server.replicas={replicas}", f"server.cpus_per_replica={1 / replicas:.2f}"]
    return [f"model.dtype={dtype}", "model.threads=1", *shared]


async def until_whole(client: httpx.AsyncClient, replicas: int, timeout_s: float = _BACK_S) -> float | None:
    """Return the seconds until all replicas are ready and idle; None after the timeout."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        with contextlib.suppress(httpx.TransportError):  # counts as not ready
            health = (await client.get("/health")).json()
            sums = sample_sums((await client.get("/metrics")).text)  # /health may hide the load
            works = sums.get("vllm:num_requests_running", 1) + sums.get("vllm:num_requests_waiting", 1)
            if health.get("status") == "ok" and health.get("replicas") == replicas and not works:
                return round(time.monotonic() - began, 2)
        await asyncio.sleep(0.1)
    return None


def give_way() -> None:
    """Give this process the lowest priority, also between sessions: Linux divides time between sessions first."""
    os.setsid()
    os.nice(19)
    with contextlib.suppress(OSError):  # not available on this system
        Path("/proc/self/autogroup").write_text("19")


def memory_mib(server: Served) -> dict[str, float]:
    """Return the resident memory of the server's processes by title; the command itself is ``serve``."""
    found = {"serve": server.process.memory_info().rss / 2**20}
    for child in server.process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            title = (child.cmdline() or [child.name()])[0]
            ray = title.startswith("ray::")  # followed after a dot by the current method
            name = title.removeprefix("ray::").partition(".")[0] if ray else Path(title.split()[0]).name
            found[name] = found.get(name, 0.0) + child.memory_info().rss / 2**20
    return {name: round(size, 1) for name, size in sorted(found.items())}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 95th and 99th percentile and the maximum; empty without values."""
    if not values:
        return {}
    found = {f"p{share}": round(float(np.percentile(values, share)), 4) for share in (50, 95, 99)}
    return found | {"max": round(max(values), 4)}


def _stop(process: subprocess.Popen[bytes]) -> None:
    for last in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):  # the second SIGINT makes outrider serve end at once
        if process.poll() is None:
            os.killpg(process.pid, last)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
            return


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
