"""A run beside the paper: the tables of both, and which of the paper's statements hold here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.papers.numbers.published import Claim, Figure, Paper, Value

Rows = Mapping[str, Mapping[str, Value]]  # row -> column -> number
Sections = dict[str, Rows]  # name of a table or figure of the paper -> what was measured here
_SAME = "no difference here beyond the spread of the repeats"


@dataclass(slots=True)
class Found:
    """What a run of a paper's tables found."""

    measures: dict[str, dict[str, dict[str, Figure]]]  # dataset -> label -> metric
    tables: Sections
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> see ``experiments.bench.figure``
    notes: list[str] = field(default_factory=list)  # what is not as in the paper


def judged(claims: Sequence[Claim], measures: Mapping[str, Mapping[str, Mapping[str, Figure]]]) -> list[dict[str, Any]]:
    """Each statement with both values of this run; ``agree`` is None where it did not measure them.

    Two values are the same when they are closer than their spreads together or than the statement's tolerance.
    """
    rows = []
    for claim in claims:
        labels = measures.get(claim.dataset, {})
        better, worse = (labels.get(label, {}).get(claim.metric) for label in (claim.better, claim.worse))
        row: dict[str, Any] = {
            "where": claim.where, "dataset": claim.dataset, "paper": claim.words, "metric": claim.metric,
            "of": [claim.better, claim.worse], "here": None, "agree": None,
        }  # fmt: skip
        if better is not None and worse is not None:
            sign = _sign(better, worse, claim)
            row["here"] = [round(better.mean, 4), round(worse.mean, 4)]
            row["agree"] = sign == 0 if claim.equal else sign > 0
            why = claim.otherwise or (_SAME if sign == 0 else "")
            if not row["agree"] and why:
                row["why"] = why
        rows.append(row)
    return rows


def _sign(better: Figure, worse: Figure, claim: Claim) -> int:
    """1 where the one that the paper prefers is better here too, -1 where it is worse, 0 where they are the same."""
    apart = better.mean - worse.mean
    if abs(apart) <= max(better.spread + worse.spread, claim.tolerance * max(abs(better.mean), abs(worse.mean))):
        return 0
    return 1 if (apart < 0) == claim.lower else -1


def beside(paper: Paper, found: Found, ran: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a record.

    Returns:
        ``paper``, ``ran`` (what ran instead), ``tables`` by name with ``section``, ``title``, ``paper`` and ``here``, the rows of
        each; ``claims`` (see ``judged``), how many of them ``agree`` of those ``told``, ``measures``, ``figures``, ``notes``.
    """
    claims = judged(paper.claims, found.measures)
    told = [claim["agree"] for claim in claims if claim["agree"] is not None]
    tables = {
        table.name: {
            "section": table.section,
            "title": table.title,
            "paper": _plain(table.rows),
            "here": _plain(found.tables.get(table.name, {})),
        }
        for table in paper.tables
    }
    for name, rows in found.tables.items():
        tables.setdefault(name, {"section": "", "title": "", "paper": {}, "here": _plain(rows)})
    return {
        "paper": {"name": paper.key, "source": paper.source, "title": paper.title, "ran": paper.ran, "datasets": paper.datasets},
        "ran": dict(ran),
        "notes": found.notes,
        "agree": sum(told),
        "told": len(told),
        "claims": claims,
        "tables": tables,
        "figures": found.figures,
        "measures": {
            name: {label: {metric: _number(value) for metric, value in row.items()} for label, row in labels.items()}
            for name, labels in found.measures.items()
        },
    }


def _plain(rows: Rows) -> dict[str, dict[str, Any]]:
    return {row: {column: _number(value) for column, value in columns.items()} for row, columns in rows.items()}


def _number(value: Value) -> Any:
    if isinstance(value, Figure):
        return {"mean": round(value.mean, 4), "spread": round(value.spread, 4)} if value.spread else round(value.mean, 4)
    return round(value, 4)
