"""``outrider bench paper``: the tables and figures of a paper, run on what is at hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from configs.slices import Dtype
from experiments.bench.options import add_engine, add_model, add_random_model, check_random_model
from experiments.bench.run import Bench, Results, Run
from experiments.papers.numbers.jacobi import PAPER as JACOBI
from experiments.papers.numbers.llma import PAPER as LLMA
from experiments.papers.numbers.ngrammys import PAPER as NGRAMMYS
from experiments.papers.numbers.published import ALL, Paper
from experiments.papers.numbers.trie import PAPER as TRIE

if TYPE_CHECKING:
    from experiments.papers.beside import Found
    from experiments.papers.stage import Stage

PAPERS: dict[str, Paper] = {paper.key: paper for paper in (LLMA, TRIE, NGRAMMYS, JACOBI)}
ELSEWHERE = "mjsd"  # whose tables are those of ``bench draft-models``
GUIDED = frozenset(("llma", "trie"))  # papers whose runs follow known outputs
RECORDS = {"llma": 10, "trie": 16, "ngrammys": 4, "jacobi": 6}  # of each file: some minutes with the demo model on one thread

DESCRIPTION = """The tables and figures of a paper, run on what is at hand, with the paper's numbers beside them and, statement by
statement, whether this run points where the paper points.

--prompts NAME=FILE says which file stands for which dataset of the paper; a name may come several times. What stands for what,
and which model and device ran instead of the paper's, is in the record.

"""
_FOLLOWS = """
The runs are target-guided (LLMA, arXiv 2304.04487, section 3.2): forwards are the model's, committed tokens are the known
outputs of the files, so that any model will do, one of random weights (--random-model) included.
"""
_OWN = """
The model writes its own outputs: its n-grams, or its guesses, are what the method drafts from.
"""


def chosen(argv: Sequence[str]) -> tuple[Bench | None, list[str]]:
    """The bench of the paper that a command line names first, and what is behind that; None, with a line, for another name."""
    name, *rest = [*argv, ""][:1] + list(argv[1:])
    if name == ELSEWHERE:
        from experiments.papers.draft_models.bench import BENCH

        return BENCH, rest
    if name in PAPERS:
        return bench_of(name), rest
    print(f"usage: outrider bench paper {{{','.join((*PAPERS, ELSEWHERE))}}} ...; PAPER --help says more", file=sys.stderr)
    return None, rest


def bench_of(key: str) -> Bench:
    """The bench of a paper of ``PAPERS``."""
    paper = PAPERS[key]
    names = "\n".join(f"  {name}: {words}" for name, words in paper.datasets.items())
    text = f"{DESCRIPTION}{paper.source}: {paper.title}\n{paper.ran}\n{names}\n{_FOLLOWS if key in GUIDED else _OWN}"
    least = dict.fromkeys(("records", "max_tokens", "repeats", "threads"), 1)
    return Bench(f"bench-paper-{key}", text, partial(measure, key), partial(options, key), least, partial(check, key), unfaithful)


def options(key: str, parser: argparse.ArgumentParser) -> None:
    """Those of a paper."""
    names = ", ".join(PAPERS[key].datasets)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE", help=f"NAME: {names}")
    add_model(parser, "bfloat16", get_args(Dtype))
    add_engine(parser)
    parser.set_defaults(records=RECORDS[key])
    if key in GUIDED:
        add_random_model(parser)


def check(key: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Makes ``prompts`` a mapping of names to files; ends the process with code 2 where a value cannot be used."""
    paper = PAPERS[key]
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


def measure(key: str, args: argparse.Namespace, run: Run) -> Results:
    """Runs a paper's tables, and puts them beside the paper's own."""
    from experiments.bench.engines.models import calm
    from experiments.papers.beside import beside
    from experiments.papers.stage import load_stage, ran

    calm(args.threads)
    stage = load_stage(args, key in GUIDED, run.progress)
    tables: Callable[[Stage, argparse.Namespace], Found] = import_module(f"experiments.papers.{key}").measure
    return beside(PAPERS[key], tables(stage, args), ran(stage, args.prompts), stage.loaded.model.device.type)


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
