"""Pictures of runs of ``exchange``, ``share_timing`` and ``outrider bench scaling``, drawn when the record is written.

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
from matplotlib.patches import Patch

from experiments.plots import save_figure
from experiments.scaling_options import KINDS, PARTS, PLAIN, called

_WORKS = {
    "none": "no compute", "unpinned": "beside compute, unpinned", "pinned": "beside compute, pinned", "model": "tiny model",
}  # fmt: skip
_ORDER = {kind: number for number, kind in enumerate(KINDS)}
_NAMED = {"plain": PLAIN, "jacobi": "jacobi"}
_BARS = ("plain", "jacobi", "best")
_LEGEND = ("plain decoding", "jacobi, the paper's method", "the best strategy of the form")


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
    """Results of ``outrider bench scaling`` as figures 6 and 7 of arXiv 2402.02057 have them: tokens per second by workers.

    A panel a workload; above each form a bar for plain decoding, one for the method of that paper (jacobi), and one for the
    strategy that is best in the form. On each bar is its speed against plain decoding on one worker.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    overall, workloads = results["overall"], results["workloads"]
    forms = sorted({row["form"]: row for row in overall.values()}.values(), key=lambda row: (row["workers"], _ORDER[row["kind"]]))
    shown = {row["form"]: bars_of(row["form"], overall) for row in forms}
    figure = Figure(figsize=(max(6.0, 1.75 * len(forms)) * len(workloads), 4.4), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for axes, (name, workload) in zip(panels, workloads.items(), strict=True):
        entries = workload["entries"]
        base = statistics.median(next(iter(entries.values()))["decode_tokens_per_s"])
        for place, row in enumerate(forms):
            for kind, label in shown[row["form"]].items():
                rates = entries[label]["decode_tokens_per_s"]
                middle, at = statistics.median(rates), place + (_BARS.index(kind) - 1) * 0.27
                ends = [[middle - min(rates)], [max(rates) - middle]]
                paint = {"color": _colour(_ORDER[row["kind"]]), "alpha": (0.35, 0.65, 1.0)[_BARS.index(kind)]}
                axes.bar(at, middle, 0.25, yerr=ends, capsize=2, **paint)
                axes.annotate(
                    f"{middle / base:.2f}x", (at, max(rates)), (0, 2), textcoords="offset points", ha="center", fontsize=7.5
                )
        names = [
            row["form"]
            + "".join(f"\n{overall[label]['strategy']}" for kind, label in shown[row["form"]].items() if kind == "best")
            for row in forms
        ]
        axes.set_xticks(range(len(forms)), names, fontsize=8.5)
        axes.set_title(name, fontsize=10)
        axes.set_axisbelow(True)
    panels[0].set_ylabel("tokens per second after the first")
    handles = [Patch(color="black", alpha=alpha, label=kind) for kind, alpha in zip(_LEGEND, (0.35, 0.65, 1.0), strict=True)]
    figure.legend(handles=handles, loc="outside upper center", frameon=False, fontsize=8.5, ncols=3)
    return save_figure(figure, out)


def bars_of(form: str, overall: Mapping[str, Any]) -> dict[str, str]:
    """The entries that stand for a form: plain decoding, jacobi, and the best strategy, as far as they ran."""
    rows = {label: row for label, row in overall.items() if row["form"] == form}
    found = {kind: label for label, row in rows.items() for kind, name in _NAMED.items() if row["strategy"].startswith(name)}
    drafting = [label for label, row in rows.items() if row["strategy"] != PLAIN]
    if drafting:
        found["best"] = max(drafting, key=lambda label: statistics.median(rows[label]["decode_ratio"]["plain"]))
    return found


def step_bars(results: Mapping[str, Any], out: Path) -> Path:
    """Results of ``outrider bench scaling``: where the time of a step goes, a panel a form, a bar a strategy.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    overall = results["overall"]
    forms = list(dict.fromkeys(row["form"] for row in overall.values()))
    strategies = list(dict.fromkeys(row["strategy"] for row in overall.values()))
    high = 0.3 * len(strategies) + 1.4
    figure = Figure(figsize=(2.9 * len(forms) + 1.0, high), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(forms), squeeze=False, sharex=True, sharey=True)[0]
    for axes, form in zip(panels, forms, strict=True):
        rows = {row["strategy"]: row["ms"] for row in overall.values() if row["form"] == form}
        places = [strategies.index(name) for name in rows]
        floor = [0.0] * len(rows)
        for number, part in enumerate(PARTS):
            wide = [ms[part] or 0.0 for ms in rows.values()]
            axes.barh(places, wide, left=floor, color=matplotlib.colormaps["Set2"](number), label=part)
            floor = [low + width for low, width in zip(floor, wide, strict=True)]
        axes.set_title(form, fontsize=10)
        axes.set_axisbelow(True)
    panels[0].set_yticks(range(len(strategies)), list(map(called, strategies)), fontsize=8)
    panels[0].invert_yaxis()
    figure.supxlabel("milliseconds of a step", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", frameon=False, fontsize=8.5, ncols=len(PARTS))
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
    "steps": step_bars,
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
