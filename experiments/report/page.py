"""``outrider bench report``: records of runs as one HTML page that needs nothing else, with their figures and tables.

A record of any shape is shown (``experiments.report.values``); of those that are known, what matters comes first
(``experiments.report.tables``), and where a record has a paper's numbers, these stand beside ours (``experiments.report.paper``).
The page has no script, loads nothing, and tells its text from its markup: names in a record cannot become elements of it.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from experiments.bench.record import RESULTS
from experiments.report.cells import Cell, cell_of
from experiments.report.drawing import course, linked, marked, spread
from experiments.report.paper import BesidePaper, beside_paper
from experiments.report.tables import headlines
from experiments.report.values import Block, Facts, Table, blocks_of

DESCRIPTION = """Records of runs as one HTML page that needs nothing else: figures, tables, machine, papers' numbers beside ours.

The figures of a record are the .svg files beside it whose names begin with its own. A .jsonl file of rows, such as the metrics of
a training run, is a table. The page has no script and loads nothing.

examples:
  outrider bench report experiments/results/2026-11-23-peers.json --out peers.html
  outrider bench report --all --out report.html
"""
_ALL_OPEN = 3  # records of a page that shows all results at once
_SHORT_REVISION = 10  # characters
_DAY = re.compile(r"^\d{4}-\d{2}-\d{2}-")  # before the name of a file


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture beside a record."""

    name: str
    data: str  # as an address that holds it


@dataclass(frozen=True, slots=True)
class Page:
    """What is shown of one record."""

    stem: str
    name: str  # of the experiment
    title: str
    when: str
    started: str  # to sort by
    machine: Facts | None
    command: str
    headlines: list[Table]
    figures: list[Figure]
    paper: BesidePaper | None
    results: list[Block]
    config: list[Block]
    open: bool  # whether all results are shown at once

    @property
    def anchor(self) -> str:
        """Its place on the page."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.stem)


def main(argv: Sequence[str]) -> int:
    """Writes the page; the exit code, 2 for a file that is no record."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("outrider bench report", description=DESCRIPTION, formatter_class=raw)
    parser.add_argument("files", type=Path, nargs="*", metavar="RECORD", help=".json files that a bench or an experiment wrote")
    parser.add_argument("--all", action="store_true", help="all records of --results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of --all; default: experiments/results")
    parser.add_argument("--title", default="Outrider: measured", help="of the page")
    parser.add_argument("--out", type=Path, required=True, help="the .html file to write")
    args = parser.parse_args(argv)
    if bool(args.files) == args.all:
        parser.error("name some records, or give --all for those of --results")
    if args.all and not args.results.is_dir():
        parser.error(f"--results: {args.results} is no folder")
    paths = list(dict.fromkeys(args.files))
    if args.all:
        paths = sorted(path for path in args.results.iterdir() if path.suffix in (".json", ".jsonl"))
    try:
        if not paths:
            raise ValueError(f"no record in {args.results}: give --results the folder that benches wrote to")
        text = render([(path, read_record(path)) for path in paths], args.title)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(f"{args.out}: {len(paths)} records, {len(text.encode()) / 2**20:.1f} MiB")
    return 0


