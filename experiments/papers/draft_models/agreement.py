"""Whether a run points where the paper points: who is the better of each two, there and here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from experiments.papers.numbers.mjsd import (
    HIGHER_IS_BETTER,
    METHODS,
    METRICS,
    SOURCE,
    TABLE_2,
    TABLE_3,
    THRESHOLDS,
)
from experiments.papers.numbers.published import Figure

EQUAL = "equal"


def better(metric: str, first: Figure, second: Figure) -> int:
    """1 where the first is the better one, -1 where the second is, 0 where they are closer than their spreads together.

    Example: perplexities 3.74 +- 0.14 and 3.64 +- 0.11 are equal: 0.10 is less than 0.25.
    """
    if abs(first.mean - second.mean) <= first.spread + second.spread:
        return 0
    return 1 if (first.mean > second.mean) == (metric in HIGHER_IS_BETTER) else -1


def compared(metric: str, names: tuple[str, str], paper: tuple[Figure, Figure], here: Sequence[Figure | None]) -> dict[str, Any]:
    """One comparison: the better one there and here, and whether they agree; None where this run does not tell."""
    there = _winner(names, better(metric, *paper))
    row: dict[str, Any] = {"metric": metric, "of": list(names), "paper": there, "here": None, "agree": None}
    first, second = here
    if first is not None and second is not None:
        row["here"] = _winner(names, better(metric, first, second))
        row["agree"] = row["here"] == there
    return row


def _winner(names: tuple[str, str], sign: int) -> str:
    return EQUAL if sign == 0 else names[0] if sign > 0 else names[1]


def methods_agree(here: Mapping[str, Mapping[str, Figure | None]]) -> list[dict[str, Any]]:
    """Table 2: each two methods in each of its columns.

    Args:
        here: metric -> the paper's name of a method -> what this run measured; methods that did not run are absent.
    """
    rows = []
    for column, metrics in TABLE_2.items():
        for metric, paper in metrics.items():
            own = here.get(metric, {})
            for first, second in combinations([method for method in METHODS if method in own], 2):
                pair = paper[first], paper[second]
                rows.append({"column": column} | compared(metric, (first, second), pair, (own[first], own[second])))
    return rows


def beams_agree(here: Mapping[int, Mapping[str, Figure | None]]) -> list[dict[str, Any]]:
    """Table 3: each two numbers of beams that both ran.

    Args:
        here: number of beams -> metric -> what this run measured.
    """
    rows = []
    for column, paper in TABLE_3.items():
        for few, many in pairwise(beams for beams in paper if beams in here):
            names = (f"{few} beams", f"{many} beams")
            for metric in METRICS:
                pair = paper[few][metric], paper[many][metric]
                rows.append({"column": column} | compared(metric, names, pair, (here[few][metric], here[many][metric])))
    return rows


def thresholds_agree(here: Mapping[float, Mapping[str, Figure | None]]) -> list[dict[str, Any]]:
    """What the paper says of the threshold in words (its figure 4).

    Args:
        here: threshold -> metric -> what this run measured.
    """
    rows = []
    for metric, winner, loser, words in THRESHOLDS:
        if winner in here and loser in here:
            sign = Figure(1.0 if metric in HIGHER_IS_BETTER else 0.0), Figure(0.0 if metric in HIGHER_IS_BETTER else 1.0)
            names = (f"threshold {winner:g}", f"threshold {loser:g}")
            rows.append({"column": words} | compared(metric, names, sign, (here[winner][metric], here[loser][metric])))
    return rows


def summed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each two and metric, over the columns of the paper.

    Returns:
        ``of``, ``metric``, ``paper`` (winner -> columns), ``here``, and in how many of how many columns they agree; ``agree`` is
        None where this run does not tell.
    """
    merged: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["metric"], *row["of"])
        found = merged.setdefault(
            key, {"of": row["of"], "metric": row["metric"], "paper": {}, "here": row["here"], "agree": None, "columns": 0}
        )
        found["paper"][row["paper"]] = found["paper"].get(row["paper"], 0) + 1
        found["columns"] += 1
        if row["agree"] is not None:
            found["agree"] = (found["agree"] or 0) + row["agree"]
    return list(merged.values())


def beside_paper(
    methods: Mapping[str, Mapping[str, Figure | None]],
    beams: Mapping[int, Mapping[str, Figure | None]],
    thresholds: Mapping[float, Mapping[str, Figure | None]],
) -> dict[str, Any]:
    """All comparisons of a run, and how many agree. See the functions above for the arguments."""
    tables = {
        "table 2": methods_agree(methods),
        "table 3": beams_agree(beams),
        "figure 4": thresholds_agree(thresholds),
    }
    told = [row["agree"] for rows in tables.values() for row in rows if row["agree"] is not None]
    ran = {key: rows for key, rows in tables.items() if rows}
    return {"source": SOURCE, "agree": sum(told), "told": len(told), "comparisons": ran}
