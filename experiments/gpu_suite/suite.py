"""All that is to be measured on a GPU, in one call of minutes on a bare machine; a short table comes last on stdout.

    python -m experiments.gpu_suite --workloads workloads/open --tokenizer tokenizers/gpt2 --out OUT
    python -m experiments.gpu_suite --parts steps,end_to_end --sizes 13b,1b --budget-s 300 --out OUT
    python -m experiments.gpu_suite --device cpu --sizes tiny --out OUT      (tries the script itself)

Parts, in the order in which they run, and the time that each is given. Those with * run for the first of --sizes alone:

    ceilings     GB/s of a copy (bytes read and written), of reading and of a matrix with a vector; TFLOP/s of a product      20 s
    tests        pytest -m gpu over the files that have such tests                                                           150 s
    steps        ms of a step, forward and argmax: as the host waits for it (wall), between events around the forward         60 s
                 (GPU), until the forward was launched (call); of 1 row against the bytes that it must read (goal: 0.85 of
                 the measured bandwidth), of 4 to 64 rows over one (goal: 1.10 at 64), behind 512 and 2048 tokens
    end_to_end   tokens/s along known outputs (every row computed, the known token committed), and the ratio over plain       60 s
                 decoding on the same record; transformers' generate (sdpa, its default cache) along the same
    strict *     outputs of random weights, drafts beside plain decoding: how many are identical, to the token                30 s
    host *       ms of a step around the forward, by phase (goal: 0.3 together)                                               20 s
    energy *     J/token by NVML, idle power included                                                                         35 s
    shares *     lookahead parallelism: a rank's share of a tree of 64 and of 256 rows on 1 to 8 ranks, and an exchange       20 s
                 as `outrider simulate` has it: a prediction from parts, no run on 8 GPUs
    profile *    ms in kernels of a step of 1 row and of 64, and the ten longest of them; traces for chrome://tracing         25 s

Models have the shape that --sizes names and random weights; kinds of runner are graphs (captured CUDA graphs), strict (rows whose
bits do not depend on their company), eager and, if asked for, compiled (graphs of layers that torch.compile made). Figures are
medians of rounds, with the least and the largest; ratios are formed round by round, or record by record, of cases that took
turns.

Every part runs in a worker process: one that fails, crashes or hangs is named as such, in the table and in the record, and the
others run. What fits no more into --budget-s is skipped and named. The record is written anew after every part, so that a kill
leaves what was found. The exit code is 1 if a part failed; a missed goal is no failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from decoding.jit import compiles_first
from experiments.bench.record import RESULTS, versions
from experiments.gpu_suite import environment
from experiments.gpu_suite.jobs import Worker
from experiments.gpu_suite.plan import KINDS, PARTS, SIZES, USUAL_KINDS, plan
from experiments.gpu_suite.record import RunningRecord, print_table
from experiments.gpu_suite.report import Job, Setting

_ENOUGH = 0.6  # of a part's time must be left for it to begin
_GRACE_S = {"cuda": 45.0, "cpu": 200.0}  # for a part that is late, before its worker is killed; a CPU compiles more
_COMPILING = ("ceilings", "tests")  # parts that run while code is compiled beside them


class Suite:
    """One run: its jobs, its deadline and its record."""

    def __init__(self, args: argparse.Namespace, record: RunningRecord, worker: Worker, setting: Setting) -> None:
        self._ends, self._record, self._worker = time.monotonic() + args.budget_s, record, worker
        self._setting, self._barred = setting, set[str]()
        self.jobs: list[dict[str, Any]] = []

    def left_s(self) -> float:
        """Seconds of the budget."""
        return self._ends - time.monotonic()

    def run(self, job: Job) -> None:
        """Runs or skips a job; the record says which."""
        entry: dict[str, Any] = {"part": job.part, "size": job.size, "state": "running", "lines": [], "found": {}}
        self.jobs.append(entry)
        if self.left_s() < _ENOUGH * job.estimate_s:
            entry["state"] = "skipped"
            entry["error_line"] = f"needs about {job.estimate_s:.0f} s, {max(0.0, self.left_s()):.0f} s are left"
            print(f"{job.name}: skipped, {entry['error_line']}", flush=True)
            self.save()
            return
        print(f"{job.name}: {self.left_s():.0f} s of the budget are left", flush=True)
        began = time.monotonic()
        self._attempts(job, entry)
        entry["seconds"] = round(time.monotonic() - began, 1)
        if "error_line" in entry:
            print(f"{job.name}: {entry['state']}: {entry['error_line']}", flush=True)
        if job.part == "profile":
            self._worker.stop()  # what listened to every launch must not be there when others are timed
        if job.part == "ceilings":
            roof = entry["found"].get("read_best_gb_s")
            self._setting = dataclasses.replace(self._setting, read_gb_s=roof)
        self.save()

    def _attempts(self, job: Job, entry: dict[str, Any]) -> None:
        """A worker that is lost takes the kind of runner that was in use with it: the job is done once more without that kind."""
        for again in (False, True):
            kinds = tuple(kind for kind in self._setting.kinds if kind not in self._barred)
            setting = dataclasses.replace(self._setting, kinds=kinds)
            limit_s = min(job.estimate_s, max(1.0, self.left_s()))
            grace_s = max(5.0, min(_GRACE_S[self._setting.device], self.left_s() + 10.0 - limit_s))

            def keep(value: dict[str, Any]) -> None:
                entry.update(value)
                self.save()

            outcome = self._worker.run(job, setting, limit_s, grace_s, keep)
            lost, kind = outcome.pop("lost"), outcome.pop("kind")
            if lost and kind in kinds:
                self._barred.add(kind)
                if not again and len(kinds) > 1 and self.left_s() > _ENOUGH * job.estimate_s:
                    print(f"{job.name}: {outcome['error_line']}: once more, without {kind}", flush=True)
                    entry["before"] = {**outcome, "kind": kind, "found": entry["found"]}
                    entry["found"], entry["lines"] = {}, []
                    continue
            entry.update(outcome)
            return

    def save(self) -> None:
        """Writes the record as far as it goes."""
        barred = {"barred_kinds": sorted(self._barred)} if self._barred else {}
        self._record.write({**barred, "jobs": self.jobs})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything; the exit code."""
    args, started = arguments(argv), datetime.now(UTC)
    environment.keep_compiled()
    fault = environment.numba_fault()
    with tempfile.TemporaryDirectory() as folder:
        described = {"system": platform.platform(), "numba_fault": fault}
        print(f"environment: {described | versions()}", flush=True)
        record = RunningRecord(vars(args), args.seed, started, args.device, args.out, described)
        setting = Setting(
            args.device, args.dtype, args.kinds, tuple(args.workloads), args.tokenizer, args.records, args.max_tokens, args.seed,
            args.out, None, Path(folder) / "scratch",
        )  # fmt: skip
        ahead = fault is None and (args.device == "cuda" or compiles_first())
        warming = environment.Warming(Path(folder) / "warm.log") if ahead else None
        worker = Worker(("numba",) if fault else ())
        suite = Suite(args, record, worker, setting)
        try:
            for job in plan(args.parts, args.sizes):
                if warming is not None and job.part not in _COMPILING:
                    warming.wait()
                    record.environment["compiled_ahead"] = warming.outcome
                suite.run(job)
        finally:
            worker.stop()
            if warming is not None:
                warming.end()
    print_table(suite.jobs)
    print(f"record: {record.path.name if record.path else 'none'}", flush=True)
    return int(any(entry["state"] == "failed" for entry in suite.jobs))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between; all when absent")
    parser.add_argument("--sizes", default="8b,7b,1b,13b", help=f"of models, the most important first: {', '.join(SIZES)}")
    parser.add_argument(
        "--kinds", default=",".join(USUAL_KINDS), help=f"of runners, of {', '.join(KINDS)}, the preferred one first"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--workloads", type=Path, nargs="+", default=[],
        help="JSON lines with prompt and output, or a folder of which specbench_rag.jsonl and llma_rag.jsonl are read; made-up "
        "texts when absent",
    )  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; a token a byte when absent")
    parser.add_argument("--records", type=int, default=12, help="of the workloads together")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a known output")
    parser.add_argument("--budget-s", type=float, default=470.0, help="seconds for all parts; default 470")
    parser.add_argument("--seed", type=int, default=0, help="of weights, trees and made-up texts")
    parser.add_argument("--revision", help="of the code, for the record, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the traces")
    args = parser.parse_args(argv)
    for name, known in (("parts", tuple(PARTS)), ("sizes", SIZES), ("kinds", KINDS)):
        setattr(args, name, _chosen(parser, name, getattr(args, name), known))
    args.parts = [part for part in PARTS if part in args.parts]
    for name in ("records", "max_tokens", "budget_s"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    args.device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu --sizes tiny tries the script itself")
    for path in (*args.workloads, *([args.tokenizer / "tokenizer.json"] if args.tokenizer else ())):
        if not path.exists():
            parser.error(f"{path} does not exist")
    return args


def _chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """What a list with commas names, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            parser.error(f"--{option}: {name!r} is not known{hint}; known: {', '.join(known)}")
    if not names:
        parser.error(f"--{option} names nothing; known: {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
