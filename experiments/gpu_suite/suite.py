"""All that is to be measured on a GPU, in calls of minutes on a bare machine; a short table comes last on stdout.

    python -m experiments.gpu_suite --workloads workloads/open --tokenizer tokenizers/gpt2 --out OUT
    python -m experiments.gpu_suite --resume --out OUT                     (goes on with what the last call left)
    python -m experiments.gpu_suite --parts steps,end_to_end --sizes 13b,1b --budget-s 300 --out OUT
    python -m experiments.gpu_suite --device double --sizes tiny --out OUT (tries the script itself, without a GPU)

Parts, in the order in which they run. Those with + run for each of --sizes, those with * for the first of them, the others once:

    smoke        models start with the defaults; an answer beside transformers' generate, warnings, the form that is exact,
                 graphs that were captured, and whether any number of rows is exact with cuBLASLt without split-K: GO or NO-GO
    tests        pytest -m gpu over the files that have such tests
    ceilings     GB/s of a copy (bytes read and written), of reading and of a matrix with a vector; TFLOP/s of a product
    steps +      ms of a step of one sequence, forward and argmax: as the host waits for it (wall), between events around the
                 forward (GPU), until the forward was launched (call). Where forwards have any number of rows, of 1 row against
                 the bytes that it must read (goal: 0.85 of the measured bandwidth), and of many over one (goal: 1.10 at 64)
    prefill +    ms of a prompt of 2048 and of 8192 tokens
    batches +    8, 32, 64 and 256 requests at once, greedy and sampled: tokens/s, ms of a step, the host's part of it
    strict *     outputs of random weights, drafts beside plain decoding: how many are identical, to the token
    real         --real-model on passages of docs/: tokens/s over plain decoding, identical outputs
    ranks        lookahead parallelism: two processes on one GPU with 0.45 of its memory each; identical outputs, tokens/s
    end_to_end * tokens/s along known outputs (every row computed, the known token committed), and the ratio over plain
                 decoding on the same record; transformers' generate (sdpa, its default cache) along the same
    host *       ms of a step around the forward, by phase (goal: 0.3 together)
    quantized *  checkpoints in the formats of transformers beside the same weights in 16 bits
    profile *    ms in kernels of a step of 1 row and of many, and the ten longest of them; traces for chrome://tracing

Models have the shape that --sizes names and random weights. Kinds of runner are strict (the default form: rows whose bits do not
depend on their company), rounding (graphs of any number of rows), eager, and compiled (graphs of layers that torch.compile made).
host measures the first of --kinds that there is. Figures are medians of rounds, with the least and the largest; ratios are formed
round by round, or record by record, of cases that took turns.

Every part runs in a worker process: one that fails, crashes or hangs is named as such, in the table and in the record, and the
others run. What fits no more into --budget-s is skipped and named. The record is written anew after every part, so that a kill
leaves what was found. The exit code is 1 if a part failed; a missed goal is no failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.decoding.jit import compiles_first
from outrider.engine.accelerator import accelerator
from outrider.engine.loading.model_files import PACKAGED_MODELS, cached_models, is_whole
from outrider.experiments.bench.record import RESULTS, versions, write_record
from outrider.experiments.device_double.guard import unavailable
from outrider.experiments.gpu_suite.device import NO_TIMES
from outrider.experiments.gpu_suite.jobs import Warming, Worker, keep_compiled, numba_fault
from outrider.experiments.gpu_suite.report import Job, Setting


@dataclass(frozen=True, slots=True)
class Part:
    """Part of the suite, and its time: parts repeat their measurement until it is over."""

    function: str
    estimate_s: float
    models: bool = True  # it needs one of the sizes
    later_s: float | None = None  # for each size behind the first; None where it runs for the first alone
    stage: int = 0  # the sizes behind the first come between stages 0 and 1


# In the order in which they run. Those of stage 0, and all sizes, fit into a first call of eight minutes.
PARTS: dict[str, Part] = {
    "smoke": Part("smoke:measure", 60.0, models=False),
    "tests": Part("tests:measure", 75.0, models=False),
    "ceilings": Part("ceilings:measure", 10.0, models=False),
    "steps": Part("steps:measure", 40.0, later_s=15.0),
    "prefill": Part("prefill:measure", 25.0, later_s=10.0),
    "batches": Part("batches:measure", 60.0, later_s=15.0),
    "strict": Part("exactness:measure", 20.0),
    "real": Part("real:measure", 25.0, models=False),
    "ranks": Part("ranks:measure", 25.0, models=False),
    "end_to_end": Part("end_to_end:measure", 45.0, stage=1),
    "host": Part("host:measure", 20.0, stage=1),
    "quantized": Part("quantized:measure", 40.0, stage=1),
    "profile": Part("profile:measure", 25.0, stage=1),
}
SIZES = ("8b", "7b", "1b", "13b", "tiny")  # keys of ``models.SIZES``, which only workers import
KINDS = ("strict", "rounding", "eager", "compiled")
USUAL_KINDS = KINDS[:2]  # the default form, and what it costs
_TINY_S = 8.0  # of every part of a tiny model
_WHOLE = ("smoke", "tests", "ranks")  # parts that take their time with a tiny model, too


def plan(parts: Sequence[str], sizes: Sequence[str]) -> list[Job]:
    """Return the jobs of a run, those of most worth first."""
    first, later, last = list[Job](), list[Job](), list[Job]()
    for number, size in enumerate(sizes):
        for name in parts:
            part = PARTS[name]
            estimate_s = part.estimate_s if number == 0 else part.later_s
            if estimate_s is None:
                continue
            if size == "tiny" and name not in _WHOLE:
                estimate_s = min(estimate_s, _TINY_S)
            job = Job(name, size if part.models else None, f"outrider.experiments.gpu_suite.parts.{part.function}", estimate_s)
            (later if number else last if part.stage else first).append(job)
    return [*first, *later, *last]


NAME = "gpu-suite"
_WHAT, _VALUE, _SPREAD, _GOAL = 66, 22, 16, 24  # characters of the columns


class RunningRecord:
    """One file, replaced whole each time that more is known."""

    def __init__(
        self, config: Mapping[str, Any], seed: int, started: datetime, device: str, folder: Path, environment: dict[str, Any]
    ) -> None:
        """See ``write_record``; ``environment`` goes before the results."""
        self._config, self._seed, self._started, self._device, self._folder = config, seed, started, device, folder
        self.environment = environment
        self.path: Path | None = None

    def write(self, results: Mapping[str, Any]) -> None:
        """Replaces what the file holds."""
        whole = {"environment": self.environment, **results}
        given = self._config, whole, self._seed, self._started, self._device
        if self.path is None:
            self.path = write_record(NAME, *given, self._folder)
            return
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix="unfinished-") as beside:
            write_record(NAME, *given, Path(beside)).replace(self.path)


def print_table(jobs: Sequence[Mapping[str, Any]]) -> None:
    """Every part with its state, and its figures below it."""
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


# Packages beside Python's own, with what they bring. Of this repository the whole checkout is needed.
NEEDS = {
    "torch": "with CUDA", "triton": "the attention kernels", "transformers": "models",
    "accelerate": "by which transformers reads weights straight to a GPU", "msgpack": "messages of the part ranks",
    "pytest": "the part tests",
}  # fmt: skip
HELPS = {"numba": "drafters and the host's part run in plain Python without it, many times slower"}
REAL_MODEL = "smollm2-135m-instruct"
_NO_REAL_MODEL = f"no trained model: --real-model names none, and {REAL_MODEL} is not in the user's cache"
_NEWEST = Path("newest")

_ENOUGH = 0.6  # of a part's time must be left for it to begin
_BUDGET_S = {"cuda": 470.0, "cpu": 3600.0, "double": 3600.0}
# For a part that is late, before its worker is killed; a CPU compiles more.
_GRACE_S = {"cuda": 45.0, "cpu": 200.0, "double": 200.0}
_WITH_RESULT = ("done", "n/a")
_RESUMED = ("device", "dtype", "kinds", "max_tokens", "records", "seed")  # options that must be those of the record
_COMPILING = ("smoke", "tests", "ceilings")  # parts that run while code is compiled beside them


class Suite:
    """One run: its jobs, its deadline and its record."""

    def __init__(self, args: argparse.Namespace, record: RunningRecord, worker: Worker, setting: Setting) -> None:
        self._ends, self._record, self._worker = time.monotonic() + args.budget_s, record, worker
        self._setting, self._barred = setting, set[str]()
        self._grace_s = _GRACE_S["double" if setting.double else "cuda" if setting.device.startswith("cuda") else "cpu"]
        self.jobs: list[dict[str, Any]] = []

    def resume(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Keep the parts of an earlier record that have a result. They are not run again."""
        self.jobs = [entry for entry in jobs if entry["state"] in _WITH_RESULT]
        for entry in self.jobs:
            self._learn(entry)

    def left_s(self) -> float:
        """Seconds of the budget."""
        return self._ends - time.monotonic()

    def run(self, job: Job) -> None:
        """Run or skip a job; the record says which. One that has a result from before is left alone."""
        if any((entry["part"], entry["size"]) == (job.part, job.size) for entry in self.jobs):
            return
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
        self._learn(entry)
        self.save()

    def _learn(self, entry: dict[str, Any]) -> None:
        if entry["part"] == "ceilings":
            self._setting = dataclasses.replace(self._setting, read_gb_s=entry["found"].get("read_best_gb_s"))

    def _attempts(self, job: Job, entry: dict[str, Any]) -> None:
        """A worker that is lost takes the kind of runner that was in use with it: the job is done once more without that kind."""
        for again in (False, True):
            kinds = tuple(kind for kind in self._setting.kinds if kind not in self._barred)
            setting = dataclasses.replace(self._setting, kinds=kinds)
            limit_s = min(job.estimate_s, max(1.0, self.left_s()))
            grace_s = max(5.0, min(self._grace_s, self.left_s() + 10.0 - limit_s))

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
    keep_compiled()
    fault = numba_fault()
    with tempfile.TemporaryDirectory() as folder:
        described: dict[str, Any] = {"system": platform.platform(), "numba_fault": fault}
        if args.device != "cuda":
            described["times"] = NO_TIMES[args.device]
        print(f"environment: {described | versions()}", flush=True)
        record = RunningRecord(vars(args), args.seed, started, args.device, args.out, described)
        setting = Setting(
            device="cpu" if args.device == "cpu" else "cuda:0", double=args.device == "double", dtype=args.dtype,
            kinds=args.kinds, workloads=tuple(args.workloads), tokenizer=args.tokenizer, records=args.records,
            max_tokens=args.max_tokens, seed=args.seed, real_model=args.real_model, no_real_model=_NO_REAL_MODEL, out=args.out,
            scratch=Path(folder) / "scratch",
        )  # fmt: skip
        ahead = fault is None and (args.device == "cuda" or compiles_first())
        warming = Warming(Path(folder) / "warm.log") if ahead else None
        worker = Worker(("numba",) if fault else ())
        suite = Suite(args, record, worker, setting)
        if args.resume is not None:
            before = json.loads(args.resume.read_text(encoding="utf-8"))
            record.path = args.resume
            of_it = {name: before[name] for name in ("started", "git", "versions")}
            described["resumed"] = [*before["results"]["environment"].get("resumed", ()), of_it]
            suite.resume(before["results"]["jobs"])
            print(f"{args.resume.name}: {len(suite.jobs)} parts have a result and are not run again", flush=True)
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
    packages = "".join(f"\n    {name:<14} {why}" for name, why in NEEDS.items())
    helpful = "".join(f"\n    {name:<14} {why}" for name, why in HELPS.items())
    parser = argparse.ArgumentParser(
        prog="outrider bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Needs this checkout and the packages{packages}\nand uses, where they are installed,{helpful}",
    )  # fmt: skip
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between; all when absent")
    parser.add_argument("--sizes", default="8b,7b,1b,13b", help=f"of models, the most important first: {', '.join(SIZES)}")
    parser.add_argument(
        "--kinds", default=",".join(USUAL_KINDS), help=f"of runners, of {', '.join(KINDS)}, the preferred one first"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu", "double"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--workloads", type=Path, nargs="+", default=[],
        help="JSON lines with prompt and output, or a folder of which specbench_rag.jsonl and llma_rag.jsonl are read; made-up "
        "texts when absent",
    )  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; a token a byte when absent")
    parser.add_argument("--records", type=int, default=12, help="of the workloads together")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a known output")
    parser.add_argument("--budget-s", type=float, help="seconds for all parts; default 470 on a GPU, else 3600")
    parser.add_argument(
        "--real-model", type=Path,
        help=f"folder of a trained model, for the part real; when absent {REAL_MODEL}, if it is in the user's cache",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=Path, nargs="?", const=_NEWEST,
        help="record to go on with: parts that have a result are not run again; the newest of --out when it names none",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of weights, trees and made-up texts")
    parser.add_argument("--revision", help="of the code, for the record, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the traces")
    args = parser.parse_args(argv)
    for name, known in (("parts", tuple(PARTS)), ("sizes", SIZES), ("kinds", KINDS)):
        setattr(args, name, _chosen(parser, name, getattr(args, name), known))
    args.parts = [part for part in PARTS if part in args.parts]
    if args.device == "auto":
        args.device = "cuda" if accelerator().unavailable() is None else "cpu"
    args.budget_s = _BUDGET_S[args.device] if args.budget_s is None else args.budget_s
    for name in ("records", "max_tokens", "budget_s"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    fault = {"cuda": accelerator().unavailable, "double": unavailable}.get(args.device, lambda: None)()
    if fault is not None:
        parser.error(f"--device {args.device}: {fault}; --device cpu --sizes tiny tries the script itself")
    if args.real_model is None:
        args.real_model = _kept_real_model()
    elif not (args.real_model / "config.json").is_file():
        parser.error(f"--real-model {args.real_model} is no folder with a config.json")
    for path in (*args.workloads, *([args.tokenizer / "tokenizer.json"] if args.tokenizer else ())):
        if not path.exists():
            parser.error(f"{path} does not exist")
    if args.resume is not None:
        args.resume = _resumed(parser, args)
    return args


def _kept_real_model() -> Path | None:
    """Return the folder of the packaged model, where it was fetched before; asked before the cache folder is changed."""
    folder = cached_models() / REAL_MODEL
    return folder if is_whole(folder, PACKAGED_MODELS[REAL_MODEL]) else None


def _resumed(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Path:
    """Return the record to go on with, which must be of the same options."""
    path = args.resume
    if path == _NEWEST:
        records = sorted(args.out.glob(f"*-{NAME}*.json"), key=lambda each: each.stat().st_mtime)
        if not records:
            parser.error(f"--resume: {args.out} holds no record of the suite")
        path = records[-1]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--resume {path}: it is no record of the suite ({type(error).__name__})")
    for name in _RESUMED:
        own = getattr(args, name)
        if config.get(name) != (list(own) if isinstance(own, tuple) else own):
            parser.error(f"--resume {path}: its {name} is {config.get(name)!r}, and --{name.replace('_', '-')} is {own!r}")
    return Path(path)


def _chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once."""
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
