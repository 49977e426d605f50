"""``outrider bench paper``: the tables and figures of a paper, run on what is at hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from configs.slices import Dtype
from experiments.bench.options import add_engine, add_model, add_random_model, check_random_model
from experiments.bench.record import ROOT, git_state, portable
from experiments.bench.run import Bench, Results, Run
from experiments.papers.numbers.jacobi import PAPER as JACOBI
from experiments.papers.numbers.llma import PAPER as LLMA
from experiments.papers.numbers.mjsd import PAPER as MJSD
from experiments.papers.numbers.ngrammys import PAPER as NGRAMMYS
from experiments.papers.numbers.published import ALL, Paper
from experiments.papers.numbers.trie import PAPER as TRIE

PAPERS: dict[str, Paper] = {paper.key: paper for paper in (LLMA, TRIE, NGRAMMYS, JACOBI, MJSD)}
GUIDED = frozenset(("llma", "trie"))  # papers whose runs follow outputs: known ones, or of the trie the model's own
PRESETS: dict[str, dict[str, Any]] = {  # what holds where nothing else is said; records of each file
    "full": {"repeats": 3, "max_tokens": None, "records": {"llma": 10, "trie": 16, "ngrammys": 4, "jacobi": 6, "mjsd": 10}},
    "short": {"repeats": 1, "max_tokens": 48, "records": {"llma": 6, "trie": 12, "ngrammys": 3, "jacobi": 4, "mjsd": 4}},
}
_CONTEXT = 256  # tokens before the step whose rows are timed
WORKLOADS = {  # the file of a folder of workloads that stands for a dataset
    "llma": {"retrieval": "llma_rag", "cache": "text2sql_human"},
    "trie": {"antrag": "specbench_rag", "dolly": "specbench_qa"},
    "ngrammys": {"mt_bench": "mtbench_gpt4", "human_eval": "humaneval_human", "gsm8k": "gsm8k_human"},
    "jacobi": {
        "mt_bench": "mtbench_gpt4", "human_eval": "humaneval_human", "gsm8k": "gsm8k_human", "mbpp": "mbpp_human",
        "cnn": "llma_cnndm", "xsum": "specbench_summarization",
    },
    "mjsd": {"prompts": "chat_gpt4t", "alpaca": "specbench_mt", "cnn": "llma_cnndm"},
}  # fmt: skip

DESCRIPTION = """The tables and figures of a paper, run on what is at hand, with the paper's numbers beside them and, statement by
statement, whether this run points where the paper points.

--prompts NAME=FILE says which file stands for which dataset of the paper; a name may come several times. --workloads FOLDER takes
a file of the folder for each. What stands for what, and which model and device ran instead of the paper's, is in the record.

Every run is kept in the file --kept as it ends: the same command goes on where it was cut off, or where --hours ended it. What it
has not measured then is "not measured" in its record. The file goes when all is measured.

