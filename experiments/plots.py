"""Pictures of recorded runs.

python -m experiments.plots loss-curve METRICS --out demo_model/loss.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

_LOSS, _ANSWERS, _ACCURACY = "#1f4e8c", "#c25a1a", "#2f7d4f"


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
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "outrider"}):
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures = parser.add_subparsers(required=True, metavar="PICTURE")
    curve = pictures.add_parser("loss-curve", help="held-out loss and answer accuracy of a training run")
    curve.add_argument("metrics", type=Path, help="metrics.jsonl of the run")
    curve.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    args = parser.parse_args()
    print(loss_curve(args.metrics, args.out))


if __name__ == "__main__":
    main()
