"""The tables of ``experiments.near_ties`` and ``experiments.exact_outputs``: where rounding decides, and where it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.report_cells import Cell
from experiments.report_values import Table, table_of


def near_ties(*records: Mapping[str, Any]) -> Table:
    """A row for each type and number of rows of the trees."""
    rows = []
    for results in records:
        for case in results["cases"]:
            trees = case["trees"]
            rows.append(
                [
                    Cell(results["dtype"]),
                    Cell(str(case["rows"])),
                    Cell(f"{trees['logit']['p99']:.2g} / {trees['logit']['max']:.2g}"),
                    Cell(f"{trees['flips']} of {results['tokens']:,}"),
                    Cell(f"{case['share']:.1%}"),
                    Cell(str(case["left"])),
                ]
            )
    moves, again = "a logit moves by: p99 / max", "a guard computes again"
    titles = ("type", "rows of a tree", moves, "other tokens", again, "other tokens then")
    return table_of("", titles, rows)


def exact_outputs(results: Mapping[str, Any]) -> Table:
    """A row for each type and strategy, both settings side by side."""
    settings = {(case["dtype"], case["exact"]): case["strategies"] for case in results["cases"]}
    rows = []
    for dtype in dict.fromkeys(dtype for dtype, _ in settings):
        price = results["cost_of_strict"][dtype]
        for usual, strict in zip(settings[dtype, "rounding"], settings[dtype, "strict"], strict=True):
            assert usual["strategy"] == strict["strategy"], (usual, strict)
            plain = usual["strategy"] == "autoregressive"
            times = f"{price['median']:.2f} ({price['quartile_1']:.2f}-{price['quartile_3']:.2f})" if plain else ""
            cells = [
                f"{row[key]} of {row['outputs']}" for row in (usual, strict) for key in ("identical_alone", "identical_crowd")
            ]
            rows.append([Cell(dtype), Cell(f"`{usual['strategy']}`"), *map(Cell, cells), Cell(times)])
    settings_of = (f"{exact}, {company}" for exact in ("rounding", "strict") for company in ("alone", "in a crowd"))
    return table_of("", ("type", "strategy", *settings_of, "time of strict over rounding"), rows)
