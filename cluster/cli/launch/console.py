"""Progress output of ``outrider serve``, and signal handling."""

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

from outrider.actors.placement.ray_folder import RayFolder
from outrider.cache_service.store.embedded import WATCHER_NAME

_PLAIN_S = 10.0  # seconds until an unchanged line is repeated


class StopRequested(Exception):
    """SIGINT or SIGTERM before the server was up."""


class Progress:
    """Progress output on stderr: lines with the seconds since the start, the last one updated in place, or JSON objects."""

    def __init__(self, as_json: bool = False) -> None:
        self._console = Console(stderr=True)
        self._as_json = as_json
        self._began = time.monotonic()
        self._moving: Status | None = None
        self._doing, self._said_s = "", 0.0

    def __call__(self, text: str, **more: str) -> None:
        """Print a line that stays; ``more`` adds fields in JSON mode."""
        self.done()
        self._print(text, more)

    def doing(self, text: str) -> None:
        """Show the current activity; call it repeatedly. Without a terminal, print a line on a change or every 10 s."""
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
        """Remove the line of the current activity."""
        if self._moving is not None:
            self._moving.stop()
            self._moving = None

    def from_a_handler(self, text: str) -> None:
        """Print a line from a signal handler."""
        clear = "\r\x1b[2K" if self._moving is not None else ""
        # `os.write`, because the handler may interrupt another print, or an import that this one needs.
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
    """Signal handlers: the first SIGINT or SIGTERM requests an orderly stop; SIGHUP or the second ends everything at once."""

    def __init__(self, say: Progress, folder: RayFolder) -> None:
        self.requested = 0  # number of the first signal, 0 before
        self._say, self._folder = say, folder

    def install(self) -> None:
        """Install the handlers."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._handle)

    def check(self) -> None:
        """Raise ``StopRequested`` if a signal has come."""
        if self.requested:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.alarm(0)  # cancel the alarm of Ray's C++ handler, which aborts the process 3 s after SIGTERM
        # Ray's processes get SIGHUP, too, and end.
        if self.requested or number == signal.SIGHUP:
            # The second signal, or SIGHUP: nothing is stopped in order any more.
            kill_children()
            self._folder.end()
            os._exit(128 + number)
        # Raise nothing here: Ray could not be stopped in order if its start were interrupted.
        self.requested = number
        self._say.from_a_handler("stopping (press Ctrl-C again to stop immediately)")


def kill_children() -> None:
    """Kill all child processes except Redis, whose watcher cleans up after this process."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if WATCHER_NAME not in child.cmdline():
                child.kill()
