"""A paper's numbers beside ours, of records that hold both.

One form is known: tables with the rows of ``paper`` and ``here``, and statements with a verdict (``experiments.papers``; in
records of before 2026-11-25 whether the sign agrees). Whatever else stands under ``paper`` is shown as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.papers.beside import DIRECTION_ONLY, FAILS, HELD, UNDECIDED
from experiments.report.cells import NOTHING, Cell, cell_of, number
from experiments.report.values import Block, Table, blocks_of

_TOLD = ("source", "agree", "told")
_VERDICTS = {True: "yes", False: "no", None: NOTHING}


@dataclass(frozen=True, slots=True)
class BesidePaper:
    """What a record says of a paper."""

    source: str
    title: str
    words: list[str]  # what ran there, what differs here
    agree: int  # comparisons that go as in the paper
    told: int  # of so many that this run could make; 0 where it made none
    blocks: list[Block]
    keys: frozenset[str]  # of the results that are shown by this
    verdicts: Mapping[str, int] = field(default_factory=dict)  # statements of each verdict, where there are such


def beside_paper(results: Mapping[str, Any]) -> BesidePaper | None:
    """What the results of a record say of a paper; None where they say nothing."""
    paper = results.get("paper")
    if not isinstance(paper, Mapping):
        return None
    if isinstance(results.get("claims"), list) and isinstance(results.get("tables"), Mapping):
        return _of_tables(paper, results)
    blocks: list[Block] = []
    for key, value in paper.items():
        if key not in _TOLD:
            blocks += blocks_of(key, value)
    agree, told = int(paper.get("agree") or 0), int(paper.get("told") or 0)
    return BesidePaper(str(paper.get("source", "")), "", [], agree, told, blocks, frozenset(("paper",)))


def _of_tables(paper: Mapping[str, Any], results: Mapping[str, Any]) -> BesidePaper:
    """The form of ``experiments.papers.beside``."""
    words = [f"There: {paper['ran']}."] if paper.get("ran") else []
    verdicts: Mapping[str, int] = results.get("verdicts") or {}
    agree, told = int(results.get("agree") or 0), int(results.get("told") or 0)
    if verdicts:
        agree = verdicts[HELD] + verdicts[DIRECTION_ONLY]
        told = agree + verdicts[FAILS] + verdicts[UNDECIDED]
    blocks: list[Block] = [_both(name, table) for name, table in results["tables"].items()]
    return BesidePaper(
        source=str(paper.get("source", "")),
        title=str(paper.get("title", "")),
        words=[*words, *results.get("notes", ())],
        agree=agree,
        told=told,
        blocks=[*blocks, _statements(results["claims"])] if results["claims"] else blocks,
        keys=frozenset(("paper", "claims", "tables", "agree", "told", "verdicts", "notes")),
        verdicts=verdicts,
    )


def directions(*records: Mapping[str, Any]) -> Table:
    """How many statements of each paper hold, of the results of a record each."""
    rows = []
    for results in records:
        found = beside_paper(results)
        assert found is not None
        title = f" {found.title}" if found.title else ""
        told = ", ".join(f"{count} {verdict}" for verdict, count in found.verdicts.items() if count)
        rows.append((Cell(f"{found.source}{title}"), Cell(told or f"{found.agree} of {found.told} by sign")))
    return Table("", (("", "paper"), ("", "statements that hold here")), tuple(rows))


def statements(results: Mapping[str, Any]) -> Table:
    """What a paper says, and whether it holds in the results of a record."""
    return _statements(results["claims"])


def _both(name: str, table: Mapping[str, Any]) -> Table:
    """A table of the paper, and below its rows those of this run."""
    sides = [(who, table.get(who) or {}) for who in ("paper", "here")]
    columns = list(dict.fromkeys(column for _, rows in sides for row in rows.values() for column in row))
    rows = tuple(
        (Cell(who), Cell(row), *(_value(values.get(column)) for column in columns))
        for who, of_side in sides
        for row, values in of_side.items()
    )
    title = ", ".join(
        part for part in (name, table.get("title"), f"section {table['section']}" if table.get("section") else "") if part
    )
    return Table(title, (("", ""), ("", ""), *(("", column) for column in columns)), rows, keys=2)


def _statements(claims: Sequence[Mapping[str, Any]]) -> Table:
    """What the paper says, and whether it holds here."""
    if any("verdict" in claim for claim in claims):
        return _answered(claims)
    titles = ("where", "dataset", "the paper says", "metric", "here", "agrees", "why not")
    rows = tuple(
        (
            *(Cell(str(claim.get(key, ""))) for key in ("where", "dataset", "paper", "metric")),
            Cell(_measured(claim)),
            Cell(_VERDICTS[claim.get("agree")]),
            Cell(str(claim.get("why", ""))),
        )
        for claim in claims
    )
    return Table("statements", tuple(("", title) for title in titles), rows, keys=1)


def _answered(claims: Sequence[Mapping[str, Any]]) -> Table:
    """The three answers to each statement: direction, size and power (``experiments.papers.beside.judged``)."""
    titles = (
        "where", "dataset", "the paper says", "metric", "here",
        "the paper's ratio", "ratio here (95 %)", "here over the paper's", "records (needed)", "verdict", "why",
    )  # fmt: skip
    rows = []
    for claim in claims:
        interval = claim.get("interval")
        ratio = number(claim["ratio"]) if "ratio" in claim else NOTHING if interval is None else "difference"
        between = "" if interval is None else f" ({number(interval[0])} to {number(interval[1])})"
        power = claim.get("power")
        needed = NOTHING if power is None else f"{power['records']} ({NOTHING if power['needed'] is None else power['needed']})"
        size = claim.get("size")
        there = NOTHING if size is None else " to ".join(dict.fromkeys(number(bound) for bound in size["paper"]))
        told = (
            *(str(claim.get(key, "")) for key in ("where", "dataset", "paper", "metric")), _measured(claim), there,
            f"{ratio}{between}", NOTHING if size is None else number(size["of_paper"]), needed, str(claim["verdict"]),
            str(claim.get("why", "")),
        )  # fmt: skip
        rows.append(tuple(map(Cell, told)))
    return Table("statements", tuple(("", title) for title in titles), tuple(rows), keys=1)


def _measured(claim: Mapping[str, Any]) -> str:
    if claim.get("here") is None:
        return "not measured"
    return " | ".join(f"{label} {number(value)}" for label, value in zip(claim["of"], claim["here"], strict=True))


def _value(value: Any) -> Cell:
    return Cell("") if value is None else cell_of(value) or Cell(str(value))
