"""Pictures of recorded runs.

python -m experiments.plots loss-curve METRICS --out demo_model/loss.svg
python -m experiments.plots strategy-bars experiments/results/RECORD.json --out bars.svg
python -m experiments.plots shared-trie experiments/results/RECORD.json --out shared.svg
python -m experiments.plots trie-capacity experiments/results/RECORD.json --out capacity.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_LOSS, _ANSWERS, _ACCURACY = "#1f4e8c", "#c25a1a", "#2f7d4f"
_SHARED_LINES = (("alone", "-", "#888888"), ("B", "-", _LOSS), ("C", "--", _ANSWERS))
_NEIGHBOURS = 2


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a training run's ``metrics.jsonl`` by step; of a step that was run again after a cut, the last one.

    Raises:
        ValueError: no rows, or a row without the figures that are drawn.
    """
    rows: dict[float, dict[str, float]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        missing = {"step", "tokens", "loss", "answer_loss", "answer_accuracy"} - row.keys()
        if missing:
            raise ValueError(f"{path}:{number}: no {', '.join(sorted(missing))}: give the metrics.jsonl of train_demo_model")
        rows[row["step"]] = row
    if not rows:
        raise ValueError(f"{path} holds no row yet")
    return [rows[step] for step in sorted(rows)]


def loss_curve(metrics: Path, out: Path) -> Path:
    """Held-out loss and answer accuracy against tokens seen, as the kind of picture that the name of ``out`` says.

    The same metrics give the same bytes.
    """
    rows = read_metrics(metrics)
    millions = [row["tokens"] / 1e6 for row in rows]
    figure = Figure(figsize=(7.5, 5.6), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for key, label, colour in (("loss", "whole records", _LOSS), ("answer_loss", "answers", _ANSWERS)):
        losses = [row[key] for row in rows]
        above.plot(millions, losses, color=colour, label=f"{label} (last: {losses[-1]:.2f})", linewidth=1.8)
    above.set_ylabel("held-out loss (nats per token)")
    above.legend(frameon=False)
    accuracy = [100 * row["answer_accuracy"] for row in rows]
    below.plot(millions, accuracy, color=_ACCURACY, label=f"answers (last: {accuracy[-1]:.1f} %)", linewidth=1.8)
    below.set_ylabel("tokens predicted (%)")
    below.set_xlabel("training tokens seen (millions)")
    below.set_ylim(0, 100)
    below.legend(frameon=False, loc="upper left")
    return save_figure(figure, out)


def strategy_bars(results: Mapping[str, Any], out: Path) -> Path:
    """Results of ``outrider bench strategies``: speed against greedy generate with its spread, and accepted tokens by source.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    overall = results["overall"]
    names, places = list(overall), range(len(overall))
    figure = Figure(figsize=(max(7.5, 0.85 * len(names)), 7.5), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True)
    ratio_bars(above, [row["ratio"] for row in overall.values()], _LOSS)
    above.set_ylabel("speed against greedy generate")
    sources = sorted({source for row in overall.values() for source in row["accepted_per_step"]})
    floor = [1.0] * len(names)  # the target's own token
    below.bar(places, floor, color="#cccccc", label="target")
    for number, source in enumerate(sources):
        heights = [row["accepted_per_step"].get(source, 0.0) for row in overall.values()]
        below.bar(places, heights, bottom=floor, color=matplotlib.colormaps["tab20"](number % 20), label=source)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    below.set_ylabel("tokens per step, by source")
    below.set_xticks(places, names, rotation=40, ha="right", fontsize=8)
    figure.legend(loc="outside upper center", frameon=False, fontsize=8, ncols=6)
    for axes in (above, below):
        axes.set_axisbelow(True)
    return save_figure(figure, out)


def trie_capacity(results: Mapping[str, Any], out: Path) -> Path:
    """Results of ``experiments.trie_ablation`` against a trie's capacity: tokens per step, and per second beside the paper's.

    Each line is relative to the full method of its trie: the explicit one's capacity is 16 times the decoding length, that of the
    compiled one is never reached.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    figure = Figure(figsize=(11.0, 4.6), layout="constrained", facecolor="white")
    steps, seconds, published = figure.subplots(1, 3, sharex=True, sharey=True)
    paper = results["paper"]["capacity"]
    capacities = list(map(int, paper))
    for number, (name, workload) in enumerate(results["workloads"].items()):
        colour = matplotlib.colormaps["tab10"](number % 10)
        for trie, line in (("explicit", "o-"), ("compiled", "o--")):
            rows = [workload["capacity"][trie][str(capacity)] for capacity in capacities]
            full = workload["parts"][trie]["full"]["tokens_per_step"]
            label = f"{name}, {trie} (1.0: {full:.2f} tokens per step)"
            steps.plot(capacities, [row["ratio"] for row in rows], line, markersize=3, color=colour, label=label)
            seconds.plot(capacities, [row["ratio_in_time"] for row in rows], line, markersize=3, color=colour)
    published.plot(capacities, [row["ratio"] for row in paper.values()], "o-", markersize=3, color="black")
    titles = ("tokens per step", "tokens per second at a 19 ms forward", "tokens per second, arXiv 2312.12728")
    for axes, title in zip((steps, seconds, published), titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(capacities, [f"{capacity}x" for capacity in capacities], fontsize=8)
        axes.set_xlabel("capacity, in decoding lengths")
    steps.set_ylabel("relative to the full method")
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=3)
    return save_figure(figure, out)


def shared_trie_curves(results: Mapping[str, Any], out: Path) -> Path:
    """Results of ``experiments.shared_trie``: tokens per step request by request, a panel a workload.

    Requests differ much in how far they can be drafted, so a line is the mean of a few neighbours; what each request took is in
    the record.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    workloads = results["workloads"]
    columns = min(3, len(workloads))
    rows = -(-len(workloads) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows + 0.6), layout="constrained", facecolor="white")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, replicas) in zip(panels, workloads.items(), strict=False):
        for replica, line, colour in _SHARED_LINES:
            series = replicas[replica]["by_request"]
            label = {"alone": "shares nothing", "B": "after A had them", "C": "started later"}[replica]
            axes.plot(range(1, len(series) + 1), _smooth(series), line, color=colour, linewidth=1.4, label=label)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(bottom=0)
    for axes in panels[len(workloads) :]:
        axes.remove()
    figure.supxlabel("request", fontsize=9)
    figure.supylabel("tokens per step", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", frameon=False, fontsize=9, ncols=3)
    return save_figure(figure, out)


_OTHERS = ("vLLM", "llama.cpp", "transformers")  # begin the names of those that are not ours


def peers(results: Mapping[str, Any], out: Path) -> Path:
    """Results of ``experiments.peers``: tokens per second of each contestant at 1, 8 and 32 requests, with spreads.

    With one request it is decoding alone, after the first token; with more, all of the time counts.

    Args:
        results: the ``results`` of a record.
        out: the file; its name says which kind of picture.
    """
    models = results["models"]
    levels = sorted({int(level) for found in models.values() for row in found["speeds"].values() for level in row})
    figure = Figure(figsize=(4.2 * len(levels), 4.4 * len(models)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(models), len(levels), squeeze=False)
    for line, (model, found) in zip(panels, models.items(), strict=True):
        for axes, level in zip(line, levels, strict=True):
            kind = "decode" if level == 1 else "all"
            rates = {name: row[str(level)][f"{kind}_tokens_per_s"] for name, row in found["speeds"].items() if str(level) in row}
            rates = {name: values for name, values in rates.items() if values}
            medians = [statistics.median(values) for values in rates.values()]
            below = [median - min(values) for median, values in zip(medians, rates.values(), strict=True)]
            above = [max(values) - median for median, values in zip(medians, rates.values(), strict=True)]
            colours = [_LOSS if name.startswith(_OTHERS) else _ANSWERS for name in rates]
            axes.barh(range(len(rates)), medians, xerr=[below, above], capsize=2, color=colours)
            axes.set_yticks(range(len(rates)), list(rates), fontsize=7)
            axes.invert_yaxis()
            axes.set_title(f"{model}, {level} at once", fontsize=9)
            axes.set_xlabel("tokens per second" + (" after the first" if level == 1 else ""), fontsize=8)
    return save_figure(figure, out)


def _smooth(series: Sequence[float]) -> list[float]:
    """The mean of each entry and its neighbours, up to ``_NEIGHBOURS`` on either side."""
    return [statistics.fmean(series[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS + 1]) for at in range(len(series))]


def ratio_bars(axes: Axes, ratios: Sequence[Sequence[float]], colours: Any) -> None:
    """Bars of medians with the lowest and the highest, against the line of 1.

    Args:
        axes: to draw on.
        ratios: of each bar, one for each repeat.
        colours: one, or one for each bar.
    """
    medians = [statistics.median(ratio) for ratio in ratios]
    below = [median - min(ratio) for median, ratio in zip(medians, ratios, strict=True)]
    above = [max(ratio) - median for median, ratio in zip(medians, ratios, strict=True)]
    axes.bar(range(len(ratios)), medians, yerr=[below, above], capsize=3, color=colours)
    axes.axhline(1.0, color="black", linewidth=0.8)


def save_figure(figure: Figure, out: Path) -> Path:
    """Writes a figure as the house draws them; an .svg has the same bytes each time."""
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "outrider"}):
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    return out


def _results(record: Path) -> Any:
    return json.loads(record.read_text(encoding="utf-8"))["results"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures = parser.add_subparsers(required=True, metavar="PICTURE")
    curve = pictures.add_parser("loss-curve", help="held-out loss and answer accuracy of a training run")
    curve.add_argument("metrics", type=Path, help="metrics.jsonl of the run")
    curve.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    curve.set_defaults(draw=lambda args: loss_curve(args.metrics, args.out))
    bars = pictures.add_parser("strategy-bars", help="speed and accepted tokens of a run of outrider bench strategies")
    bars.add_argument("record", type=Path, help="its record")
    bars.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    bars.set_defaults(draw=lambda args: strategy_bars(_results(args.record), args.out))
    capacity = pictures.add_parser("trie-capacity", help="tokens per step against the trie's capacity of a run of trie_ablation")
    capacity.add_argument("record", type=Path, help="its record")
    capacity.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    capacity.set_defaults(draw=lambda args: trie_capacity(_results(args.record), args.out))
    shared = pictures.add_parser("shared-trie", help="tokens per step request by request of a run of shared_trie")
    shared.add_argument("record", type=Path, help="its record")
    shared.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    shared.set_defaults(draw=lambda args: shared_trie_curves(_results(args.record), args.out))
    args = parser.parse_args()
    print(args.draw(args))


if __name__ == "__main__":
    main()
