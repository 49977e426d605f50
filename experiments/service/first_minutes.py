"""The first five minutes of a newcomer: clone, install, serve, first answer, second start, memory and disk.

outrider bench service first-minutes

A clone of the last commit is installed with an empty cache. A start is timed from ``make serve`` until ``/ready`` and until the
first whole answer; its parts come from the output of the command. The second start uses the files the first one kept. An empty
Serve application starts before and after each. ``outrider generate``, to its first token, and the memory of the API process are
measured in turns with an older revision (``--against``).
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from outrider.experiments.bench.record import ROOT
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.service.served import Served, free_port, memory_mib, running

_QUESTION = (
    "Context:\nThe library opens at nine in the morning. On Sundays it stays closed.\n\nQuestion: When does the library open?"
)
_MAX_TOKENS = 64
_START_S = 300.0
_LINE = re.compile(r"^\[ *([\d.]+) s\] (.*)$", re.MULTILINE)
_LARGEST = 12  # packages listed by size
_AGAINST = "1208135"  # its packages had no common parent
_GENERATE = ("generate", "--prompt", "The capital of France is", "--max-tokens", "1")
_ROUNDS = 3
_API = "ray::ServeReplica:outrider:api"
_EMPTY = """
import signal, sys, time
from ray import serve
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for commands in the background
class Empty:
    def __call__(self, request): return "empty"
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(serve.deployment(Empty).bind())
time.sleep(3600)
"""


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", default=_AGAINST, metavar="REVISION", help="older revision to compare with, without `outrider.`"
    )


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Install once and start twice."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch) / "clone", Path(scratch) / "cache"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"XDG_CACHE_HOME": str(cache)}
        run.progress.say("cloning and installing")
        found: Results = {"install": _install(folder, environment), "starts": [], "empty_s": [_empty(folder, environment)]}
        for name in ("first start", "later start"):
            run.progress.say(name)
            found["starts"].append({"start": name, **_start(folder, environment)})
            found["empty_s"].append(_empty(folder, environment))
        run.progress.say(f"revision {args.against}")
        found |= {"against": args.against, **_in_turns(folder, Path(scratch) / "older", environment, args.against)}
        empty_s = statistics.median(found["empty_s"])
        for start in found["starts"]:
            start["of empty"] = round(start["ready_s"] / empty_s, 2)
        found["kept MB"] = round(sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 1e6)
    return found


def _empty(folder: Path, environment: Mapping[str, str]) -> float:
    """Return the seconds that an empty Serve application takes to its first 200."""
    port, began = free_port(), time.perf_counter()
    command = [str(folder / ".venv/bin/python"), "-c", _EMPTY, str(port)]
    with running("an empty application", command, folder, environment, f"http://127.0.0.1:{port}/", folder / "empty.log"):
        return round(time.perf_counter() - began, 1)


def _in_turns(folder: Path, older: Path, environment: Mapping[str, str], revision: str) -> dict[str, Any]:
    """Return the seconds of ``outrider generate`` to its first token, and the API's memory, here and in an older revision."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(older)], check=True)
    subprocess.run(["git", "checkout", "-q", revision], cwd=older, check=True)
    python = str(folder / ".venv/bin/python")
    own, other = [python, "-m", "outrider.cluster.cli.main"], [python, "-m", "cluster.cli.main"]
    sides = {"own": (own, folder), "against": (other, older)}
    found: dict[str, Any] = {"generate": {name: [] for name in sides}, "api_pss_mib": {}}
    for turn in range(1 + _ROUNDS):
        for name, (command, place) in sides.items():
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            variables = {**environment, "PYTHONPATH": str(place)}
            subprocess.run([*command, *_GENERATE], cwd=place, env=variables, check=True, stdout=subprocess.DEVNULL)
            wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if turn:  # the first one compiles and checks
                found["generate"][name].append({"wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 2)})
    for name, (command, place) in sides.items():
        url = f"http://127.0.0.1:{(port := free_port())}"
        serving = [*command, "serve", f"server.port={port}"]
        variables = {**environment, "PYTHONPATH": str(place)}
        with running(name, serving, place, variables, f"{url}/ready", place / "serve.log") as process:
            httpx.post(f"{url}/tokenize", json={"prompt": _QUESTION}, timeout=_START_S).raise_for_status()
            children = psutil.Process(process.pid).children(recursive=True)
            pss = [each.memory_full_info().pss for each in children if " ".join(each.cmdline()).startswith(_API)]
            found["api_pss_mib"][name] = round(sum(pss) / 2**20, 1)
    walls = {name: statistics.median(each["wall_s"] for each in runs) for name, runs in found["generate"].items()}
    memory = found["api_pss_mib"]
    ratios = {"generate": walls["own"] / walls["against"], "api_pss": memory["own"] / memory["against"]}
    return found | {"of older": {name: round(ratio, 2) for name, ratio in ratios.items()}}


def _install(folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Clone the last commit, run ``make install`` there, and return seconds and MB by package."""
    began = time.perf_counter()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    cloned = time.perf_counter()
    subprocess.run(["make", "install"], cwd=folder, env=dict(environment), check=True, stdout=sys.stderr)
    ended = time.perf_counter()
    (packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    sizes = {path.name: _megabytes(path) for path in packages.iterdir()}
    largest = sorted(sizes.items(), key=lambda each: -each[1])[:_LARGEST]
    return {
        "clone_s": round(cloned - began, 1), "install_s": round(ended - cloned, 1), "mb": round(_megabytes(folder / ".venv")),
        "packages_mb": {name: round(size) for name, size in largest},
    }  # fmt: skip


def _megabytes(path: Path) -> float:
    """Return the disk space as ``du`` counts it, without links."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(each.lstat().st_blocks * 512 for each in files if not each.is_symlink()) / 1e6


def _start(folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run ``make serve`` until the first answer, and return times and memory."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as scratch, httpx.Client(base_url=url, timeout=_START_S) as client:
        began, log = time.perf_counter(), Path(scratch) / "serve.log"
        command = ["make", "serve", f"ARGS=server.port={port}"]
        with running("make serve", command, folder, environment, f"{url}/ready", log) as process:
            ready_s, asked = time.perf_counter() - began, time.perf_counter()
            body = {"messages": [{"role": "user", "content": _QUESTION}], "temperature": 0, "max_tokens": _MAX_TOKENS}
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            answer = client.post("/v1/chat/completions", json={"model": model, **body}).raise_for_status().json()
            answered = time.perf_counter()
            memory = memory_mib(Served(url, psutil.Process(process.pid)))
        said = {text: float(seconds) for seconds, text in _LINE.findall(log.read_text())}
    return {
        "ready_s": round(ready_s, 1), "answer_s": round(answered - began, 1), "answer_alone_s": round(answered - asked, 2),
        "model": model, "answer": answer["choices"][0]["message"]["content"], "tokens": answer["usage"]["completion_tokens"],
        "memory_mib": memory, "said_at_s": said,
    }  # fmt: skip


BENCH = Bench(
    "first-minutes", __doc__ or "", measure, _options, refuses=(RuntimeError, subprocess.SubprocessError, httpx.HTTPError)
)
