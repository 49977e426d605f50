"""``outrider bench report``: records as tables in Markdown."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.experiments.report.tables import KEYS, beside_paper, headlines, title_of
from outrider.experiments.report.values import Table, blocks_of, print_tables, table_of, text_of

DESCRIPTION = """Print records as tables in Markdown: run, machine, main tables, papers' numbers beside this run's, all results.

A .jsonl file, such as the metrics of a training run, is shown as a table. The figures of a record are .svg files beside it.

example:
  outrider bench report experiments/results/2026-11-23-peers.json
"""
_DAY = re.compile(r"^\d{4}-\d{2}-\d{2}-")


def main(argv: Sequence[str]) -> int:
    """Print the records; return the exit code, 2 for a file that is not a record."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("outrider bench report", description=DESCRIPTION, formatter_class=raw)
    parser.add_argument("files", type=Path, nargs="+", metavar="RECORD", help=".json files that a bench or an experiment wrote")
    try:
        for path in parser.parse_args(argv).files:
            record = read_record(path)
            print(f"\n# {path.name}")
            print_tables(tables_of(record))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
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


def tables_of(record: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a record: its run, main tables, comparison with a paper, all results and the configuration."""
    results = record["results"]
    paper = beside_paper(results)
    tables = [table_of("", ("", ""), _run(record)), *headlines(record)]
    if paper:
        notes = [[str(words)] for words in (results["paper"].get("ran"), *results.get("notes", ())) if words]
        tables += [table_of(f"beside the paper: {title_of(results)}", ("notes",), notes), *paper]
    tables += blocks_of("", {key: item for key, item in results.items() if key not in {"figures", *(KEYS if paper else ())}})
    return tables + [table for key in ("config", "versions") if record.get(key) for table in blocks_of(key, record[key])]


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
