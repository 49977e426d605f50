"""Progress lines of ``outrider serve``, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from types import FrameType

import psutil
from rich.console import Console
from rich.status import Status
from rich.text import Text

from actors.placement.ray_folder import RayFolder
from cache_service.store.embedded import WATCHER_NAME

_PLAIN_S = 10.0  # between two lines of the same


class StopRequested(Exception):
    """Ctrl-C or SIGTERM came before the server was up."""


class Progress:
    """What the command says on stderr: lines with the seconds since the beginning, or objects of JSON.

    On a terminal the last line is what is being done just now, and it moves.
    """

    def __init__(self, as_json: bool = False) -> None:
        self._console = Console(stderr=True)
        self._as_json = as_json
        self._began = time.monotonic()
        self._moving: Status | None = None
        self._doing, self._said_s = "", 0.0

    def __call__(self, text: str, **more: str) -> None:
        """A line that stays; ``more`` is for those who read JSON."""
        self.done()
        self._print(text, more)

    def doing(self, text: str) -> None:
        """What is being done; to be called again and again. Where nothing can move, a line when it changes, or after 10 s."""
        if self._console.is_terminal and not self._as_json:
            shown = f"[{self._seconds():6.1f} s] {text}"
            if self._moving is None:
                self._moving = self._console.status("")
                self._moving.start()
            self._moving.update(Text(shown))
        elif text != self._doing or time.monotonic() - self._said_s > _PLAIN_S:
            self._doing, self._said_s = text, time.monotonic()
            self._print(text, {})

    def done(self) -> None:
        """Takes the line that moves away."""
        if self._moving is not None:
            self._moving.stop()
            self._moving = None

    def from_a_handler(self, text: str) -> None:
        """Print a line from a signal's handler, which may interrupt any other line, or an import for it."""
        clear = "\r\x1b[2K" if self._moving is not None else ""
        os.write(2, f"{clear}{self._line(text, {})}\n".encode())

    def _print(self, text: str, more: dict[str, str]) -> None:
        if self._as_json:
            print(self._line(text, more), file=sys.stderr, flush=True)
        else:
            self._console.print(self._line(text, more), markup=False, highlight=False, soft_wrap=True)

    def _line(self, text: str, more: dict[str, str]) -> str:
        if self._as_json:
            return json.dumps({"seconds": round(self._seconds(), 1), "message": text, **more})
        return f"[{self._seconds():6.1f} s] {text}"

    def _seconds(self) -> float:
        return time.monotonic() - self._began


class StopSignals:
    """Takes SIGINT and SIGTERM: the first asks for an orderly stop, the second ends everything at once.

    So does SIGHUP, of a terminal that is closed: Ray's processes, which get it, too, end of it.

    The first one raises nothing: Ray interrupted half-way through its start could not be stopped in order.
    """

    def __init__(self, say: Progress, folder: RayFolder) -> None:
        self.requested = 0  # number of the first signal
        self._say, self._folder = say, folder

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._handle)

    def check(self) -> None:
        """Raises ``StopRequested`` once a signal has come."""
        if self.requested:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.alarm(0)  # Ray's handler in C++, where it was the first to get SIGTERM, has the process aborted after 3 s
        if self.requested or number == signal.SIGHUP:
            kill_children()
            self._folder.end()
            os._exit(128 + number)
        self.requested = number
        self._say.from_a_handler("stopping (Ctrl-C again ends everything at once)")


def kill_children() -> None:
    """End all processes that this one has started but Redis, which has a watcher that cleans up after this process."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if WATCHER_NAME not in child.cmdline():
                child.kill()