"""
_FOLLOWS = """
The runs are target-guided (LLMA, arXiv 2304.04487, section 3.2): forwards are the model's, committed tokens are the known
outputs of the files, so that any model will do, one of random weights (--random-model) included. The references of `cache` are
the known outputs of the most similar other prompts of its file, in place of the file's own, which --random-model keeps.
"""
_WRITTEN = """
The model writes its own outputs greedily, and each strategy follows them. With --random-model the known outputs of the files are
followed instead.
"""
_OWN = """
The model writes its own outputs: its n-grams, or its guesses, are what the method drafts from.
"""
_MODULES = {"mjsd": "experiments.papers.draft_models.tables"}  # of papers whose tables are made elsewhere
_HOW = {"llma": _FOLLOWS, "trie": _WRITTEN}


def chosen(argv: Sequence[str]) -> tuple[Bench | None, list[str]]:
    """The bench of the paper that a command line names first, and what is behind that; None, with a line, for another name."""
    name, *rest = [*argv, ""][:1] + list(argv[1:])
    if name in PAPERS:
        return bench_of(name), rest
    print(f"usage: outrider bench paper {{{','.join(PAPERS)}}} ...; PAPER --help says more", file=sys.stderr)
    return None, rest


def bench_of(key: str) -> Bench:
    """The bench of a paper of ``PAPERS``."""
    paper = PAPERS[key]
    names = "\n".join(f"  {name}: {words}" for name, words in paper.datasets.items())
    text = f"{DESCRIPTION}{paper.source}: {paper.title}\n{paper.ran}\n{names}\n{_HOW.get(key, _OWN)}"
    least = dict.fromkeys(("records", "max_tokens", "repeats", "threads"), 1) | {"hours": 0.0}
    return Bench(f"bench-paper-{key}", text, partial(measure, key), partial(options, key), least, partial(check, key), unfaithful)


def options(key: str, parser: argparse.ArgumentParser) -> None:
    """Those of a paper."""
    names = ", ".join(PAPERS[key].datasets)
    parser.add_argument("--prompts", nargs="+", default=[], metavar="NAME=FILE", help=f"NAME: {names}")
    files = ", ".join(f"{name}={stem}.jsonl" for name, stem in WORKLOADS[key].items())
    parser.add_argument("--workloads", type=Path, help=f"folder of JSON-lines files, in place of --prompts: {files}")
    add_model(parser, "bfloat16", get_args(Dtype))
    add_engine(parser)
    parser.set_defaults(repeats=None)
    told = "; ".join(
        f"{name}: --records {preset['records'][key]} --repeats {preset['repeats']}"
        + (f" --max-tokens {preset['max_tokens']}" if preset["max_tokens"] else "")
        for name, preset in PRESETS.items()
    )
    parser.add_argument("--preset", choices=PRESETS, default="full", help=f"what holds of these where it is not given; {told}")
    parser.add_argument("--hours", type=float, help="after which no run begins; no bound when absent")
    kept = Path(f"paper-{key}.kept.jsonl")
    parser.add_argument("--kept", type=Path, default=kept, help=f"file of the runs so far; default: {kept}")
    if key in GUIDED:
        add_random_model(parser)
    if key == MJSD.key:
        text = "folder or name of the small model, or self:int8 or self:int4, the model itself with fewer bits"
        parser.add_argument("--draft-model", default="demo_draft_model", help=f"{text}; default: demo_draft_model")


def check(key: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Makes ``prompts`` a mapping of names to files; ends the process with code 2 where a value cannot be used."""
    paper, preset = PAPERS[key], PRESETS[args.preset]
    for name, value in (preset | {"records": preset["records"][key]}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if bool(args.prompts) == (args.workloads is not None):
        parser.error("give either --prompts NAME=FILE or --workloads FOLDER")
    if args.workloads is not None:
        args.prompts = [f"{name}={args.workloads / stem}.jsonl" for name, stem in WORKLOADS[key].items()]
    files: dict[str, list[Path]] = {}
    for text in args.prompts:
        name, separator, path = text.partition("=")
        if not separator or not path or name not in paper.datasets:
            parser.error(f"--prompts {text!r} must be NAME=FILE with a NAME of {', '.join(paper.datasets)}")
        files.setdefault(name, []).append(Path(path))
    args.prompts = files
    stems = {path: path.stem for paths in files.values() for path in paths}
    if len(set(stems.values())) < len(stems):
        parser.error("two files of --prompts have one name: a workload is called after its file")
    if key in GUIDED:
        check_random_model(args, parser)
        if args.tokenizer is not None and not args.random_model:
            parser.error("--tokenizer is that of a --random-model: a model has its own")


def measure(key: str, args: argparse.Namespace, run: Run) -> Results:
    """Runs a paper's tables, and puts them beside the paper's own."""
    from experiments.bench.engines.models import calm
    from experiments.papers.beside import Found, beside
    from experiments.papers.devices import step_ms
    from experiments.papers.kept import KeptRuns, OutOfTimeError
    from experiments.papers.stage import load_stage, ran

    calm(args.threads)
    follows = key == "llma" or getattr(args, "random_model", None) is not None
    stage = load_stage(args, follows, run.progress)
    tables = import_module(_MODULES.get(key, f"experiments.papers.{key}"))
    shaping = {name: value for name, value in vars(args).items() if name not in ("out", "json", "hours", "kept")}
    planned = tables.runs({name: len(prompts) for name, prompts in stage.datasets.items()}, args.repeats)
    of = portable({"paper": key} | shaping | {"git": git_state(ROOT)})
    runs, found, rows = KeptRuns(args.kept, of, args.hours, planned), Found(), PAPERS[key].rows
    times = step_ms(stage.loaded, [(1, _CONTEXT), (rows, _CONTEXT)])
    if len(times) == 2:
        ratio = times[rows, _CONTEXT] / times[1, _CONTEXT]
        found.notes.append(f"a step of {rows} rows behind {_CONTEXT} tokens takes {ratio:.2f} times one of one row here")
    run.progress.left = runs.left
    try:
        tables.measure(replace(stage, runs=runs), found)
        runs.end()
    except OutOfTimeError as error:
        found.notes.append(f"not all of it: {error}")
        run.progress.say(f"{error}: the same command goes on with {args.kept}")
    told = ran(stage, args.prompts) | {"preset": args.preset}
    return beside(PAPERS[key], found, told, stage.loaded.model.device.type)


def unfaithful(results: Results, args: argparse.Namespace) -> list[str]:
    """What gave another output than plain decoding though it must not: where known outputs are followed, or in an exact type."""
    from experiments.bench.strategies import EXACT_DTYPES
    from experiments.papers.stage import BEST

    if results["ran"]["dtype"] not in EXACT_DTYPES and results["paper"]["name"] not in GUIDED:
        return []
    return [
        f"{label} on {name} is not identical to plain decoding"
        for name, labels in results["measures"].items()
        for label, row in labels.items()
        if name != ALL and label != BEST and row.get("differing")
    ]
