"""The project's tests that need a GPU, run by pytest in processes of their own.

They have a configuration of their own, ``experiments/gpu_suite/pytest.ini``, which asks for no plugin and no conftest: the
project's own needs packages that a machine with a GPU may lack.
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

from outrider.experiments.bench.record import ROOT
from outrider.experiments.gpu_suite.bare import CUT_OFF, ENDS
from outrider.experiments.gpu_suite.device import is_cuda
from outrider.experiments.gpu_suite.report import Report, Setting, UnavailableError

_FOLDERS = ("tests/decoding", "tests/engine", "tests/lossless")
_MARK = re.compile(r"pytest\.mark\.gpu\b")
_INI = "experiments/gpu_suite/pytest.ini"
_WORKERS = 4  # each has the tests of one file, so that a fault on the device ends the others of that file alone
# What runs on the double, where nothing that is marked gpu does.
_ON_DOUBLE = ("tests/engine/cuda/test_gpu_double.py", "several_layers and strict")
_KEPT_CHARS = 3000  # of the output for a file
_FINE = (0, 5)  # exit codes of pytest: all passed or were skipped; nothing was collected
_GRACE_S = 20.0  # for a test that runs when the time is up


def marked_files(root: Path = ROOT) -> list[str]:
    """The files with tests marked ``gpu``, found by their text: others need not be importable here."""
    return [
        str(path.relative_to(root))
        for folder in _FOLDERS
        for path in sorted((root / folder).rglob("test_*.py"))
        if _MARK.search(path.read_text(encoding="utf-8"))
    ]


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``tests``. On a CPU the tests are collected and skipped; on the double of a GPU some of its own tests run.

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
    ran = {" ".join(group): outcome for group, outcome in zip(groups, outcomes, strict=True)}
    report.found["by_file"] = {
        file: {"exit_code": code, "summary": summary_line(output), "output": output[-_KEPT_CHARS:]}
        for file, (code, output) in ran.items()
    }
    failures = [line for _, output in ran.values() for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    report.found["failures"] = failures
    for file, (code, output) in ran.items():
        what = f"{len(files)} files" if " " in file else Path(file).name
        cut = f", {CUT_OFF}" if CUT_OFF in output else ""
        report.line(what, summary_line(output) + cut, goal="no failure", met=_is_fine(code, output))
    for failure in failures[:10]:
        report.line("", failure[:150])
    wrong = [file for file, (code, output) in ran.items() if not _is_fine(code, output)]
    if wrong:
        raise RuntimeError(f"pytest: failures in {', '.join(wrong)}")


def _is_fine(code: int | None, output: str) -> bool:
    """Return whether no test failed of those for which there was time."""
    return code in _FINE or (CUT_OFF in output and not re.search(r"^(FAILED|ERROR) ", output, re.MULTILINE))


def _run(files: Sequence[str], chosen: list[str], report: Report) -> tuple[int | None, str]:
    """Return the exit code of pytest over some files, None where it did not end in time, and its output."""
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
    """Pytest's last line that says what became of the tests, or the last one there is."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error|deselected)|no tests ran", line)]
    return telling[-1] if telling else lines[-1] if lines else "no output"
