"""Fault injection into Redis at a small size, and the statistics of lost ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.configs.slices import SpeculationOptions
from outrider.experiments.bench.run import run
from outrider.experiments.faults import cache
from outrider.experiments.faults.cache import FAULTS, Answer, Pass, compared, halves
from outrider.experiments.faults.ranks import Run, summary
from outrider.experiments.service.served import served
from tests.helpers.models import SENTENCES


def answers(*rows: tuple[int, int, int, float, int]) -> Pass:
    """Make a pass of requests with these outputs, numbers of tokens and steps, seconds and places."""
    made = tuple(Answer([output], tokens, steps, 0, seconds, place) for output, tokens, steps, seconds, place in rows)
    return Pass(made, sum(answer.seconds for answer in made))


def test_phase_compared_with_plain_decoding() -> None:
    plain = [answers((1, 4, 4, 2.0, 1), (2, 4, 4, 4.0, 2))]
    phase = [answers((1, 4, 1, 1.0, 2), (3, 4, 3, 5.0, 1))]
    row = compared(phase, plain)
    assert (row["requests"], row["identical"], row["tokens_per_step"]) == (2, 1, 2.0)
    assert row["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert row["request_ratio"] == {"p50": 1.4, "p5": 0.86, "lowest": 0.8}
    assert compared(phase + plain, plain + phase)["request_ratio"]["lowest"] == 0.5
    assert compared(plain, plain)["identical"] == 2


def test_tokens_per_step_of_requests_answered_before_and_after_the_fault() -> None:
    a = answers((1, 8, 8, 1.0, 2), (2, 8, 8, 1.0, 1))  # the fault came after one of two
    b = answers((1, 8, 8, 1.0, 1), (2, 8, 2, 1.0, 2))
    assert halves([a], [b]) == {"answered_before": 4.0, "answered_after": 1.0}


def drafting(strategy: str = "auto") -> SpeculationOptions:
    """Return options with which the number of draft rows does not depend on the speed of the machine."""
    return SpeculationOptions(strategy, options={"all_rows": True} if strategy == "auto" else {})


def test_outputs_equal_plain_decoding_and_sharing_returns(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SpeculationOptions", drafting)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": sentence[at:]}) + "\n" for sentence in SENTENCES for at in (0, 4)))
    options = ["--requests", "6", "--max-tokens", "40", "--concurrency", "3", "--repeats", "1", "--dtype", "float32"]
    assert run(cache.BENCH, ["--prompts", str(prompts), "--model", str(tiny_model), "--out", str(tmp_path), *options]) == 0
    results = json.loads(next(tmp_path.glob("*-cache-faults.json")).read_text())["results"]["3 at a time"]
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


def test_times_are_summarized_by_victim() -> None:
    runs = [
        Run("KILL", "follower", 0.1, 4, (), 0.2, 0.1, 3.0),
        Run("KILL", "leader", 0.5, 3, ("APIError: gone",), 9.0, None, 20.0),
        Run("KILL", "follower", 0.9, 4, (), 0.4, 0.3, 5.0),
    ]
    made = summary(runs)
    assert {name: (part["runs"], part["identical"], part["of"]) for name, part in made.items()} == {
        "all": (3, 11, 12), "follower": (2, 8, 8), "leader": (1, 3, 4),
    }  # fmt: skip
    assert made["follower"]["recovered_s"] == {"median": 4.0, "min": 3.0, "max": 5.0}
    assert made["all"]["pause_s"] == {"median": 0.4, "min": 0.2, "max": 9.0}
    assert made["leader"]["noticed_s"] == {}
    assert summary(runs[:1]).keys() == {"all", "follower"}


def test_server_that_does_not_start_reports_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"did not start: (?s:.*)not a folder"), served(str(tmp_path / "none"), []):
        pytest.fail("it started")
