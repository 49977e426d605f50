"""A Ray of our own: who reaches it, and where its token is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.actors.placement.own_ray import RayTokenError, start_ray

REPOSITORY = Path(__file__).resolve().parents[3]
# What a Ray in a process of its own tells of itself: where it listens, how many files and command lines hold its token. SIGTERM
# stays with the process.
TELL = """
import json, os, signal
from pathlib import Path
import psutil, ray
from outrider.actors.placement.own_ray import own_ray

@ray.remote
def work():
    import outrider
    return outrider.__file__

came = []

def of_the_caller(number, frame):
    came.append(number)

signal.signal(signal.SIGTERM, of_the_caller)
with own_ray():
    os.kill(os.getpid(), signal.SIGTERM)
    assert came == [signal.SIGTERM] and signal.alarm(0) == 0
    code = ray.get(work.remote())
    temporary = Path(ray._private.worker._global_node.temp_dir)
    modes = [f"{path.stat().st_mode & 0o777:o}" for path in temporary.parents]
    processes = psutil.Process().children(recursive=True)
    listening = {
        one.laddr.ip.removeprefix("::ffff:")
        for process in (*processes, psutil.Process()) for one in process.net_connections("inet") if one.status == "LISTEN"
    }
    token = os.environ["RAY_AUTH_TOKEN"].encode()
    files = [path for path in Path(ray._private.worker._global_node.get_session_dir_path()).rglob("*") if path.is_file()]
    files += [path for path in Path.home().rglob("*") if path.is_file()]
    holding = [str(path) for path in files if token in path.read_bytes()]
    lines = [line for process in processes for line in process.cmdline() if token.decode() in line]
left = [str(process) for process in processes if process.is_running() and process.status() != "zombie"]
folder = {"code": code, "modes": modes, "temporary": str(temporary), "left": left, "processes": len(processes)}
print(json.dumps(folder | {"listening": sorted(listening), "token": len(token), "told": holding + lines}))
"""


@pytest.mark.slow
def test_nobody_else_reaches_its_ports_its_token_and_its_folder_and_it_runs_our_code(tmp_path: Path) -> None:
    (tmp_path / "outrider").mkdir()
    (tmp_path / "outrider" / "__init__.py").touch()  # the user's own
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-P", "-c", TELL]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0 and "SIGTERM received" not in run.stderr, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["processes"] > 3 and told["token"] == 64
    assert told["listening"] == ["127.0.0.1"]
    assert told["told"] == [] and not (tmp_path / ".ray").exists()
    assert told["code"] == str(REPOSITORY / "outrider" / "__init__.py")
    assert told["modes"][0] == "700" and told["left"] == [] and not Path(told["temporary"]).parent.exists()


@pytest.mark.parametrize("mode", ["disabled", "DISABLED", "off"])
def test_without_a_token_none_is_started(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(RayTokenError, match=rf"RAY_AUTH_MODE is {mode}: .* unset it"):
        start_ray()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_token_that_others_may_read_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int) -> None:
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("a" * 64)
    file.chmod(mode)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RayTokenError, match=f"others may read it: chmod 600 {file}"):
        start_ray("127.0.0.1:1")
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    with pytest.raises(RayTokenError, match="others may read it"):
        start_ray("127.0.0.1:1")
