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


def on_threads(function: int, data: int, threads: int) -> bool:
    """Calls ``void function(void *data)`` once on each of so many threads, and returns when all are done.

    Args:
        function: its address.
        data: an address.
        threads: at least 1; the caller's thread is one of them.

    Returns:
        False when there is no way to torch's threads, and nothing was called.
    """
    parallel = _parallel()
    if parallel is None:
        return False
    parallel(function, data, threads, 0)
    return True
