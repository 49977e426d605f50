"""Cached folders that several processes share, moved into place whole by one process at a time. Files: ``private_files``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.decoding.private_files import make_folder


def cache_folder_of(made: Path, folder: Path, replaced: Path) -> None:
    """Sync ``made`` to disk and move it to ``folder``, so that readers find all of it; an old folder moves to ``replaced``."""
    for path in (*made.iterdir(), made):
        _sync(path)
    # A folder cannot be renamed over one that holds files.
    if os.path.lexists(folder):
        os.rename(folder, replaced)
    os.rename(made, folder)
    _sync(folder.parent)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock file, creating its folder if need be. Other processes wait; the lock ends with its process at the latest."""
    make_folder(path.parent)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
