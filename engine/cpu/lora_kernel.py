"""Outputs of LoRA adapters (arXiv 2106.09685), ``up @ (down @ x)``, computed row by row.

Sums and factors are float32 for every model dtype, and the changed output is rounded once more.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types

from outrider.decoding.jit import compiled, compiled_callback
from outrider.engine.cpu.simd import (
    FLOAT,
    FLOATS,
    INT,
    LANES,
    LIKE,
    TYPES,
    WIDTH,
    add,
    address_of,
    bytes_of,
    claim,
    copy_bytes,
    int_at,
    load,
    load_splat,
    multiply_add,
    primitive,
    splat,
    spread,
    store,
)

_FLOAT = np.float32(0)  # stands for its type
_TOGETHER = 4  # independent partial sums, so that additions overlap


class LayerFactors(ctypes.Structure):
    """One adapter's factors of a layer; all 0 if it has none."""

    _fields_ = (
        ("down", ctypes.c_int64),  # [size, rank] float32
        ("up", ctypes.c_int64),  # [rank, outputs, padded to a multiple of ``WIDTH``] float32
        ("rank", ctypes.c_int64),  # zero-padded to a multiple of ``WIDTH``
    )


class LowRank(ctypes.Structure):
    """Job that adds adapters to a layer's outputs; addresses are of the first element, and everything is contiguous."""

    _fields_ = (
        ("factors", ctypes.c_int64),  # [adapters] ``LayerFactors``
        ("input", ctypes.c_int64),  # [rows, size]
        ("output", ctypes.c_int64),  # [rows, outputs], added to in place
        ("scratch", ctypes.c_int64),  # [rows, scratch_size] float32
        ("scratch_size", ctypes.c_int64),  # greatest rank plus ``WIDTH``
        ("size", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("rows", ctypes.c_int64),  # this and the next two are 0 in a ``NativeStep``, which has them itself
        ("adapters", ctypes.c_int64),  # [rows] int64: adapter of each row, -1: none
        ("taken", ctypes.c_int64),  # address of a counter, 0
    )


_FACTORS = np.dtype(LayerFactors)


@primitive(LANES, types.int64, LIKE)
def _spread_at(builder: Any, address: Any, like: Any) -> Any:
    b = builder
    if like == types.float32:
        return spread(b, b.load(b.inttoptr(address, FLOAT.as_pointer()), align=4))
    if like == types.int16:
        return spread(b, b.fpext(b.load(b.inttoptr(address, ir.HalfType().as_pointer()), align=2), FLOAT))
    half = b.zext(b.load(b.inttoptr(address, ir.IntType(16).as_pointer()), align=2), INT)
    return spread(b, b.bitcast(b.shl(half, INT(16)), FLOAT), FLOATS)


@compiled
def add_low_rank(job: Any, row: int, adapter: int, like: Any) -> None:
    """Add an adapter's outputs to a row; adapter -1 adds nothing."""
    if adapter < 0:
        return
    factors = carray(address_of(job.factors), adapter + 1, _FACTORS)[adapter]
    if factors.rank == 0:
        return
    wide, rank = bytes_of(like), factors.rank
    source, target = job.input + row * job.size * wide, job.output + row * job.outputs * wide
    inner = job.scratch + row * job.scratch_size * 4
    for first in range(0, rank, WIDTH):
        # Sums follow the inner size, so that a row's bits do not depend on other rows.
        a, b, c, d = splat(_FLOAT), splat(_FLOAT), splat(_FLOAT), splat(_FLOAT)
        place, step, whole = factors.down + first * 4, rank * 4, job.size // _TOGETHER * _TOGETHER
        for number in range(0, whole, _TOGETHER):
            at = source + number * wide
            a = multiply_add(_spread_at(at, like), load(place, _FLOAT), a)
            b = multiply_add(_spread_at(at + wide, like), load(place + step, _FLOAT), b)
            c = multiply_add(_spread_at(at + 2 * wide, like), load(place + 2 * step, _FLOAT), c)
            d = multiply_add(_spread_at(at + 3 * wide, like), load(place + 3 * step, _FLOAT), d)
            place += _TOGETHER * step
        for number in range(whole, job.size):
            a = multiply_add(_spread_at(source + number * wide, like), load(place, _FLOAT), a)
            place += step
        store(inner + first * 4, add(add(a, b), add(c, d)), _FLOAT)
    across = (job.outputs + WIDTH - 1) // WIDTH * WIDTH * 4
    for first in range(0, job.outputs, WIDTH):
        sums, place = splat(_FLOAT), factors.up + first * 4
        for number in range(rank):
            sums = multiply_add(load_splat(inner + number * 4), load(place, _FLOAT), sums)
            place += across
        at = target + first * wide
        if first + WIDTH <= job.outputs:
            store(at, add(load(at, like), sums), like)
        else:  # incomplete vector: memory behind it belongs to others
            spare, left = inner + rank * 4, (job.outputs - first) * wide
            copy_bytes(at, spare, left)
            store(spare, add(load(spare, like), sums), like)
            copy_bytes(spare, at, left)


@compiled
def _run(jobs: Any, like: Any) -> None:
    job = carray(jobs, 1)[0]
    while True:
        row = claim(job.taken)
        if row >= job.rows:
            return
        add_low_rank(job, row, int_at(job.adapters + row * 8), like)


_SIGNATURE = types.void(types.CPointer(from_dtype(np.dtype(LowRank))))


@cache
def entry_point(dtype: str) -> Any:
    """Return the C function ``void (LowRank *)`` that every thread calls; see ``attention_kernel.entry_point``."""
    like = TYPES[dtype]

    def run(job: Any) -> None:
        _run(job, like)

    run.__qualname__ = f"run_{dtype}"  # key of the cache on disk
    return compiled_callback(_SIGNATURE)(run)
