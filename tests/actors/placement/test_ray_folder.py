"""The folder of a Ray of our own: whose it is, when it goes, and where it cannot be."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outrider.actors.placement.ray_folder import RayFolder, RayFolderError, base_folder
from outrider.cluster.cli.launch.preflight import LaunchError, check_folder
from tests.helpers.waiting import eventually


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files are: pytest's own folders have long paths."""
    base = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    yield base
    shutil.rmtree(base)


def with_logs(folder: RayFolder) -> RayFolder:
    folder.logs.mkdir(0o777, parents=True)
    (folder.logs / "raylet.out").write_text("said")
    return folder


def test_it_is_this_users_alone_and_goes_at_the_end(base: Path) -> None:
    folder = RayFolder.make()
    state = folder.path.stat()
    assert folder.path.parent == base and stat.S_IMODE(state.st_mode) == 0o700 and state.st_uid == os.geteuid()
    assert with_logs(folder).end() is None
    assert folder.end(keep_logs=True) is None  # repeated
    assert list(base.iterdir()) == []


@pytest.mark.slow
def test_after_a_failure_the_logs_are_kept_for_this_user_and_only_the_last_ones(base: Path) -> None:
    kept = [with_logs(RayFolder.make()).end(keep_logs=True) for _ in range(7)]
    left = sorted(base.iterdir())
    assert len(left) == 5 and kept[-1] in left
    assert [path.read_text() for path in left[0].iterdir()] == ["said"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in left} == {0o700}


def test_that_of_a_process_that_lives_stays_and_that_of_a_dead_one_goes_with_its_processes(base: Path) -> None:
    code = f"""
import os, subprocess, tempfile
tempfile.tempdir = {str(base)!r}
from outrider.actors.placement.ray_folder import RayFolder
folder = RayFolder.make()
child = subprocess.Popen(["sleep", "600"], env={{**os.environ, "RAY_TMPDIR": str(folder.ray)}}, start_new_session=True)
print(folder.path, child.pid, flush=True)
input()
os.abort()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        path, child = process.stdout.readline().split()
        RayFolder.make().end()
        assert Path(path).is_dir() and psutil.pid_exists(int(child))
        process.communicate("\n")
    assert process.returncode == -signal.SIGABRT
    eventually(lambda: not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE)
    RayFolder.make().end()
    assert not Path(path).exists()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize("name", ["x" * 90, "a\nb", "a'b", "ü"])
def test_a_path_that_is_not_fit_is_refused_by_the_name_of_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(variable, str(tmp_path / name))
    with pytest.raises(RayFolderError, match=rf"^{variable}: .* {'too long' if name == 'x' * 90 else 'characters'} .*set "):
        base_folder()
    with pytest.raises(LaunchError, match=f"^{variable}: "):
        check_folder()
