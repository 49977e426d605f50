"""The experiment with lost ranks: its figures, and what it says when nothing works."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from experiments.bench.run import run
from experiments.faults.ranks import BENCH, Run, ask_all, streaming, summary
from experiments.service.asks import Answer
from experiments.service.served import served


def test_a_pause_is_one_that_the_signal_fell_into_or_that_came_later() -> None:
    heard = Answer(times=[0.0, 5.0, 5.5, 7.5, 7.6])
    assert heard.pause_s(since=0.0) == 5.0
    assert heard.pause_s(since=5.2) == 2.0
    assert heard.pause_s(since=7.55) == pytest.approx(0.1)
    assert heard.pause_s(since=8.0) == 0.0


def test_times_are_summed_up_by_victim() -> None:
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


def test_a_request_that_fails_is_told_and_ends_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (heard,) = asyncio.run(ask_all(f"http://127.0.0.1:{port}", "tiny", [streaming("why", 0.0, 1, 8)]))
    assert heard.texts == {} and heard.error is not None and heard.error.startswith("ConnectError")


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"did not start: (?s:.*)not a folder"), served(str(tmp_path / "none"), []):
        pytest.fail("it started")


def test_too_few_prompts_are_one_line(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "why"}) + "\n")
    options = ["--prompts", str(prompts), "--model", str(tiny_model), "--max-tokens", "8", "--context", "256"]
    assert run(BENCH, options) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "has 1 prompts that fit" in error
    for wrong in (["--max-tokens", "0"], ["--world-size", "1"]):
        with pytest.raises(SystemExit):
            run(BENCH, [*options, *wrong])
