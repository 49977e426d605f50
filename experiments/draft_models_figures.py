"""Pictures of ``outrider bench draft-models``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.draft_models_paper import TABLE_1, TABLE_3
from experiments.plots import ratio_bars, save_figure
from experiments.record import NOT_METERED

_EXACT, _LAW, _LOSSY = "#1f4e8c", "#2f7d4f", "#c25a1a"


def draft_models_figures(results: Mapping[str, Any], out: Path) -> list[Path]:
    """All pictures of a run: ``out`` for the methods, and beside it ``-ablations`` and ``-batches`` where they ran.

    Args:
        results: the ``results`` of a record.
        out: the file of the first; its name says which kind of picture.
    """
    pictures = [methods_figure(results, out)]
    for part, draw in (("ablations", ablations_figure), ("batches", batches_figure)):
        if results[part]:
            pictures.append(draw(results, out.with_name(f"{out.stem}-{part}{out.suffix}")))
    return pictures


def methods_figure(results: Mapping[str, Any], out: Path) -> Path:
    """Speed, perplexity and, where it was metered, energy of each method; variants of the ablations are left out."""
    variants = {label for part in results["ablations"].values() for label in part.values() if label != "mjsd"}
    rows = {label: row for label, row in results["methods"].items() if label not in variants}
    metered = all(NOT_METERED not in row["energy"]["j_per_token"] for row in rows.values())
    figure = Figure(figsize=(max(7.5, 0.7 * len(rows)), 10.0 if metered else 7.5), layout="constrained", facecolor="white")
    panels = figure.subplots(3 if metered else 2, 1, sharex=True)
    colours = [_EXACT if row["identical"] else _LAW if row["lossless"] else _LOSSY for row in rows.values()]
    ratio_bars(panels[0], [row["speedup"] for row in rows.values()], colours)
    panels[0].set_ylabel(f"tokens per second against {results['baseline']}")
    _bars(panels[1], [row["perplexity"] for row in rows.values()], colours)
    panels[1].set_ylabel("perplexity by the target")
    panels[1].set_ylim(bottom=1.0)
    if metered:
        _bars(panels[2], [row["energy"]["j_per_token"] for row in rows.values()], colours)
        panels[2].set_ylabel(f"joules per token ({results['energy_source']}, idle power included)")
    panels[-1].set_xticks(range(len(rows)), list(rows), rotation=40, ha="right", fontsize=8)
    panels[0].set_title("blue: text of the seed; green: the target's law; orange: lossy", fontsize=9)
    for axes in panels:
        axes.set_axisbelow(True)
    return save_figure(figure, out)


def ablations_figure(results: Mapping[str, Any], out: Path) -> Path:
    """MJSD's speed, energy where metered, and perplexity against beams and threshold; the paper's Table 3 in grey."""
    figure = Figure(figsize=(9.0, 7.5), layout="constrained", facecolor="white")
    panels = figure.subplots(2, 2, sharey="row")
    for column, part in enumerate(("beams", "thresholds")):
        rows = {float(value): results["methods"][label] for value, label in results["ablations"][part].items()}
        for axes, key, title in zip(
            panels[:, column], ("tokens_per_s", "perplexity"), ("tokens per second", "perplexity"), strict=True
        ):
            _line(axes, rows, [row[key] for row in rows.values()], color=_LOSSY, label="here")
            axes.set_ylabel(title)
            axes.set_xlabel(part)
            if part == "beams":
                axes.set_xscale("log", base=2)
                axes.set_xticks(list(rows), [f"{value:g}" for value in rows])
    for pair, style in zip(TABLE_3, ("--", ":"), strict=True):
        beams = list(TABLE_3[pair])
        panels[1, 0].plot(
            beams, [TABLE_3[pair][n]["perplexity"].mean for n in beams], style, color="#888888", label=f"paper, {pair}"
        )
    panels[0, 0].set_title("tokens per second of the paper are those of other models: not drawn", fontsize=8)
    panels[1, 0].legend(frameon=False, fontsize=8)
    return save_figure(figure, out)


def batches_figure(results: Mapping[str, Any], out: Path) -> Path:
    """What a forward costs by its batch size, relative to a batch of one; seconds, and joules where metered."""
    batches = results["batches"]
    first = next(iter(batches))
    figure = Figure(figsize=(7.5, 4.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for key, colour, name in (("s_per_run", _EXACT, "seconds"), ("j_per_run", _LOSSY, "joules")):
        if None not in batches[first][key]:
            base = statistics.median(batches[first][key])
            places = {float(size): row for size, row in batches.items()}
            _line(
                axes,
                places,
                [[value / base for value in row[key]] for row in batches.values()],
                color=colour,
                label=f"{name}, here",
            )
        known = [size for size in TABLE_1 if str(size) in batches]
        if len(known) > 1 and int(first) in TABLE_1:
            values = [TABLE_1[size][key] / TABLE_1[int(first)][key] for size in known]
            axes.plot(known, values, "--", color=colour, alpha=0.5, label=f"{name}, paper")
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(size) for size in batches], list(batches))
    axes.set_xlabel("requests in a forward")
    axes.set_ylabel(f"of a forward, relative to a batch of {first}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return save_figure(figure, out)


def _line(axes: Axes, places: Mapping[float, Any], repeats: Sequence[Sequence[float]], **style: Any) -> None:
    """Medians with the lowest and the highest."""
    medians = [statistics.median(values) for values in repeats]
    below = [median - min(values) for median, values in zip(medians, repeats, strict=True)]
    above = [max(values) - median for median, values in zip(medians, repeats, strict=True)]
    axes.errorbar(list(places), medians, yerr=[below, above], fmt="o-", capsize=3, markersize=4, **style)


def _bars(axes: Axes, repeats: Sequence[Sequence[float]], colours: Sequence[str]) -> None:
    medians = [statistics.median(values) for values in repeats]
    below = [median - min(values) for median, values in zip(medians, repeats, strict=True)]
    above = [max(values) - median for median, values in zip(medians, repeats, strict=True)]
    axes.bar(range(len(repeats)), medians, yerr=[below, above], capsize=3, color=list(colours))
