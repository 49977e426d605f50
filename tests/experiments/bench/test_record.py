"""A record says what was run on what, and gives nothing of the machine away."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engine.measures.energy import NoMeter, open_meter
from experiments.bench.record import ROOT, command_line, describe_device, git_state, portable, write_record


def test_record_has_every_field_and_no_absolute_path(tmp_path: Path) -> None:
    started = datetime.now(UTC) - timedelta(seconds=90)
    config = {
        "corpus": Path("/data/corpus"),
        "model": str(ROOT / "demo_model"),
        "nested": {"files": ["/data/x/a.jsonl", "b.jsonl"]},
    }
    path = write_record("a-run", config, {"figure": 1.5, "file": Path("/data/out.txt")}, 7, started, folder=tmp_path / "results")
    text = path.read_text()
    record = json.loads(text)
    assert set(record) == {
        "name", "started", "finished", "duration_s", "git", "command", "config", "seed", "device", "versions", "results",
        "energy",
    }  # fmt: skip
    assert record["config"] == {"corpus": "corpus", "model": "demo_model", "nested": {"files": ["a.jsonl", "b.jsonl"]}}
    assert record["results"] == {"figure": 1.5, "file": "out.txt"}
    assert record["seed"] == 7
    assert record["energy"] == {"source": "n/a"}
    assert 89 < record["duration_s"] < 300
    assert record["versions"]["torch"]
    assert record["versions"]["transformers"]
    assert record["versions"]["outrider"]
    assert record["device"]["cpu"]
    assert record["device"]["cores"] >= 1
    assert record["device"]["torch_threads"] >= 1
    assert path.name == f"{record['finished'][:10]}-a-run.json"
    for private in ("/data", str(ROOT), str(tmp_path), str(Path.home()) + "/", platform.node()):
        assert private not in text, private
    assert f"/{getpass.getuser()}/" not in text


def test_a_second_record_does_not_replace_the_first(tmp_path: Path) -> None:
    paths = [write_record("twice", {}, {"run": run}, None, datetime.now(UTC), folder=tmp_path) for run in range(3)]
    assert [json.loads(path.read_text())["results"]["run"] for path in paths] == [0, 1, 2]
    assert paths[1].stem == paths[0].stem + "-2"
    assert paths[2].stem == paths[0].stem + "-3"


def test_a_value_that_is_no_json_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got object"):
        write_record("odd", {}, {"value": object()}, None, datetime.now(UTC), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_command_line_is_what_one_types_at_the_root() -> None:
    typed = [
        "/usr/bin/python3",
        "-m",
        "experiments.x",
        "--model=/srv/m",
        "--out",
        str(ROOT / "build" / "o"),
        "../shared/w",
        "--n",
        "3",
    ]
    assert command_line(typed) == "python -m experiments.x --model=m --out build/o ../shared/w --n 3"
    assert portable({"flag": None, "n": 3, "ratio": "1/2"}) == {"flag": None, "n": 3, "ratio": "1/2"}


def test_git_state_sees_changes_but_not_earlier_records(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    (tmp_path / "experiments" / "results" / "old.json").write_text("{}")
    clean = git_state(tmp_path)
    assert clean is not None
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "new.py").write_text("")
    changed = git_state(tmp_path)
    assert changed == {"revision": clean["revision"], "dirty": True}


def test_energy_is_what_the_meter_said_or_not_told(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in (("name", "package-0"), ("energy_uj", "5000000"), ("max_energy_range_uj", "262143328850")):
        (zone / name).write_text(text)
    meter = open_meter(["cpu"], tmp_path)
    meter.idle_w = 0.5
    with meter.span() as span:
        (zone / "energy_uj").write_text("17500000")
    path = write_record("metered", {}, {}, None, datetime.now(UTC), folder=tmp_path / "results", energy=span)
    told = json.loads(path.read_text())["energy"]
    assert (told["source"], told["joules"], told["idle_w"], told["coarse"]) == ("rapl", 12.5, 0.5, True)
    assert told["net_joules"] == pytest.approx(12.5 - 0.5 * told["seconds"], abs=0.01) and told["seconds"] < 5
    with NoMeter().span() as untold:
        pass
    path = write_record("untold", {}, {}, None, datetime.now(UTC), folder=tmp_path / "results", energy=untold)
    told = json.loads(path.read_text())["energy"]
    assert [told[name] for name in ("source", "joules", "net_joules", "idle_w")] == ["n/a"] * 4


def test_device_without_a_gpu_names_none() -> None:
    assert set(describe_device("cpu")) == {"type", "cpu", "cores", "torch_threads"}
