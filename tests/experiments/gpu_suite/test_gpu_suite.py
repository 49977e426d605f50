"""The GPU suite on a CPU and on the double of a GPU, with no more packages than it says that it needs; faults and deadlines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from outrider.experiments.device_double.guard import unavailable
from outrider.experiments.gpu_suite.jobs import Worker
from outrider.experiments.gpu_suite.parts import tests
from outrider.experiments.gpu_suite.report import Job, Report, Setting, is_fatal
from outrider.experiments.gpu_suite.suite import NEEDS, PARTS, RunningRecord, Suite, arguments, plan, print_table

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests.experiments.gpu_suite.test_gpu_suite"
# Hides installed packages that are not in ALLOWED as if they were not there, and breaks one module of the project.
GUARD = """
import os, sys
from importlib.machinery import PathFinder

class Guard(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == os.environ["BROKEN"]:
            raise ImportError("broken on purpose")
        spec = super().find_spec(name, path, target)
        installed = path is None and spec is not None and "site-packages" in (spec.origin or str(spec.submodule_search_locations))
        return None if installed and name not in os.environ["ALLOWED"].split(",") else spec

sys.meta_path[sys.meta_path.index(PathFinder)] = Guard
"""
OUTPUT = "Paris is the capital of France. The Seine flows through it."
RECORDS = [
    {"id": f"a/{number}", "prompt": f"{number}. {OUTPUT} What is the capital?", "output": OUTPUT, "references": [OUTPUT]}
    for number in range(3)
]
Run = tuple[subprocess.CompletedProcess[str], dict[str, Any]]


def modules_of(packages: Iterable[str]) -> set[str]:
    """Top-level modules of packages and of all that they require."""
    wanted, known = list(packages), set[str]()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in known:
            continue
        known.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            for text in metadata.requires(name) or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    wanted.append(requirement.name)
    found = metadata.packages_distributions().items()
    return {module for module, owners in found if known & {canonicalize_name(owner) for owner in owners}}


def bare(folder: Path, packages: Iterable[str], broken: str = "none") -> dict[str, str]:
    """The environment of a process that has these packages and no others."""
    (folder / "sitecustomize.py").write_text(GUARD)
    own = {"PYTHONPATH": str(folder), "ALLOWED": ",".join(modules_of(packages)), "BROKEN": broken, "OMP_NUM_THREADS": "1"}
    return os.environ | own


def run_bare(folder: Path, *options: str, broken: str = "none") -> Run:
    """One run with what the suite says that it needs, and numba; and its record."""
    environment = bare(folder, [*NEEDS, "numba"], broken)
    command = [sys.executable, "-m", "outrider.experiments.gpu_suite", "--sizes", "tiny", "--out", str(folder / "out"), *options]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    paths = list((folder / "out").glob("*.json"))
    assert len(paths) == 1, ran.stdout + ran.stderr
    assert {entry.name.split("-")[0] for entry in (folder / "out").iterdir()} <= {"profile", paths[0].name.split("-")[0]}
    return ran, json.loads(paths[0].read_text())


@pytest.fixture(scope="module")
def bare_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of all parts on the CPU, as on a bare machine."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return run_bare(
        folder, "--device", "cpu", "--workloads", str(folder / "a.jsonl"), "--kinds", "strict,rounding,eager",
        "--revision", "abc", "--real-model", str(ROOT / "demo_model"), "--max-tokens", "32",
        broken="outrider.experiments.gpu_suite.parts.profile",
    )  # fmt: skip


@pytest.mark.proof
@pytest.mark.timeout(1000)  # where nothing was compiled before
def test_every_part_runs_on_a_bare_machine_and_one_that_fails_is_named(bare_run: Run) -> None:
    ran, record = bare_run
    assert ran.returncode == 1, ran.stdout + ran.stderr  # a part failed
    jobs = {job["part"]: job for job in record["results"]["jobs"]}
    assert set(jobs) == set(PARTS)
    failed = jobs.pop("profile")
    assert failed["state"] == "failed" and "broken on purpose" in failed["error"][-1]
    assert "profile tiny" in ran.stdout and "FAILED: ImportError: broken on purpose" in ran.stdout
    assert {part: job["state"] for part, job in jobs.items()} == dict.fromkeys(jobs, "done"), ran.stdout
    assert "rounding: n/a: needs CUDA and Triton" in ran.stdout
    assert record["config"]["revision"] == "abc" and str(ROOT) not in json.dumps(record)
    assert "CPU" in record["results"]["environment"]["times"]


@pytest.mark.proof
def test_figures_of_the_parts_fit_together(bare_run: Run) -> None:
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
        assert set(found["prefill"][kind]) == {"96", "512"}
        for batch in ("2", "8"):
            assert set(found["batches"][kind][batch]) == {"greedy", "sampled"}
    assert "generate" in found["end_to_end"]["strict"]["contestants"]
    assert all(row["identical"] == row["outputs"] for row in found["strict"]["strict"].values())
    formats = [row for name, row in found["quantized"].items() if name != "warnings"]
    assert len(formats) == 5 and {row["most_apart"] for row in formats} == {0.0}
    assert found["smoke"]["go"] and found["smoke"]["tiny"]["exact"] and found["smoke"]["any_rows"]["check"] is None
    assert found["real"]["model"]["name"] == "demo_model"
    assert found["real"]["llma"]["identical"] == found["real"]["llma"]["compared"] > 0
    assert found["ranks"]["identical"] == found["ranks"]["outputs"] > 0 == found["ranks"]["losses"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_short_run_on_the_double_names_a_part_that_fails_and_can_go_on(tmp_path: Path) -> None:
    _, first = run_bare(tmp_path, "--device", "double", "--parts", "ceilings")
    given = ("--device", "double", "--resume", "--parts", "smoke,ceilings,profile")
    ran, record = run_bare(tmp_path, *given, broken="outrider.experiments.gpu_suite.parts.profile")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    jobs = {job["part"]: job for job in record["results"]["jobs"]}
    states = {part: job["state"] for part, job in jobs.items()}
    assert states == {"smoke": "done", "ceilings": "done", "profile": "failed"}, ran.stdout
    assert jobs["ceilings"] == first["results"]["jobs"][0] and len(record["results"]["environment"]["resumed"]) == 1
    assert "profile tiny" in ran.stdout and "FAILED: ImportError: broken on purpose" in ran.stdout
    started = jobs["smoke"]["found"]["tiny"]
    assert started["exact"] and started["form"]["rows"] == 64 and started["form"]["graphs"] == [64]
    assert "mean nothing" in record["results"]["environment"]["times"] and record["device"]["type"] == "double"


@pytest.mark.proof
@pytest.mark.timeout(1000)
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_the_gpu_path_runs_through_every_part_on_the_double_and_a_run_can_go_on(tmp_path: Path) -> None:
    given = ["--device", "double", "--max-tokens", "16"]
    _, first = run_bare(tmp_path, *given, "--parts", "ceilings,real")
    ran, record = run_bare(tmp_path, *given, "--resume")
    jobs = {job["part"]: job for job in record["results"]["jobs"]}
    without = {"real", "quantized"}  # no trained model, no kernels of other packages
    assert {part: job["state"] for part, job in jobs.items()} == {
        part: "n/a" if part in without else "done" for part in PARTS
    }, ran.stdout  # fmt: skip
    assert jobs["ceilings"] == first["results"]["jobs"][0] and len(record["results"]["environment"]["resumed"]) == 1
    assert "not in the user's cache" in jobs["real"]["error_line"]
    found = {part: job["found"] for part, job in jobs.items()}
    started = found["smoke"]["tiny"]
    assert started["exact"] and started["form"]["rows"] == 64 and started["form"]["graphs"] == [64]
    assert started["capture_failures"] == {} and started["lacks_graphs"] is None
    assert found["tests"]["by_file"] and all("passed" in each["summary"] for each in found["tests"]["by_file"].values())
    for part in ("steps", "prefill", "batches", "strict", "end_to_end"):
        assert {"strict", "rounding"} <= set(found[part]), part
    assert set(found["steps"]["strict"]["cases"]["32/65"]).isdisjoint({"of_roof", "over_one_row"})
    assert "of_roof" in found["steps"]["rounding"]["cases"]["32/4"]
    profile = found["profile"]["rounding"]["16"]
    assert 0 < sum(kernel["ms"] for kernel in profile["longest"]) <= profile["step_ms"] * 1.001
    assert "strict" in found["host"] and found["ranks"]["identical"] == found["ranks"]["outputs"]
    assert "mean nothing" in record["results"]["environment"]["times"] and record["device"]["type"] == "double"


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
        ("steps 8b", ("strict", "rounding")), ("steps 8b", ("rounding",)), ("host 8b", ("rounding",)),
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
    assert [name for name, _ in worker.asked] == ["ceilings"]
    assert [entry["state"] for entry in run.jobs] == ["done", "skipped"]
    print_table(run.jobs)
    assert "tests SKIPPED: needs about 75 s, 20 s are left" in capsys.readouterr().out


def test_a_call_of_eight_minutes_has_room_for_every_size() -> None:
    jobs = plan(list(PARTS), ("8b", "7b", "1b", "13b"))
    last = max(number for number, job in enumerate(jobs) if job.size == "13b")
    assert sum(job.estimate_s for job in jobs[: last + 1]) <= 470
    assert sum(job.estimate_s for job in jobs[last + 1 :]) < 470 / 2  # what --resume goes on with


def test_a_resumed_run_keeps_results_and_runs_what_has_none(tmp_path: Path) -> None:
    done = {"state": "done", "lost": False, "kind": None}
    worker = Scripted(done, done)
    run = suite(tmp_path, worker, 100.0)
    states = {"ceilings": "done", "steps": "failed", "prefill": "running", "real": "n/a"}
    run.resume([
        {"part": part, "size": "8b" if part in ("steps", "prefill") else None, "state": state, "found": {"read_best_gb_s": 3.0}}
        for part, state in states.items()
    ])  # fmt: skip
    for job in plan(list(states), ["8b"]):
        run.run(job)
    assert [name for name, _ in worker.asked] == ["steps 8b", "prefill 8b"]
    assert run._setting.read_gb_s == 3.0 and len(run.jobs) == 4


def test_what_is_imported_is_what_the_suite_needs(tmp_path: Path) -> None:
    """All modules load with what NEEDS brings, and each of it is used."""
    names = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in sorted((ROOT / "experiments/gpu_suite").rglob("*.py"))
        if path.name not in ("__main__.py", "compile_kernels.py", "plan_table.py")
    ]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=bare(tmp_path, NEEDS), capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    through_others = {"accelerate", "pytest"}  # transformers imports it when a model is loaded; a program of its own
    assert set(NEEDS) - through_others <= set(ran.stdout.split())


def test_files_with_tests_are_found_by_their_text_and_their_outcome_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tests/engine/measures/test_energy.py" in tests.marked_files()
    folder = tmp_path / "tests" / "engine"
    folder.mkdir(parents=True)
    (folder / "test_b.py").write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_one():\n    assert 1 == 2\n")
    (folder / "test_a.py").write_text("import not_there\n")
    (tmp_path / "tests" / "conftest.py").write_text("import not_there\n")
    assert tests.marked_files(tmp_path) == ["tests/engine/test_b.py"]
    (tmp_path / "own.ini").write_text("[pytest]\naddopts = --noconftest\n")
    monkeypatch.setattr(tests, "ROOT", tmp_path)
    monkeypatch.setattr(tests, "_INI", "own.ini")
    monkeypatch.setattr(tests, "marked_files", lambda: ["tests/engine/test_b.py"])
    report = Report(Job("tests", None, "", 1.0), 60.0, lambda kind, value: None)
    with pytest.raises(RuntimeError, match=r"failures in tests/engine/test_b\.py"):
        tests.measure(Setting(), report, {})
    (found,) = report.found["by_file"].values()
    assert found["exit_code"] == 1 and report.found["failures"][0].startswith("FAILED tests/engine/test_b.py::test_one")
    assert report.lines[0]["verdict"] == "MISSED"


def test_tests_for_which_no_time_is_left_do_not_begin_and_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tmp_path / "test_a.py"
    test.write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_one():\n    pass\n")
    monkeypatch.setattr(tests, "marked_files", lambda: [str(test)])
    report = Report(Job("tests", None, "", 1.0), 60.0, lambda kind, value: None)
    monkeypatch.setattr(tests.time, "time", lambda: 0.0)
    tests.measure(Setting(), report, {})
    assert tests.CUT_OFF in report.lines[0]["value"] and report.lines[0]["verdict"] == "met"


def test_only_errors_that_cost_the_device_are_fatal() -> None:
    assert is_fatal(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not is_fatal(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_fatal(RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"))


@pytest.mark.parametrize(
    ("config", "said"),
    [(None, "holds no record"), ({"device": "cuda"}, "its device is 'cuda'"), ([], "no record of the suite")],
)
def test_a_record_of_other_options_is_not_resumed(
    config: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "1-gpu-suite.json").write_text(json.dumps({"config": config} if config else []))
    with pytest.raises(SystemExit):
        arguments(["--device", "cpu", "--out", str(tmp_path), "--resume"])
    assert said in capsys.readouterr().err
