"""Compilation of loops over arrays with numba, where it is installed, and the cache of compiled code on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])

_ROOM = Path(__file__).parent
_PROCESS = uuid.uuid4().hex[:12]
NATIVE = importlib.util.find_spec("numba") is not None  # without it the same functions run as plain Python, many times slower


def compiled(function: F) -> F:
    """Compiles a function of numbers, arrays and named tuples of arrays at its first call.

    The machine code is kept on disk, under a name that changes with any source of this room, or beside the function's elsewhere:
    numba notices a change in the file of a function, but not in those of the functions it calls. Where nothing can be written
    each process compiles anew.
    """
    if not NATIVE:
        return function
    import numba

    made = _kept(function, lambda **settings: numba.njit(**settings)(function))
    # numba numbers the files of a function's types. Two processes that compile it at once for different types would choose the
    # same number, and a third one would be given the code of other types than its own: each process has names of its own.
    kept = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if kept is not None:
        kept._data_name_pattern = kept._data_name_pattern.replace("{number", f"{_PROCESS}-{{number")
    return cast(F, made)


def compiled_callback(signature: Any) -> Callable[[Callable[..., None]], Any]:
    """Compiles a function at once into a C function, kept on disk as those of ``compiled``; its address is ``address``.

    Args:
        signature: numba's.
    """
    import numba

    def decorate(function: Callable[..., None]) -> Any:
        return _kept(function, lambda **settings: numba.cfunc(signature, **settings)(function))

    return decorate


def _kept(function: Callable[..., object], compile_it: Callable[..., Any]) -> Any:
    """What ``compile_it`` makes of a function, with a place on disk where there is one."""
    import numba

    folder = cache_folder() / f"native-{_version(_sources(Path(function.__code__.co_filename)))}"
    if not _writable(folder):  # numba would look for another folder itself, one without our version in its name
        return compile_it()
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
    try:
        return compile_it(cache=True)
    finally:
        settings.CACHE_DIR = before


def cache_folder() -> Path:
    """Where what is costly to make is kept: ``$XDG_CACHE_HOME/outrider``, or ``~/.cache/outrider``.

    In the temporary folder for a user without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "outrider"
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:  # a container whose user has no entry and no HOME
        return Path(tempfile.gettempdir()) / "outrider"


def compiles_first() -> bool:
    """Whether this version's functions were never compiled for this user: who uses them first then waits."""
    return NATIVE and not any((cache_folder() / f"native-{_version()}").rglob("*.nbc"))


@cache
def _writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _sources(path: Path) -> Path:
    """The folder of all that a function in a file may call: this room, or the file's own folder, with that above it where there
    is compiled code, too."""
    if path.is_relative_to(_ROOM):
        return _ROOM
    return path.parent.parent if any(path.parent.parent.glob("native_*.py")) else path.parent


@cache
def _version(folder: Path = _ROOM) -> str:
    """Digits that stand for the sources below a folder: this room, where no other is named."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
