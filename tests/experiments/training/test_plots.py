"""The picture of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from experiments.training.curve import loss_curve, read_metrics


def metrics(path: Path, steps: list[int], **changes: float) -> Path:
    """A metrics file with a row a step."""
    rows = [
        {"step": step, "tokens": step * 4096, "loss": 9 / step, "answer_loss": 8 / step, "answer_accuracy": 0.5} for step in steps
    ]
    path.write_text("".join(json.dumps(row | changes) + "\n" for row in rows))
    return path


def test_the_picture_is_an_svg_and_the_same_each_time(tmp_path: Path) -> None:
    source = metrics(tmp_path / "metrics.jsonl", [250, 500, 750])
    first, second = loss_curve(source, tmp_path / "a" / "loss.svg"), loss_curve(source, tmp_path / "b.svg")
    assert ElementTree.parse(first).getroot().tag.endswith("svg")
    assert first.read_bytes() == second.read_bytes()
    other = loss_curve(metrics(tmp_path / "other.jsonl", [250, 500, 750], answer_accuracy=0.9), tmp_path / "c.svg")
    assert other.read_bytes() != first.read_bytes()


def test_steps_run_again_after_a_cut_count_once(tmp_path: Path) -> None:
    rows = read_metrics(metrics(tmp_path / "metrics.jsonl", [250, 500, 500, 750]))
    assert [row["step"] for row in rows] == [250, 500, 750]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"step": 1, "loss": 2}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:1: no answer_accuracy, answer_loss, tokens"):
        read_metrics(tmp_path / "x.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no row yet"):
        read_metrics(tmp_path / "empty.jsonl")
