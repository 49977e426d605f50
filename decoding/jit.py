"""Compilation of array loops with numba, if installed, and the on-disk cache of the compiled code."""

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

from outrider.decoding.private_files import make_folder, private_folder

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])

_ROOM = Path(__file__).parent
_PROCESS = uuid.uuid4().hex[:12]
_FORMAT = b"sealed"  # part of the cache key: change it with the format of the files
# Without numba, or with its switch for debuggers and coverage, the same functions run as plain Python, many times slower.
NATIVE = importlib.util.find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
IMAGE = Path(sys.prefix) / "share" / "outrider"  # compiled code in an image: one folder for each of its ``KINDS``
NAME_VARIABLE, FEATURES_VARIABLE = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"
# An image ships compiled code (``BROUGHT``) for several kinds of processors, because numba's own cache only matches code that was
# compiled on a processor with exactly the same features.
_AVX2 = ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# Kinds of processors, the best first: LLVM's name of the target processor, and its features.
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
_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18  # Linux: a system call, its request, and the requested state


def compiled(function: F) -> F:
    """Compile a function of numbers, arrays and named tuples of arrays at its first call."""
    if not NATIVE:
        return function
    import numba

    return cast(F, _with_cache(numba.njit(function), function))


def compiled_callback(signature: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that compiles a function, for a numba signature, into a C function with an ``address``."""
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
    # The hash covers all sources: numba notices a change in a function's own file, but not in the functions it calls.
    folder = cache_folder() / f"native-{_version(_sources(Path(function.__code__.co_filename)))}"
    _take_over(folder)
    # If nothing can be written, every process compiles again.
    if _writable(folder):
        from outrider.decoding.compiled_files import FunctionCache

        made._cache = FunctionCache(function, folder)
    return made


def cache_folder() -> Path:
    """Return the cache folder, ``$XDG_CACHE_HOME/outrider`` or ``~/.cache/outrider``, or a temporary one (``private_folder``)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # a container user without a passwd entry and HOME
            return private_folder(None)
    return private_folder(base / "outrider" if base.is_absolute() else None)


def compiles_first() -> bool:
    """Return whether this version's functions were never compiled for this user, so that first calls wait for the compiler."""
    folders = (cache_folder(), *((BROUGHT,) if BROUGHT else ()))
    return NATIVE and not any(any((each / f"native-{_version()}").rglob("*.nbc")) for each in folders)


def kinds_of_processor(flags: str | None = None) -> list[str]:
    """Return the ``KINDS`` that a processor supports, the best first. Empty if it is not x86-64 or its features are unknown.

    Args:
        flags: processor features in Linux's spelling; default: those of this machine that this process may use.
    """
    has = _flags() if flags is None else set(flags.split())
    if flags is None and tiles_are_refused():
        has = has - _TILE_FLAGS
    return [kind for kind, (_, needs) in KINDS.items() if has.issuperset(_AS_LINUX_NAMES.get(each, each) for each in needs)]


@cache
def _flags() -> set[str]:
    if platform.machine() != "x86_64":
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def tiles_are_refused() -> bool:
    """Return whether the processor has AMX tiles that Linux, or the sandbox around this process, does not allow it to use."""
    return _flags() >= _TILE_FLAGS and not _may_use_tiles()


@cache
def _may_use_tiles() -> bool:
    """Request the AMX registers from Linux. A process may use them only after this request."""
    system_call: Any = ctypes.CDLL(None).syscall
    return bool(system_call(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0)


def compile_for(kind: str) -> dict[str, str]:
    """Return the environment variables that make numba compile for one of ``KINDS``, on any processor."""
    name, features = KINDS[kind]
    # By default LLVM uses only half of the register width of x86-64-v4.
    narrow = ("-prefer-256-bit",) if name == "x86-64-v4" else ()
    return {NAME_VARIABLE: name, FEATURES_VARIABLE: ",".join((*(f"+{each}" for each in features), *narrow))}


def _brought() -> Path | None:
    """Return the image's compiled code for this processor's best kind, or None, and set numba to compile for the same kind."""
    kinds = kinds_of_processor() if NATIVE else []
    wanted = compile_for(kinds[0]) if kinds else {}
    if any(os.environ.get(name, value) != value for name, value in wanted.items()):
        return None  # the user's own settings win
    # Code for a lesser kind would load sooner, but run slower for the life of the process.
    folder = IMAGE / kinds[0] if kinds and (IMAGE / kinds[0]).is_dir() else None
    if folder is None and not (kinds and tiles_are_refused()):  # numba's default uses all features of the processor
        return None
    os.environ.update(wanted)
    if "numba" in sys.modules:  # it has read the environment already
        settings: Any = sys.modules["numba"].config
        settings.CPU_NAME, settings.CPU_FEATURES = wanted[NAME_VARIABLE], wanted[FEATURES_VARIABLE]
    return folder


BROUGHT = _brought()


@cache
def _take_over(folder: Path) -> None:
    """Copy the image's compiled code to a writable cache folder, unless that folder already exists."""
    if BROUGHT is None or folder.exists() or not (BROUGHT / folder.name).is_dir():
        return
    half = folder.with_name(f".{folder.name}-{_PROCESS}")
    try:
        shutil.copytree(BROUGHT / folder.name, half)
        set_modes(half, 0o700, 0o600)  # an image's files may be group-writable, and such files are refused
        half.rename(folder)
    except OSError:  # not writable, or another process was first
        shutil.rmtree(half, ignore_errors=True)


def set_modes(folder: Path, folders: int, files: int) -> None:
    """Set the file modes of a folder and everything below it."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(folders if path.is_dir() else files)


@cache
def _writable(folder: Path) -> bool:
    """Return whether files can be created in a folder, creating it if needed. If not, log one warning per parent folder."""
    try:
        make_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _warn_unkept(folder.parent, os.strerror(error.errno or 0))
        return False
    return True


@cache
def _warn_unkept(folder: Path, reason: str) -> None:
    logger.warning("compiled code cannot be cached in %s (%s): every start compiles it again", folder, reason)


def _sources(path: Path) -> Path:
    """Return the folder of everything that a function in a file may call: this package, or the file's own folder."""
    if path.is_relative_to(_ROOM):
        return _ROOM
    # The parent of the file's folder, if that has compiled code (``native_*.py``), too.
    return path.parent.parent if any(path.parent.parent.glob("native_*.py")) else path.parent


@cache
def _version(folder: Path = _ROOM) -> str:
    digest = hashlib.sha256(_FORMAT)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
