"""Entries of strong scaling and their results: rows, communication, crossover, predictions of the simulation, figures."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.request import PLAIN
from outrider.engine.emulation.hardware import ModelShape
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.record import ROOT
from outrider.experiments.service.served import fresh_sums
from outrider.experiments.simulation.steps import Software

TIMEOUT_S = 600.0
_NAMES = {
    "one": "", "threads": "", "lookahead": "LP ", "elastic": "LP elastic ", "tensor": "TP ", "pipeline": "PP ",
    "replicas": "replicas ",
}  # fmt: skip
KINDS = tuple(_NAMES)
COUNTERS = {
    "steps": "outrider:steps_total", "rows": "outrider:step_rows_total", "forward_s": "outrider:forward_seconds_total",
    "exchange_s": "outrider:exchange_seconds_total", "exchange_bytes": "outrider:exchange_bytes_total",
    "ttft_s": "vllm:time_to_first_token_seconds_sum", "decode_s": "vllm:request_decode_time_seconds_sum",
    "request_steps": "outrider:request_steps_total",
    "tokens": "outrider:tokens_total", "drafted": "outrider:draft_tokens_total",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """A form of parallelism."""

    kind: str  # of ``KINDS``
    workers: int  # further threads of one rank count as workers
    threads: int  # per worker

    @property
    def ranks(self) -> int:
        """Return the number of processes that compute."""
        return 1 if self.kind in ("one", "threads") else self.workers

    @property
    def rank_threads(self) -> int:
        """Return the torch threads of each rank."""
        return self.threads * self.workers // self.ranks

    @property
    def label(self) -> str:
        """Return the name in tables: ``LP 2 x 1`` has two ranks with a thread each."""
        return f"{_NAMES[self.kind]}{self.ranks} x {self.rank_threads}"

    def settings(self) -> list[str]:
        """Return the settings of its server."""
        found = [f"model.threads={self.rank_threads}", f"server.cpus_per_replica={min(0.5, 1 / self.ranks)}"]
        if self.kind in ("elastic", "replicas"):
            found.append(f"server.replicas={self.ranks}")
        if self.kind == "elastic":
            found += ["parallelism.mode=lookahead", "parallelism.world_size=auto", "parallelism.adaptive=false"]
        elif self.kind in ("lookahead", "tensor", "pipeline"):
            found += [f"parallelism.mode={self.kind}", f"parallelism.world_size={self.ranks}", "parallelism.adaptive=false"]
        return found


def forms_of(kinds: Sequence[str], workers: Sequence[int], threads: int, gpus: int | None) -> tuple[list[Form], dict[str, str]]:
    """Return the forms that this machine can run, one worker first, and the reasons of the others.

    ``gpus`` is the number of GPUs to compute on; None to compute on the processor.
    """
    found, skipped = [Form("one", 1, threads)], {}
    for count, kind in itertools.product([count for count in workers if count > 1], KINDS[1:]):
        form = Form(kind, count, threads)
        reason = _missing(form, gpus)
        if kind in kinds and reason is None:
            found.append(form)
        elif kind in kinds:
            skipped[form.label] = reason or ""
    return found, skipped


def _missing(form: Form, gpus: int | None) -> str | None:
    if form.kind == "threads" and gpus is not None:
        return "more threads do not apply to a GPU"
    if gpus is not None and gpus < form.workers:
        return f"this machine has {gpus} GPU{'s' * (gpus != 1)}"
    if form.kind == "tensor" and find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: pip install -e '.[baselines]'"
    return None


@dataclass(frozen=True, slots=True)
class Round:
    """Concurrent requests, their duration, and the engines' counters (see ``COUNTERS``)."""

    requests: int
    tokens: int
    wall_s: float  # from the first request to the last answer, HTTP included
    counts: Mapping[str, float]
    latency_s: float = 0.0  # of all requests, one after the other

    @property
    def decode_rate(self) -> float:
        """Return tokens per second of a request after its first token, by the engine's clock."""
        return (self.tokens - self.requests) / self.counts["decode_s"]


@dataclass(slots=True)
class Entry:
    """A strategy in a form with a number of concurrent requests; a round per repeat by workload.

    Several concurrent requests are from all workloads together, as the single workload ``all``.
    """

    form: Form
    strategy: str
    clients: int = 1
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    differing: int = 0

    @property
    def label(self) -> str:
        """Return the name in tables."""
        at_once = f", {self.clients} at once" if self.clients > 1 else ""
        return f"{self.form.label}, {'plain' if self.strategy == PLAIN else self.strategy}{at_once}"

    def rates(self, workload: str) -> list[float]:
        """Return tokens per second of a request after its first token, for each repeat."""
        return [one.decode_rate for one in self.rounds[workload]]

    @property
    def wall_rates(self) -> list[float]:
        """Return tokens per second of all requests together by the client's clock, for each repeat."""
        repeats = zip(*self.rounds.values(), strict=True)
        return [sum(one.tokens for one in own) / sum(one.wall_s for one in own) for own in repeats]

    def total(self, name: str) -> float:
        """Return a counter of ``COUNTERS`` over all rounds."""
        return sum(one.counts[name] for own in self.rounds.values() for one in own)


