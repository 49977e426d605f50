"""A paper's numbers beside this run's, from records of ``bench paper`` and ``bench scaling``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.experiments.report.values import NOTHING, Table, number, table_of, text_of

Results = Mapping[str, Any]
KEYS = ("paper", "claims", "tables", "agree", "told", "verdicts", "notes")  # of the results, shown by ``beside_paper``


def title_of(results: Results) -> str:
    """Return the source and the title of the paper."""
    return f"{results['paper'].get('source', '')} {results['paper'].get('title', '')}".strip()


def beside_paper(results: Results) -> list[Table]:
    """Return the paper's tables with the rows of this run below them, and its statements; empty without a paper."""
    if not isinstance(results.get("claims"), list) or not isinstance(results.get("tables"), Mapping):
        return []
    tables = [_both(name, table) for name, table in results["tables"].items()]
    return [*tables, statements(results)] if results["claims"] else tables


def directions(*records: Results) -> Table:
    """Count the statements of each paper by verdict, one record per paper."""
    rows = []
    for results in records:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in results["verdicts"].items() if count)
        rows.append((title_of(results), counts))
    return table_of("", ("paper", "statements that hold here"), rows)


def _both(name: str, table: Mapping[str, Any]) -> Table:
    """Return a table of the paper, with the rows of this run below."""
    sides = [(who, table.get(who) or {}) for who in ("paper", "here")]
    columns = list(dict.fromkeys(column for _, rows in sides for row in rows.values() for column in row))
    rows = []
    for who, of_side in sides:
        for row, values in of_side.items():
            known = (values.get(column) for column in columns)
            rows.append((who, row, *("" if value is None else text_of(value) or str(value) for value in known)))
    section = f"section {table['section']}" if table.get("section") else ""
    return table_of(", ".join(filter(None, (name, table.get("title"), section))), ("", "", *columns), rows)


def statements(results: Results) -> Table:
    """Return what a paper says, with direction, size and power of what was measured here (``experiments.papers.beside``)."""
    titles = (
        "where", "dataset", "the paper says", "metric", "here",
        "the paper's ratio", "ratio here (95 %)", "here over the paper's", "records (needed)", "verdict", "why",
    )  # fmt: skip
    return table_of("statements", titles, map(_statement, results["claims"]))


def _statement(claim: Mapping[str, Any]) -> list[str]:
    interval, power, size = claim.get("interval"), claim.get("power"), claim.get("size")
    ratio = number(claim["ratio"]) if "ratio" in claim else NOTHING if interval is None else "difference"
    if interval is not None:
        ratio += f" ({number(interval[0])} to {number(interval[1])})"
    needed = NOTHING
    if power is not None:
        needed = f"{power['records']} ({NOTHING if power['needed'] is None else power['needed']})"
    here = "not measured"
    if claim.get("here") is not None:
        here = " | ".join(f"{label} {number(value)}" for label, value in zip(claim["of"], claim["here"], strict=True))
    agrees = {True: "agrees in sign", False: "differs in sign", None: NOTHING}[claim.get("agree")]  # up to 2026-11-24
    return [
        *(str(claim.get(key, "")) for key in ("where", "dataset", "paper", "metric")),
        here,
        NOTHING if size is None else " to ".join(dict.fromkeys(number(bound) for bound in size["paper"])),
        ratio,
        NOTHING if size is None else number(size["of_paper"]),
        needed,
        str(claim.get("verdict", agrees)),
        str(claim.get("why", "")),
    ]
