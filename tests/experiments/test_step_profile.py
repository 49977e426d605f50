"""The profile of steps from end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.step_profile import PHASES, main


def test_measures_every_case_and_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--random-model", "tiny", "--dtype", "float32", "--context", "24", "--max-tokens", "12", "--budget", "8"]
    assert main([*options, "--batch", "1", "3", "--steps", "6", "--out", str(tmp_path)]) == 0
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


def test_refuses_numbers_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "--steps must be at least 1" in capsys.readouterr().err