def read_record(path: Path) -> dict[str, Any]:
    """A record, or the rows of a .jsonl file in the form of one.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no record; the message names the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return {
                "name": _DAY.sub("", path.stem),
                "results": {"rows": [json.loads(line) for line in text.splitlines() if line.strip()]},
            }
        record = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("results"), dict):
        raise ValueError(f"{path} is no record of a run: it has no `results`; give a file that a bench or an experiment wrote")
    return {"name": path.stem} | record


def render(records: Sequence[tuple[Path, Mapping[str, Any]]], title: str) -> str:
    """The page's text. Records of one experiment stand together, the latest first.

    Args:
        records: each with its file, beside which its figures lie.
        title: of the page.
    """
    pages = [_page(path, record, len(records) <= _ALL_OPEN) for path, record in records]
    by_name: dict[str, list[Page]] = {}
    for page in sorted(sorted(pages, key=lambda page: page.started, reverse=True), key=lambda page: page.name):
        by_name.setdefault(page.name, []).append(page)
    environment = Environment(
        loader=PackageLoader("experiments.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"marked": marked, "course": course, "spread": spread, "linked": linked}
    in_order = [page for entries in by_name.values() for page in entries]
    return environment.get_template("page.html").render(title=title, pages=in_order, contents=list(by_name.items()))


def figures_beside(path: Path) -> list[Figure]:
    """The .svg files that belong to a record: named as it is, or with more behind its name, but for another record's.

    ``day-bench-load.json`` has ``day-bench-load.svg`` and ``day-bench-load-step.svg``; ``day-bench-load-all.svg`` is not among
    them where there is a ``day-bench-load-all.json``.
    """
    beside = sorted(path.parent.iterdir(), key=lambda file: (len(file.stem), file))
    others = [
        file.stem for file in beside if file.suffix == ".json" and _belongs(file.stem, path.stem) and file.stem != path.stem
    ]
    return [
        Figure(file.name, _inlined(file))
        for file in beside
        if file.suffix == ".svg" and _belongs(file.stem, path.stem) and not any(_belongs(file.stem, other) for other in others)
    ]


def _belongs(name: str, stem: str) -> bool:
    return name == stem or name.startswith(f"{stem}-")


def _inlined(picture: Path) -> str:
    """As an address: within an <img> no script of a picture runs, and the ids of two pictures cannot clash."""
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.read_bytes()).decode('ascii')}"


def _page(path: Path, record: Mapping[str, Any], opened: bool) -> Page:
    name, results, first = str(record["name"]), record["results"], headlines(record)
    paper = beside_paper(results)
    known = {"figures"} | (paper.keys if paper else frozenset())
    rest = {key: item for key, item in results.items() if key not in known}
    return Page(
        stem=path.name,
        name=name,
        title=name.replace("-", " ").capitalize(),
        when=_when(record),
        started=str(record.get("started", "")),
        machine=_machine(record),
        command=str(record.get("command", "")),
        headlines=first,
        figures=figures_beside(path),
        paper=paper,
        results=blocks_of("", rest),
        config=_config(record),
        open=opened or not (first or paper),
    )


def _machine(record: Mapping[str, Any]) -> Facts | None:
    """What computed, at which revision, with which seed, and the model of those that have one."""
    device, git, energy, config = (record.get(key) or {} for key in ("device", "git", "energy", "config"))
    model = {} if config.get("random_model") else {"model": config.get("model")}
    told: dict[str, Any] = {
        "device": device.get("gpu", device.get("type")),
        "processor": device.get("cpu"),
        "cores": device.get("cores"),
        "torch threads": device.get("torch_threads"),
        **model,
        "random model": config.get("random_model"),
        "type": config.get("dtype"),
        "revision": f"{git['revision'][:_SHORT_REVISION]}{' and changes' if git.get('dirty') else ''}" if git else None,
        "seed": record.get("seed"),
        "joules": energy.get("joules"),
        "energy meter": energy.get("source"),
    }
    pairs = tuple((key, cell_of(value) or Cell(str(value))) for key, value in told.items() if value is not None)
    return Facts("machine", pairs) if pairs else None


def _config(record: Mapping[str, Any]) -> list[Block]:
    found = {key: record[key] for key in ("config", "versions") if record.get(key)}
    return [block for key, value in found.items() for block in blocks_of(key, value)]


def _when(record: Mapping[str, Any]) -> str:
    """Day and time of the start, and how long it took."""
    parts = []
    if "started" in record:
        parts.append(f"{datetime.fromisoformat(record['started']):%d %B %Y, %H:%M} UTC")
    if "duration_s" in record:
        seconds = record["duration_s"]
        parts.append(f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s")
    return ", ".join(parts)
