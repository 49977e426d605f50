"""``outrider bench paper``: the tables and figures of a paper."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from outrider.configs.slices import Dtype
from outrider.experiments.bench.options import add_engine, add_model
from outrider.experiments.bench.record import ROOT, git_state, portable
from outrider.experiments.bench.run import Bench, Results, Run, run
from outrider.experiments.papers.numbers.mjsd import load_mjsd
from outrider.experiments.papers.numbers.published import ALL, KNOWN, Paper, load

PAPERS: dict[str, Paper] = {key: load(key) for key in ("llma", "trie", "ngrammys", "jacobi")} | {"mjsd": load_mjsd()}
PRESETS: dict[str, dict[str, Any]] = {
    "full": {"repeats": 3, "max_tokens": None, "timed": 12},
    "short": {"repeats": 1, "max_tokens": 96, "timed": 4},
}
_CONTEXT = 256  # tokens before the step whose rows are timed
_OF_RUN = ("out", "json", "hours", "kept")  # options that do not change what is measured
DESCRIPTION = """Run the tables and figures of a paper on a local model, and compare them with the paper's numbers and statements.

--prompts NAME=FILE names the files that stand for a dataset of the paper; a name may be repeated. --workloads FOLDER takes a file
of the folder for each dataset. The record says which models, data and device replaced the paper's.

Each run is saved in the file --kept: the same command continues after an interruption, or after --hours ended it. Statements that
were not reached are "not measured" in the record. The file is deleted when everything is measured.

"""
_FOLLOWS = {  # by ``Paper.follows``
    "files": """The runs are target-guided (LLMA, arXiv 2304.04487, section 3.2): forwards are the model's, committed tokens are
