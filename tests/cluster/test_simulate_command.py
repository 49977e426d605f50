"""``outrider simulate`` as a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_command_explains_itself_and_refuses_in_one_line() -> None:
    command = [sys.executable, "-m", "cluster.cli.main", "simulate"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=REPOSITORY, timeout=120)
    assert done.returncode == 0 and "--find" in done.stdout and "Not simulated" in done.stdout and not done.stderr
    done = subprocess.run(
        [*command, "none.jsonl", "--tokenizer", "none", "--gpu", "H100", "--model", "llama-2-7b", "--rate", "1"],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: tokenizer 'none' has no tokenizer.json"), done.stderr
    assert "Traceback" not in done.stderr
