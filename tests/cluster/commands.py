"""``outrider`` as a user runs it: what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from outrider.cluster.cli.main import app

REPOSITORY = Path(__file__).resolve().parents[2]
PLAIN = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
ENVIRONMENT = os.environ | PLAIN | {"PYTHONPATH": str(REPOSITORY)}
COMMAND = [sys.executable, "-m", "outrider.cluster.cli.main"]

Finished = subprocess.CompletedProcess[str]


def outrider(*arguments: object, text: str | None = None) -> Finished:
    """In this process, which has imported everything already."""
    command = list(map(str, arguments))
    run = CliRunner(env=PLAIN).invoke(app, command, input=text)
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return Finished(command, run.exit_code, run.stdout, run.stderr)


def outrider_apart(*arguments: object, cwd: Path = REPOSITORY, text: str | None = None, code: str = "") -> Finished:
    """In a process of its own, which may begin with other code than the command's."""
    command = [*([sys.executable, "-c", code] if code else COMMAND), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, input=text, timeout=300)


def error_line(run: Finished, code: int) -> str:
    """The one error on stderr of a command that failed as it should."""
    assert run.returncode == code, (run.stdout, run.stderr)
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in run.stderr
    return error


def lines(run: Finished) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What ``outrider generate --json`` tells of each record, and its summary."""
    assert run.returncode == 0, run.stderr
    *records, last = map(json.loads, run.stdout.splitlines())
    return records, last["summary"]
