"""The experiment with faults of Redis, small; and its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.slices import SpeculationOptions
from experiments.bench.run import run
from experiments.faults import cache
from experiments.faults.cache import BENCH, FAULTS
from experiments.faults.figures import Answer, Pass, compared, halves, ratios
from tests.helpers.models import SENTENCES


def answers(*rows: tuple[str, int, int, float, int]) -> Pass:
    """Output, tokens, steps, seconds and place of each; decoding takes half of the time."""
    made = tuple(Answer(output, tokens, steps, 0, seconds, seconds / 2, place) for output, tokens, steps, seconds, place in rows)
    return Pass(made, sum(answer.seconds for answer in made))


def test_a_phase_beside_plain_decoding() -> None:
    plain = [answers(("a", 4, 4, 2.0, 1), ("b", 4, 4, 4.0, 2))]
    phase = [answers(("a", 4, 1, 1.0, 2), ("c", 4, 3, 5.0, 1))]
    row = compared(phase, plain)
    assert (row["requests"], row["identical"], row["tokens_per_step"]) == (2, 1, 2.0)
    assert row["ratio"] == row["decode_ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert row["request_ratio"] == {"p50": 1.4, "p5": 0.86, "lowest": 0.8}
    assert ratios(phase + plain, plain + phase)["request_ratio"]["lowest"] == 0.5
    assert compared(plain, plain)["identical"] == 2


def test_what_b_knew_is_what_a_had_answered_before_the_fault() -> None:
    a = answers(("a", 8, 8, 1.0, 2), ("b", 8, 8, 1.0, 1))  # the fault came after one of two
    b = answers(("a", 8, 8, 1.0, 1), ("b", 8, 2, 1.0, 2))
    assert halves([a], [b]) == {"answered_before": 4.0, "answered_after": 1.0}


def drafting(strategy: str = "auto") -> SpeculationOptions:
    """Options with which as many rows are drafted on a busy machine as on another."""
    return SpeculationOptions(strategy, options={"all_rows": True} if strategy == "auto" else {})


def test_outputs_are_plain_decodings_and_sharing_comes_back(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SpeculationOptions", drafting)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": sentence[at:]}) + "\n" for sentence in SENTENCES for at in (0, 4)))
    options = ["--requests", "6", "--max-tokens", "40", "--context", "256", "--concurrency", "3", "--repeats", "1"]
    given = ["--prompts", str(prompts), "--model", str(tiny_model), "--dtype", "float32", "--out", str(tmp_path / "out")]
    assert run(BENCH, [*given, *options]) == 0
    record = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    results = record["results"]["3 at a time"]
    phases = results["phases"]
    assert phases.keys() == {"plain", "plain again"} | {
        f"{phase}, {name}" for fault in FAULTS for phase in ("healthy", fault, f"after {fault}") for name in "AB"
    }
    assert all(row["identical"] == row["requests"] == 6 for row in phases.values())
    assert phases["plain"]["tokens_per_step"] == 1.0
    for fault in FAULTS:
        assert phases[f"after {fault}, B"]["shared_tokens"] > phases[f"{fault}, A"]["shared_tokens"]
        assert phases[f"after {fault}, B"]["tokens_per_step"] > 1.5 * phases[f"after {fault}, A"]["tokens_per_step"]
    assert {"connection", "full"} <= results["mirrors"][0]["failures"].keys()  # a pause is shorter than a timeout here


def test_prompts_that_cannot_be_used_are_one_line(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "why"}) + "\n")
    options = ["--model", str(tiny_model), "--max-tokens", "8", "--context", "256"]
    assert run(BENCH, ["--prompts", str(prompts), *options]) == 2
    assert run(BENCH, ["--prompts", str(tmp_path / "none.jsonl"), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 2 and "has 1 prompts" in errors[0]
    with pytest.raises(SystemExit):
        run(BENCH, ["--prompts", str(prompts), *options, "--concurrency", "0"])
