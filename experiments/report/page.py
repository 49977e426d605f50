"""``outrider bench report``: records as one HTML page without scripts and external files."""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from outrider.experiments.bench.record import RESULTS
from outrider.experiments.report.tables import KEYS, beside_paper, headlines, title_of
from outrider.experiments.report.values import Table, blocks_of, table_of, text_of

DESCRIPTION = """Records as one HTML page without scripts: machine, tables, figures, papers' numbers beside this run's.

The figures of a record are the .svg files beside it whose names begin with its name. A .jsonl file, such as the metrics of a
training run, is shown as a table.

examples:
  outrider bench report experiments/results/2026-11-23-peers.json --out peers.html
  outrider bench report --all --out report.html
"""
_DAY = re.compile(r"^\d{4}-\d{2}-\d{2}-")
_MARKS = ((re.compile(r"`([^`]+)`"), r"<code>\1</code>"), (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"))
_STYLE = """:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; max-width: 1300px; margin: 24px auto }
body { padding: 0 16px } table { border-collapse: collapse; font-size: 13px; margin: 12px 0 }
.scroll { overflow-x: auto } th, td { border: 1px solid #8886; padding: 3px 9px; text-align: left; max-width: 46ch }
img { max-width: 100%; background: white } pre { white-space: pre-wrap } article { border-top: 1px solid #8886 }"""


def main(argv: Sequence[str]) -> int:
    """Write the page; return the exit code, 2 for a file that is not a record."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("outrider bench report", description=DESCRIPTION, formatter_class=raw)
    parser.add_argument("files", type=Path, nargs="*", metavar="RECORD", help=".json files that a bench or an experiment wrote")
    parser.add_argument("--all", action="store_true", help="all records of --results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of --all; default: experiments/results")
    parser.add_argument("--title", default="Outrider: measured", help="title of the page")
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
    """Read a record, or the rows of a .jsonl file as one.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a record; the message names the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            return {"name": _DAY.sub("", path.stem), "results": {"rows": rows}}
        record = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("results"), dict):
        raise ValueError(f"{path} is no record of a run: it has no `results`; give a file that a bench or an experiment wrote")
    return {"name": path.stem} | record


def render(records: Sequence[tuple[Path, Mapping[str, Any]]], title: str) -> str:
    """Return the page of some records, each with its file: by name of the experiment, the latest first."""
    latest = sorted(records, key=lambda each: str(each[1].get("started", "")), reverse=True)
    ordered = sorted(latest, key=lambda each: str(each[1]["name"]))
    contents = "".join(f'<li><a href="#{_anchor(path)}">{escape(path.name)}</a></li>' for path, _ in ordered)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    articles = "\n".join(_article(path, record) for path, record in ordered)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1><ul>{contents}</ul>\n{articles}\n</body></html>\n"
    )


def _article(path: Path, record: Mapping[str, Any]) -> str:
    """Return a record's part of the page: its run, main tables, figures, and all the rest folded."""
    results = record["results"]
    paper = beside_paper(results)
    known = {"figures", *(KEYS if paper else ())}
    rest = blocks_of("", {key: item for key, item in results.items() if key not in known})
    config = [table for key in ("config", "versions") if record.get(key) for table in blocks_of(key, record[key])]
    parts = [f"<h2>{escape(path.name)}</h2>", _table(table_of("", ("", ""), _run(record)))]
    parts += map(_table, headlines(record))
    for picture in figures_beside(path):  # within an <img> no script of a picture runs
        data = base64.b64encode(picture.read_bytes()).decode("ascii")
        parts.append(f'<p><img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.name)}"></p>')
    if paper:
        notes = "".join(
            f"<p>{escape(str(words))}</p>" for words in (results["paper"].get("ran"), *results.get("notes", ())) if words
        )
        parts += [f"<h3>Beside the paper: {escape(title_of(results))}</h3>{notes}", *map(_table, paper)]
    for summary, tables in (("All results", rest), ("Configuration and versions", config)):
        parts.append(f"<details><summary>{summary}</summary>{''.join(map(_table, tables))}</details>")
    return f'<article id="{_anchor(path)}">{"".join(parts)}</article>'


def _run(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name, time, machine, revision, seed, energy and command of a run."""
    device, git, energy = (record.get(key) or {} for key in ("device", "git", "energy"))
    revision = f"{git['revision'][:10]}{' and changes' if git.get('dirty') else ''}" if git else None
    facts = {
        "experiment": record["name"], "started": record.get("started"), "seconds": record.get("duration_s"),
        "device": device.get("gpu", device.get("type")), "processor": device.get("cpu"), "cores": device.get("cores"),
        "torch threads": device.get("torch_threads"), "revision": revision, "seed": record.get("seed"),
        "joules": energy.get("joules"), "energy meter": energy.get("source"), "command": record.get("command"),
    }  # fmt: skip
    return [(key, text_of(value) or str(value)) for key, value in facts.items() if value is not None]


def figures_beside(path: Path) -> list[Path]:
    """Return the .svg files of a record: named like it, or with a suffix, unless another record has the longer name.

    ``day-load.json`` has ``day-load.svg`` and ``day-load-step.svg``, but not ``day-load-all.svg`` if there is a
    ``day-load-all.json``.
    """
    others = [file.stem for file in path.parent.glob("*.json") if file != path and _belongs(file.stem, path.stem)]
    pictures = sorted(path.parent.glob("*.svg"), key=lambda file: (len(file.stem), file))
    own = [file for file in pictures if _belongs(file.stem, path.stem)]
    return [file for file in own if not any(_belongs(file.stem, other) for other in others)]


def _belongs(name: str, stem: str) -> bool:
    return name == stem or name.startswith(f"{stem}-")


def _anchor(path: Path) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in path.name)


def _table(table: Table) -> str:
    head = "".join(f"<th>{_marked(title)}</th>" for title in table.header)
    rows = "".join(f"<tr>{''.join(f'<td>{_marked(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    title = f"<h4>{_marked(table.title)}</h4>" if table.title else ""
    return f'{title}<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _marked(text: str) -> str:
    """Escape a text, and render its `code` and **bold** parts."""
    shown = escape(text)
    for pattern, replacement in _MARKS:
        shown = pattern.sub(replacement, shown)
    return shown
