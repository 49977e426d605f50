"""What the entries of a run come to: rows, efficiency, communication, from where on which form wins, and the figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from decoding.request import PLAIN
from experiments.bench.figure import panel
from experiments.bench.scaling.asking import Entry
from experiments.bench.scaling.forms import Form
from experiments.simulation.hardware import ModelShape


def row_of(entry: Entry, base: Entry, shape: ModelShape | None, memory: Mapping[str, float]) -> dict[str, Any]:
    """An entry over all workloads.

    ``decode_ratio`` and ``speed_up`` are against plain decoding on one worker with as many requests at once, repeat by repeat: of
    a request after its first token by the engine's clock, and of all requests together by the clock of who asks.

    Args:
        entry: what is told of.
        base: plain decoding on one worker.
        shape: of the model, for the bytes of tensor and pipeline parallelism; None where it is not known.
        memory: MiB of the form's processes by title, or by GPU.
    """
    pairs = [[a / b for a, b in zip(entry.rates(name), base.rates(name), strict=True)] for name in entry.rounds]
    done = [one for own in entry.rounds.values() for one in own]
    form, requests = entry.form, sum(one.requests for one in done)
    speed_up = [round(a / b, 3) for a, b in zip(entry.wall_rates, base.wall_rates, strict=True)]
    request_steps = entry.total("request_steps")
    return {
        "form": form.label, "kind": form.kind, "workers": form.workers, "ranks": form.ranks, "threads": form.rank_threads,
        "strategy": entry.strategy, "clients": entry.clients,
        "tokens_per_s": round(statistics.median(entry.wall_rates), 2),
        "tokens_per_step": round(entry.total("tokens") / request_steps, 3),
        "drafted_per_step": round(entry.total("drafted") / request_steps, 2),
        "identical": requests - entry.differing, "records": requests,
        "decode_ratio": {"plain": [round(statistics.fmean(repeat), 3) for repeat in zip(*pairs, strict=True)]},
        "speed_up": speed_up, "efficiency": round(statistics.median(speed_up) / form.workers, 3),
        "communication": communication(entry, shape), "memory_mib": dict(memory),
    }  # fmt: skip


def communication(entry: Entry, shape: ModelShape | None) -> dict[str, Any]:
    """Bytes and seconds of a step that ranks exchange: ``measured`` by the ranks, or ``computed`` from the rows of the steps.

    Tensor parallelism sums a row of each layer twice, a ring's 2 (n - 1) / n of its bytes a rank, n ranks; a pipeline hands each
    row on n times. How long these take nobody measures: ``seconds`` is None.

    Example: 32 layers of 4,096 in two bytes on two ranks: 64 sums of 8,192 bytes, and each rank sends 8,192 of each: 1 MiB a row.
    """
    form, steps = entry.form, max(1.0, entry.total("steps"))
    if form.kind in ("lookahead", "elastic"):
        told = {"bytes": entry.total("exchange_bytes") / steps, "seconds": round(entry.total("exchange_s") / steps, 6)}
        return {"how": "measured", **told}
    if form.kind not in ("tensor", "pipeline"):
        return {"how": "none", "bytes": 0, "seconds": 0.0}
    if shape is None:
        return {"how": "unknown", "bytes": None, "seconds": None}
    row_bytes = shape.hidden * shape.value_bytes
    times = 2 * shape.layers * 2 * (form.ranks - 1) if form.kind == "tensor" else form.ranks
    return {"how": "computed", "bytes": entry.total("rows") / steps * times * row_bytes, "seconds": None}


def crossover(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which form and strategy has most tokens per second, by number of workers and of requests at once, and in sentences.

    ``threads`` are left out: they are one worker of another size. A sentence tells from how many requests at once on another form
    wins, and how far ahead of the best of another form it is: 1.00 is as fast.
    """
    workers = sorted({row["workers"] for row in rows if row["kind"] not in ("one", "threads")})
    wins: dict[str, dict[str, Any]] = {}
    sentences = []
    for count in workers:
        own = [row for row in rows if row["kind"] != "threads" and row["workers"] in (1, count)]
        by_clients = {}
        for clients in sorted({row["clients"] for row in own}):
            ordered = sorted(
                (row for row in own if row["clients"] == clients), key=lambda row: -statistics.median(row["speed_up"])
            )
            best = ordered[0]
            other = next((row for row in ordered if row["kind"] != best["kind"]), best)
            ahead = statistics.median(best["speed_up"]) / statistics.median(other["speed_up"])
            by_clients[str(clients)] = {
                "form": best["form"], "kind": best["kind"], "strategy": best["strategy"],
                "speed_up": statistics.median(best["speed_up"]), "next": other["form"], "ahead": round(ahead, 3),
            }  # fmt: skip
        wins[str(count)] = by_clients
        sentences.append(f"{count} workers: {_changes(by_clients)}")
    return {"wins": wins, "sentences": sentences}


def _changes(by_clients: Mapping[str, Mapping[str, Any]]) -> str:
    """Where the winner changes along the requests at once."""
    parts, former = [], ""
    for clients, won in by_clients.items():
        if won["form"] != former:
            name = "plain" if won["strategy"] == PLAIN else won["strategy"]
            parts.append(f"from {clients} at once {won['form']} with {name} ({won['ahead']:.2f} times {won['next']})")
        former = won["form"]
    return ", ".join(parts)


def figures(rows: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any]) -> dict[str, Any]:
    """Speed after the first token; speed-up by requests at once; prediction beside measurement; tokens of a step by ranks."""
    alone = [row for row in rows if row["clients"] == 1]
    speed: dict[str, dict[str, Any]] = {}
    for row in alone:
        speed.setdefault(row["form"], {})[row["strategy"]] = row["decode_ratio"]["plain"]
    found = {"speed after the first token": panel("bars", "", "", "times plain decoding on one worker", speed)}
    if any(row["clients"] > 1 for row in rows):
        for strategy in dict.fromkeys(row["strategy"] for row in rows):
            lines: dict[str, dict[str, Any]] = {}
            for row in (row for row in rows if row["strategy"] == strategy):
                lines.setdefault(row["form"], {})[str(row["clients"])] = row["speed_up"]
            found[strategy] = panel("lines", "all requests together", "requests at once", "times plain on one worker", lines)
    steps: dict[str, dict[str, float]] = {}
    for row in alone:
        if row["kind"] in ("one", "lookahead"):
            steps.setdefault(row["strategy"], {})[str(row["ranks"])] = row["tokens_per_step"]
    found["tokens of a step"] = panel("lines", "lookahead parallelism", "ranks", "tokens per step", steps)
    told = predicted.get("rows", {})
    if told:
        series = {
            name: {label: row[name] for label, row in told.items()} for name in ("measured", "predicted")
        }  # the speed-ups of all requests together
        found["prediction"] = panel("bars", "simulated from this machine's own calibration", "", "speed-up", series)
    return found


def one_worker(entries: Sequence[Entry], clients: int) -> Entry:
    """Plain decoding on one worker with so many requests at once."""
    return next(entry for entry in entries if entry.form == Form("one", 1, entry.form.threads) and entry.clients == clients)
