"""What attacks by another key, or by none, do to a calm one: its inter-token times, its texts, its rows, the server's memory.

python -m experiments.service attacks [--rounds 5] [--seconds 1.2] [--only files heads] [--once] [--parts rows server] [--resume]

``outrider serve`` runs once, with a key for a calm client, two for attackers and one for the operator. The calm client streams a
short greedy answer in a loop. In a round each form of attack has its turn: the calm client alone, beside the attack, and beside
polite clients: as many, who ask for as much and as often, and send nothing unusual. Attackers are a process that gives way to all
others and keeps to one core. ``--once`` fires each shot of each form once and says which statuses came: a 5xx is a failure.
The part ``rows`` needs no server: the real scheduler, step by step. What is measured is kept in ``--out`` until the run is over;
``--resume`` goes on with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cache_service.namespace import hash_key
from configs.schema import find_model
from experiments.bench.options import add_model
from experiments.bench.record import ROOT, Kept, git_state, portable
from experiments.bench.run import Bench, Results, Run
from experiments.service.attacks import rows
from experiments.service.attacks.attacker import Attacker, attacker_cores, once
from experiments.service.attacks.catalog import chosen
from experiments.service.attacks.shots import Target
from experiments.service.attacks.turns import Turns
from experiments.service.attacks.verdicts import Goals, is_fault, memory_fails, verdict
from experiments.service.overload import engine_pids
from experiments.service.served import Served, free_port, served

CALM, ATTACKERS, OPERATOR = "outrider-calm", ("outrider-attacker", "outrider-second-attacker"), "outrider-operator"
_PART = "service-attacks.part.jsonl"
_GOALS = Goals()


def settings(args: argparse.Namespace, admin_port: int) -> list[str]:
    """Return those of the server."""
    named = [("calm", (CALM,)), ("attacker", ATTACKERS)]
    keys = [f"tenancy.tenants.{name}.keys=[{', '.join(map(_quoted, own))}]" for name, own in named]
    operator = [f"tenancy.admin_keys=[{_quoted(OPERATOR)}]", f"server.admin_port={admin_port}"]
    return [f"model.dtype={args.dtype}", "model.threads=1", *keys, *operator]


def _quoted(key: str) -> str:
    return f'"{hash_key(key)}"'


def placement() -> dict[str, Any]:
    """Return which cores there are and which of them attackers keep to. No process of the server is pinned to any."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {"cores": cores, "attacker": attacker_cores(), "attacker_nice": 19, "server": cores}


def measure(args: argparse.Namespace, run: Run) -> Results:
    """Measure the parts that were asked for."""
    forms = chosen(args.only)
    results: Results = {"goals": {name: getattr(_GOALS, name) for name in Goals.__slots__}, "placement": placement()}
    if "rows" in args.parts and not args.once:
        run.progress.say("rows of the calm request, by the scheduler")
        results["rows"] = rows.measure()
    if "server" not in args.parts:
        return results
    model, admin_port = find_model(args.model), free_port()
    kept = None if args.once else _kept(args)
    run.progress.say("a server starts")
    with (
        served(model, settings(args, admin_port)) as server,
        contextlib.closing(_attacker(server, model, admin_port, args)) as made,
    ):
        if args.once:
            return results | _once(args, server, made.target, run)
        assert kept is not None
        turns = Turns(server, made, CALM, args.seconds, run.progress)
        turns.play(forms, kept, args.rounds, args.minutes)
    results |= summary(kept.found)
    _path(args).unlink()
    return results


def _attacker(server: Served, model: str, admin_port: int, args: argparse.Namespace) -> Attacker:
    parts = urlsplit(server.url)
    return Attacker(Target(str(parts.hostname), int(parts.port or 80), Path(model).name, ATTACKERS, admin_port, size=args.size))


def _path(args: argparse.Namespace) -> Path:
    return Path(args.out) / _PART


def _kept(args: argparse.Namespace) -> Kept:
    """Return what was measured before, of the same options and revision; nothing where this run does not go on with it."""
    path = _path(args)
    if not args.resume:
        path.unlink(missing_ok=True)
    setting = {name: getattr(args, name) for name in ("model", "dtype", "only", "seconds", "size")}
    return Kept(path, portable(setting | {"git": git_state(ROOT)}), lambda turn: (turn["form"], turn["round"]))


def _once(args: argparse.Namespace, server: Served, target: Target, run: Run) -> Results:
    run.progress.say("each shot of each form once")
    pids = engine_pids(server)
    return {"once": asyncio.run(once(chosen(args.only), target)), "same_processes": pids == engine_pids(server)}


def summary(found: list[dict[str, Any]]) -> Results:
    """Return the verdicts of what was measured, those that fail first, and the memory of each kind at its last turn."""
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
    """Return what does not reach its goal."""
    found = [f"{each['form']}: {fails}" for each in results.get("attacks", ()) for fails in each["fails"]]
    found += [
        f"{each['form']}: a calm row in {each['attack']} steps, {each['polite']} beside polite requests"
        for each in results.get("rows", ()) if each["ratio"] < _GOALS.rows
    ]  # fmt: skip
    found += [line for kind, told in results.get("memory", {}).items() for line in memory_fails(kind, told, _GOALS)]
    for title, statuses in results.get("once", {}).items():
        found += [f"{title}: {count} answers were {label}" for label, count in statuses.items() if is_fault(label)]
    return found + ([] if results.get("same_processes", True) else ["a process was replaced"])


def options(parser: argparse.ArgumentParser) -> None:
    """Add those of the command."""
    add_model(parser, "bfloat16")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each form")
    parser.add_argument("--seconds", type=float, default=1.2, help="of each of the three windows of a turn")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no further turn begins")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="forms whose titles contain one of these")
    parser.add_argument(
        "--size", type=float, default=1.0, help="of large bodies and numbers of clients, relative to the attack's"
    )
    parser.add_argument("--parts", nargs="+", choices=("rows", "server"), default=["rows", "server"])
    parser.add_argument("--once", action="store_true", help="fire each shot of each form once, and list the statuses")
    parser.add_argument(
        "--resume", action="store_true", help="go on with a run that was cut off, of the same options and revision"
    )


BENCH = Bench(
    "service-attacks", __doc__ or "", measure, options, {"rounds": 1, "seconds": 0.1, "minutes": 0.1, "size": 0.001},
    wrong=wrong, refuses=(RuntimeError,),
)  # fmt: skip
