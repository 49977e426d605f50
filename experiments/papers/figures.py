"""The sweeps of a paper's figures, drawn: lines, and heat maps of two settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import save_figure

_COLUMNS = 3


def panel(kind: str, title: str, x: str, y: str, series: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A panel as JSON values.

    Args:
        kind: ``lines``, ``bars`` or ``heat``.
        title: above it.
        x: what the inner keys of ``series`` are.
        y: what its values are; of a heat map, what the outer keys are.
        series: line -> x -> value; of a heat map, row -> column -> value.
    """
    return {"kind": kind, "title": title, "x": x, "y": y, "series": {key: dict(row) for key, row in series.items()}}


def draw(figures: Mapping[str, Mapping[str, Any]], out: Path) -> Path:
    """All panels of a run on one page; the file's name says which kind of picture.

    Args:
        figures: name -> ``panel``, at least one of which has a series; those without one are left out.
        out: the file.
    """
    figures = {name: each for name, each in figures.items() if each["series"]}
    columns = min(_COLUMNS, len(figures))
    rows = -(-len(figures) // columns)
    page = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="constrained", facecolor="white")
    grid = page.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, each) in zip(grid, figures.items(), strict=False):
        (_heat if each["kind"] == "heat" else _lines)(axes, each)
        axes.set_title(f"{name}: {each['title']}", fontsize=8)
        axes.set_xlabel(each["x"], fontsize=8)
        axes.set_ylabel(each["y"], fontsize=8)
        axes.tick_params(labelsize=7)
    for axes in grid[len(figures) :]:
        axes.remove()
    return save_figure(page, out)


def _lines(axes: Axes, each: Mapping[str, Any]) -> None:
    ticks = list(dict.fromkeys(x for line in each["series"].values() for x in line))
    width = 0.8 / len(each["series"])
    for number, (label, line) in enumerate(each["series"].items()):
        at = [ticks.index(x) for x in line]
        if each["kind"] == "bars":
            axes.bar([place + number * width for place in at], list(line.values()), width, label=label)
        else:
            axes.plot(at, list(line.values()), "o-", markersize=3, linewidth=1.3, label=label)
    axes.set_xticks(range(len(ticks)), ticks)
    if len(each["series"]) > 1:
        axes.legend(frameon=False, fontsize=7)


def _heat(axes: Axes, each: Mapping[str, Any]) -> None:
    rows = list(each["series"])
    columns = list(dict.fromkeys(x for line in each["series"].values() for x in line))
    values = [[each["series"][row].get(column, float("nan")) for column in columns] for row in rows]
    axes.imshow(values, aspect="auto", origin="lower", cmap="viridis")
    middle = (min(map(min, values)) + max(map(max, values))) / 2
    for down, line in enumerate(values):
        for right, value in enumerate(line):
            colour = "black" if value > middle else "white"
            axes.text(right, down, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
