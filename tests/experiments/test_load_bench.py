"""``outrider bench load`` from end to end on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from experiments.bench import arguments, main
from experiments.load import strategies_of, verdict
from experiments.load_figures import load_figures

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = "the quick brown fox jumps over the lazy dog and a request travels from the door to the engine and back again"
SMALL = ("--concurrency", "1,2", "--load", "0.8", "--step", "none", "--requests", "3", "--repeats", "2")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths, words = [], TEXT.split()
    for name in ("a", "b"):
        lines = [
            {"id": f"{name}/{i}", "prompt": " ".join(words[i : i + 6]), "output": " ".join(words[i : i + 8])} for i in range(3)
        ]
        words.reverse()
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def load(*arguments: object) -> int:
    return main(["load", *map(str, arguments)])


def test_a_guided_run_has_all_parts(
    tiny_model: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    guided = ("--guided", "--random-model", "tiny", "--tokenizer", tiny_model, "--budget", 8, "--max-tokens", 12)
    chosen = ("--strategy", "auto", "--strategy", "llma:copy_length=4")
    assert load(*guided, "--prompts", *files, *chosen, *SMALL, "--per-workload", 2, "--json", "--out", out) == 0
    shown = capsys.readouterr()
    results = json.loads(shown.out)
    record = json.loads(next(out.glob("*.json")).read_text())
    assert record["results"] == results and record["name"] == "bench-load" and record["config"]["concurrency"] == [1, 2]
    assert "1 at once, llma:copy_length=4: " in shown.err

    ours, alone = ["autoregressive", "auto", "llma:copy_length=4"], ["generate", "generate + lookup"]
    assert list(results["closed"]["1"]["servers"]) == [*ours, *alone, "generate_batch"]
    assert list(results["closed"]["2"]["servers"]) == [*ours, "generate_batch"] == list(results["open"]["0.8"]["servers"])
    for cell in (*results["closed"].values(), *results["open"].values()):
        assert cell["requests"] == 3
        for name, row in cell["servers"].items():
            assert len(row["ratio"]) == (2 if name in ours[:2] else 1) and row["tokens_per_s"] > 0
            assert {run["output_tokens"] for run in row["repeats"]} == {36} and row["ttft_ms"]["p99"] >= row["ttft_ms"]["p50"] > 0
        plain = cell["servers"]["autoregressive"]
        assert (set(plain["ratio"]), plain["tokens_per_step"], plain["drafted_per_step"]) == ({1.0}, 1.0, 0.0)
        assert cell["servers"]["llma:copy_length=4"]["drafted_per_request_step"] > 0
    assert results["open"]["0.8"]["requests_per_s"] == pytest.approx(0.8 * results["capacity"], abs=1e-2)
    assert list(results["workloads"]) == ["a", "b"] and list(results["workloads"]["a"]["servers"]) == ours[:2]
    assert results["differing"] == dict.fromkeys([*ours, *alone], 0) and results["skipped"] == {}
    assert sum(line.startswith("auto: at least ") for line in verdict(results)) == 1

    pictures = sorted(path for path in out.iterdir() if path.suffix == ".svg")
    assert [path.stem.partition("bench-load")[2] for path in pictures] == ["-open", "-workloads", ""]
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in pictures)
    again = load_figures(results, tmp_path / "again.svg")
    assert {path.read_bytes() for path in again} == {path.read_bytes() for path in pictures}


def test_an_unguided_run_tells_of_outputs_that_differ(
    tiny_model: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ("--concurrency", "2", "--load", "none", "--step", "none", "--requests", 3, "--repeats", 1)
    model = ("--model", tiny_model, "--dtype", "float64", "--max-tokens", 6)
    assert load(*model, "--prompts", *files, "--strategy", "trie", *parts, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr()
    results = json.loads(next((tmp_path / "out").glob("*.json")).read_text())["results"]
    assert results["differing"] == {"autoregressive": 0, "trie": 0, "generate_batch": 0}
    assert "open" not in results and "step" not in results and "clients 2" in shown.out
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_load_step_is_kept_and_drawn(tiny_model: Path, files: list[Path], tmp_path: Path) -> None:
    parts = ("--concurrency", "1", "--load", "none", "--step", "1,2", "--phase", 2, "--requests", 2, "--repeats", 1, "--no-stock")
    model = ("--model", tiny_model, "--max-tokens", 20, "--strategy", "autoregressive")
    assert load(*model, "--prompts", *files, *parts, "--out", tmp_path / "out") == 0
    results = json.loads(next((tmp_path / "out").glob("*.json")).read_text())["results"]
    (run,) = results["step"]["runs"]["autoregressive"]
    assert [phase["concurrency"] for phase in run["phases"]] == [1, 2] and run["back_after"] is None
    assert len(run["windows"]) == 8 and {window["tokens_per_step"] for window in run["windows"]} <= {1.0, None}
    assert len(list((tmp_path / "out").glob("*.svg"))) == 2 and list(results["closed"]["1"]["servers"]) == ["autoregressive"]


def test_the_baseline_always_runs_first() -> None:
    assert [choice.label for choice in strategies_of(["trie", "llma"])] == ["autoregressive", "trie", "llma"]
    assert [choice.label for choice in strategies_of(["trie", "autoregressive"])] == ["autoregressive", "trie"]
    everything = [choice.label for choice in strategies_of(None)]
    assert everything[0] == "autoregressive" and "auto" in everything and len(set(everything)) == len(everything) >= 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "1,x"], "argument --concurrency: must be numbers with commas between them, such as 1,2,4, or none"),
        (["--concurrency", "0,1"], "argument --concurrency: must be numbers from 1 on"),
        (["--concurrency", "none"], "--concurrency must name a number of clients"),
        (["--concurrency", "4,4"], "--concurrency names a number twice"),
        (["--load", "0.5,nan"], "argument --load: must be numbers from 0.01 on"),
        (["--step", "8"], "--step needs two phases at least"),
        (["--phase", "1"], "--phase must be at least 2 seconds, got 1"),
        (["--duration", "inf"], "--duration must be at least 0.1 seconds, got inf"),
        (["--single-repeats", "0"], "--single-repeats must be at least 1, got 0"),
        (["--random-model", "tiny"], "--random-model needs --guided"),
    ],
)
def test_options_that_cannot_be_used_end_at_once(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["load", "--prompts", "p.jsonl", *options])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.splitlines()[-1].startswith("outrider bench load: error: ")


def test_what_cannot_be_used_is_one_line(
    tiny_model: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--model", str(tiny_model), "--out", str(tmp_path / "out")]
    twice = tmp_path / "twice.jsonl"
    twice.write_text(files[0].read_text())
    assert load(*out, "--prompts", *files) == 2
    assert load(*out, "--prompts", *files, "--concurrency", 1, "--strategy", "trei") == 2
    assert load(*out, "--prompts", *files, twice, "--concurrency", 1, "--max-tokens", 5) == 2
    assert load(*out, "--prompts", tmp_path / "absent.jsonl") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    expected = (
        "6 prompts fit, 32 are needed",
        "did you mean 'trie'",
        "two records of --prompts have one id",
        "could not be read",
    )
    assert len(errors) == 4 and all(part in error for part, error in zip(expected, errors, strict=True)), errors
    assert not (tmp_path / "out").exists()


def test_the_command_explains_itself() -> None:
    args = arguments(["load", "--prompts", "p.jsonl"])
    defaults: dict[str, Any] = {"concurrency": (1, 2, 4, 8, 16, 32), "load": (0.5, 0.7, 0.9, 1.1, 1.2), "step": (1, 32, 1)}
    assert {name: getattr(args, name) for name in defaults} == defaults and args.per_workload is None
    assert arguments(["load", "--prompts", "p.jsonl", "--step", "none", "--per-workload"]).step == ()
    command = [sys.executable, "-m", "cluster.cli.main", "bench", "load", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert done.returncode == 0 and "example" in done.stdout and "--concurrency" in done.stdout and not done.stderr
