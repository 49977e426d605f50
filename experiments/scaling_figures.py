"""Pictures of runs of ``exchange``, ``lookahead_scaling`` and ``share_timing``, drawn when the record is written.

python -m experiments.scaling_figures exchange experiments/results/RECORD.json --out exchange.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.plots import ratio_bars, save_figure

_WORKS = {
    "none": "no compute", "unpinned": "beside compute, unpinned", "pinned": "beside compute, pinned", "model": "tiny model",
}  # fmt: skip
PARTS = ("propose", "compute", "recompute", "exchange", "rest")  # of a step


def exchange_bars(results: Mapping[str, Any], out: Path) -> Path:
    """Results of ``experiments.exchange``: the median exchange by transport, with its p90, a panel a group size.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    cases = results["cases"]
    worlds = sorted({row["world"] for row in cases})
    transports = list(dict.fromkeys(row["transport"] for row in cases))
    figure = Figure(figsize=(4.6 * len(worlds), 3.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(worlds), squeeze=False, sharey=True)[0]
    width = 0.8 / len(_WORKS)
    for axes, world in zip(panels, worlds, strict=True):
        for number, (work, label) in enumerate(_WORKS.items()):
            rows = [row for row in cases if (row["world"], row["work"]) == (world, work)]
            places = [transports.index(row["transport"]) + (number - (len(_WORKS) - 1) / 2) * width for row in rows]
            medians = [max(row["exchange_ms"]["p50"], 1e-3) for row in rows]  # a logarithm has no place for zero
            above = [max(row["exchange_ms"]["p90"] - low, 0.0) for row, low in zip(rows, medians, strict=True)]
            axes.bar(places, medians, width, yerr=[[0.0] * len(above), above], capsize=2, color=_colour(number), label=label)
        axes.set_title(f"{world} ranks", fontsize=10)
        axes.set_yscale("log")
        axes.set_xticks(range(len(transports)), transports)
        axes.set_axisbelow(True)
    panels[0].set_ylabel("exchange of a step (ms): p50, up to p90")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", frameon=False, fontsize=9, ncols=4)
    return save_figure(figure, out)


def scaling_bars(results: Mapping[str, Any], out: Path) -> Path:
    """Results of ``experiments.lookahead_scaling``: speed against plain decoding with its spread, and where a step's time goes.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    overall = results["overall"]
    places = range(len(overall))
    figure = Figure(figsize=(max(7.0, 1.0 * len(overall)), 7.0), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True)
    colours = [_colour(row["ranks"] - 1) for row in overall.values()]
    ratio_bars(above, [row["decode_ratio"]["plain"] for row in overall.values()], colours)
    above.set_ylabel("tokens/s after the first token,\nagainst plain decoding on one thread")
    floor = [0.0] * len(overall)
    for number, part in enumerate(PARTS):
        heights = [row["ms"][part] for row in overall.values()]
        below.bar(places, heights, bottom=floor, color=matplotlib.colormaps["Set2"](number), label=part)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    below.set_ylabel("milliseconds of a step")
    below.legend(frameon=False, fontsize=8, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.5, 1.12))
    names = [
        f"{row['strategy']}\n{row['ranks']} x {row['threads']} thread{'s' * (row['threads'] > 1)}\nbudget {row['budget']}"
        for row in overall.values()
    ]
    below.set_xticks(places, names, fontsize=7)
    for axes in (above, below):
        axes.set_axisbelow(True)
    return save_figure(figure, out)


def prediction_lines(results: Mapping[str, Any], out: Path) -> Path:
    """Results of ``experiments.share_timing``: predicted speed and tokens per step against the ranks of a group.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    figure = Figure(figsize=(9.0, 3.8), layout="constrained", facecolor="white")
    speed, tokens = figure.subplots(1, 2, sharex=True)
    for number, (label, rows) in enumerate(results["strategies"].items()):
        worlds = [int(world) for world in rows]
        ratios = [row["ratio"] for row in rows.values()]
        medians = [statistics.median(ratio) for ratio in ratios]
        speed.plot(worlds, medians, "o-", markersize=4, color=_colour(number), label=label)
        low, high = [min(ratio) for ratio in ratios], [max(ratio) for ratio in ratios]
        speed.fill_between(worlds, low, high, color=_colour(number), alpha=0.2)
        tokens.plot(worlds, [row["tokens_per_step"] for row in rows.values()], "o-", markersize=4, color=_colour(number))
    speed.axhline(1.0, color="black", linewidth=0.8)
    speed.set_ylabel("predicted tokens/s against one rank,\neach at its own best budget")
    tokens.set_ylabel("tokens per step")
    for axes in (speed, tokens):
        axes.set_xlabel("ranks, a device each")
    speed.legend(frameon=False, fontsize=9)
    return save_figure(figure, out)


def _colour(number: int) -> Any:
    return matplotlib.colormaps["tab10"](number % 10)


_PICTURES: dict[str, Callable[[Mapping[str, Any], Path], Path]] = {
    "exchange": exchange_bars,
    "scaling": scaling_bars,
    "prediction": prediction_lines,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=tuple(_PICTURES))
    parser.add_argument("record", type=Path, help="of the run")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    args = parser.parse_args()
    results = json.loads(args.record.read_text(encoding="utf-8"))["results"]
    print(_PICTURES[args.picture](results, args.out))


if __name__ == "__main__":
    main()
