"""The one runner: what it makes of a bench's options, results and errors, and what its figures and progress look like."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from experiments.bench.figure import draw, panel
from experiments.bench.options import numbers
from experiments.bench.progress import Progress
from experiments.bench.record import ROOT
from experiments.bench.run import Bench, Results, Run, run, run_named

SERIES = {"a": {"1": [1.0, 3.0, 2.0], "2": 4.0}, "b": {"2": [2.0, 2.5]}}


def measure(args: argparse.Namespace, given: Run) -> Results:
    given.progress.say("halfway")
    if args.count == 13:
        raise ValueError("13 is not to be had")
    rows = {name: {"x": number, "y": [number, number + 1]} for number, name in enumerate("ab")}
    return {"rows": rows, "by number": {200: 3}, "figures": {"one": panel("bars", "", "", "seconds", SERIES)}}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, nargs="?", default=3)
    parser.add_argument("--seed", type=int, default=5)


def wrong(results: Results, args: argparse.Namespace) -> list[str]:
    return ["too many"] if args.count > 7 else []


BENCH = Bench("a-bench", "What it is.", measure, options, {"count": 1}, wrong=wrong)


def test_a_run_leaves_record_figure_table_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BENCH, ["--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    record = json.loads(next(tmp_path.glob("*-a-bench.json")).read_text())
    assert (record["seed"], record["config"]["count"]) == (5, 3) and record["results"]["rows"]["b"] == {"x": 1, "y": [1, 2]}
    picture = next(tmp_path.glob("*-a-bench.svg"))
    assert ElementTree.parse(picture).getroot().tag.endswith("svg") and picture.name in shown.err
    assert "halfway" in shown.err and "1.5 (1-2)" in shown.out and "seconds" not in shown.out


def test_json_is_all_that_is_printed_and_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BENCH, ["--out", str(tmp_path), "--json", "--count", "8"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rows"]["a"]["x"] == 0 and "wrong: too many" in shown.err


def test_what_cannot_be_used_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BENCH, ["--out", str(tmp_path / "out"), "--count", "13"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: 13 is not to be had" and not (tmp_path / "out").exists()
    for bad, words in ((["--count", "0"], "--count must be at least 1, got 0"), (["--nothing"], "unrecognized arguments")):
        with pytest.raises(SystemExit, match="2"):
            run(BENCH, bad)
        assert words in capsys.readouterr().err


def test_a_bench_that_is_not_recorded_writes_where_it_is_told_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = Bench("quiet", "", lambda args, given: {"a": 1}, recorded=False)
    assert run(quiet, []) == 0 and list(tmp_path.iterdir()) == []
    assert run(quiet, ["--out", "here"]) == 0 and len(list((tmp_path / "here").iterdir())) == 1


def test_a_name_that_is_not_known_is_told_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_named({"one": "nowhere"}, "prog", ["two"]) == 2
    assert capsys.readouterr().err.startswith("usage: prog {one}")
    assert run_named({"one": "nowhere"}, "prog", ["--help"]) == 0


@pytest.mark.parametrize("kind", ["lines", "curves", "bars", "stack", "heat"])
def test_every_kind_of_panel_is_drawn_and_the_same_each_time(kind: str, tmp_path: Path) -> None:
    series: dict[str, dict[str, Any]] = SERIES if kind != "heat" else {"r": {"1": 1.0, "2": 2.0}, "s": {"1": 3.0, "2": 4.0}}
    panels = {"first": panel(kind, "title", "x", "y", series), "empty": panel(kind, "", "x", "y", {})}
    first, second = draw(panels, tmp_path / "a.svg"), draw(panels, tmp_path / "b.svg")
    assert first.read_bytes() == second.read_bytes() and json.loads(json.dumps(panels)) == panels


def test_progress_says_how_long_something_takes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.bench.progress._TOLD_S", 0.1)
    with Progress() as progress:
        progress.say("begins")
        progress.note("at once: no line")
        time.sleep(0.8)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[  0.0 min] begins" and lines[1].startswith("[  0.0 min] at once: no line: ")


def test_numbers_with_commas() -> None:
    assert numbers(int, 1)("1,2,4") == (1, 2, 4)
    for text in ("1,x", "0,1", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            numbers(float, 1)(text)


@pytest.mark.parametrize(
    "name", ["strategies", *(pytest.param(name, marks=pytest.mark.slow) for name in ("load", "scaling"))]
)
def test_the_command_hands_its_options_to_the_bench(name: str) -> None:
    command = [sys.executable, "-m", "cluster.cli.main", "bench", name, "--prompts", "p.jsonl", "--repeats", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2
    assert f"outrider bench {name}: error: --repeats must be at least 1, got 0" in done.stderr
