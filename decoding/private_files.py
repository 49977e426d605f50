"""Files that one process keeps for the next ones of the same user, and that nobody else can have written or damaged unnoticed.

Code and pickles are among them: who loads a stranger's runs the stranger's commands.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

_NOWHERE = Path(os.devnull) / "outrider"  # a path below which nothing is, and nothing can be written
_MAX_LINKS = 40  # on the way to a folder, as Linux has it
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SEAL_BYTES = 32


def private_folder(wanted: Path | None) -> Path:
    """Return a folder that nobody but this user can write to, made if need be: ``wanted``, where it is one.

    The folder must be this user's, and no group or other user may write to it. Each folder and link above must be the user's or
    root's. Where others may write to a folder above, it must be sticky, or a volume of root's, as containers have them.

    Returns:
        Else a temporary folder that is removed when this process ends, and a warning says why. Where there is none either, a path
        at which nothing can be written. Where ``wanted`` cannot be made, ``wanted``: who writes there is told.
    """
    if wanted is None:
        return _temporary("this user has no home")
    refusal = _refusal(wanted)
    return wanted if refusal is None else _temporary(f"{wanted} is not used: {refusal}")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it for this user alone, where they are missing. Raises ``OSError``."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(0o700, exist_ok=True)


def open_private(path: Path) -> BinaryIO:
    """Open a file to read that this user or root wrote, and nobody else can have.

    Raises:
        OSError: it cannot be opened, is a link or no file, or is somebody else's, or others may write to it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe would wait for its writer
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_WRITE:
        return os.fdopen(handle, "rb")
    os.close(handle)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    raise PermissionError(errno.EACCES, f"it is user {found.st_uid}'s and has the mode {found.st_mode & 0o7777:o}", str(path))


def keep_file(path: Path, content: bytes | memoryview) -> None:
    """Put a file in place whole: other processes see the old one or the new one. Its folder is made where it is missing."""
    make_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def keep_sealed(path: Path, content: bytes) -> None:
    """Keep a file as ``keep_file`` does, with digits behind its content by which ``read_sealed`` knows it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # no file can take its place
    keep_file(path, content + _seal(path, content))


def read_sealed(path: Path) -> bytes:
    """Return the content of a file as ``keep_sealed`` kept it.

    Raises:
        OSError: see ``open_private``.
        ValueError: the file is not what was kept under its name.
    """
    with open_private(path) as file:
        kept = file.read()
    content = kept[:-_SEAL_BYTES]
    if kept[-_SEAL_BYTES:] != _seal(path, content):
        raise ValueError(f"{path} is damaged")
    return content


def _seal(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()  # with the name: a file under another's is none


def _refusal(folder: Path) -> str | None:
    """Return why others can change what lies in a folder; None where they cannot, or where there can be no such folder."""
    with contextlib.suppress(OSError):
        make_folder(folder)
    try:
        way = list(_way(folder))
    except OSError:
        return None  # nothing can be read there, and who writes there is told
    for at, found in way[:-1]:
        if found.st_uid not in (0, os.geteuid()):
            return f"{at} belongs to user {found.st_uid}"
        if not stat.S_ISLNK(found.st_mode) and found.st_mode & _OTHERS_WRITE and not _is_shared_safely(at, found):
            return f"{at} may be written by others (mode {found.st_mode & 0o7777:o})"
    at, found = way[-1]
    if found.st_uid != os.geteuid():
        return f"{at} belongs to user {found.st_uid}"
    return f"{at} may be written by others (mode {found.st_mode & 0o7777:o})" if found.st_mode & _OTHERS_WRITE else None


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each folder and link by which the kernel comes to a path, from the root on."""
    left, at, links = list(reversed(path.absolute().parts)), Path(path.anchor or "/"), 0
    while left:
        part = left.pop()
        if part == "..":
            at = at.parent
            continue
        found = os.lstat(at / part)
        yield at / part, found
        if not stat.S_ISLNK(found.st_mode):
            at = at / part
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        left += reversed(Path(os.readlink(at / part)).parts)


def _is_shared_safely(at: Path, found: os.stat_result) -> bool:
    """Return whether others who may write to a folder cannot take a user's folder in it away, or are no others."""
    if found.st_mode & stat.S_ISVTX or (found.st_uid == 0 and os.path.ismount(at)):
        return True
    # The group of this user alone, to which many systems give new folders. Root's is no such group: others are often in it.
    if found.st_mode & stat.S_IWOTH or found.st_gid != os.getegid() or os.geteuid() == 0:
        return False
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(found.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


@cache
def _temporary(reason: str) -> Path:
    """Return a folder for this process alone, and say why there is no other."""
    try:
        made = Path(tempfile.mkdtemp(prefix="outrider-"))
    except OSError:
        made = _NOWHERE
    if made != _NOWHERE and _refusal(made) is not None:
        made.rmdir()
        made = _NOWHERE
    logger.warning(
        "%s; what is compiled and measured is not kept for the next start: set XDG_CACHE_HOME to a folder of your own, to which "
        "and above which nobody else may write (chmod go-w)", reason,
    )  # fmt: skip
    if made != _NOWHERE:
        atexit.register(_remove, made, os.getpid())
    return made


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
