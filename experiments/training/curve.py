"""The picture of a training run: python -m experiments.training.curve METRICS --out demo_model/loss.svg"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from experiments.bench.figure import draw, panel


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
    """Held-out loss and answer accuracy against tokens seen; the same metrics give the same bytes."""
    rows = read_metrics(metrics)

    def line(key: str, scale: float = 1.0) -> dict[str, float]:
        return {str(row["tokens"] / 1e6): scale * row[key] for row in rows}

    losses = {
        f"{words} (last: {rows[-1][key]:.2f})": line(key)
        for key, words in (("loss", "whole records"), ("answer_loss", "answers"))
    }
    accuracy = {f"answers (last: {100 * rows[-1]['answer_accuracy']:.1f} %)": line("answer_accuracy", 100)}
    seen = "training tokens seen (millions)"
    panels = {
        "held-out loss": panel("curves", "", seen, "nats per token", losses),
        "tokens predicted": panel("curves", "", seen, "%", accuracy),
    }
    return draw(panels, out)


def main() -> None:
    """Draws what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of the run")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    args = parser.parse_args()
    print(loss_curve(args.metrics, args.out))


if __name__ == "__main__":
    main()
