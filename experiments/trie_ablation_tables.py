"""What the ablation of the trie reached, beside the figures of the paper (Lookahead, arXiv 2312.12728)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

FULL = "full"
PAPER_FORWARD_S = 1 / 52.4  # its Table 4: AntGLM-10B on AntRAG without drafts emits 52.4 tokens a second, one a step
# Tokens per second of AntGLM-10B on AntRAG: its Table 5, and Table 6 by capacity in multiples of the decoding length.
PAPER_PARTS = {
    FULL: 280.9,
    "without prompt branches": 234.5,
    "without output branches": 202.0,
    "without pruning": 221.4,
    "without elimination": 234.2,
}
PAPER_CAPACITIES = {1: 254.5, 2: 258.7, 4: 268.8, 8: 273.3, 16: 280.7, 32: 280.8, 64: 279.5, 128: 278.3}


def published() -> dict[str, dict[str, dict[str, float]]]:
    """The paper's figures with their ratio to the full method, by the labels of the results: ``parts`` and ``capacity``."""
    labels = {"parts": PAPER_PARTS, "capacity": {str(capacity): speed for capacity, speed in PAPER_CAPACITIES.items()}}
    return {
        kind: {label: {"tokens_per_s": speed, "ratio": round(speed / PAPER_PARTS[FULL], 4)} for label, speed in rows.items()}
        for kind, rows in labels.items()
    }


def add_ratios(rows: Sequence[dict[str, Any]], full: Mapping[str, float]) -> None:
    """Writes into each row what it reached relative to the full method.

    ``ratio`` is of tokens per step. ``ratio_in_time`` is of tokens per second, if a forward took what the paper's takes however
    many rows it computes, and the trie's work came on top: the nearest to the paper's tokens per second without a model.

    Example: 1.9 tokens a step and 0.9 ms beside the 19.1 ms forward against 1.9 and 7.1 ms: 20.0 / 26.2 = 0.76.
    """
    speed = [_tokens_per_s(row) for row in (full, *rows)]
    for row, own in zip(rows, speed[1:], strict=True):
        row["ratio"] = round(row["tokens_per_step"] / full["tokens_per_step"], 4)
        row["ratio_in_time"] = round(own / speed[0], 4)


def _tokens_per_s(row: Mapping[str, float]) -> float:
    return row["tokens_per_step"] / (PAPER_FORWARD_S + row["us_per_step"] / 1e6)


def mean_ratios(workloads: Mapping[str, Any]) -> dict[str, Any]:
    """What each condition reached relative to the full method, in tokens per step and in time, as means over workloads."""
    kinds: dict[str, Any] = {"parts": {}, "capacity": {}}
    for kind, tries in kinds.items():
        for trie in ("explicit", "compiled"):
            rows = [result[kind][trie] for result in workloads.values()]
            tries[trie] = {
                label: {key: round(statistics.fmean(row[label][key] for row in rows), 4) for key in ("ratio", "ratio_in_time")}
                for label in rows[0]
            }
    return kinds


def tables(name: str, result: Mapping[str, Any], paper: Mapping[str, Any]) -> tuple[Table, Table]:
    """What was reached on a workload, and what it took; a row a condition.

    Args:
        name: of the workload.
        result: of the workload, from the ``results`` of a record.
        paper: as ``published`` gives it.
    """
    titles = ("paper tok/s", "ratio", "explicit tok/step", "ratio", "in time", "compiled tok/step", "ratio", "in time")
    reached = _table(name, *titles)
    took = _table(
        name, "explicit: retrieval us", "p99", "update us", "us a step", "updates", "nodes", "MiB", "compiled: us", "p99",
        "us a step", "MiB", "tokens",
    )  # fmt: skip
    for kind, rows in paper.items():
        for label, said in rows.items():
            explicit, compiled = result[kind]["explicit"][label], result[kind]["compiled"].get(label)
            shown, last = (f"capacity {label}x", False) if kind == "capacity" else (label, label == list(rows)[-1])
            speed = (f"{said['tokens_per_s']:.1f}", f"{said['ratio']:.3f}")
            reached.add_row(shown, *speed, *_reached(explicit), *_reached(compiled), end_section=last)
            took.add_row(shown, *_took_explicit(explicit), *_took_compiled(compiled), end_section=last)
    return reached, took


def _table(*titles: str) -> Table:
    name, *others = titles
    return Table(Column(name, no_wrap=True), *(Column(title, justify="right") for title in others))


def _reached(row: Mapping[str, Any] | None) -> tuple[str, ...]:
    if row is None:
        return ("", "", "")
    return (f"{row['tokens_per_step']:.3f}", f"{row['ratio']:.3f}", f"{row['ratio_in_time']:.3f}")


def _took_explicit(row: Mapping[str, Any]) -> tuple[str, ...]:
    times = [f"{row[key]:,.0f}" for key in ("retrieval_p50_us", "retrieval_p99_us", "update_p50_us", "us_per_step")]
    return (*times, f"{row['update_share']:.0%}", f"{row['nodes']:,}", f"{row['mib']:.1f}")


def _took_compiled(row: Mapping[str, Any] | None) -> tuple[str, ...]:
    if row is None:
        return ("", "", "", "", "")
    times = [f"{row[key]:,.1f}" for key in ("retrieval_p50_us", "retrieval_p99_us", "us_per_step")]
    return (*times, f"{row['mib']:.1f}", f"{row['capacity_tokens']:,}" if "capacity_tokens" in row else "")
