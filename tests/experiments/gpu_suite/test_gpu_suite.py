"""The GPU suite on a CPU, with no more packages than a bare GPU machine has; and what it makes of faults and deadlines."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.gpu_suite.jobs import Worker
from experiments.gpu_suite.parts import tests
from experiments.gpu_suite.plan import PARTS, plan
from experiments.gpu_suite.record import RunningRecord, print_table
from experiments.gpu_suite.report import Job, Report, Setting, is_fatal
from experiments.gpu_suite.suite import Suite, arguments, main

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests.experiments.gpu_suite.test_gpu_suite"
# Hides installed packages as if they were not there, and breaks one module of the project.
GUARD = """
import os, sys
from importlib.machinery import PathFinder

class Guard(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == os.environ["BROKEN"]:
            raise ImportError("broken on purpose")
        spec = super().find_spec(name, path, target)
        hidden = name in os.environ["ABSENT"].split(",") and spec is not None and "site-packages" in (spec.origin or "")
        return None if hidden else spec

sys.meta_path[sys.meta_path.index(PathFinder)] = Guard
"""
ABSENT = "ray,pydantic,msgpack,redis,fastapi,uvicorn,starlette,typer,llguidance,simpy,pybreaker,httpx,psutil,prometheus_client"
OUTPUT = "Paris is the capital of France. The Seine flows through it."
RECORDS = [
    {"id": f"a/{number}", "prompt": f"{number}. {OUTPUT} What is the capital?", "output": OUTPUT, "references": [OUTPUT]}
    for number in range(3)
]


@pytest.fixture(scope="module")
def bare_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One run of all parts but the tests, as on a bare machine; and its record."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(GUARD)
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    settings = {
        "PYTHONPATH": str(folder),
        "ABSENT": ABSENT,
        "BROKEN": "experiments.gpu_suite.parts.energy",
        "OMP_NUM_THREADS": "1",
    }
    parts = ",".join(part for part in PARTS if part != "tests")
    options = ["--device", "cpu", "--sizes", "tiny", "--out", str(folder / "out"), "--workloads", str(folder / "a.jsonl")]
    ran = subprocess.run(
        [sys.executable, "-m", "experiments.gpu_suite", *options, "--parts", parts, "--revision", "abc"],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=560,
    )  # fmt: skip
    (path,) = (folder / "out").glob("*.json")
    assert {entry.name.split("-")[0] for entry in (folder / "out").iterdir()} <= {"profile", path.name.split("-")[0]}
    record: dict[str, Any] = json.loads(path.read_text())
    return ran, record


@pytest.mark.slow
@pytest.mark.timeout(600)  # where nothing was compiled before
def test_every_part_runs_on_a_bare_machine_and_one_that_fails_is_named(
    bare_run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    ran, record = bare_run
    assert ran.returncode == 1, ran.stdout + ran.stderr  # a part failed
    jobs = {job["part"]: job for job in record["results"]["jobs"]}
    assert list(jobs) == [part for part in PARTS if part != "tests"]
    failed = jobs.pop("energy")
    assert failed["state"] == "failed" and "broken on purpose" in failed["error"][-1]
    assert "energy tiny" in ran.stdout and "FAILED: ImportError: broken on purpose" in ran.stdout
    assert {part: job["state"] for part, job in jobs.items()} == dict.fromkeys(jobs, "done"), ran.stdout
    assert "graphs: n/a: needs CUDA and Triton" in ran.stdout
    assert record["config"]["revision"] == "abc" and str(ROOT) not in json.dumps(record)


@pytest.mark.slow
def test_figures_of_the_parts_fit_together(bare_run: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    found = {job["part"]: job["found"] for job in bare_run[1]["results"]["jobs"]}
    assert found["steps"]["roof_gb_s"] == found["ceilings"]["read_best_gb_s"]
    for kind in ("strict", "eager"):
        cases = found["steps"][kind]["cases"]
        assert list(cases) == [f"{context}/{rows}" for context in (32, 96) for rows in (1, 4, 16)]
        for case in cases.values():
            assert case["over_one_row"]["min"] <= case["over_one_row"]["median"] <= case["over_one_row"]["max"]
            assert case["of_roof"]["median"] == pytest.approx(case["least_ms"] / case["wall_ms"]["median"], rel=0.3)
        rows = found["end_to_end"][kind]["contestants"]
        assert {name: row["wrong"] for name, row in rows.items()} == dict.fromkeys(rows, 0)
        assert rows["autoregressive"]["tokens_per_step"] == 1.0 == rows["autoregressive"]["ratio"]["median"]
        assert rows["llma"]["tokens_per_step"] > 3  # the output is in the prompt, and the tokens are bytes
        for row in found["strict"][kind].values():
            assert row["identical"] + len(row["parted_at"]) == row["outputs"] > 0
    assert "generate" in found["end_to_end"]["strict"]["contestants"]
    assert all(row["identical"] == row["outputs"] for row in found["strict"]["strict"].values())
    (shares,) = (value for name, value in found["shares"].items() if name in ("strict", "eager"))
    assert [(row["tree_rows"], row["ranks"]) for row in shares] == [(rows, ranks) for rows in (64, 256) for ranks in (1, 2, 4, 8)]
    assert all(max(row["rows"]) <= row["tree_rows"] and len(row["rows"]) == row["ranks"] for row in shares)
    formats = [row for name, row in found["quantized"].items() if name != "warnings"]
    assert len(formats) == 5 and {row["most_apart"] for row in formats} == {0.0}
    profile = found["profile"]["strict"]["1"]
    assert 0 < sum(kernel["ms"] for kernel in profile["longest"]) <= profile["step_ms"] * 1.001


def fine(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """A part that finds how often it was called in this worker."""
    kept["calls"] = kept.get("calls", 0) + 1
    report.found["calls"] = kept["calls"]
    report.line("calls", str(kept["calls"]))


def raises(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """A part that fails in the middle."""
    report.found["before"] = 1
    raise ValueError("not today\nand not tomorrow")


def faults(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """A part after which its process cannot use the device any more."""
    report.using("strict")
    with report.attempt("strict"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def dies(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """A part that takes its process with it."""
    report.found["before"] = 2
    report.save()
    os._exit(7)


def hangs(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """A part without an end."""
    time.sleep(600)


@pytest.mark.slow
def test_a_part_that_fails_dies_or_hangs_leaves_the_others_a_worker() -> None:
    worker, seen = Worker(), []

    def run(name: str, limit_s: float = 60.0) -> dict[str, Any]:
        seen.clear()
        return worker.run(Job(name, None, f"{HERE}:{name}", 1.0), Setting(), limit_s, 0.0, seen.append)

    try:
        assert run("fine") == {"state": "done", "lost": False, "kind": None} and seen[-1]["found"] == {"calls": 1}
        outcome = run("raises")
        assert (outcome["state"], outcome["error_line"], outcome["lost"]) == ("failed", "ValueError: not today", False)
        assert seen[-1]["found"] == {"before": 1} and "and not tomorrow" in outcome["error"][-1]
        assert run("fine")["state"] == "done" and seen[-1]["found"] == {"calls": 2}  # the same worker
        outcome = run("faults")
        assert (outcome["state"], outcome["lost"], outcome["kind"]) == ("failed", True, "strict")
        assert "illegal memory access" in outcome["error_line"]
        outcome = run("dies")
        assert outcome["error_line"] == "its process ended with exit code 7" and seen[-1]["found"] == {"before": 2}
        assert "killed" in run("hangs", 10.0)["error_line"]
        assert run("fine")["state"] == "done" and seen[-1]["found"] == {"calls": 1}  # another one
    finally:
        worker.stop()


class Scripted(Worker):
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        super().__init__()
        self._answers, self.asked = list(answers), list[tuple[str, tuple[str, ...]]]()

    def run(self, job: Job, setting: Setting, limit_s: float, grace_s: float, on_found: Any) -> dict[str, Any]:
        """See ``Worker``."""
        self.asked.append((job.name, setting.kinds))
        on_found({"found": {"read_best_gb_s": 7.0}, "lines": []})
        return dict(self._answers.pop(0))


def suite(folder: Path, worker: Worker, budget_s: float) -> Suite:
    args = argparse.Namespace(budget_s=budget_s)
    return Suite(args, RunningRecord({}, 0, datetime.now(UTC), "cpu", folder, {}), worker, Setting())


def test_a_kind_that_costs_a_worker_is_left_out_from_then_on(tmp_path: Path) -> None:
    lost = {"state": "failed", "error": ["x"], "error_line": "CUDA error", "lost": True, "kind": "strict"}
    done = {"state": "done", "lost": False, "kind": "eager"}
    worker = Scripted(lost, done, done)
    run = suite(tmp_path, worker, 100.0)
    for job in plan(["steps", "host"], ["8b"]):
        run.run(job)
    assert worker.asked == [
        ("steps 8b", ("graphs", "strict", "eager")), ("steps 8b", ("graphs", "eager")), ("host 8b", ("graphs", "eager")),
    ]  # fmt: skip
    assert [entry["state"] for entry in run.jobs] == ["done", "done"] and run.jobs[0]["before"]["kind"] == "strict"
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["results"]["barred_kinds"] == ["strict"]


def test_what_does_not_fit_into_the_budget_is_skipped_and_what_does_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Scripted({"state": "done", "lost": False, "kind": None})
    run = suite(tmp_path, worker, 20.0)
    for job in plan(["ceilings", "tests"], ["8b"]):
        run.run(job)
    assert worker.asked == [("ceilings", ("graphs", "strict", "eager"))]
    assert [entry["state"] for entry in run.jobs] == ["done", "skipped"]
    print_table(run.jobs)
    assert "tests SKIPPED: needs about 150 s, 20 s are left" in capsys.readouterr().out


def test_the_order_of_the_jobs_is_that_of_their_worth() -> None:
    names = [job.name for job in plan(list(PARTS), ("8b", "7b"))]
    assert names[:4] == ["ceilings", "tests", "steps 8b", "end_to_end 8b"] and names[-2:] == ["steps 7b", "end_to_end 7b"]
    assert len(names) == len(set(names)) == len(PARTS) + 2
    every = plan(list(PARTS), ("8b",))
    assert sum(job.estimate_s for job in every) < 470


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parts", "stepz"], "'stepz' is not known (did you mean 'steps'?)"),
        (["--sizes", "9b"], "'9b' is not known"),
        (["--kinds", ","], "--kinds names nothing"),
        (["--budget-s", "0"], "--budget-s must be at least 1"),
        (["--device", "cuda"], "torch sees no GPU here"),
        (["--workloads", "nowhere"], "nowhere does not exist"),
        (["--tokenizer", "nowhere"], "nowhere/tokenizer.json does not exist"),
    ],
)
def test_bad_arguments_are_named(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_defaults_are_those_of_the_help() -> None:
    args = arguments(["--device", "cpu"])
    assert args.parts == list(PARTS) and args.sizes == ("8b", "7b", "1b", "13b") and args.kinds == ("graphs", "strict", "eager")


def test_files_with_tests_are_found_by_their_text_and_their_outcome_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tests/engine/measures/test_energy.py" in tests.marked_files()
    folder = tmp_path / "tests" / "engine"
    folder.mkdir(parents=True)
    (folder / "test_b.py").write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_one():\n    assert 1 == 2\n")
    (folder / "test_a.py").write_text("import not_there\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    assert tests.marked_files(tmp_path) == ["tests/engine/test_b.py"]
    monkeypatch.setattr(tests, "ROOT", tmp_path)
    monkeypatch.setattr(tests, "marked_files", lambda: ["tests/engine/test_b.py"])
    report = Report(Job("tests", None, "", 1.0), 60.0, lambda kind, value: None)
    with pytest.raises(RuntimeError, match="1 failed"):
        tests.measure(Setting(), report, {})
    assert report.found["exit_code"] == 1 and report.found["failures"][0].startswith("FAILED tests/engine/test_b.py::test_one")
    assert report.lines[0]["verdict"] == "MISSED"


@pytest.mark.slow
def test_tests_for_a_gpu_can_be_collected_on_a_bare_machine(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    settings = {"PYTHONPATH": str(tmp_path), "ABSENT": f"{ABSENT},hypothesis", "BROKEN": "none", "PYTEST_ADDOPTS": ""}
    files = tests.marked_files()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in (
        "engine/forward/test_slot_attention",
        "engine/forward/test_static_runner",
        "engine/forward/test_attention_parts",
        "lossless/test_exactness",
    ):
        assert f"tests/{name}.py" in files and f"tests/{name}.py::" in ran.stdout


def test_the_record_is_one_file_that_is_replaced_whole(tmp_path: Path) -> None:
    record = RunningRecord({}, 0, datetime.now(UTC), "cpu", tmp_path, {"python": "3"})
    for number in range(3):
        record.write({"jobs": [number]})
    assert [path.name for path in tmp_path.iterdir()] == [record.path.name] if record.path else False
    results = json.loads((tmp_path / str(record.path)).read_text())["results"]
    assert results == {"environment": {"python": "3"}, "jobs": [2]}


def test_only_errors_that_cost_the_device_are_fatal() -> None:
    assert is_fatal(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not is_fatal(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_fatal(RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"))


def test_draws_are_of_the_seed() -> None:
    from experiments.gpu_suite.texts import made_up

    one, same, other = (made_up(2, 500, 40, 30, seed) for seed in (1, 1, 2))
    assert one == same != other and all(len(prompt.known or ()) == 30 for prompt in one)
    assert np.isin(one[0].known, range(500)).all()
