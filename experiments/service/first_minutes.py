"""The first five minutes of a newcomer: clone, install, serve, first answer, second start, memory and disk.

    python -m experiments.service first-minutes           # a clone of what is committed, installed anew, with no cache
    python -m experiments.service first-minutes --here    # this folder and its environment, with a cache of compiled code alone

A start is timed from its command to what an HTTP client sees: ready, then the first whole answer. Its parts are what the command
says of itself. The second start finds what the first one kept.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from experiments.bench.record import ROOT
from experiments.bench.run import Bench, Results, Run
from experiments.service.served import Served, free_port, memory_mib, running

_QUESTION = (
    "Context:\nThe library opens at nine in the morning. On Sundays it stays closed.\n\nQuestion: When does the library open?"
)
_MAX_TOKENS = 64
_START_S = 300.0
_LINE = re.compile(r"^\[ *([\d.]+) s\] (.*)$", re.MULTILINE)
_LARGEST = 12  # packages that are named


def measure(args: argparse.Namespace, run: Run) -> Results:
    """All of it, in order."""
    found: Results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = ROOT, Path(scratch) / "cache"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"XDG_CACHE_HOME": str(cache)}
        if args.here:
            run.progress.say("compiling")
            subprocess.run([sys.executable, "-m", "cluster.cli.launch.compile_ahead"], cwd=folder, env=environment, check=True)
        else:
            folder = Path(scratch) / "clone"
            run.progress.say("cloning and installing")
            found["install"] = _install(folder, environment)
        for name in ("first start", *("later start",) * args.later):
            run.progress.say(name)
            found.setdefault("starts", []).append({"start": name, **_start(folder, environment, args.set)})
        found["kept MB"] = round(sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 1e6)
    return found


def _install(folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """A clone of the last commit, and ``make install`` in it: seconds, and MB by package."""
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
    """As ``du`` counts, links left out."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(each.lstat().st_blocks * 512 for each in files if not each.is_symlink()) / 1e6


def _start(folder: Path, environment: Mapping[str, str], settings: list[str]) -> dict[str, Any]:
    """``make serve`` until the first answer has come, and what its processes hold then."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as scratch, httpx.Client(base_url=url, timeout=_START_S) as client:
        began, log = time.perf_counter(), Path(scratch) / "serve.log"
        command = ["make", "serve", f"ARGS={' '.join((f'server.port={port}', *settings))}"]
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


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("--here", action="store_true", help="this folder as it is installed, no clone")
    parser.add_argument("--later", type=int, default=1, help="further starts; default: 1")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the server")


BENCH = Bench("first-minutes", __doc__ or "", measure, options, {"later": 0}, refuses=(RuntimeError, subprocess.SubprocessError))
