"""How far a run is, on stderr, also where that is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_TOLD_S = 5.0  # between two lines while the same thing runs


class Progress:
    """Lines with the minutes since the start: what runs now, and every few seconds for how long."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._what, self._since, self._told = "", self._began, self._began
        self.left: Callable[[], str] = str  # what a line ends with: how much is left, where it is known
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def say(self, what: str) -> None:
        """Something new runs, or has come out: a line at once."""
        with self._lock:
            self._what, self._since = what, time.perf_counter()
            self._print(what)

    def note(self, what: str) -> None:
        """Something new runs, of very many: a line only when the last one is some seconds old."""
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
