"""What matters of the records of speed, as tables: strategies, load, draft models, ranks.

A report shows all rows; the README chooses rows and columns. A field of several repeats is their median, with the lowest and the
highest behind it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.report_cells import Cell, figure, median, repeats, rounded
from experiments.report_values import Table, table_of

Results = Mapping[str, Any]
_EARLY_EXIT = "generate + early exit "


def contestant(name: str) -> str:
    """A contestant of ``bench strategies`` in words."""
    if name.startswith(_EARLY_EXIT):
        return f"`generate`, assisted by its own first {name.removeprefix(_EARLY_EXIT)} layers"
    return "`generate` with its prompt lookup" if name == "generate + lookup" else f"`{name}`"


STRATEGY_COLUMNS: dict[str, Callable[[Mapping[str, Any]], Cell]] = {
    "speed": lambda row: repeats(row["ratio"]),
    "decode": lambda row: median(row["decode_ratio"]),
    "tokens per step": lambda row: figure(row["tokens_per_step"]),
    "ms a forward": lambda row: figure(row["ms"]["forward"], 1),
    "identical": lambda row: Cell(f"{row['identical']} of {row['records']}"),
}


def strategies(
    results: Results, rows: Mapping[str, str] | None = None, columns: Sequence[str] = tuple(STRATEGY_COLUMNS)
) -> Table:
    """``bench strategies``: a row a contestant; speeds are ratios to greedy ``generate``.

    Args:
        results: of the record.
        rows: contestants and what they are called; all when absent.
        columns: of ``STRATEGY_COLUMNS``.
    """
    overall = results["overall"]
    shown = rows or {name: contestant(name) for name in overall}
    cells = [[Cell(label), *(STRATEGY_COLUMNS[column](overall[name]) for column in columns)] for name, label in shown.items()]
    if "identical" in columns and len({overall[name]["records"] for name in shown}) == 1:
        for row, name in zip(cells[1:], list(shown)[1:], strict=True):  # of how many is said once
            row[1 + list(columns).index("identical")] = Cell(str(overall[name]["identical"]))
    return table_of("", ("", *columns), cells)


def load(results: Results) -> Table:
    """``bench load``, closed loop: tokens a second over the baseline's by the number of clients."""
    closed, baseline = results["closed"], results["baseline"]
    servers = list(dict.fromkeys(name for cell in closed.values() for name in cell["servers"]))
    rows = []
    for name in servers:
        if name != baseline:
            cells = [cell["servers"].get(name) for cell in closed.values()]
            rows.append([Cell(f"`{name}` over `{baseline}`"), *(repeats(cell["ratio"]) if cell else Cell("") for cell in cells)])
    if "auto" in servers:
        drafted = [cell["servers"]["auto"]["drafted_per_step"] for cell in closed.values()]
        rows.append([Cell("rows drafted in a step"), *(figure(value, 1) for value in drafted)])
    plain = [cell["servers"][baseline]["tokens_per_s"] for cell in closed.values()]
    rows.append([Cell(f"`{baseline}`, tokens/s"), *(figure(value, 0) for value in plain)])
    return table_of("", ("clients", *closed), rows)


def load_workloads(results: Results) -> Table | None:
    """``bench load``, one client on each file alone: speed over the baseline's; None where this was not run."""
    workloads = results.get("workloads") or {}
    rows = [
        [
            Cell(f"`{name}`"),
            Cell(f"`{server}`"),
            repeats(row["ratio"]),
            repeats(row["decode_ratio"]),
            figure(row["tokens_per_step"]),
        ]
        for name, cell in workloads.items()
        for server, row in cell["servers"].items()
        if server != results["baseline"] and row.get("decode_ratio")
    ]
    titles = ("one client on", "", "speed", "decode", "tokens per step")
    return table_of("", titles, rows, keys=2) if rows else None


def draft_models(results: Results, rows: Mapping[str, str] | None = None) -> Table:
    """``bench draft-models``: a row a method, beside plain decoding.

    Args:
        results: of the record.
        rows: methods and what they are called; all but those of ablations when absent.
    """
    methods = results["methods"]
    plain = {results["baseline"], "greedy"}
    shown = rows or {name: f"`{name}`" for name in methods if ":" not in name}
    cells = []
    for name, label in shown.items():
        row = methods[name]
        same = row["identical"]
        text = f"the seed's, {same['same']} of {same['of']}" if same else "same law" if row["lossless"] else "lossy"
        values = [value for value in row["perplexity"] if value is not None]
        spread = statistics.stdev(values) if len(set(values)) > 1 else 0.0
        mean = statistics.fmean(values)
        perplexity = Cell(f"{mean:.2f}" + (f" ± {spread:.2f}" if spread else ""), mean)
        cells.append(
            [
                Cell(label),
                repeats(row["speedup"]),
                figure(row["tokens_per_step"]) if row["tokens_per_step"] else Cell(""),
                perplexity,
                Cell("" if name in plain else text),
            ]
        )
    return table_of("", ("", "speed", "tokens per step", "perplexity", "the text"), cells)


def scaling(results: Results, rows: Mapping[str, str] | None = None) -> Table:
    """``experiments.lookahead_scaling``: speeds of decoding, and where a step's time goes.

    Args:
        results: of the record.
        rows: entries and what they are called; all when absent.
    """
    overall, cells = results["overall"], []
    for name, label in (rows or {name: f"`{name}`" for name in overall}).items():
        row, ms = overall[name], overall[name]["ms"]
        parts = ("compute", "recompute", "exchange") if row["ranks"] > 1 else ("compute",)
        alone = Cell("") if row["strategy"] == "autoregressive" else repeats(row["decode_ratio"]["one_rank"])
        if row["ranks"] > 1 and alone.high is not None and alone.high < 1:  # what more ranks should not do
            middle, _, spread = alone.text.partition(" ")
            alone = replace(alone, text=f"**{middle}** {spread}".rstrip())
        cells.append(
            [
                Cell(label), repeats(row["decode_ratio"]["plain"]), repeats(row["decode_ratio"]["plain_wide"]), alone,
                figure(row["tokens_per_step"]), Cell(", ".join(rounded(ms[part], 1) for part in parts)),
            ]
        )  # fmt: skip
    titles = (
        "", "beside plain, 1 thread", "beside plain, 2 threads", "beside one rank, 1 thread", "tokens per step",
        "step in ms: compute, recompute, exchange",
    )  # fmt: skip
    return table_of("", titles, cells)
