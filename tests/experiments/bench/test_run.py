"""Runner, records, figures and progress."""

from __future__ import annotations

import argparse
import getpass
import json
import platform
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest

from outrider.engine.measures.energy import NoMeter, open_meter
from outrider.experiments.bench.figure import panel
from outrider.experiments.bench.options import numbers
from outrider.experiments.bench.record import ROOT, Kept, command_line, describe_energy, git_state, write_record
from outrider.experiments.bench.run import Bench, Results, Run, run

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


BENCH = Bench("a-bench", "A bench.", measure, options, {"count": 1}, wrong=wrong)


def test_a_run_leaves_record_figure_table_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BENCH, ["--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    record = json.loads(next(tmp_path.glob("*-a-bench.json")).read_text())
    assert (record["seed"], record["config"]["count"]) == (5, 3) and record["results"]["rows"]["b"] == {"x": 1, "y": [1, 2]}
    picture = next(tmp_path.glob("*-a-bench.svg"))
    assert ElementTree.parse(picture).getroot().tag.endswith("svg") and picture.name in shown.err
    assert "halfway" in shown.err and "1.5 (1-2)" in shown.out


def test_wrong_results_exit_with_1_and_json_is_all_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BENCH, ["--out", str(tmp_path), "--json", "--count", "8"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["rows"]["a"]["x"] == 0 and "wrong: too many" in shown.err


def test_invalid_input_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BENCH, ["--out", str(tmp_path / "out"), "--count", "13"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: 13 is not to be had" and not (tmp_path / "out").exists()
    for bad, words in ((["--count", "0"], "--count must be at least 1, got 0"), (["--nothing"], "unrecognized arguments")):
        with pytest.raises(SystemExit, match="2"):
            run(BENCH, bad)
        assert words in capsys.readouterr().err


def test_numbers_with_commas() -> None:
    assert numbers(int, 1)("1,2,4") == (1, 2, 4)
    for text in ("1,x", "0,1", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            numbers(float, 1)(text)


def test_a_record_names_no_host_no_user_and_no_absolute_path(tmp_path: Path) -> None:
    started = datetime.now(UTC) - timedelta(seconds=90)
    config = {"corpus": Path("/data/corpus"), "model": str(ROOT / "demo_model"), "nested": {"files": ["/data/x/a.jsonl", "b"]}}
    paths = [
        write_record("a-run", config, {"figure": 1.5, "file": Path("/data/out.txt")}, 7, started, folder=tmp_path / "results")
        for _ in range(3)
    ]
    text = paths[0].read_text()
    record = json.loads(text)
    assert [path.stem for path in paths[1:]] == [f"{paths[0].stem}-2", f"{paths[0].stem}-3"]  # none replaces another
    assert set(record) == {
        "name", "started", "finished", "duration_s", "git", "command", "config", "seed", "device", "versions", "results",
        "energy",
    }  # fmt: skip
    assert record["config"] == {"corpus": "corpus", "model": "demo_model", "nested": {"files": ["a.jsonl", "b"]}}
    assert record["results"] == {"figure": 1.5, "file": "out.txt"} and record["energy"] == {"source": "n/a"}
    assert record["seed"] == 7 and 89 < record["duration_s"] < 300 and record["device"]["cores"] >= 1
    assert all(record["versions"][name] for name in ("torch", "transformers", "outrider"))
    for private in ("/data", str(ROOT), str(tmp_path), str(Path.home()) + "/", platform.node(), f"/{getpass.getuser()}/"):
        assert private not in text, private
    typed = ["/usr/bin/python3", "-m", "experiments.x", "--model=/srv/m", "--out", str(ROOT / "build" / "o"), "../shared/w"]
    assert command_line(typed) == "python -m experiments.x --model=m --out build/o ../shared/w"


def test_git_state_sees_changes_but_not_earlier_records(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    (tmp_path / "experiments" / "results" / "old.json").write_text("{}")
    clean = git_state(tmp_path)
    assert clean is not None and len(clean["revision"]) == 40 and clean["dirty"] is False
    (tmp_path / "new.py").write_text("")
    assert git_state(tmp_path) == {"revision": clean["revision"], "dirty": True}


def test_energy_is_that_of_the_meter_or_not_available(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in (("name", "package-0"), ("energy_uj", "5000000"), ("max_energy_range_uj", "262143328850")):
        (zone / name).write_text(text)
    meter = open_meter(["cpu"], tmp_path)
    meter.idle_w = 0.5
    with meter.span() as span:
        (zone / "energy_uj").write_text("17500000")
    told = describe_energy(span)
    assert (told["source"], told["joules"], told["idle_w"], told["coarse"]) == ("rapl", 12.5, 0.5, True)
    assert told["net_joules"] == pytest.approx(12.5 - 0.5 * told["seconds"], abs=0.01) and told["seconds"] < 5
    with NoMeter().span() as untold:
        pass
    assert [describe_energy(untold)[name] for name in ("source", "joules", "net_joules", "idle_w")] == ["n/a"] * 4


def test_an_interrupted_run_continues_with_kept_values_of_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    Kept(path, {"a": 1}, lambda line: line[0]).add(["x", 2])
    with path.open("a") as file:
        file.write('["cut o')
    again = Kept(path, {"a": 1}, lambda line: line[0])
    assert again.found == [["x", 2]] and again.has("x") and not again.has("cut o")
    with pytest.raises(ValueError, match="another setting"):
        Kept(path, {"a": 2}, lambda line: line[0])
