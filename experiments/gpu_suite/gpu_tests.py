"""The project's tests marked ``gpu``, run by pytest in separate processes.

``experiments/gpu_suite/pytest.ini`` asks for no plugin and no conftest: the project's own need packages that a machine with a GPU
may lack.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from experiments.bench.record import ROOT
from experiments.gpu_suite.bare import CUT_OFF, ENDS
from experiments.gpu_suite.device import is_cuda
from experiments.gpu_suite.worker import Report, Setting, UnavailableError

_FOLDERS = ("tests/decoding", "tests/engine", "tests/lossless")
_INI = "experiments/gpu_suite/pytest.ini"
_WORKERS = 4  # each runs the tests of one file, so that a fault on the device ends the others of that file alone
# Runs on the double, where no test marked gpu does.
_ON_DOUBLE = ("tests/engine/forward/test_gpu_double.py", "several_layers and strict")
_KEPT_CHARS = 3000  # of the output for a file
_GRACE_S = 20.0  # for a running test when the time is up


def marked_files(root: Path = ROOT) -> list[str]:
    """Return the files with tests marked ``gpu``, found by their text: others need not be importable here."""
    files = [path for folder in _FOLDERS for path in sorted((root / folder).rglob("test_*.py"))]
    marked = (path for path in files if re.search(r"pytest\.mark\.gpu\b", path.read_text(encoding="utf-8")))
    return [str(path.relative_to(root)) for path in marked]


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """Run the tests. On a CPU they are collected and skipped; on the double some of its tests run.

    Raises:
        UnavailableError: no file has such a test.
        RuntimeError: a test failed, or pytest could not run.
    """
    files, chosen = marked_files(), ["-m", "gpu"]
    if setting.double:
        files, chosen = [_ON_DOUBLE[0]], ["-k", _ON_DOUBLE[1]]
    report.found["files"] = files
    if not files:
        raise UnavailableError("no file of tests is marked gpu")
    report.say(f"{len(files)} files: {', '.join(files)}")
    groups = [[file] for file in files] if is_cuda(setting.device) else [files]
    with ThreadPoolExecutor(_WORKERS) as pool:
        outcomes = list(pool.map(partial(_run, chosen=chosen, report=report), groups))
    report.found |= {"by_file": {}, "failures": []}
    wrong = []
    for group, (code, output) in zip(groups, outcomes, strict=True):
        file, summary = " ".join(group), summary_line(output)
        report.found["by_file"][file] = {"exit_code": code, "summary": summary, "output": output[-_KEPT_CHARS:]}
        failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        report.found["failures"] += failures
        cut = f", {CUT_OFF}" if CUT_OFF in output else ""
        fine = code in (0, 5) or bool(cut and not failures)  # 5: nothing was collected
        wrong += [] if fine else [file]
        what = Path(file).name if len(group) == 1 else f"{len(group)} files"
        report.line(what, summary + cut, goal="no failure", met=fine)
    for failure in report.found["failures"][:10]:
        report.line("", failure[:150])
    if wrong:
        raise RuntimeError(f"pytest: failures in {', '.join(wrong)}")


def _run(files: Sequence[str], chosen: list[str], report: Report) -> tuple[int | None, str]:
    """Return pytest's exit code for some files, None if it did not end in time, and its output."""
    command = [sys.executable, "-m", "pytest", "-c", _INI, "--rootdir", ".", *chosen, *files]
    command += ["-p", "no:cacheprovider", "-q", "--tb=short", "-rfE"]
    own = {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    own[ENDS] = str(time.time() + max(1.0, report.left_s() - 2.0))
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | own
    limit_s, began = max(1.0, report.left_s()) + _GRACE_S, time.monotonic()
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return None, f"{output}\nno end after {limit_s:.0f} s"
    report.say(f"{files[0]}, {time.monotonic() - began:.0f} s: {summary_line(ran.stdout)}")
    return ran.returncode, ran.stdout


def summary_line(output: str) -> str:
    """Return pytest's last line with counts of tests, or else the last line."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()]
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error|deselected)|no tests ran", line)]
    return (counts or lines or ["no output"])[-1]
