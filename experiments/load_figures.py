"""Pictures of ``outrider bench load``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from experiments.plots import ratio_bars, save_figure

_AUTO, _PLAIN, _STOCK = "#1f4e8c", "#000000", "#c25a1a"
_FLOOR = 0.98  # of plain decoding's speed, at every concurrency


def load_figures(results: Mapping[str, Any], out: Path) -> list[Path]:
    """All pictures of a run: ``out`` for the closed loop, and beside it ``-open``, ``-step`` and ``-workloads`` where they ran.

    Args:
        results: the ``results`` of a record.
        out: the file of the first; its name says which kind of picture.
    """
    pictures = [closed_loop(results, out)]
    for part, draw in (("open", open_loop), ("step", load_step), ("workloads", by_workload)):
        if results.get(part):
            pictures.append(draw(results, out.with_name(f"{out.stem}-{part}{out.suffix}")))
    return pictures


def closed_loop(results: Mapping[str, Any], out: Path) -> Path:
    """Tokens a second, the ratio to plain decoding, TTFT, TPOT and drafted rows against concurrency."""
    figure = Figure(figsize=(11.0, 10.5), layout="constrained", facecolor="white")
    (speed, ratio), (first, each), (drafted, steps) = figure.subplots(3, 2, sharex=True)
    cells = results["closed"]
    for name, style in _styles(cells, results["baseline"]).items():
        at = [int(key) for key, cell in cells.items() if name in cell["servers"]]
        rows = [cell["servers"][name] for cell in cells.values() if name in cell["servers"]]
        _line(speed, at, [row["tokens_per_s"] for row in rows], style, name)
        _line(ratio, at, [row["ratio_median"] for row in rows], style)
        if len(rows[0]["ratio"]) > 1 and name != results["baseline"]:
            low, high = ([pick(row["ratio"]) for row in rows] for pick in (min, max))
            ratio.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
        _latencies(first, each, at, rows, style)
        _line(steps, at, [row["tokens_per_step"] for row in rows], style)
        if rows[0]["drafted_per_request_step"] is not None:
            _line(drafted, at, [row["drafted_per_request_step"] for row in rows], style)
    ratio.axhline(_FLOOR, color="#888888", linewidth=0.8, linestyle=":")
    _titled(speed, "tokens per second")
    _titled(ratio, f"tokens per second relative to {results['baseline']} (band: repeats)")
    _titled(first, "time to first token, ms (p50; dotted: p99)", log=True)
    _titled(each, "time per output token, ms (p50; dotted: p99)", log=True)
    _titled(drafted, "rows drafted by request and step")
    _titled(steps, "tokens by request and step")
    ticks = [int(key) for key in cells]
    for axes in (drafted, steps):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("clients, each with one request at a time")
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=6)
    return save_figure(figure, out)


def open_loop(results: Mapping[str, Any], out: Path) -> Path:
    """TTFT, TPOT, end to end and drafted rows against the load of a Poisson process."""
    figure = Figure(figsize=(11.0, 7.5), layout="constrained", facecolor="white")
    (first, each), (whole, drafted) = figure.subplots(2, 2, sharex=True)
    cells = results["open"]
    for name, style in _styles(cells, results["baseline"]).items():
        at = [100 * float(key) for key, cell in cells.items() if name in cell["servers"]]
        rows = [cell["servers"][name] for cell in cells.values() if name in cell["servers"]]
        _latencies(first, each, at, rows, style, name)
        _line(whole, at, [row["e2e_ms"]["p50"] for row in rows], style)
        _line(whole, at, [row["e2e_ms"]["p99"] for row in rows], style | {"linestyle": ":", "marker": ""})
        if rows[0]["drafted_per_request_step"] is not None:
            _line(drafted, at, [row["drafted_per_request_step"] for row in rows], style)
    _titled(first, "time to first token, ms (p50; dotted: p99)", log=True)
    _titled(each, "time per output token, ms (p50; dotted: p99)", log=True)
    _titled(whole, "arrival to end, ms (p50; dotted: p99)", log=True)
    _titled(drafted, "rows drafted by request and step")
    for axes in (whole, drafted):
        axes.set_xticks([100 * float(key) for key in cells])
        axes.set_xlabel(f"load, % of what {results['baseline']} can do ({results['capacity']:.1f} requests/s)")
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=6)
    return save_figure(figure, out)


def load_step(results: Mapping[str, Any], out: Path) -> Path:
    """Tokens by step, rows drafted and seconds by token over the time of a load step; thin lines are single repeats."""
    figure = Figure(figsize=(9.0, 8.0), layout="constrained", facecolor="white")
    panels = figure.subplots(3, 1, sharex=True)
    titles = {
        "tokens_per_step": "tokens by request and step",
        "drafted_per_request_step": "rows drafted by request and step",
        "tpot_ms": "time per output token of a client, ms",
    }
    runs = results["step"]["runs"]
    for name, style in _styles({"step": {"servers": runs}}, results["baseline"]).items():
        for axes, key in zip(panels, titles, strict=True):
            for run in runs[name]:
                points = [(window["at_s"], window[key]) for window in run["windows"] if window[key] is not None]
                axes.plot(*zip(*points, strict=True), color=style["color"], linewidth=0.7, alpha=0.35) if points else None
            middle = _middle(runs[name], key)
            axes.plot(*middle, color=style["color"], linewidth=1.8, label=name if axes is panels[0] else None)
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        _titled(axes, title, log=key == "tpot_ms")
        for number, phase in enumerate(next(iter(runs.values()))[0]["phases"]):
            if number % 2:
                axes.axvspan(phase["start_s"], phase["end_s"], color="#dddddd", alpha=0.5, linewidth=0)
            if axes is panels[0]:
                place = (phase["start_s"] + phase["end_s"]) / 2
                label = f"{phase['concurrency']} at once"
                axes.text(place, 1.0, label, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
    panels[0].set_title(titles["tokens_per_step"], fontsize=10, pad=16)
    panels[-1].set_xlabel("seconds")
    figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=4)
    return save_figure(figure, out)


def by_workload(results: Mapping[str, Any], out: Path) -> Path:
    """Speed of one client against plain decoding, a bar a workload, with the lowest and the highest repeat."""
    cells, baseline = results["workloads"], results["baseline"]
    names = [name for name in next(iter(cells.values()))["servers"] if name != baseline]
    figure = Figure(figsize=(max(6.0, 0.45 * len(cells) + 2), 3.8 * max(1, len(names))), layout="constrained", facecolor="white")
    panels = figure.subplots(max(1, len(names)), 1, sharex=True, squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=False):
        axes.set_axisbelow(True)
        ratio_bars(axes, [cell["servers"][name]["ratio"] for cell in cells.values()], _AUTO)
        axes.set_ylabel(f"{name} relative to {baseline}")
    panels[-1].set_xticks(range(len(cells)), list(cells), rotation=40, ha="right", fontsize=8)
    return save_figure(figure, out)


def _styles(cells: Mapping[str, Any], baseline: str) -> dict[str, dict[str, Any]]:
    """How each server is drawn: ``auto`` and plain decoding stand out, transformers is dashed."""
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell["servers"]))
    styles, singles = {}, 0
    for name in names:
        style: dict[str, Any] = {"linewidth": 1.1, "linestyle": "-", "marker": "o", "markersize": 3}
        if name == baseline or name.partition(":")[0] == "auto":
            style |= {"color": _PLAIN if name == baseline else _AUTO, "linewidth": 2.4}
        elif name.startswith("generate"):
            style |= {"color": _STOCK, "linestyle": "--", "marker": {"generate": "s", "generate_batch": "^"}.get(name, "x")}
        else:
            style["color"] = matplotlib.colormaps["Set2"](singles % 8)
            singles += 1
        styles[name] = style
    return styles


def _line(axes: Axes, at: Sequence[float], values: Sequence[float], style: Mapping[str, Any], label: str | None = None) -> None:
    axes.plot(at, values, label=label, **style)


def _latencies(
    first: Axes, each: Axes, at: Sequence[float], rows: Sequence[Any], style: Mapping[str, Any], label: str | None = None
) -> None:
    """p50 as the server's line, p99 dotted."""
    for axes, key, named in ((first, "ttft_ms", label), (each, "tpot_ms", None)):
        points = [(place, row[key]) for place, row in zip(at, rows, strict=True) if row[key]["p50"] is not None]
        places = [place for place, _ in points]
        _line(axes, places, [values["p50"] for _, values in points], style, named)
        _line(axes, places, [values["p99"] for _, values in points], dict(style) | {"linestyle": ":", "marker": ""})


def _middle(runs: Sequence[Any], key: str) -> tuple[list[float], list[float]]:
    """The median over the repeats, window by window."""
    columns = [
        [window[key] for window in windows if window[key] is not None]
        for windows in zip(*(r["windows"] for r in runs), strict=False)
    ]
    times = [windows[0]["at_s"] for windows in zip(*(run["windows"] for run in runs), strict=False)]
    points = [(at, statistics.median(values)) for at, values in zip(times, columns, strict=True) if values]
    return [at for at, _ in points], [value for _, value in points]


def _titled(axes: Axes, title: str, log: bool = False) -> None:
    axes.set_title(title, fontsize=10)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
