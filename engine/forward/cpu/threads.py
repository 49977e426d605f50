"""Runs a C function on the threads that torch computes with.

torch's threads wait for their next work in a loop, so that threads of our own would compete with them for the processors. On
Linux they are those of GNU's OpenMP library, whose entry for a parallel region takes any function.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_LIBRARY = "libgomp.so.1"


@cache
def _parallel() -> Callable[..., None] | None:
    """``GOMP_parallel(function, data, threads, flags)`` of the library that torch has loaded; None where torch uses another."""
    loaded_only = getattr(os, "RTLD_NOLOAD", None)
    if loaded_only is None or not torch.backends.openmp.is_available():
        return None
    try:
        function: Any = ctypes.CDLL(_LIBRARY, mode=loaded_only).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    parallel: Callable[..., None] = function
    return parallel


class Kernel:
    """A C function ``void (job *)``, for one thread or for several at once."""

    def __init__(self, address: int) -> None:
        self._address, self._call = address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, job: ctypes.Structure, threads: int = 1) -> None:
        """Calls it once on each of so many threads, one of which is the caller's, and returns when all are done.

        Where there is no way to torch's threads it is called once.
        """
        at, parallel = ctypes.addressof(job), _parallel() if threads > 1 else None
        if parallel is None:
            self._call(at)
        else:
            parallel(self._address, at, threads, 0)
