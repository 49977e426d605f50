"""Progress lines on stderr, also without a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_TOLD_S = 5.0  # between two lines while the same thing runs


class Progress:
    """Printer of progress lines with the minutes since the start, repeated every few seconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._what, self._since, self._told = "", self._began, self._began
        self.left: Callable[[], str] = str  # suffix of each line, such as the remaining time
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def say(self, what: str) -> None:
        """Print a line at once."""
        with self._lock:
            self._what, self._since = what, time.perf_counter()
            self._print(what)

    def note(self, what: str) -> None:
        """Print a line only if the last one is some seconds old."""
        with self._lock:
            self._what, self._since = what, time.perf_counter()
            if self._since - self._told > _TOLD_S:
                self._print(what)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._ended.wait(0.5):
            with self._lock:
                if self._what and time.perf_counter() - self._told > _TOLD_S:
                    self._print(f"{self._what}: {time.perf_counter() - self._since:.0f} s")

    def _print(self, line: str) -> None:
        self._told = time.perf_counter()
        print(f"[{(self._told - self._began) / 60:5.1f} min] {line}{self.left()}", file=sys.stderr, flush=True)
