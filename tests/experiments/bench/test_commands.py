"""The command table of ``outrider bench``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider.cluster.cli.bench import BENCHES
from outrider.experiments.bench.__main__ import COMMANDS, main
from outrider.experiments.bench.record import ROOT


def test_the_command_line_offers_every_command() -> None:
    assert list(BENCHES) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([name, "--help"])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert code == 0 and "usage: " in shown.out + shown.err


def test_the_command_hands_its_options_to_the_bench() -> None:
    command = [sys.executable, "-m", "outrider.cluster.cli.main", "bench", "strategies", "--prompts", "p.jsonl", "--repeats", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2 and "outrider bench strategies: error: --repeats must be at least 1, got 0" in done.stderr
