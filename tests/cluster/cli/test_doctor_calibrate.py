"""``outrider doctor --calibrate`` as a user meets it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from outrider.cluster.cli.calibrate import server_threads
from outrider.configs.schema import Config
from outrider.configs.slices import EngineOptions, ModelOptions, ServerOptions, SpeculationOptions
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.jit import cache_folder
from outrider.engine.engine import load_runner
from outrider.engine.target import LocalTarget
from tests.cluster.commands import error_line, outrider, outrider_apart

# A curve that was timed on a busy machine is not kept: here it is, however busy.
KEPT = "from outrider.engine.measures import calibration; calibration._DISTURBED = float('inf'); "
COMMAND = f"{KEPT}from outrider.cluster.cli.main import main; main()"
WITHOUT_MATPLOTLIB = f"import sys; sys.modules['matplotlib'] = None; {COMMAND}"


@pytest.mark.slow
def test_a_table_and_a_figure(model: Path, tmp_path: Path) -> None:
    arguments = ("--calibrate", "--model", str(model), "--dtype", "float32", "--out", "made")
    run = outrider_apart("doctor", *arguments, cwd=tmp_path, code=COMMAND)
    assert run.returncode == 0, run.stderr
    assert "tiny, float32" in run.stdout and "1 thread" in run.stdout and "rows of each" in run.stdout
    assert "critical decoding length: " in run.stdout and "A further request adds" in run.stdout
    figure = tmp_path / "made" / "latency-tiny-float32.svg"
    assert f"figure: {figure.relative_to(tmp_path)}" in run.stdout
    assert figure.read_text().lstrip().startswith("<?xml")
    assert f"kept in {cache_folder()}/latency-" in run.stdout
    assert "Traceback" not in run.stderr and "no figure" not in run.stderr


@pytest.mark.slow
def test_json_without_matplotlib_and_what_servers_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "service.yaml"
    config.write_text(f"model: {{path: {model}, dtype: float32, device: cpu, threads: 1}}\nengine: {{max_running: 3}}\n")
    run = outrider_apart("doctor", "--calibrate", "--config", str(config), "--json", cwd=tmp_path, code=WITHOUT_MATPLOTLIB)
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stderr.splitlines() if line.startswith("no figure: ")]
    told = json.loads(run.stdout)
    assert (told["model"], told["dtype"], told["threads"], told["figure"]) == ("tiny", "float32", 1, None)
    assert {step["sequences"] for step in told["steps"]} == {1, 2, 3} and all(step["ms"] > 0 for step in told["steps"])
    curve = LatencyCurve.from_json(told["curve"])
    assert told["critical_rows"] == curve.critical_rows(told["slack"])
    loaded, runner = load_runner(
        ModelOptions(str(model), dtype="float32", device="cpu", threads=1), EngineOptions(max_running=3), SpeculationOptions(), 1
    )
    target = LocalTarget(runner, loaded.info("auto", True), loaded.tokenizer)
    monkeypatch.setattr(runner, "forward", None)  # nothing is measured
    assert target.latency() == curve


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        ("--dtype float32", "--dtype requires --model or --calibrate"), ("--model demo_model --out x", "--out"),
        ("--model demo_model --dtype int3", "model.dtype"), ("--threads 2 --json", "--threads requires --calibrate"),
        ("--calibrate --dtype int3", "model.dtype"), ("--calibrate --threads 0", "model.threads"),
        ("--calibrate --config nothing.yaml", "nothing.yaml"), ("--calibrate --model ./nowhere", "is not a folder"),
        ("--calibrate --model .", "no config.json"), ("--calibrate --out file", "--out file is not a folder"),
    ):  # fmt: skip
        run = outrider("doctor", *arguments.split())
        assert said in error_line(run, 2) and (run.stdout, len(run.stderr.splitlines())) == ("", 1)


def test_threads_are_those_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    wide = ServerOptions(cpus_per_replica=3.5)
    assert server_threads(Config(server=wide)) == 3
    assert server_threads(Config(server=ServerOptions(cpus_per_replica=0))) == 1
    assert server_threads(Config(model=ModelOptions(threads=2), server=wide)) == 2
    alone = server_threads(Config())
    assert alone is not None and 1 <= alone <= (os.cpu_count() or 1)
    assert alone == len(os.sched_getaffinity(0)) or alone == psutil.cpu_count(logical=False)
    assert server_threads(Config(server=ServerOptions(replicas=2))) == 1  # they share the cores
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert server_threads(Config(server=wide)) is None
    assert server_threads(Config(model=ModelOptions(threads=2))) == 2
