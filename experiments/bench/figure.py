"""Figures of runs: panels of lines, bars or heat maps, stored as JSON values in the results and drawn beside the record."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLUMNS = 3
_BEYOND_HUNDREDTHS = re.compile(r"(?<=\d\.\d\d)\d+")  # digits of coordinates, which make half of a file
Value = float | Sequence[float]  # several repeats are drawn as the median with an error bar


def panel(kind: str, title: str, x: str, y: str, series: Mapping[str, Mapping[Any, Value]]) -> dict[str, Any]:
    """Return a panel as JSON values.

    ``kind`` is ``lines``, ``curves`` (numeric x), ``bars`` (side by side), ``stack`` (stacked bars) or ``heat``. ``series`` maps
    line -> x -> value, or row -> column -> value for a heat map.
    """
    return {
        "kind": kind,
        "title": title,
        "x": x,
        "y": y,
        "series": {key: {str(x): value for x, value in row.items()} for key, row in series.items()},
    }


def draw(figures: Mapping[str, Mapping[str, Any]], out: Path) -> Path:
    """Draw all panels that have a series into one file, whose suffix selects the format."""
    figures = {name: each for name, each in figures.items() if each["series"]}
    columns = min(_COLUMNS, len(figures))
    rows = -(-len(figures) // columns)
    page = Figure(figsize=(max(4.6 * columns, 7.5), 3.6 * rows), layout="constrained", facecolor="white")
    grid = page.subplots(rows, columns, squeeze=False).ravel()
    kinds = {"heat": _heat, "curves": _curves, "lines": _lines, "bars": _bars, "stack": _bars}
    for axes, (name, each) in zip(grid, figures.items(), strict=False):
        kinds[each["kind"]](axes, each)
        axes.set_title(f"{name}: {each['title']}" if each["title"] else name, fontsize=8)
        axes.set_xlabel(each["x"], fontsize=8)
        axes.set_ylabel(each["y"], fontsize=8)
        axes.tick_params(labelsize=7)
        if each["kind"] != "heat" and len(each["series"]) > 1:
            axes.legend(frameon=False, fontsize=7)
    for axes in grid[len(figures) :]:
        axes.remove()
    return save_figure(page, out)


def _lines(axes: Axes, each: Mapping[str, Any]) -> None:
    ticks = list(dict.fromkeys(x for line in each["series"].values() for x in line))
    for label, line in each["series"].items():
        axes.errorbar([ticks.index(x) for x in line], *_spread(line), fmt="o-", markersize=3, linewidth=1.3, label=label)
    axes.set_xticks(range(len(ticks)), ticks)


def _curves(axes: Axes, each: Mapping[str, Any]) -> None:
    for label, line in each["series"].items():
        axes.plot(list(map(float, line)), [_middle(value) for value in line.values()], linewidth=1.4, label=label)


def _bars(axes: Axes, each: Mapping[str, Any]) -> None:
    ticks = list(dict.fromkeys(x for line in each["series"].values() for x in line))
    stacked, floor = each["kind"] == "stack", dict.fromkeys(ticks, 0.0)
    width = 0.8 if stacked else 0.8 / len(each["series"])
    for number, (label, line) in enumerate(each["series"].items()):
        medians, ends = _spread(line)
        at = [ticks.index(x) + (0.0 if stacked else number * width) for x in line]
        colour = matplotlib.colormaps["tab20"](number % 20)
        axes.bar(
            at, medians, width, [floor[x] for x in line] if stacked else 0.0, yerr=ends, capsize=2, label=label, color=colour
        )
        for x, value in zip(line, medians, strict=True):
            floor[x] += value
    long = max(map(len, ticks), default=0) > 8
    axes.set_xticks(range(len(ticks)), ticks, rotation=40 if long else 0, ha="right" if long else "center")


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


def _middle(value: Value) -> float:
    return statistics.median(value) if isinstance(value, Sequence) else value


def _spread(line: Mapping[str, Value]) -> tuple[list[float], list[list[float]] | None]:
    """Return medians and their distances to the extremes; None if each x has a single value."""
    medians = [_middle(value) for value in line.values()]
    if not any(isinstance(value, Sequence) for value in line.values()):
        return medians, None
    several = [value if isinstance(value, Sequence) else [value] for value in line.values()]
    below = [middle - min(values) for middle, values in zip(medians, several, strict=True)]
    return medians, [below, [max(values) - middle for middle, values in zip(medians, several, strict=True)]]


def save_figure(figure: Figure, out: Path) -> Path:
    """Write a figure in the common style; the bytes of an .svg are reproducible."""
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    if out.suffix == ".svg":
        out.write_text(_BEYOND_HUNDREDTHS.sub("", out.read_text(encoding="utf-8")), encoding="utf-8")
    return out
