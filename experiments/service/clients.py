"""Clients that others wrote, against a running server: OpenAI's SDK, LangChain, locust, aiperf and schemathesis.

python -m experiments.service clients [--url http://127.0.0.1:8000] [--seconds 60] [--cases 2000] [--only openai locust]

Each gets a virtual environment of its own, kept in ``--venvs`` for the next time, so that none of them decides what this project
depends on. Without ``--url`` an ``outrider serve`` of the demo model is started. The record holds what each printed last.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from configs.schema import find_model
from experiments.bench import run as bench
from experiments.bench.options import add_model, add_settings
from experiments.peers.environments import AIPERF, Environments, MissingPeerError
from experiments.service.served import sample_sums, server_at

_SCRIPTS = Path(__file__).resolve().parent / "client_scripts"
_TAIL = 60  # lines of what a client printed that the record keeps
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PATHS = re.compile(r"(?:/[\w.+-]+){2,}(?=/)")  # folders; the last part stays


@dataclass(frozen=True, slots=True)
class Target:
    """Whom the clients ask."""

    url: str
    model: str  # its name
    tokenizer: str  # folder, or name on the hub
    seconds: float
    users: int
    cases: int
    folder: Path  # for files of theirs


@dataclass(frozen=True, slots=True)
class Client:
    """A tool from the package index."""

    package: str
    command: Callable[[Path, Target], list[str]]  # given the folder of its environment's programs


def _script(name: str, bin_: Path, target: Target) -> list[str]:
    return [str(bin_ / "python"), str(_SCRIPTS / f"{name}.py"), target.url, target.model]


def _locust(bin_: Path, target: Target) -> list[str]:
    return [
        str(bin_ / "locust"), "-f", str(_SCRIPTS / "locust_file.py"), "--headless", "--host", target.url, "--only-summary",
        "-u", str(target.users), "-r", str(target.users), "-t", f"{target.seconds:g}s", "--stop-timeout", "30",
    ]  # fmt: skip


def _aiperf(bin_: Path, target: Target) -> list[str]:
    return [
        str(bin_ / "aiperf"), "profile", "--model", target.model, "--url", target.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", target.tokenizer, "--concurrency", str(target.users), "--benchmark-duration", f"{target.seconds:g}",
        "--synthetic-input-tokens-mean", "200", "--output-tokens-mean", "100", "--extra-inputs", "ignore_eos:true",
        "--artifact-dir", str(target.folder / "aiperf"), "--ui", "none",
    ]  # fmt: skip


def _schemathesis(bin_: Path, target: Target) -> list[str]:
    return [
        str(bin_ / "schemathesis"), "run", f"{target.url}/openapi.json", "--url", target.url,
        "--checks", "not_a_server_error", "--max-examples", str(target.cases), "--phases", "examples,coverage,fuzzing",
        "--request-timeout", "120", "--suppress-health-check", "all", "--no-color",
    ]  # fmt: skip


CLIENTS: dict[str, Client] = {
    "openai": Client("openai==3.54.0", lambda bin_, target: _script("openai_sdk", bin_, target)),
    "langchain": Client("langchain-openai==1.7.3", lambda bin_, target: _script("langchain_chat", bin_, target)),
    "locust": Client("locust==2.47.0", _locust),
    "aiperf": Client(f"aiperf=={AIPERF}", _aiperf),
    "schemathesis": Client("schemathesis==4.32.5", _schemathesis),
}


def measure(args: argparse.Namespace, given: bench.Run) -> bench.Results:
    """Runs the clients, one after the other."""
    model, results = find_model(args.model), dict[str, Any]()
    made = Environments(args.venvs, {}, True, given.progress.say)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(server_at(args.url, args.model, ["model.threads=1", f"model.dtype={args.dtype}", *args.set]))
        name = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()["data"][0]["id"]
        target = Target(url, name, str(Path(model).resolve()), args.seconds, args.users, args.cases, folder)
        for client in args.only:
            given.progress.say(client)
            results[client] = run(CLIENTS[client], made.of(CLIENTS[client].package).parent, target)
            results[client]["well_after"] = httpx.get(f"{url}/health", timeout=30).json().get("status") == "ok"
        return {"clients": results, "speculation": speculation(url)}


def run(client: Client, bin_: Path, target: Target) -> dict[str, Any]:
    """Runs a client to its end; what it printed last, how long it took and its exit code."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    command, began = client.command(bin_, target), time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=target.folder,
        env=clean | {"NO_COLOR": "1", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    return {
        "package": client.package,
        "command": shown([Path(command[0]).name, *command[1:]]),
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "printed": tail(done.stdout),
    }


def shown(command: Sequence[str]) -> str:
    """A command without folders."""
    return " ".join(_PATHS.sub("", part) if part.startswith("/") else part for part in command)


def tail(text: str) -> list[str]:
    """The last lines of what a program printed, without colours and folders."""
    lines = [line.rstrip() for line in _COLOURS.sub("", text).replace("\r", "\n").split("\n")]
    return [_PATHS.sub("", line) if "://" not in line else line for line in lines if line][-_TAIL:]


def speculation(url: str) -> Mapping[str, float]:
    """The four counters that load tools make acceptance of, after all clients; empty where ``/metrics`` is closed."""
    answer = httpx.get(f"{url}/metrics", timeout=30)
    sums = sample_sums(answer.text) if answer.status_code == 200 else {}
    return {name: value for name, value in sums.items() if name.startswith("vllm:spec_decode_num_") and name.endswith("_total")}


def options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--url", help="of a running server; one of its own when absent")
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS), help="clients to run; all by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load by locust, and by aiperf")
    parser.add_argument("--users", type=int, default=4, help="of locust and aiperf at once")
    parser.add_argument("--cases", type=int, default=200, help="examples of schemathesis for each operation")
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "outrider-clients", help="kept between runs")
    add_settings(parser)


def failed(results: bench.Results, args: argparse.Namespace) -> list[str]:
    """The clients that failed, or after which the server was not well."""
    return [name for name, of in results["clients"].items() if of["exit_code"] or not of["well_after"]]


BENCH = bench.Bench(
    "clients", __doc__ or "", measure, options, dict.fromkeys(("seconds", "users", "cases"), 1), wrong=failed,
    refuses=(RuntimeError, MissingPeerError, httpx.HTTPError),
)  # fmt: skip
