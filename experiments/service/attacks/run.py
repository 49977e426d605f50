"""Attacks with another key, or without one, beside a calm client: its inter-token times, texts and rows, and the server's memory.

outrider bench service attacks [--rounds 5] [--seconds 1.2] [--only files heads] [--once]

A server runs with a key for a calm client, two for attackers and one for the operator. The calm client streams a short greedy
answer in a loop. In a round each form of attack has its turn: the calm client alone, beside the attack, and beside polite
clients: as many, who ask for as much and as often, and send nothing unusual. Attackers are a low-priority process on one core.
The calm client's rows are counted with the real scheduler, step by step, without a server. ``--once`` fires each shot of each
form once and counts the statuses: a 5xx is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outrider.cache_service.namespace import hash_key
from outrider.configs.schema import find_model
from outrider.experiments.bench.options import add_model
from outrider.experiments.bench.run import Bench, Results, Run
from outrider.experiments.service.attacks import rows
from outrider.experiments.service.attacks.attacker import Attacker, attacker_cores, once
from outrider.experiments.service.attacks.forms import chosen
from outrider.experiments.service.attacks.shots import Target, is_fault
from outrider.experiments.service.attacks.turns import Goals, Turns, memory_fails, verdict
from outrider.experiments.service.served import free_port, served

CALM, ATTACKERS, OPERATOR = "outrider-calm", ("outrider-attacker", "outrider-second-attacker"), "outrider-operator"
_GOALS = Goals()


def settings(args: argparse.Namespace) -> list[str]:
    """Return the settings of a server with keys for all clients."""
    named = [("calm", (CALM,)), ("attacker", ATTACKERS)]
    keys = [f"tenancy.tenants.{name}.keys=[{', '.join(map(_quoted, own))}]" for name, own in named]
    return [f"model.dtype={args.dtype}", "model.threads=1", *keys, f"tenancy.admin_keys=[{_quoted(OPERATOR)}]"]


def _quoted(key: str) -> str:
    return f'"{hash_key(key)}"'


def placement() -> dict[str, Any]:
    """Return the available cores and those of attackers; the server's processes are not pinned."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {"cores": cores, "attacker": attacker_cores(), "attacker_nice": 19, "server": cores}


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Measure rows and forms, or with ``--once`` the statuses alone."""
    forms = chosen(args.only)
    results: Results = {"goals": {name: getattr(_GOALS, name) for name in Goals.__slots__}, "placement": placement()}
    if not args.once:
        run.progress.say("rows of the calm request, by the scheduler")
        results["rows"] = rows.measure()
    model, admin_port = find_model(args.model), free_port()
    run.progress.say("a server starts")
    with served(model, [*settings(args), f"server.admin_port={admin_port}"]) as server:
        parts = urlsplit(server.url)
        target = Target(str(parts.hostname), int(parts.port or 80), Path(model).name, ATTACKERS, admin_port)
        if args.once:
            run.progress.say("each shot of each form once")
            pids = server.serve_pids()
            return results | {"once": asyncio.run(once(forms, target)), "same_processes": pids == server.serve_pids()}
        with contextlib.closing(Attacker(target)) as attacker:
            found = Turns(server, attacker, CALM, args.seconds, run.progress).play(forms, args.rounds)
    return results | summary(found)


def summary(found: list[dict[str, Any]]) -> Results:
    """Return the verdicts of the turns, failures first, and the memory of each kind at its last turn."""
    by_form: dict[str, list[dict[str, Any]]] = {}
    memory: dict[str, dict[str, float]] = {}
    for turn in found:
        if "memory" in turn:
            memory[turn["kind"]] = turn["memory"]
        else:
            by_form.setdefault(turn["form"], []).append(turn)
    verdicts = [verdict(title, turns[0]["emits"], turns, _GOALS) for title, turns in by_form.items()]
    worst = sorted(verdicts, key=lambda each: (not each["fails"], -each["to_polite"]["median"]))
    return {"attacks": worst, "memory": memory}


def wrong(results: Results, args: argparse.Namespace) -> list[str]:
    """Return missed goals."""
    found = [f"{each['form']}: {fails}" for each in results.get("attacks", ()) for fails in each["fails"]]
    found += [
        f"{each['form']}: a calm row in {each['attack']} steps, {each['polite']} beside polite requests"
        for each in results.get("rows", ()) if each["ratio"] < _GOALS.rows
    ]  # fmt: skip
    found += [line for kind, memory in results.get("memory", {}).items() for line in memory_fails(kind, memory, _GOALS)]
    for title, statuses in results.get("once", {}).items():
        found += [f"{title}: {count} answers were {label}" for label, count in statuses.items() if is_fault(label)]
    return found + ([] if results.get("same_processes", True) else ["a process was replaced"])


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each form")
    parser.add_argument("--seconds", type=float, default=1.2, help="duration of each of the three windows of a turn")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="forms whose titles contain one of these")
    parser.add_argument("--once", action="store_true", help="fire each shot of each form once, and count the statuses")


BENCH = Bench(
    "service-attacks", __doc__ or "", measure, options, {"rounds": 1, "seconds": 0.1}, wrong=wrong, refuses=(RuntimeError,)
)
