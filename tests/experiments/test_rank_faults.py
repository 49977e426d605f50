"""The experiments with lost ranks and with the load of elastic groups: their figures, and what they say when nothing works."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from experiments import elastic_load, rank_faults
from experiments.disturbed import Ask, Heard, Run, ask_all
from experiments.elastic_load import compared
from experiments.rank_faults import summary
from experiments.replica_process import Answered
from experiments.served import served
from tests.models import SENTENCES


def test_a_pause_is_one_that_the_signal_fell_into_or_that_came_later() -> None:
    heard = Heard(times=[0.0, 5.0, 5.5, 7.5, 7.6])
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
    assert made["follower"]["recovered_s"] == {"median": 4.0, "max": 5.0}
    assert made["all"]["pause_s"] == {"median": 0.4, "max": 9.0}
    assert made["leader"]["noticed_s"] == {}
    assert summary(runs[:1]).keys() == {"all", "follower"}


def test_a_request_that_fails_is_told_and_ends_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (heard,) = asyncio.run(ask_all(f"http://127.0.0.1:{port}", "tiny", [Ask("why", 0.0, 1)], 8, lambda text: None))
    assert heard.text == "" and heard.finish is None
    assert heard.error is not None and heard.error.startswith("APIConnectionError")


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"did not start: (?s:.*)not a folder"), served(str(tmp_path / "none"), []):
        pytest.fail("it started")


def test_too_few_prompts_are_one_line(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "why"}) + "\n")
    options = ["--prompts", str(prompts), "--model", str(tiny_model), "--max-tokens", "8", "--context", "256"]
    assert rank_faults.main(options) == 2
    assert elastic_load.main(options) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("has 1 prompts that fit" in error for error in errors)
    for main in (rank_faults.main, elastic_load.main):
        with pytest.raises(SystemExit):
            main([*options, "--max-tokens", "0"])
    with pytest.raises(SystemExit):
        rank_faults.main([*options, "--world-size", "1"])


def test_throughput_width_and_starvation() -> None:
    elastic = [(2.0, [Answered([1] * 8, 2, 2.0, [2, 2]), Answered([2] * 8, 4, 1.0, [1, 2, 2, 2])])]
    independent = [(4.0, [Answered([1] * 8, 8, 3.0, [1] * 8), Answered([3] * 8, 8, 3.0, [1] * 8)])]
    row = compared(elastic, independent, 2)
    assert (row["requests"], row["identical"]) == (2, 1)
    assert row["ratio"] == {"median": 2.0, "lowest": 2.0, "highest": 2.0}
    assert row["tokens_per_step"] == {"elastic": 2.667, "independent": 1.0}
    assert row["starved"] == {"elastic": 1.333, "independent": 1.0}
    assert (row["full_width"], row["mean_width"]) == (0.833, 1.833)


def test_one_request_has_all_ranks_and_every_output_is_right(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": sentence}) + "\n" for sentence in SENTENCES))
    options = ["--requests", "3", "--max-tokens", "60", "--context", "256", "--repeats", "1", "--dtype", "float32"]
    run = ["--prompts", str(prompts), "--model", str(tiny_model), "--out", str(tmp_path / "out")]
    assert elastic_load.main([*run, *options]) == 0
    results = json.loads((tmp_path / "out" / capsys.readouterr().out.strip()).read_text())["results"]
    assert all(results[part]["identical"] == results[part]["requests"] == 3 for part in ("alone", "at_once"))
    assert results["alone"]["full_width"] > 0.5
    assert results["at_once"]["mean_width"] < results["alone"]["mean_width"]
