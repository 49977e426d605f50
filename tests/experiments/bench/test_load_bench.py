"""``outrider bench load`` from end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench.__main__ import main

TEXT = "the quick brown fox jumps over the lazy dog and a request travels from the door to the engine and back again"


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


def test_a_run_has_all_parts(tiny_model: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    model = ("--model", tiny_model, "--dtype", "float64", "--budget", 8, "--max-tokens", 12)
    chosen = ("--strategy", "auto", "--strategy", "llma:copy_length=4", "--strategy", "autoregressive")
    small = ("--concurrency", "1,2", "--load", "0.8", "--requests", "3", "--repeats", "2")
    assert load(*model, "--prompts", *files, *chosen, *small, "--json", "--out", out) == 0
    shown = capsys.readouterr()
    results = json.loads(shown.out)
    record = json.loads(next(out.glob("*.json")).read_text())
    assert record["results"] == results and record["name"] == "bench-load" and record["config"]["concurrency"] == [1, 2]
    assert "1 clients, repeat 1: llma:copy_length=4" in shown.err
    ours = ["autoregressive", "auto", "llma:copy_length=4"]  # the baseline first
    for cell in (*results["closed"].values(), *results["open"].values()):
        tokens = cell["servers"]["autoregressive"]["repeats"][0]["output_tokens"]
        assert cell["requests"] == 3 and list(cell["servers"]) == ours
        for row in cell["servers"].values():
            assert len(row["ratio"]) == 2 and row["tokens_per_s"] > 0
            assert {run["output_tokens"] for run in row["repeats"]} == {tokens}
            assert row["ttft_ms"]["p99"] >= row["ttft_ms"]["p50"] > 0
        plain = cell["servers"]["autoregressive"]
        assert (set(plain["ratio"]), plain["tokens_per_step"], plain["drafted_per_step"]) == ({1.0}, 1.0, 0.0)
    assert results["open"]["0.8"]["requests_per_s"] == pytest.approx(0.8 * results["capacity"], abs=1e-2)
    assert results["differing"] == dict.fromkeys(ours, 0) and len(list(out.glob("*.svg"))) == 1


def test_a_run_tells_of_outputs_that_differ(
    tiny_model: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = (
        "--model",
        tiny_model,
        "--dtype",
        "float64",
        "--max-tokens",
        6,
        "--concurrency",
        "2",
        "--requests",
        3,
        "--repeats",
        1,
    )
    assert load(*model, "--prompts", *files, "--strategy", "trie", "--out", tmp_path / "out") == 0
    results = json.loads(next((tmp_path / "out").glob("*.json")).read_text())["results"]
    assert results["differing"] == {"autoregressive": 0, "trie": 0} and "open" not in results
    assert "`trie` over `autoregressive`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "1,x"], "argument --concurrency: must be numbers with commas between them, such as 1,2,4"),
        (["--concurrency", "0,1"], "argument --concurrency: must be numbers from 1 on"),
        (["--concurrency", "4,4"], "--concurrency names a number twice"),
        (["--load", "0.5,nan"], "argument --load: must be numbers from 0.01 on"),
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
