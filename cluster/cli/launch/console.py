"""Progress lines of ``outrider serve``, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

import psutil
from rich.console import Console

from cache_service.store.embedded import WATCHER_NAME


class StopRequested(Exception):
    """Ctrl-C or SIGTERM came before the server was up."""


class Progress:
    """Lines on stderr that start with the seconds since the beginning."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        line = f"[{time.monotonic() - self._began:6.1f} s] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class StopSignals:
    """Takes SIGINT and SIGTERM: the first asks for an orderly stop, the second ends the process at once.

    The first one raises nothing: Ray interrupted half-way through its start could not be stopped in order.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say

    def install(self) -> None:
        """Also to be called after ``ray.init``, which installs a handler of its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def check(self) -> None:
        """Raises ``StopRequested`` once a signal has come."""
        if self.requested:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            kill_ray()
            os._exit(128 + number)
        self.requested = True
        self._say("stopping (Ctrl-C again ends everything at once)")


def kill_ray() -> None:
    """Ends Ray's processes: left alone, some outlive this one by a minute. Redis has a watcher, which cleans up after it."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if WATCHER_NAME not in child.cmdline():
                child.kill()
