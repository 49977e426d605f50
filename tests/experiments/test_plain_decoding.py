"""Plain decoding beside transformers: the same tokens, rates and ratios of every cell, a record and a figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.plain_decoding import main, ratios


def test_all_cells_run_and_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--dtype float32 --threads 1 --batches 1 3 --prompt-tokens 9 --output-tokens 6 --repeats 2 --seed 3"
    assert main(["--random-model", "tiny", *options.split(), "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-plain-decoding.json")
    record = json.loads(path.read_text())
    results = record["results"]
    cells = {
        "autoregressive": {"1", "3"},
        "generate": {"1", "3"},
        "generate + lookup": {"1"},
        "generate_batch": {"1", "3"},
    }
    assert results["skipped"] == {}
    assert {name: set(by_batch) for name, by_batch in results["tokens_per_s"].items()} == cells
    rates = [values for by_batch in results["tokens_per_s"].values() for values in by_batch.values()]
    assert all(len(values) == 2 and min(values) > 0 for values in rates)
    assert results["identical"] == {f"{name} {b}": f"{b}/{b}" for name, batches in cells.items() for b in sorted(batches)}
    assert record["config"]["threads"] == 1 and record["seed"] == 3
    assert path.with_suffix(".svg").read_text().count("generate_batch") >= 1
    assert "autoregressive, batch 3 / batch 1" in capsys.readouterr().out


def test_prompts_from_a_file(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} quick brown foxes jump over the lazy dog"}) + "\n" for n in range(2)))
    options = ["--threads", "1", "--batches", "2", "--output-tokens", "3", "--repeats", "1"]
    given = ["--model", str(tiny_model), "--prompts", str(path), *options, "--out", str(tmp_path)]
    assert main([*given, "--prompt-tokens", "5"]) == 0
    (record,) = tmp_path.glob("*-plain-decoding.json")
    assert set(json.loads(record.read_text())["results"]["tokens_per_s"]["autoregressive"]) == {"2"}
    assert main([*given, "--prompt-tokens", "500"]) == 2
    assert "lower --prompt-tokens" in capsys.readouterr().err


def test_ratios_are_taken_repeat_by_repeat() -> None:
    rates = {
        "autoregressive": {1: [10.0, 12.0], 8: [60.0, 66.0]},
        "generate": {1: [8.0, 8.0]},
        "generate_batch": {8: [30.0, 66.0]},
    }
    assert ratios(rates) == {
        "autoregressive / generate, batch 1": [1.25, 1.5],
        "autoregressive / generate_batch, batch 8": [2.0, 1.0],
        "autoregressive, batch 8 / batch 1": [6.0, 5.5],
    }


@pytest.mark.parametrize("options", ["--random-model tiny --prompts a", "--model m --output-tokens 1", "--dtype bfloat16"])
def test_options_that_do_not_fit(options: str) -> None:
    with pytest.raises(SystemExit):
        main(options.split())
