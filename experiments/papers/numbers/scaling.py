"""Comparison of a run of ``outrider bench scaling`` with figures 6 and 7 of Lookahead Decoding (arXiv 2402.02057)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.decoding.request import PLAIN
from outrider.experiments.papers.beside import Found, Rows, beside
from outrider.experiments.papers.numbers.published import ALL, Figure, Value, figure_of, load

PAPER = load("scaling")
_METRIC = "times plain decoding on one worker"


def beside_figures(results: Mapping[str, Any], dtype: str, device: str) -> dict[str, Any]:
    """Return tables and judged statements (see ``experiments.papers.beside``); the largest number of workers is compared.

    Args:
        results: with ``overall`` and ``workloads``.
        dtype: of the run.
        device: ``cpu`` or ``cuda``.
    """
    overall = results["overall"]
    most = max(row["workers"] for row in overall.values())
    rows = {label: row for label, row in overall.items() if row["workers"] in (1, most)}
    found = Found({ALL: _measures(rows.values())}, {"figure 6": _rates(rows, results["workloads"])})
    cores = f"{most} processes with a core each" if device == "cpu" else f"{most} GPUs"
    found.notes.append(
        f"Here: {cores}, {dtype}; speeds are of tokens after the first, against plain decoding on one worker. Plain decoding on "
        f"as many threads stands beside them, which the paper has no like of."
    )
    told = beside(PAPER, found, {}, device)
    return {key: told[key] for key in ("paper", "claims", "tables", "verdicts", "notes")}


def _called(strategy: str) -> str:
    return "plain" if strategy == PLAIN else strategy


def _measures(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Figure]]:
    """Return the ratios by kind and strategy; of several options of a strategy, the first is taken."""
    found: dict[str, dict[str, Figure]] = {}
    for row in rows:
        name = _called(row["strategy"]).partition(":")[0]
        found.setdefault(f"{row['kind']}, {name}", {_METRIC: figure_of(row["decode_ratio"]["plain"])})
    return found


def _rates(rows: Mapping[str, Mapping[str, Any]], workloads: Mapping[str, Any]) -> Rows:
    """Return the lowest and highest ratio over the workloads of plain decoding and the paper's method."""
    base = {name: statistics.median(next(iter(of["entries"].values()))["decode_tokens_per_s"]) for name, of in workloads.items()}
    found: dict[str, dict[str, Value]] = {}
    for label, row in rows.items():
        if _called(row["strategy"]) in ("plain", "jacobi"):
            rates = {name: of["entries"][label]["decode_tokens_per_s"] for name, of in workloads.items()}
            ratios = [statistics.median(rates[name]) / base[name] for name in rates]
            found[label] = {"lowest": min(ratios), "highest": max(ratios)}
    return found
