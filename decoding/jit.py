"""Compilation of loops over arrays with numba, where it is installed, and the cache of compiled code on disk.

An image brings such code (``brought``): compiled for kinds of processors, as numba by itself finds only what was compiled on a
processor with the very same features.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from decoding.private_files import make_folder, private_folder

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])

_ROOM = Path(__file__).parent
_PROCESS = uuid.uuid4().hex[:12]
_FORMAT = b"sealed"  # another where files are kept otherwise
NATIVE = importlib.util.find_spec("numba") is not None  # without it the same functions run as plain Python, many times slower
IMAGE = Path(sys.prefix) / "share" / "outrider"  # what an image brings: a folder for each of ``KINDS`` that it was made for
NAME_VARIABLE, FEATURES_VARIABLE = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"
_AVX2 = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# Kinds of processors, the best first: LLVM's name of the processor that is compiled for, and its features.
_BF16 = (*_AVX512, "avx512bf16", "avx512vnni")
_TILES = ("amx-tile", "amx-bf16")
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "amx": ("x86-64-v4", (*_BF16, *_TILES)),
    "avx512bf16": ("x86-64-v4", _BF16),
    "avx512": ("x86-64-v4", _AVX512),
    "avx2": ("x86-64-v3", _AVX2),
}
_AS_LINUX_NAMES = {
    "bmi": "bmi1", "lzcnt": "abm", "avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni", "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
}  # fmt: skip
_TILE_FLAGS = {_AS_LINUX_NAMES[each] for each in _TILES}
_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18  # Linux: a system call, its request, and what is asked for


def compiled(function: F) -> F:
    """Compiles a function of numbers, arrays and named tuples of arrays at its first call.

    The machine code is kept on disk, under a name that changes with any source of this room, or beside the function's elsewhere:
    numba notices a change in the file of a function, but not in those of the functions it calls. Where nothing can be written
    each process compiles anew, and what was damaged is compiled anew.
    """
    if not NATIVE:
        return function
    import numba

    return cast(F, _with_cache(numba.njit(function), function))


def compiled_callback(signature: Any) -> Callable[[Callable[..., None]], Any]:
    """Compiles a function at once into a C function, kept on disk as those of ``compiled``; its address is ``address``.

    Args:
        signature: numba's.
    """
    from numba.core import ccallback, sigutils

    normalize: Any = sigutils.normalize_signature
    make: Any = ccallback.CFunc
    arguments = normalize(signature)

    def decorate(function: Callable[..., None]) -> Any:
        made = _with_cache(make(function, arguments, locals={}, options={}), function)
        made.compile()
        return made

    return decorate


def _with_cache(made: Any, function: Callable[..., object]) -> Any:
    """Give a compiled function a cache on disk, where there is a folder for it, and return it."""
    folder = cache_folder() / f"native-{_version(_sources(Path(function.__code__.co_filename)))}"
    _take_over(folder)
    if _writable(folder):
        from decoding.compiled_files import FunctionCache

        made._cache = FunctionCache(function, folder)
    return made


def cache_folder() -> Path:
    """Where what is costly to make is kept: ``$XDG_CACHE_HOME/outrider``, or ``~/.cache/outrider``.

    A temporary folder where others may write to that one, or there is none: see ``private_folder``.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # a container whose user has no entry and no HOME
            return private_folder(None)
    return private_folder(base / "outrider" if base.is_absolute() else None)


def compiles_first() -> bool:
    """Whether this version's functions were never compiled for this user: who uses them first then waits."""
    folders = (cache_folder(), *((BROUGHT,) if BROUGHT else ()))
    return NATIVE and not any(any((each / f"native-{_version()}").rglob("*.nbc")) for each in folders)


