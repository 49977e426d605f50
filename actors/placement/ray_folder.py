"""The folder of a Ray that this process starts: its sockets and logs, for nobody but this user, gone when it ends."""

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
_RAY = "r"  # in a folder of its own, which Ray opens to everybody
_PREFIX, _LOGS = "outrider-ray-", "outrider-logs-"
_KEPT = 5  # logs of so many Rays that ended badly
MARK = "RAY_TMPDIR"  # in the environment of all of Ray's processes: by it they are found, orphans too
_MAX_SOCKET = 103 if sys.platform == "darwin" else 107  # bytes of a socket's path
_END_S = 10.0


# Ends Ray's processes when the process that started them dies, however that is: the pipe that this one reads closes then.
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
    """Ray can have no folder where temporary files are; the message says what to do."""


def base_folder() -> Path:
    """Return where Ray's folder is made: ``RAY_TMPDIR``, else ``TMPDIR``, else the system's temporary folder.

    Raises:
        RayFolderError: its path is not fit for Ray, or there is no such folder.
    """
    try:
        base = Path(os.environ.get(MARK) or tempfile.gettempdir()).absolute()
    except FileNotFoundError as error:
        raise RayFolderError(f"{error.strerror or error}: set TMPDIR to a folder that can be written") from None
    variable = MARK if os.environ.get(MARK) else "TMPDIR"
    if not re.fullmatch(r"[ -&(-\[\]-~]+", str(base)):  # tried: with others its processes do not start
        raise RayFolderError(f"{variable}: {str(base)!r} has characters that Ray cannot have in paths: set it to another folder")
    longest = len(f"{base}/{_PREFIX}12345678/{_RAY}/{SESSION}/sockets/plasma_store")
    if longest > _MAX_SOCKET:
        raise RayFolderError(
            f"{variable}: the path of a socket below {base} is too long ({longest} characters, at most {_MAX_SOCKET}): set "
            f"{variable} to a shorter folder"
        )
    return base


class RayFolder:
    """A folder of mode 0700 that is locked as long as this process lives."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._handles = [lock]
        self._watcher: subprocess.Popen[bytes] | None = None

    @classmethod
    def make(cls) -> RayFolder:
        """Make a folder, and remove those of processes that were killed. Raises ``OSError``."""
        folder = cls._make()
        read_end, lifeline = os.pipe()  # not inherited, so that only this process keeps it open
        folder._handles.append(lifeline)
        try:  # a session of its own: Ctrl-C in the terminal is this process's to handle
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
            if lock is not None:  # else another process took it for a stale one, and removes it
                return cls(path, lock)

    @property
    def ray(self) -> Path:
        """Return the folder of Ray alone."""
        return self.path / _RAY

    @property
    def logs(self) -> Path:
        """Return the folder of the logs of Ray's processes and of replicas."""
        return self.ray / SESSION / "logs"

    def end(self, keep_logs: bool = False) -> Path | None:
        """Kill what is left of Ray's processes, and remove the folder. Harmless when repeated.

        Returns:
            Where logs are kept, in a folder of their own; None where they are not.
        """
        _kill_processes(self.ray)
        kept = self._set_logs_apart() if keep_logs and self.logs.is_dir() else None
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
        self.logs.chmod(0o700)  # Ray opens it to everybody
        self.logs.rename(kept)
        os.utime(kept)
        return kept


def _own(base: Path, prefix: str) -> Iterator[Path]:
    """Yield the folders of this user whose names begin so."""
    for path in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it has just gone
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                yield path


def _locked(path: Path) -> int | None:
    """Return a handle by which a folder is locked; None where another process has it, or it has gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # another process has it, or it has just gone
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    os.close(handle)
    return None


def _kill_processes(folder: Path) -> None:
    """Kill the processes of the Ray that has a folder, wherever they hang by now: some outlive Ray by a minute."""
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
