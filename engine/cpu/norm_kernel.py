"""RMS norm in one call: torch takes seven operations, whose calls cost more than the arithmetic of a few rows."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from outrider.decoding.jit import compiled, compiled_callback
from outrider.engine.cpu.simd import TYPES, WIDTH, bytes_of, load, multiply, multiply_add, splat, store, stored, total

_FLOAT = np.float32(0)  # stands for its type


class Norm(ctypes.Structure):
    """Job of an RMS norm; addresses are of the first element, and everything is contiguous."""

    _fields_ = (
        ("input", ctypes.c_int64),  # [rows, size]
        ("weight", ctypes.c_int64),  # [size], float32 if ``wide``
        ("output", ctypes.c_int64),  # [rows, size]
        ("rows", ctypes.c_int64),  # 0 in a ``NativeStep``, which has the number of rows
        ("size", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("epsilon", ctypes.c_double),
        ("wide", ctypes.c_int64),  # whether only the end result is rounded
    )


_SIGNATURE = types.void(types.CPointer(from_dtype(np.dtype(Norm))))


@compiled
def normalise(input: int, weight: int, output: int, size: int, epsilon: float, wide: int, like: Any) -> None:
    """Compute ``weight * (x / sqrt(mean(x ** 2) + epsilon))``, rounded as in Llama's module: before and after the weight."""
    squares, step = splat(_FLOAT), bytes_of(like)
    for first in range(0, size, WIDTH):
        numbers = load(input + first * step, like)
        squares = multiply_add(numbers, numbers, squares)
    scale = splat(np.float32(1) / np.sqrt(total(squares) / np.float32(size) + np.float32(epsilon)))
    for first in range(0, size, WIDTH):
        numbers = multiply(load(input + first * step, like), scale)
        if wide:  # as in Gemma's module: float32 weight, rounded once
            store(output + first * step, multiply(numbers, load(weight + first * 4, _FLOAT)), like)
        else:
            store(output + first * step, multiply(stored(numbers, like), load(weight + first * step, like)), like)


@compiled
def _run(job: Any, like: Any) -> None:
    norm, wide = carray(job, 1)[0], bytes_of(like)
    for row in range(norm.rows):
        at = row * norm.size * wide
        normalise(norm.input + at, norm.weight, norm.output + at, norm.size, norm.epsilon, norm.wide, like)


@cache
def entry_point(dtype: str) -> Any:
    """Return the C function ``void (Norm *)`` with its ``address``; see ``attention_kernel.entry_point``."""
    like = TYPES[dtype]

    def run(job: Any) -> None:
        _run(job, like)

    run.__qualname__ = f"run_{dtype}"  # key of the cache on disk
    return compiled_callback(_SIGNATURE)(run)
