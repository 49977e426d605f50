"""The first five minutes of a newcomer: clone, install, serve, first answer, second start, memory and disk.

outrider bench service first-minutes

A clone of the last commit is installed with an empty cache. A start is timed from ``make serve`` until ``/ready`` and until the
first whole answer; its parts come from the output of the command. The second start uses the files the first one kept.
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


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Install once and start twice."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch) / "clone", Path(scratch) / "cache"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"XDG_CACHE_HOME": str(cache)}
        run.progress.say("cloning and installing")
        found: Results = {"install": _install(folder, environment), "starts": []}
        for name in ("first start", "later start"):
            run.progress.say(name)
            found["starts"].append({"start": name, **_start(folder, environment)})
        found["kept MB"] = round(sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 1e6)
    return found


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


BENCH = Bench("first-minutes", __doc__ or "", measure, refuses=(RuntimeError, subprocess.SubprocessError, httpx.HTTPError))
