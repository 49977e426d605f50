"""All checks and measurements of a GPU, in calls of minutes on a bare machine; a short table comes last on stdout.

    outrider bench gpu --parts smoke --out OUT                  (a minute: GO or NO-GO)
    outrider bench gpu --workloads DIR --tokenizer DIR --out OUT
    outrider bench gpu --resume --out OUT                       (continues with what the last call left)
    outrider bench gpu --device double --sizes tiny --out OUT   (tries the script itself, without a GPU)
    outrider bench gpu plans                                    (table of computed plans, without a GPU)
    outrider bench gpu kernels                                  (compiles the attention kernels, without a GPU)

Models have random weights. Kinds of runner are strict (the default: the bits of a row do not depend on other rows), rounding
(graphs of any number of rows), eager, and compiled (graphs of layers that torch.compile made). Figures are medians of rounds,
with the least and the largest. Ratios are formed round by round, or record by record, of cases that took turns.

Every part runs in a worker process: if one fails, crashes or hangs, the table and the record name it, and the others run. What no
longer fits into --budget-s is skipped and named. The record is written after every part. The exit code is 1 if a part failed; a
missed goal is no failure.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decoding.jit import compiles_first
from engine.accelerator import accelerator
from engine.loading.model_files import PACKAGED_MODELS, is_whole, kept_models
from experiments.bench.record import RESULTS, ROOT, versions
from experiments.device_double.guard import unavailable
from experiments.gpu_suite import warm
from experiments.gpu_suite.suite import KINDS, NAME, PARTS, SIZES, Suite, plan, print_table
from experiments.gpu_suite.worker import Setting, Worker

# Packages besides Python's own. Of this repository the whole checkout is needed.
NEEDS = {
    "torch": "with CUDA", "triton": "the attention kernels", "transformers": "models",
    "accelerate": "with which transformers reads weights straight to a GPU", "msgpack": "messages of the part ranks",
    "pytest": "the part tests",
}  # fmt: skip
HELPS = {"numba": "drafters and the host's part are many times slower without it"}
TABLES = {"plans": "experiments.gpu_suite.plan_table", "kernels": "experiments.gpu_suite.compile_kernels"}
REAL_MODEL = "smollm2-135m-instruct"
_BUDGET_S = {"cuda": 470.0, "cpu": 3600.0, "double": 3600.0}
_NO_TIMES = {"cpu": "of a CPU: not those of a GPU", "double": "of the double of a GPU, which computes on the CPU: meaningless"}
_RESUMED = ("device", "dtype", "kinds", "max_tokens")  # options that must be those of the record
_COMPILING = ("smoke", "any_rows", "tests", "ceilings")  # parts that run while code is compiled beside them


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite or a table, and return the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0] in TABLES:
        code: int = importlib.import_module(TABLES[given[0]]).main(given[1:])
        return code
    args, started = arguments(given), datetime.now(UTC)
    os.environ["XDG_CACHE_HOME"] = str(ROOT / ".pytest_cache" / "user_cache")  # compiled code, as the project's tests keep it
    environment: dict[str, Any] = {"system": platform.platform()}
    if args.device != "cuda":
        environment["times"] = _NO_TIMES[args.device]
    print(f"environment: {environment | versions()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            device="cpu" if args.device == "cpu" else "cuda:0", double=args.device == "double", dtype=args.dtype,
            kinds=args.kinds, workloads=tuple(args.workloads), tokenizer=args.tokenizer, max_tokens=args.max_tokens,
            real_model=args.real_model, out=args.out, scratch=Path(folder) / "scratch",
        )  # fmt: skip
        worker = Worker()
        suite = Suite(args, setting, worker, started, environment)
        if args.resume:
            _resume(suite, args, environment)
        log, compiling = Path(folder) / "warm.log", None
        if args.device == "cuda" or compiles_first():
            compiling = warm.start(log)
        try:
            for job in plan(args.parts, args.sizes):
                if compiling is not None and job.part not in _COMPILING:
                    environment["compiled_ahead"] = warm.finish(compiling, log)
                    compiling = None
                suite.run(job)
        finally:
            worker.stop()
            if compiling is not None:
                compiling.kill()
                compiling.wait()
    print_table(suite.jobs)
    print(f"record: {suite.path.name if suite.path else 'none'}", flush=True)
    return int(any(entry["state"] == "failed" for entry in suite.jobs))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line."""
    listed = {
        "parts, in the order in which they run": {name: part.what for name, part in PARTS.items()},
        "packages that are needed beside this checkout": NEEDS,
        "packages that are used if they are installed": HELPS,
    }
    epilog = "\n\n".join(
        f"{title}:\n" + "\n".join(f"    {name:<14} {what}" for name, what in table.items()) for title, table in listed.items()
    )
    parser = argparse.ArgumentParser(
        prog="outrider bench gpu", description=__doc__, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between; all when absent")
    parser.add_argument("--sizes", default="8b,7b,1b,13b", help=f"of models, the most important first: {', '.join(SIZES)}")
    parser.add_argument("--kinds", default="strict,rounding", help=f"of runners, the preferred one first: {', '.join(KINDS)}")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu", "double"), default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--workloads", type=Path, nargs="+", default=[], help="JSON lines with prompt and output, or folders")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; one token per byte when absent")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a known output")
    parser.add_argument("--budget-s", type=float, help="seconds for all parts; default 470 on a GPU, else 3600")
    parser.add_argument("--real-model", type=Path, help=f"trained model for the part real; default {REAL_MODEL}, if downloaded")
    parser.add_argument("--resume", action="store_true", help="go on with the newest record of --out")
    parser.add_argument("--revision", help="of the code, for the record, if git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the traces")
    args = parser.parse_args(argv)
    for name, known in (("parts", tuple(PARTS)), ("sizes", SIZES), ("kinds", KINDS)):
        setattr(args, name, _chosen(parser, name, getattr(args, name), known))
    args.parts = [part for part in PARTS if part in args.parts]
    if args.device == "auto":
        args.device = "cuda" if accelerator().unavailable() is None else "cpu"
    args.budget_s = _BUDGET_S[args.device] if args.budget_s is None else args.budget_s
    for name in ("max_tokens", "budget_s"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    fault = {"cuda": accelerator().unavailable, "double": unavailable}.get(args.device, lambda: None)()
    if fault is not None:
        parser.error(f"--device {args.device}: {fault}; --device cpu --sizes tiny tries the script itself")
    if args.real_model is None:  # asked before the cache folder changes
        kept = kept_models() / REAL_MODEL
        args.real_model = kept if is_whole(kept, PACKAGED_MODELS[REAL_MODEL]) else None
    elif not (args.real_model / "config.json").is_file():
        parser.error(f"--real-model {args.real_model} is no folder with a config.json")
    for path in (*args.workloads, *([args.tokenizer / "tokenizer.json"] if args.tokenizer else ())):
        if not path.exists():
            parser.error(f"{path} does not exist")
    if args.resume:
        args.resume = _record_of(parser, args)
    return args


def _chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names in a list with commas, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            parser.error(f"--{option}: {name!r} is not known{hint}; known: {', '.join(known)}")
    if not names:
        parser.error(f"--{option} names nothing; known: {', '.join(known)}")
    return names


def _record_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Path:
    """Return the newest record of the suite, which must have the same options."""
    records = sorted(args.out.glob(f"*-{NAME}*.json"), key=lambda each: each.stat().st_mtime)
    if not records:
        parser.error(f"--resume: {args.out} holds no record of the suite")
    path: Path = records[-1]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--resume: {path} is no record of the suite ({type(error).__name__})")
    for name in _RESUMED:
        own = getattr(args, name)
        if config.get(name) != (list(own) if isinstance(own, tuple) else own):
            parser.error(f"--resume: in {path} its {name} is {config.get(name)!r}, and --{name.replace('_', '-')} is {own!r}")
    return path


def _resume(suite: Suite, args: argparse.Namespace, environment: dict[str, Any]) -> None:
    before = json.loads(args.resume.read_text(encoding="utf-8"))
    of_it = {name: before[name] for name in ("started", "git", "versions")}
    environment["resumed"] = [*before["results"]["environment"].get("resumed", ()), of_it]
    suite.resume(args.resume, before["results"]["jobs"])
    print(f"{args.resume.name}: {len(suite.jobs)} parts have a result and are not run again", flush=True)


if __name__ == "__main__":
    sys.exit(main())
