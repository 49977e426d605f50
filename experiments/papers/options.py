"""The options of ``outrider bench paper``, read before anything heavy is imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from experiments.papers.jacobi_paper import PAPER as JACOBI
from experiments.papers.llma_paper import PAPER as LLMA
from experiments.papers.ngrammys_paper import PAPER as NGRAMMYS
from experiments.papers.published import Paper
from experiments.papers.trie_paper import PAPER as TRIE

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


def add_parsers(parser: argparse.ArgumentParser, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """A parser a paper.

    Args:
        parser: of ``bench paper``.
        common: adds the options that all have beside ``--prompts``.
    """
    papers = parser.add_subparsers(required=True, metavar="PAPER", dest="paper")
    for key, paper in PAPERS.items():
        names = "\n".join(f"  {name}: {words}" for name, words in paper.datasets.items())
        follows = _FOLLOWS if key in GUIDED else _OWN
        text = f"{DESCRIPTION}{paper.source}: {paper.title}\n{paper.ran}\n{names}\n{follows}"
        raw, more = argparse.RawDescriptionHelpFormatter, f"--records is {RECORDS[key]} when absent"
        own = papers.add_parser(key, help=paper.source, description=text, formatter_class=raw, epilog=more)
        own.add_argument("--prompts", nargs="+", required=True, metavar="NAME=FILE", help=f"NAME: {', '.join(paper.datasets)}")
        common(own)
        own.set_defaults(records=RECORDS[key], random_model=None, tokenizer=None)
        if key in GUIDED:
            own.add_argument(
                "--random-model", choices=("110m", "280m", "tiny"), help="a Llama of random weights; with --tokenizer"
            )
            own.add_argument(
                "--tokenizer", type=Path, help="folder of the tokenizer of known outputs; the model's own when absent"
            )
    papers.add_parser(ELSEWHERE, help="the same as bench draft-models, which has its tables", add_help=False)


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Makes ``prompts`` a mapping of names to files; ends the process with code 2 where a value cannot be used."""
    paper = PAPERS[args.paper]
    if find_spec("matplotlib") is None:
        parser.error("the figures need matplotlib: install outrider with the extra `dev`")
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
    if args.random_model and (args.tokenizer is None or args.dtype == "auto"):
        parser.error("--random-model needs --tokenizer and a --dtype")
