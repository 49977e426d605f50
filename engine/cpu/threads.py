"""Calls of a C function on the threads that torch computes with, by GNU OpenMP's entry point for a parallel region."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# torch's threads spin between jobs, so further threads would compete with them for the cores.
_LIBRARY = "libgomp.so.1"


@cache
def _parallel() -> Callable[..., None] | None:
    """Return ``GOMP_parallel(function, data, threads, flags)`` of torch's OpenMP library; None if torch uses another one."""
    # Only the library that torch has loaded: a second copy would bring further threads.
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
    """C function ``void (job *)`` that runs on one thread or on several at once."""

    def __init__(self, address: int) -> None:
        self._address, self._call = address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, job: ctypes.Structure, threads: int = 1) -> None:
        """Call the function on ``threads`` threads, including the caller's, and wait for all; once if torch's cannot be used."""
        at, parallel = ctypes.addressof(job), _parallel() if threads > 1 else None
        if parallel is None:
            self._call(at)
        else:
            parallel(self._address, at, threads, 0)
