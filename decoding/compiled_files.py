"""Numba's on-disk cache of compiled functions, as ``decoding.jit`` uses it. No cache failure keeps a program from starting."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba.core.caching

from outrider.decoding.private_files import read_sealed, save_sealed

logger = logging.getLogger(__name__)

caching: Any = numba.core.caching  # untyped
_PROCESS = uuid.uuid4().hex[:12]


class FunctionCache(caching.FunctionCache):  # type: ignore[misc]
    """On-disk cache of one function. Unreadable entries are compiled again; entries that cannot be written are skipped."""

    def __init__(self, function: Callable[..., object], folder: Path) -> None:
        self._impl_class = functools.partial(_Place, folder=folder)
        super().__init__(function)
        place = self._impl
        self._cache_file = _SealedFiles(self._cache_path, place.filename_base, place.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code of a signature, or None if it is missing or unusable."""
        found = None
        with _compiled_anew():
            found = super().load_overload(sig, target_context)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save the compiled code of a signature, or log a warning if it cannot be written."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn("compiled code cannot be cached (%s): the next start compiles the missing part again", error)


# numba's own class tries other folders if the first is not writable; this one uses the given folder only.
class _Place(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Names of a function's cache files in a given folder."""

    def __init__(self, function: Callable[..., object], folder: Path) -> None:
        path = inspect.getfile(function)
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(function, path, folder)
        self._filename_base = self.get_filename_base(f"{Path(path).stem}.{function.__qualname__}", sys.abiflags)


class _Locator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    def __init__(self, function: Callable[..., object], path: str, folder: Path) -> None:
        self._py_file, self._lineno = path, function.__code__.co_firstlineno
        self._cache_path = str(folder / self.get_suitable_cache_subpath(path))

    def ensure_cache_path(self) -> None:
        """Do nothing: ``save_sealed`` creates the folder."""


class _SealedFiles(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Index and machine-code files of one function. A file is unpickled only after its checksum matched."""

    def __init__(self, folder: str, name: str, stamp: Any) -> None:
        super().__init__(folder, name, stamp)
        # numba numbers the files of a function by signature. Without the process id, two processes that compile different
        # signatures at once would choose the same number, and a third would load code for the wrong types.
        self._data_name_pattern: str = f"{name}.{_PROCESS}-{{number:d}}.nbc"

    def _load_index(self) -> dict[Any, str]:
        found: dict[Any, str] = {}
        with _compiled_anew():
            file = io.BytesIO(read_sealed(Path(self._index_path)))
            if pickle.load(file) == self._version:  # otherwise the rest may refer to classes that no longer exist
                stamp, names = pickle.load(file)
                found = names if stamp == self._source_stamp else {}
        return found

    def _save_index(self, overloads: dict[Any, str]) -> None:
        save_sealed(Path(self._index_path), pickle.dumps(self._version) + self._dump((self._source_stamp, overloads)))

    def _load_data(self, name: str) -> Any:
        found = None
        with _compiled_anew():
            found = pickle.loads(read_sealed(Path(self._data_path(name))))
        return found

    def _save_data(self, name: str, data: Any) -> None:
        save_sealed(Path(self._data_path(name)), self._dump(data))


@contextmanager
def _compiled_anew() -> Iterator[None]:
    """Treat a cache entry that fails to load as missing."""
    try:
        yield
    except FileNotFoundError:
        pass  # not compiled yet, or the process was killed between writing the index and the code
    except Exception as error:  # noqa: BLE001  # anything that reading, unpickling and linking may raise
        _warn("cached compiled code cannot be used and is compiled again: %s", error)


_warned = set[str]()


def _warn(line: str, error: Exception) -> None:
    """Log a warning once per process. After a power cut hundreds of files may be damaged."""
    if line not in _warned:
        _warned.add(line)
        logger.warning(line, f"{type(error).__name__}: {error}")
