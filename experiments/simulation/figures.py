"""A sweep of ``outrider simulate`` as a picture: what latency costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.plots import save_figure


def latency_against_cost(results: Mapping[str, Any], out: Path) -> Path:
    """p99 of the latency against dollars a million tokens, a panel a traffic, a colour a strategy, a mark a deployment.

    Args:
        results: of ``experiments.simulate``.
        out: the file; its name says which kind of picture.
    """
    rows = results["rows"]
    traffic = list(dict.fromkeys(row["traffic"] for row in rows))
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    figure = Figure(figsize=(5.2 * len(traffic) + 0.8, 4.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(traffic), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, traffic, strict=True):
        for number, strategy in enumerate(strategies):
            own = [row for row in rows if (row["traffic"], row["strategy"]) == (name, strategy)]
            points = [(row["usd_per_million"], row["e2e_s"]["p99"]) for row in own]
            colour = matplotlib.colormaps["tab10"](number % 10)
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, label=strategy)
            for row, point in zip(own, points, strict=True):
                axes.annotate(row["deployment"], point, xytext=(4, 3), textcoords="offset points", fontsize=6, color=colour)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("$ a million output tokens")
        axes.set_yscale("log")
    panels[0].set_ylabel("p99 of the latency (s)")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle("a simulation, no measurement", fontsize=9)
    return save_figure(figure, out)
