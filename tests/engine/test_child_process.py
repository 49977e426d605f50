"""Processes that are started: whose code they run, and what they are told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from outrider.engine.child_process import PIP_VARIABLES, child_environment, python_module


def test_a_package_of_this_name_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('theirs')")
    run = subprocess.run(
        python_module("outrider.engine.child_process"), cwd=tmp_path, env=child_environment(), capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_no_secret_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("RAY_AUTH_TOKEN", "OUTRIDER_REDIS_URL", "OUTRIDER_REDIS_PASSWORD", "OUTRIDER_CACHE_SECRET", "HF_TOKEN", "AWS_KEY")
    for name in (*secrets, "PIP_INDEX_URL", "https_proxy", "XDG_CACHE_HOME", "NUMBA_CPU_NAME"):
        monkeypatch.setenv(name, "told")
    given = {name for name, value in child_environment().items() if value == "told"}
    assert given == {"XDG_CACHE_HOME", "NUMBA_CPU_NAME"}
    given = {name for name, value in child_environment(*PIP_VARIABLES).items() if value == "told"}
    assert given == {"XDG_CACHE_HOME", "NUMBA_CPU_NAME", "PIP_INDEX_URL", "https_proxy"}
