"""Files that one process keeps for later processes of the same user, protected against other users and against damage."""

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

_NOWHERE = Path(os.devnull) / "outrider"  # a path that does not exist and cannot be created
_MAX_LINKS = 40  # symbolic links in one path: Linux's limit
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SEAL_BYTES = 32


def private_folder(wanted: Path | None) -> Path:
    """Return ``wanted``, created if needed, if only this user can write to it; else a temporary folder.

    Returns:
        A temporary folder is removed when this process ends, and a warning gives the reason. If there is none either, the result
        is a path at which nothing can be written. If ``wanted`` cannot be created it is still returned: writing there raises.
    """
    if wanted is None:
        return _temporary("this user has no home directory")
    refusal = _refusal(wanted)
    return wanted if refusal is None else _temporary(f"{wanted} is not used: {refusal}")


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. Raise ``OSError`` if that fails."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(0o700, exist_ok=True)


def open_private(path: Path) -> BinaryIO:
    """Open a regular file for reading that only this user or root can have written.

    Raises:
        OSError: the file cannot be opened, is a link or not a regular file, belongs to another user, or others may write to it.
    """
    # O_NONBLOCK: a named pipe would wait for its writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    # The files include code and pickles: loading another user's file would run that user's commands.
    if stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_WRITE:
        return os.fdopen(handle, "rb")
    os.close(handle)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    raise PermissionError(errno.EACCES, f"it is user {found.st_uid}'s and has the mode {found.st_mode & 0o7777:o}", str(path))


def save_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically: other processes see the old or the new content. Missing folders are created."""
    make_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            # On the disk before the rename: after a power cut the name holds the old or the whole new content.
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save_sealed(path: Path, content: bytes) -> None:
    """Write a file as ``save_file`` does, followed by a checksum that ``read_sealed`` verifies."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # a file cannot replace a folder
    save_file(path, content + _seal(path, content))


def read_sealed(path: Path) -> bytes:
    """Return the content of a file that ``save_sealed`` wrote. Raise ``OSError`` or, for a bad checksum, ``ValueError``."""
    with open_private(path) as file:
        kept = file.read()
    content = kept[:-_SEAL_BYTES]
    if kept[-_SEAL_BYTES:] != _seal(path, content):
        raise ValueError(f"{path} is damaged")
    return content


def _seal(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()  # includes the name, so that a renamed file is invalid


def _refusal(folder: Path) -> str | None:
    """Return why other users can change the content of a folder, or None if they cannot or the folder cannot exist."""
    with contextlib.suppress(OSError):
        make_folder(folder)
    try:
        way = list(_way(folder))
    except OSError:
        return None  # nothing can be read there, and writing raises an error
    # Each folder and link above must belong to the user or root. A folder above that others may write to must be sticky, or a
    # mount point of root's, as container volumes are.
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
    """Yield each folder and link that the kernel resolves on the way to a path, from the root on."""
    left, at, links = list(reversed(path.absolute().parts)), Path(path.anchor or "/"), 0
    while left:
        part = left.pop()
        if part == "..":
            # Links are resolved already, so that the lexical parent is the kernel's.
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
    """Return whether no other user can remove or replace this user's entries in a folder that is writable by group or others."""
    if found.st_mode & stat.S_ISVTX or (found.st_uid == 0 and os.path.ismount(at)):
        return True
    # Many systems give new folders to a group that holds this user alone. Root's group often has other members.
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
    """Return a folder for this process alone and log why it is used."""
    try:
        made = Path(tempfile.mkdtemp(prefix="outrider-"))
    except OSError:
        made = _NOWHERE
    # The system's folder for temporary files may itself be unsafe.
    if made != _NOWHERE and _refusal(made) is not None:
        made.rmdir()
        made = _NOWHERE
    logger.warning(
        "%s; compiled code and measurements are not cached for the next start: set XDG_CACHE_HOME to a folder of your own; other "
        "users must not have write access to it or its parents (chmod go-w)", reason,
    )  # fmt: skip
    if made != _NOWHERE:
        atexit.register(_remove, made, os.getpid())
    return made


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
