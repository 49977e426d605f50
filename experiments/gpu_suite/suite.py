"""Parts of the GPU suite, and a run of them: order, deadline, record and table."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.bench.record import write_record
from experiments.gpu_suite.worker import Job, Setting, Worker

NAME = "gpu-suite"  # of the record
_ENOUGH = 0.6  # share of a part's time that must be left for it to begin
_GRACE_S = {"cuda": 45.0, "cpu": 200.0, "double": 200.0}  # for a late part, before its worker is killed; a CPU compiles more
_WHAT, _VALUE, _SPREAD, _GOAL = 76, 22, 16, 24  # characters of the table's columns


@dataclass(frozen=True, slots=True)
class Part:
    """Part of the suite. Its time is also its limit: parts repeat what they measure until it is over."""

    function: str  # MODULE:NAME in this package
    estimate_s: float
    what: str  # for --help
    models: bool = True  # it needs one of the sizes
    later_s: float | None = None  # for each size after the first; None if it runs for the first alone
    stage: int = 0  # the sizes after the first come between stages 0 and 1
    alone: bool = False  # see ``Job``
    environment: Mapping[str, str] = field(default_factory=dict)  # see ``Job``


# In the order in which they run. Those of stage 0, for all sizes, fit into a first call of eight minutes.
PARTS: dict[str, Part] = {
    "smoke": Part("smoke:measure_smoke", 45.0, "starts, and an answer beside transformers': GO or NO-GO", models=False),
    "any_rows": Part(
        "smoke:measure_any_rows", 20.0, "exactness of any number of rows, cuBLASLt without split-K", models=False, alone=True,
        environment={"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"},  # as vLLM; read when CUDA starts
    ),
    "tests": Part("gpu_tests:measure", 75.0, "pytest -m gpu", models=False),
    "ceilings": Part("steps:measure_ceilings", 10.0, "memory bandwidth and matrix products of the device", models=False),
    "steps": Part("steps:measure_steps", 40.0, "ms of a step: 1 row against the bandwidth, many rows against 1", later_s=15.0),
    "prefill": Part("steps:measure_prefill", 25.0, "ms of prompts of 2048 and 8192 tokens", later_s=10.0),
    "batches": Part("host:measure_batches", 60.0, "8 to 256 requests at once: tokens/s, the host's part of a step", later_s=15.0),
    "strict": Part("outputs:measure_strict", 20.0, "random weights: outputs that equal plain decoding's"),
    "real": Part("outputs:measure_real", 25.0, "--real-model on passages of docs/: tokens/s, equal outputs", models=False),
    "ranks": Part("ranks:measure", 25.0, "lookahead parallelism of two processes on one GPU", models=False),
    "end_to_end": Part("outputs:measure_end_to_end", 45.0, "tokens/s along known outputs, beside transformers'", stage=1),
    "host": Part("host:measure_host", 20.0, "ms of a step around the forward, by phase", stage=1),
    "quantized": Part("quantized:measure", 40.0, "quantized checkpoints beside the same weights in 16 bits", stage=1),
    "profile": Part("steps:measure_profile", 25.0, "kernels of a step; traces for chrome://tracing", stage=1, alone=True),
}  # fmt: skip
SIZES = ("8b", "7b", "1b", "13b", "tiny")  # keys of ``models.SIZES``, which only workers import
KINDS = ("strict", "rounding", "eager", "compiled")  # of runners; see ``models.build_runner``
_TINY_S = 8.0  # of a part with a tiny model
_WHOLE = ("smoke", "any_rows", "tests", "ranks")  # parts that take their time with a tiny model, too


def plan(parts: Sequence[str], sizes: Sequence[str]) -> list[Job]:
    """Return the jobs of a run, the most useful first."""
    first, later, last = list[Job](), list[Job](), list[Job]()
    for number, size in enumerate(sizes):
        for name in parts:
            part = PARTS[name]
            estimate_s = part.estimate_s if number == 0 else part.later_s
            if estimate_s is None:
                continue
            if size == "tiny" and name not in _WHOLE:
                estimate_s = min(estimate_s, _TINY_S)
            function = f"experiments.gpu_suite.{part.function}"
            job = Job(name, size if part.models else None, function, estimate_s, part.alone, part.environment)
            (later if number else last if part.stage else first).append(job)
    return [*first, *later, *last]


class Suite:
    """One run."""

    def __init__(
        self, args: argparse.Namespace, setting: Setting, worker: Worker, started: datetime, environment: dict[str, Any]
    ) -> None:
        """Start the clock of ``args.budget_s``; ``environment`` goes to the record, before the jobs."""
        self._args, self._setting, self._worker = args, setting, worker
        self._started, self._environment = started, environment
        self._ends = time.monotonic() + args.budget_s
        self._barred = set[str]()  # kinds of runner that cost a worker
        self.jobs: list[dict[str, Any]] = []
        self.path: Path | None = None  # of the record

    def resume(self, path: Path, jobs: Sequence[dict[str, Any]]) -> None:
        """Go on with an earlier record. Its parts that have a result are not run again."""
        self.path = path
        self.jobs = [entry for entry in jobs if entry["state"] in ("done", "n/a")]
        for entry in self.jobs:
            self._learn(entry)

    def run(self, job: Job) -> None:
        """Run a job, or skip it if it does not fit into the budget; leave it alone if it has a result."""
        if any((entry["part"], entry["size"]) == (job.part, job.size) for entry in self.jobs):
            return
        entry: dict[str, Any] = {"part": job.part, "size": job.size, "state": "running", "lines": [], "found": {}}
        self.jobs.append(entry)
        left_s, began = self._ends - time.monotonic(), time.monotonic()
        if left_s < _ENOUGH * job.estimate_s:
            why = f"needs about {job.estimate_s:.0f} s, {max(0.0, left_s):.0f} s are left"
            entry |= {"state": "skipped", "error_line": why}
        else:
            print(f"{job.name}: {left_s:.0f} s of the budget are left", flush=True)
            self._attempt(job, entry, again=True)
            entry["seconds"] = round(time.monotonic() - began, 1)
            self._learn(entry)
        if "error_line" in entry:
            print(f"{job.name}: {entry['state']}: {entry['error_line']}", flush=True)
        self.save()

    def _learn(self, entry: dict[str, Any]) -> None:
        if entry["part"] == "ceilings":
            self._setting = dataclasses.replace(self._setting, read_gb_s=entry["found"].get("read_best_gb_s"))

    def _attempt(self, job: Job, entry: dict[str, Any], again: bool) -> None:
        """Run a job, and ``again`` without the kind of runner that was in use if the worker is lost."""
        kinds = tuple(kind for kind in self._setting.kinds if kind not in self._barred)
        left_s = self._ends - time.monotonic()
        limit_s = min(job.estimate_s, max(1.0, left_s))
        grace_s = max(5.0, min(_GRACE_S[self._args.device], left_s + 10.0 - limit_s))

        def keep(value: dict[str, Any]) -> None:
            entry.update(value)
            self.save()

        outcome = self._worker.run(job, dataclasses.replace(self._setting, kinds=kinds), limit_s, grace_s, keep)
        lost, kind = outcome.pop("lost"), outcome.pop("kind")
        if lost and kind in kinds:
            self._barred.add(kind)
            if again and len(kinds) > 1 and self._ends - time.monotonic() > _ENOUGH * job.estimate_s:
                print(f"{job.name}: {outcome['error_line']}: once more, without {kind}", flush=True)
                entry["before"] = {**outcome, "kind": kind, "found": entry["found"]}
                entry |= {"found": {}, "lines": []}
                self._attempt(job, entry, again=False)
                return
        entry.update(outcome)

    def save(self) -> None:
        """Replace the record as a whole, so that a kill leaves what was found."""
        results = {"environment": self._environment, "barred_kinds": sorted(self._barred), "jobs": self.jobs}
        folder: Path = self._args.out
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as beside:
            into = folder if self.path is None else Path(beside)
            made = write_record(NAME, vars(self._args), results, 0, self._started, self._args.device, into)
            self.path = made if self.path is None else made.replace(self.path)


def print_table(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Print all parts with their states and figures."""
    print(f"\n{'':{_WHAT}} {'median':>{_VALUE}} {'range':>{_SPREAD}}  {'goal or note':{_GOAL}}")
    for job in jobs:
        name = job["part"] if job["size"] is None else f"{job['part']} {job['size']}"
        seconds = f", {job['seconds']:.0f} s" if "seconds" in job else ""
        state = "" if job["state"] == "done" else f" {job['state'].upper()}: {job.get('error_line', '')}"
        print(f"{name}{seconds}{state}")
        if "before" in job:
            print(f"  without {job['before']['kind']}, as the worker was lost: {job['before']['error_line']}")
        for text in job["found"].get("warnings", ())[: None if job["part"] == "smoke" else 3]:
            print(f"  warning: {text}")
        for line in job["lines"]:
            if len(line["value"]) > _VALUE:
                print(f"  {line['what']}: {line['value']}".rstrip(), line["goal"], line["verdict"])
                continue
            cells = (f"  {line['what']:{_WHAT - 2}}", f"{line['value']:>{_VALUE}}", f"{line['spread']:>{_SPREAD}}")
            print(*cells, "", f"{line['goal']:{_GOAL - 8}} {line['verdict']}".rstrip(), flush=True)