def kinds_of_processor(flags: str | None = None) -> list[str]:
    """Which of ``KINDS`` the processor is, the best first; none where it is no x86-64, or where that is not told.

    Args:
        flags: its features as Linux tells them; those of this machine that this process may use when absent.
    """
    has = _flags() if flags is None else set(flags.split())
    if flags is None and tiles_are_refused():
        has = has - _TILE_FLAGS
    return [kind for kind, (_, needs) in KINDS.items() if has.issuperset(_AS_LINUX_NAMES.get(each, each) for each in needs)]


@cache
def _flags() -> set[str]:
    """The processor's features as Linux tells them; none where it is no x86-64."""
    if platform.machine() != "x86_64":
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def tiles_are_refused() -> bool:
    """Whether the processor has AMX's tiles and Linux, or what this process runs in, does not let it use them."""
    return _flags() >= _TILE_FLAGS and not _may_use_tiles()


@cache
def _may_use_tiles() -> bool:
    """Asks Linux for the registers of AMX, which no process has that has not asked."""
    system_call: Any = ctypes.CDLL(None).syscall
    return bool(system_call(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0)


def compile_for(kind: str) -> dict[str, str]:
    """Variables with which numba compiles for one of ``KINDS``, whatever processor compiles."""
    name, features = KINDS[kind]
    # LLVM would take half of the width of this kind's registers for who has asked for none.
    narrow = ("-prefer-256-bit",) if name == "x86-64-v4" else ()
    return {NAME_VARIABLE: name, FEATURES_VARIABLE: ",".join((*(f"+{each}" for each in features), *narrow))}


def _brought() -> Path | None:
    """The folder of compiled code that the image has for this processor, and numba told to compile for the same.

    None where there is none for the best of its kinds: code for a lesser one would be there sooner, and be slower ever after.
    """
    kinds = kinds_of_processor() if NATIVE else []
    wanted = compile_for(kinds[0]) if kinds else {}
    if any(os.environ.get(name, value) != value for name, value in wanted.items()):
        return None  # who set them decides
    folder = IMAGE / kinds[0] if kinds and (IMAGE / kinds[0]).is_dir() else None
    if folder is None and not (kinds and tiles_are_refused()):  # numba by itself compiles for all that the processor has
        return None
    os.environ.update(wanted)
    if "numba" in sys.modules:  # it has read them already
        settings: Any = sys.modules["numba"].config
        settings.CPU_NAME, settings.CPU_FEATURES = wanted[NAME_VARIABLE], wanted[FEATURES_VARIABLE]
    return folder


BROUGHT = _brought()


@cache
def _take_over(folder: Path) -> None:
    """Copies what the image has of a folder of compiled code to where more can be added; nothing where something is there."""
    if BROUGHT is None or folder.exists() or not (BROUGHT / folder.name).is_dir():
        return
    half = folder.with_name(f".{folder.name}-{_PROCESS}")
    try:
        shutil.copytree(BROUGHT / folder.name, half)
        set_modes(half, 0o700, 0o600)  # an image may let a group write, of which nothing is read
        half.rename(folder)
    except OSError:  # nothing can be written, or another process was first
        shutil.rmtree(half, ignore_errors=True)


def set_modes(folder: Path, folders: int, files: int) -> None:
    """Set who may read and write a folder and all in it."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(folders if path.is_dir() else files)


@cache
def _writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if need be; a warning says where not, once for all folders."""
    try:
        make_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _warn_unkept(folder.parent, os.strerror(error.errno or 0))
        return False
    return True


@cache
def _warn_unkept(folder: Path, reason: str) -> None:
    logger.warning("compiled code cannot be kept in %s (%s): every start compiles anew", folder, reason)


def _sources(path: Path) -> Path:
    """The folder of all that a function in a file may call: this room, or the file's own folder, with that above it where there
    is compiled code, too."""
    if path.is_relative_to(_ROOM):
        return _ROOM
    return path.parent.parent if any(path.parent.parent.glob("native_*.py")) else path.parent


@cache
def _version(folder: Path = _ROOM) -> str:
    """Digits that stand for the sources below a folder: this room, where no other is named."""
    digest = hashlib.sha256(_FORMAT)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
