"""numba's cache of compiled functions on disk, as ``decoding.jit`` uses it: no fault of it keeps a program from starting."""

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

from decoding.private_files import keep_sealed, read_sealed

logger = logging.getLogger(__name__)

caching: Any = numba.core.caching  # which says no types
_PROCESS = uuid.uuid4().hex[:12]


class FunctionCache(caching.FunctionCache):  # type: ignore[misc]
    """The cache of one function: what cannot be read is compiled anew, and what cannot be written is not kept."""

    def __init__(self, function: Callable[..., object], folder: Path) -> None:
        self._impl_class = functools.partial(_Place, folder=folder)
        super().__init__(function)
        place = self._impl
        self._cache_file = _SealedFiles(self._cache_path, place.filename_base, place.locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what was compiled for a signature; None where it was not, or cannot be used."""
        found = None
        with _compiled_anew():
            found = super().load_overload(sig, target_context)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled for a signature, where that can be."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn("compiled code cannot be kept (%s): the next start compiles again what is missing", error)


class _Place(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Names a function's files in a given folder. numba's own looks for other folders where one cannot be written to."""

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
        """Do nothing: ``keep_sealed`` makes the folder."""


class _SealedFiles(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The index of a function and its files of machine code. Nothing is unpickled, or run, but what was written whole."""

    def __init__(self, folder: str, name: str, stamp: Any) -> None:
        super().__init__(folder, name, stamp)
        # numba numbers the files of a function's types. Two processes that compile it at once for different types would choose
        # the same number, and a third one would be given the code of other types than its own.
        self._data_name_pattern: str = f"{name}.{_PROCESS}-{{number:d}}.nbc"

    def _load_index(self) -> dict[Any, str]:
        found: dict[Any, str] = {}
        with _compiled_anew():
            file = io.BytesIO(read_sealed(Path(self._index_path)))
            if pickle.load(file) == self._version:  # else the rest may be of classes that are no more
                stamp, names = pickle.load(file)
                found = names if stamp == self._source_stamp else {}
        return found

    def _save_index(self, overloads: dict[Any, str]) -> None:
        keep_sealed(Path(self._index_path), pickle.dumps(self._version) + self._dump((self._source_stamp, overloads)))

    def _load_data(self, name: str) -> Any:
        found = None
        with _compiled_anew():
            found = pickle.loads(read_sealed(Path(self._data_path(name))))
        return found

    def _save_data(self, name: str, data: Any) -> None:
        keep_sealed(Path(self._data_path(name)), self._dump(data))


@contextmanager
def _compiled_anew() -> Iterator[None]:
    """Have what cannot be loaded count as not there."""
    try:
        yield
    except FileNotFoundError:
        pass  # not compiled yet, or an index of a process that was killed before it wrote the code
    except Exception as error:  # noqa: BLE001  # reading, and whatever unpickling and linking may raise
        _warn("compiled code that was kept cannot be used and is compiled anew: %s", error)


_warned = set[str]()


def _warn(line: str, error: Exception) -> None:
    """Say a line once: after a power cut it would be of a hundred files."""
    if line not in _warned:
        _warned.add(line)
        logger.warning(line, f"{type(error).__name__}: {error}")
