"""Kept folders that several processes share: put in place whole, by one process at a time. Files: ``decoding.private_files``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decoding.private_files import make_folder


def keep_folder(made: Path, folder: Path, replaced: Path) -> None:
    """Puts a folder of files in place whole, on the disk, too: who finds it finds all of it.

    Args:
        made: the folder, in the same file system.
        folder: where it goes.
        replaced: where one goes that is there already.
    """
    for path in (*made.iterdir(), made):
        _sync(path)
    if os.path.lexists(folder):
        os.rename(folder, replaced)
    os.rename(made, folder)
    _sync(folder.parent)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time: the others wait. The lock ends with the process that has it, however that ends.

    The folder of its file is made when it does not exist.
    """
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
