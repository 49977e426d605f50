"""Private folder of a Ray cluster's sockets and logs, removed when the cluster stops."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

SESSION = "session"
_RAY = "r"  # subfolder for Ray, which Ray makes accessible to all users
_PREFIX, _LOGS = "outrider-ray-", "outrider-logs-"
_KEPT = 5  # log folders kept of clusters that failed
MARK = "RAY_TMPDIR"  # set in the environment of all Ray processes; used to find them, orphans included
_MAX_SOCKET = 103 if sys.platform == "darwin" else 107  # longest path of a socket, in bytes
_END_S = 10.0


# Kills Ray's processes when the process that started them dies in any way: the pipe that this script reads closes then.
_WATCHER = """
read -r _
found=yes
while [ "$found" ]; do
  found=
  for each in /proc/[0-9]*; do
    if grep -qsxzF -- "$1" "$each/environ"; then kill -9 "${each#/proc/}"; found=yes; fi
  done
  [ -z "$found" ] || sleep 0.2
done
"""


class RayFolderError(OSError):
    """Error of a temporary folder that Ray cannot use; the message says what to do."""


def base_folder() -> Path:
    """Return the parent of Ray's folder: ``RAY_TMPDIR``, else the temporary folder. Raises RayFolderError if unusable."""
    try:
        base = Path(os.environ.get(MARK) or tempfile.gettempdir()).absolute()
    except FileNotFoundError as error:
        raise RayFolderError(f"{error.strerror or error}: set TMPDIR to a folder that can be written") from None
    variable = MARK if os.environ.get(MARK) else "TMPDIR"
    if not re.fullmatch(r"[ -&(-\[\]-~]+", str(base)):  # tested: with other characters Ray's processes do not start
        raise RayFolderError(f"{variable}: {str(base)!r} has characters that Ray cannot have in paths: set it to another folder")
    longest = len(f"{base}/{_PREFIX}12345678/{_RAY}/{SESSION}/sockets/plasma_store")
    if longest > _MAX_SOCKET:
        raise RayFolderError(
            f"{variable}: the path of a socket below {base} is too long ({longest} characters, at most {_MAX_SOCKET}): set "
            f"{variable} to a shorter folder"
        )
    return base


class RayFolder:
    """Folder of mode 0700, locked as long as this process lives."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._handles = [lock]
        self._watcher: subprocess.Popen[bytes] | None = None

    @classmethod
    def make(cls) -> RayFolder:
        """Create a folder, and remove those of killed processes. Raises ``OSError``."""
        folder = cls._make()
        read_end, lifeline = os.pipe()  # not inherited, so that only this process keeps it open
        folder._handles.append(lifeline)
        try:  # new session: Ctrl-C in the terminal reaches this process only
            folder._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "outrider-ray", f"{MARK}={folder.ray}"], env={"PATH": os.defpath}, stdin=read_end,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(read_end)
        return folder

    @classmethod
    def _make(cls) -> RayFolder:
        base = base_folder()
        for stale in _own(base, _PREFIX):
            lock = _locked(stale)
            if lock is not None:
                cls(stale, lock).end(keep_logs=True)
        while True:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            lock = _locked(path)
            if lock is not None:  # otherwise another process considers it stale and removes it
                return cls(path, lock)

    @property
    def ray(self) -> Path:
        """Return the folder that Ray uses."""
        return self.path / _RAY

    @property
    def logs(self) -> Path:
        """Return the folder of the logs of Ray's processes and of replicas."""
        return self.ray / SESSION / "logs"

    def end(self, keep_logs: bool = False) -> Path | None:
        """Kill Ray's remaining processes and remove the folder. Idempotent. Returns the folder of kept logs, if any."""
        _kill_processes(self.ray)
        kept = self._set_logs_apart() if keep_logs and self.logs.is_dir() else None
        # Before the lock is released: a folder without a lock counts as stale, and another start would remove it as well.
        shutil.rmtree(self.path, ignore_errors=True)
        while self._handles:
            os.close(self._handles.pop())
        if self._watcher is not None:
            self._watcher.wait()
        return kept

    def _set_logs_apart(self) -> Path:
        base = self.path.parent
        for old in sorted(_own(base, _LOGS), key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
        kept = Path(tempfile.mkdtemp(prefix=_LOGS, dir=base))
        self.logs.chmod(0o700)  # Ray makes it accessible to all users
        self.logs.rename(kept)
        os.utime(kept)
        return kept


def _own(base: Path, prefix: str) -> Iterator[Path]:
    for path in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it has just gone
            found = path.lstat()
            # The temporary folder is shared: other users' folders, and links, must be neither trusted nor removed.
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                yield path


def _locked(path: Path) -> int | None:
    """Lock a folder and return the handle; None if another process holds the lock or the folder is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # another process has it, or it has just gone
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Otherwise the path was removed, or replaced by another folder, before the lock was taken.
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    os.close(handle)
    return None


def _kill_processes(folder: Path) -> None:
    # Some processes outlive Ray by a minute.
    deadline = time.monotonic() + _END_S
    while (left := [one for one in psutil.process_iter() if _is_of(one, folder)]) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get(MARK) == str(folder)
    except (psutil.Error, OSError):
        return False  # another user's, or it has ended
