"""The project's tests that need a GPU, run by pytest in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.bench.record import ROOT
from experiments.gpu_suite.report import Report, Setting, UnavailableError

_FOLDERS = ("tests/decoding", "tests/engine", "tests/lossless")
_MARK = re.compile(r"pytest\.mark\.gpu\b")
_WORKERS = 4  # each has the tests of one file, so that a fault on the device ends the others of that file alone
_KEPT_CHARS = 6000  # of the output


def marked_files(root: Path = ROOT) -> list[str]:
    """The files with tests marked ``gpu``, found by their text: others need not be importable here."""
    return [
        str(path.relative_to(root))
        for folder in _FOLDERS
        for path in sorted((root / folder).rglob("test_*.py"))
        if _MARK.search(path.read_text(encoding="utf-8"))
    ]


def measure(setting: Setting, report: Report, kept: dict[str, Any]) -> None:
    """The part ``tests``. Without a GPU the tests are collected and skipped.

    Raises:
        UnavailableError: no file has such a test.
        RuntimeError: a test failed, or pytest could not run.
    """
    files = marked_files()
    report.found["files"] = files
    if not files:
        raise UnavailableError("no file of tests is marked gpu")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *files, "-p", "no:cacheprovider", "-q", "--tb=short", "-rfE"]
    if setting.device.startswith("cuda") and len(files) > 1:
        command += ["-n", str(min(_WORKERS, len(files)))]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    report.say(f"{len(files)} files: {', '.join(files)}")
    limit_s = max(1.0, report.left_s() - 2.0)
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        report.found["output"] = output[-_KEPT_CHARS:]
        raise RuntimeError(f"pytest did not end in {limit_s:.0f} s") from error
    report.found |= {"exit_code": ran.returncode, "output": ran.stdout[-_KEPT_CHARS:], "summary": summary_line(ran.stdout)}
    failures = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    report.found["failures"] = failures
    report.line("pytest -m gpu", report.found["summary"], goal="no failure", met=ran.returncode == 0)
    for failure in failures[:10]:
        report.line("", failure[:150])
    report.say(report.found["summary"])
    if ran.returncode:
        raise RuntimeError(f"pytest: {report.found['summary']}")


def summary_line(output: str) -> str:
    """Pytest's last line that says what became of the tests, or the last one there is."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error|deselected)|no tests ran", line)]
    return telling[-1] if telling else lines[-1] if lines else "no output"
