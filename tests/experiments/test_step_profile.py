"""The profile of steps from end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from decoding.request import Request, SamplingParams
from decoding.tree import DraftTree
from engine.forward.batch import Work, pack
from experiments.bench.engines.phases import WaitingForward
from experiments.bench.run import run
from experiments.step_profile import BENCH, PHASES


def test_measures_every_case_and_writes_a_record(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(tiny_model), "--dtype", "float32", "--context", "24", "--max-tokens", "12", "--budget", "8"]
    assert run(BENCH, [*options, "--batch", "1", "3", "--steps", "6", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    cases = json.loads(path.read_text())["results"]["cases"]
    assert [(case["strategy"], case["batch"], case["sampled"]) for case in cases] == [
        (strategy, batch, sampled) for sampled in (False, True) for strategy in ("autoregressive", "auto") for batch in (1, 3)
    ]
    for case in cases:
        assert case["steps"] == 6 and tuple(case["ms"]) == PHASES
        assert case["ms"]["forward"] > 0 and case["ms"]["pack"] > 0 and case["ms"]["verify"] > 0
        assert case["step_ms"] == pytest.approx(sum(case["ms"].values()), abs=1e-3)
        assert 0 < case["around"] < 1
        if case["strategy"] == "autoregressive":
            assert case["drafted"] == 0 and case["tokens_per_step"] == 1
    assert "autoregressive" in capsys.readouterr().out


def test_a_waiting_forward_goes_on_with_the_text() -> None:
    text = [5, 6, 7, 8, 9, 1, 2]
    forward = WaitingForward(text, 10, 8, 0.0)
    first, second = (Request(name, text[at : at + 2], SamplingParams(max_tokens=4)) for name, at in (("a", 0), ("b", 3)))
    first.slot, second.slot = 1, 0
    forward.live = [(first, 0), (second, 3)]
    tree = DraftTree(np.array([6, 7, 3, 8], np.int32), np.array([-1, 0, 0, 1], np.int32), np.zeros(4, np.int8), 4)
    works = [Work(first, 0, 2, tree, frozenset()), Work(second, 0, 2, DraftTree.chain(9, ()), frozenset())]
    for _ in range(2):  # nothing is left of the last call
        logits = forward(pack(works))
        assert logits.argmax(1).tolist() == [7, 8, 8, 9, 1] and logits.sum() == 5


def test_beside_a_waiting_forward_drafts_are_as_right_as_the_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three four five six seven eight nine ten " * 60)
    options = ["--model", "demo_model", "--text", str(tmp_path / "text"), "--context", "64", "--max-tokens", "64", "--greedy"]
    case = ["--strategy", "llma", "--batch", "1", "--steps", "6", "--waiting-ms", "1"]
    assert run(BENCH, [*options, *case, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    (case,) = json.loads(path.read_text())["results"]["cases"]
    assert case["ms"]["forward"] >= 1 and case["tokens_per_step"] > 4
