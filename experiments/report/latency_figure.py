"""The figure of ``outrider doctor --calibrate``.

outrider doctor --calibrate --json > latency.json && python -m experiments.report.latency_figure latency.json --out latency.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decoding.budget.latency import LatencyCurve, StepLoad
from experiments.bench.figure import save_figure

_COLOURS = "#1f4e8c", "#c25a1a", "#2f7d4f", "#7a3e9d"


def latency_figure(told: Mapping[str, Any], out: Path) -> Path:
    """Step times by rows, by requests and by context: what was measured as dots, and the curve that was fitted as lines.

    Args:
        told: what ``outrider doctor --calibrate --json`` printed.
        out: the file; its name says which kind of picture.

    Raises:
        KeyError, ValueError: it is not that.
    """
    curve = LatencyCurve.from_json(told["curve"])
    steps = told["steps"]
    figure = Figure(figsize=(12.0, 4.2), layout="constrained", facecolor="white")
    by_rows, by_requests, by_context = figure.subplots(1, 3)
    _rows(by_rows, curve, steps, told)
    several = [step for step in steps if step["sequences"] > 1 or (step["context"] == curve.context and step["rows"] == 1)]
    _lines(by_requests, curve, several, "sequences", ("rows", "context"), "{rows} each, {context} tokens before")
    by_requests.set_xlabel("requests in the step")
    by_requests.set_xscale("log", base=2)
    counts = sorted({step["sequences"] for step in several})
    by_requests.set_xticks(counts, list(map(str, counts)))
    alone = [step for step in steps if step["sequences"] == 1]
    deep = {step["rows"] for step in alone if step["context"] != curve.context}
    _lines(by_context, curve, [step for step in alone if step["rows"] in deep], "context", ("rows",), "{rows}")
    by_context.set_xlabel("tokens before them, one request")
    for axes, title in zip((by_requests, by_context), ("rows", "rows"), strict=True):
        axes.legend(frameon=False, fontsize=8, title=title, title_fontsize=8)
    threads = f", torch threads: {told['threads']}" if told["threads"] else ""
    figure.suptitle(f"{told['model']}, {told['dtype']}, {told['device']}{threads}", fontsize=10)
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms per step")
    return save_figure(figure, out)


def _rows(axes: Axes, curve: LatencyCurve, steps: list[dict[str, Any]], told: Mapping[str, Any]) -> None:
    """Rows of one request, and how many of them take about as long as one."""
    own = [step for step in steps if step["sequences"] == 1 and step["context"] == curve.context]
    axes.plot([step["rows"] for step in own], [step["ms"] for step in own], "o", color=_COLOURS[0], label="measured")
    rows = np.linspace(1, curve.rows[-1], 400)
    axes.plot(rows, 1e3 * curve.seconds(rows, StepLoad(1, 1, curve.context)), color=_COLOURS[0], linewidth=1.4, label="curve")
    critical = told["critical_rows"]
    axes.axvspan(1, max(critical, 1.02), color=_COLOURS[2], alpha=0.15, linewidth=0)
    axes.axvline(critical, color=_COLOURS[2], linewidth=1.0)
    most = 1e3 * told["slack"] * float(curve.seconds(np.ones(1), StepLoad(1, 1, curve.context))[0])
    axes.axhline(
        most, color=_COLOURS[2], linewidth=1.0, linestyle="--", label=f"{told['slack']} x one row: up to {critical} rows"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(curve.rows, list(map(str, curve.rows)))
    axes.set_xlabel(f"rows of one request behind {curve.context} tokens")
    axes.legend(frameon=False, fontsize=8)


def _lines(axes: Axes, curve: LatencyCurve, steps: list[dict[str, Any]], along: str, by: tuple[str, ...], label: str) -> None:
    """One line and its dots for each kind of step."""
    kinds = sorted({tuple(step[name] for name in by) for step in steps})
    for number, kind in enumerate(kinds):
        own = sorted((step for step in steps if tuple(step[name] for name in by) == kind), key=lambda step: step[along])
        if len(own) < 2:
            continue
        colour, places = _COLOURS[number % len(_COLOURS)], [step[along] for step in own]
        axes.plot(places, [step["ms"] for step in own], "o", color=colour, label=label.format(**own[0]))
        axes.plot(places, [step["curve_ms"] for step in own], color=colour, linewidth=1.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", help="what outrider doctor --calibrate --json printed; - for stdin")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    args = parser.parse_args()
    try:
        text = sys.stdin.read() if args.calibration == "-" else Path(args.calibration).read_text(encoding="utf-8")
        print(latency_figure(json.loads(text), args.out))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {args.calibration}: {type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
