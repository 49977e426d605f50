"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    """Whether a condition comes about in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Fails unless a condition comes about in time."""
    assert wait_for(condition, timeout_s)