the known outputs of the files. The references of `cache` are the known outputs of the most similar other prompts of its file.
""",
    "written": "The model writes its own outputs greedily, and each strategy follows them.\n",
    "own": "The model generates its own outputs.\n",
}


def main(argv: Sequence[str]) -> int:
    """Run the bench of the paper that the command line names first, and return its exit code; 2 for an unknown name."""
    name, *rest = argv or [""]
    if name in PAPERS:
        return run(bench_of(name), rest, f"outrider bench paper {name}")
    print(f"usage: outrider bench paper {{{','.join(PAPERS)}}} ...; PAPER --help says more", file=sys.stderr)
    return 0 if name in ("-h", "--help") else 2


def bench_of(key: str) -> Bench:
    """Return the bench of a paper of ``PAPERS``."""
    paper = PAPERS[key]
    names = "\n".join(f"  {name}: {words}" for name, words in paper.datasets.items())
    text = f"{DESCRIPTION}{paper.source}: {paper.title}\n{paper.ran}\n{names}\n\n{_FOLLOWS[paper.follows]}"
    least = dict.fromkeys(("records", "max_tokens", "repeats", "threads"), 1) | {"timed": 0, "hours": 0.0}
    return Bench(
        f"bench-paper-{key}", text, partial(measure, paper), partial(options, paper), least, partial(check, paper), unfaithful
    )


def options(paper: Paper, parser: argparse.ArgumentParser) -> None:
    """Add the options of a paper."""
    names = ", ".join(paper.datasets)
    parser.add_argument("--prompts", nargs="+", default=[], metavar="NAME=FILE", help=f"NAME: {names}")
    files = ", ".join(f"{name}={'+'.join(stems)}" for name, stems in paper.workloads.items())
    parser.add_argument("--workloads", type=Path, help=f"folder of JSON-lines files, NAME.jsonl, instead of --prompts: {files}")
    add_model(parser, "bfloat16", get_args(Dtype))
    add_engine(parser)
    parser.set_defaults(repeats=None)
    presets = "; ".join(
        f"{name}: --records {paper.records[name]} --repeats {preset['repeats']} --timed {preset['timed']}"
        + (f" --max-tokens {preset['max_tokens']}" if preset["max_tokens"] else "")
        for name, preset in PRESETS.items()
    )
    parser.add_argument("--preset", choices=PRESETS, default="full", help=f"defaults of these options; {presets}")
    text = "prompts of each race whose speed is measured where outputs are followed; steps are counted on all records; 0: none"
    parser.add_argument("--timed", type=int, help=text)
    parser.add_argument("--hours", type=float, help="after which no run begins; default: no limit")
    kept = Path(f"paper-{paper.key}.kept.jsonl")
    parser.add_argument("--kept", type=Path, default=kept, help=f"file of the runs so far; default: {kept}")
    if paper.strategies:
        text = "folder or name of the small model, or self:int8 or self:int4, the model itself with fewer bits"
        parser.add_argument("--draft-model", default="demo_draft_model", help=f"{text}; default: demo_draft_model")
        parser.add_argument("--strategy", action="append", default=[], help="a further strategy on the same prompts; repeatable")


def check(paper: Paper, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Make ``prompts`` a mapping of names to files and fill in the preset; exit with code 2 if a value is invalid."""
    for name, value in (PRESETS[args.preset] | {"records": paper.records[args.preset]}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if bool(args.prompts) == (args.workloads is not None):
        parser.error("give either --prompts NAME=FILE or --workloads FOLDER")
    if args.workloads is not None:
        args.prompts = [f"{name}={args.workloads / stem}.jsonl" for name, stems in paper.workloads.items() for stem in stems]
    files: dict[str, list[Path]] = {}
    for text in args.prompts:
        name, separator, path = text.partition("=")
        if not separator or not path or name not in paper.datasets:
            parser.error(f"--prompts {text!r} must be NAME=FILE with a NAME of {', '.join(paper.datasets)}")
        files.setdefault(name, []).append(Path(path))
    args.prompts = files
    stems = {path: path.stem for name, paths in files.items() if name != KNOWN for path in paths}
    if len(set(stems.values())) < len(stems):
        parser.error("two files of --prompts have one name: a workload is called after its file")


def measure(paper: Paper, args: argparse.Namespace, given: Run) -> Results:
    """Run a paper's tables and compare them with the paper's own."""
    from outrider.experiments.bench.engines.models import calm
    from outrider.experiments.papers.beside import Found, beside
    from outrider.experiments.papers.devices import step_ms
    from outrider.experiments.papers.kept import KeptRuns, OutOfTimeError
    from outrider.experiments.papers.stage import load_stage, ran

    calm(args.threads)
    stage = load_stage(args, paper.follows == "files", given.progress)
    setting = {name: value for name, value in vars(args).items() if name not in _OF_RUN}
    setting = portable({"paper": paper.key, **setting, "git": git_state(ROOT)})
    stage, found = replace(stage, runs=KeptRuns(args.kept, setting, args.hours, given.meter)), Found()
    times = step_ms(stage.loaded, [(1, _CONTEXT), (paper.rows, _CONTEXT)])
    if len(times) == 2:
        ratio = times[paper.rows, _CONTEXT] / times[1, _CONTEXT]
        found.notes.append(f"a step of {paper.rows} rows behind {_CONTEXT} tokens takes {ratio:.2f} times one of one row here")
    try:
        import_module(f"outrider.experiments.papers.{paper.key}").measure(stage, found)
        stage.runs.end()
    except OutOfTimeError as error:
        found.notes.append(f"not all of it: {error}")
        given.progress.say(f"{error}: the same command goes on with {args.kept}")
    told = ran(stage, args.prompts) | {"preset": args.preset}
    return beside(paper, found, told, stage.loaded.model.device.type)


def unfaithful(results: Results, args: argparse.Namespace) -> list[str]:
    """List outputs that wrongly differ from plain decoding: if known outputs are followed, or with an exact dtype."""
    from outrider.experiments.bench.strategies import EXACT_DTYPES
    from outrider.experiments.papers.stage import BEST

    if results["ran"]["dtype"] not in EXACT_DTYPES and PAPERS[results["paper"]["name"]].follows == "own":
        return []
    return [
        f"{label} on {name} is not identical to plain decoding"
        for name, labels in results["measures"].items()
        for label, row in labels.items()
        if name != ALL and label != BEST and row.get("differing")
    ]