def ask(url: str, body: Mapping[str, Any], prompts: Sequence[str], clients: int) -> tuple[Round, list[str]]:
    """Send prompts with ``clients`` concurrent requests; return the texts in the order of the prompts.

    Raises:
        RuntimeError: a request is refused.
    """
    at = urlsplit(url)

    def one(prompt: str) -> tuple[int, str, float]:
        began = time.perf_counter()
        with contextlib.closing(http.client.HTTPConnection(at.hostname or "", at.port, timeout=TIMEOUT_S)) as connection:
            data = json.dumps({**body, "messages": [{"role": "user", "content": prompt}]})
            connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {answer}")
        text = answer["choices"][0]["message"]["content"] or ""
        return answer["usage"]["completion_tokens"], text, time.perf_counter() - began

    before, began = _counters(at.hostname or "", at.port), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(one, prompts))
    wall_s, after = time.perf_counter() - began, _counters(at.hostname or "", at.port)
    counts = {name: after[name] - before[name] for name in COUNTERS}
    tokens, texts, latency_s = zip(*answers, strict=True)
    return Round(len(prompts), sum(tokens), wall_s, counts, sum(latency_s)), list(texts)


def _counters(host: str, port: int | None) -> dict[str, float]:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
        sums = fresh_sums(connection)
    return {name: sums.get(sample, 0.0) for name, sample in COUNTERS.items()}


_CALIBRATE_S = 600.0
_SOFTWARE = Software()


def row_of(entry: Entry, base: Entry, shape: ModelShape | None, memory: Mapping[str, float]) -> dict[str, Any]:
    """Return the row of an entry over all workloads, compared with plain decoding on one worker (``base``).

    ``decode_ratio`` compares requests after their first token by the engine's clock, ``speed_up`` all requests together by the
    client's. ``shape`` is needed for the bytes of tensor and pipeline parallelism; ``memory`` is MiB by process or GPU.
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
    """Return bytes and seconds per step that ranks exchange, ``measured`` by them or ``computed`` from the steps' rows.

    Tensor parallelism sums a row of each layer twice; a ring sends 2 (n - 1) / n of its bytes per rank, with n ranks. A pipeline
    passes each row on n times. Their times are unknown: ``seconds`` is None.

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
    """Return the form and strategy with most tokens per second, by numbers of workers and of concurrent requests.

    ``threads`` are one worker of another size, and left out. A sentence says from how many concurrent requests another form wins,
    and its ratio to the best of the other forms.
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
    """Describe where the winner changes with the number of concurrent requests."""
    parts, former = [], ""
    for clients, won in by_clients.items():
        if won["form"] != former:
            name = "plain" if won["strategy"] == PLAIN else won["strategy"]
            parts.append(f"from {clients} at once {won['form']} with {name} ({won['ahead']:.2f} times {won['next']})")
        former = won["form"]
    return ", ".join(parts)


def figures(rows: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the panels: speed after the first token, speed-up by load, tokens per step by ranks, and prediction."""
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
        series = {name: {label: row[name] for label, row in told.items()} for name in ("measured", "predicted")}
        found["prediction"] = panel("bars", "simulated from this machine's own calibration", "", "speed-up", series)
    return found


def one_worker(entries: Sequence[Entry], clients: int) -> Entry:
    """Return plain decoding on one worker with as many concurrent requests."""
    return next(entry for entry in entries if entry.form == Form("one", 1, entry.form.threads) and entry.clients == clients)


def calibrated(model: str, dtype: str, device: str, threads: int) -> LatencyCurve:
    """Measure the latency curve of one worker with ``outrider doctor --calibrate``.

    Raises:
        ValueError: the command fails; with its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--model", model, "--dtype", dtype, "--device", device, "--threads", str(threads)]
        command = [
            sys.executable,
            "-m",
            "outrider.cluster.cli.main",
            "doctor",
            "--calibrate",
            "--json",
            "--out",
            folder,
            *settings,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_CALIBRATE_S)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ValueError(f"outrider doctor --calibrate failed, and it said: {said}")
    return LatencyCurve.from_json(json.loads(done.stdout)["curve"])
