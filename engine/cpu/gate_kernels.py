"""Row-wise gates and norms of recurrent layers, rounded as in the modules of Qwen3.5 and Granite 4."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numba import carray

from outrider.decoding.jit import compiled
from outrider.engine.cpu.norm_kernel import normalise
from outrider.engine.cpu.simd import (
    WIDTH,
    address_of,
    bytes_of,
    copy_bytes,
    load,
    multiply,
    multiply_add,
    silu,
    splat,
    store,
    stored,
    total,
)

_FLOAT = np.float32(0)  # stands for its type
_ONE = np.float32(1)


class Decays(ctypes.Structure):
    """Job that fills ``decay`` and ``rate`` of a rule, see ``recurrence_kernel.NativeRule``."""

    _fields_ = (
        ("steps", ctypes.c_int64),  # [rows, heads], read in whole vectors
        ("steps_row", ctypes.c_int64),
        ("strengths", ctypes.c_int64),  # [rows, heads] likewise: b before the sigmoid; 0: the steps are copied unchanged
        ("strengths_row", ctypes.c_int64),
        ("bias", ctypes.c_int64),  # [heads] float32, of the steps
        ("rates", ctypes.c_int64),  # [heads] float32: multiplier of a step's softplus
        ("decay", ctypes.c_int64),  # [rows, heads] float32
        ("rate", ctypes.c_int64),  # [rows, heads] float32
        ("heads", ctypes.c_int64),
    )


class GatedNorm(ctypes.Structure):
    """Job of an RMS norm of parts of a row with a SiLU gate."""

    _fields_ = (
        ("input", ctypes.c_int64),  # [rows, parts * size], changed in place; float32 if ``gate_first``
        ("gate", ctypes.c_int64),  # [rows, parts * size]
        ("gate_row", ctypes.c_int64),
        ("weight", ctypes.c_int64),  # [size]; [parts * size] if ``gate_first``
        ("output", ctypes.c_int64),  # [rows, parts * size]
        ("parts", ctypes.c_int64),
        ("size", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("gate_first", ctypes.c_int64),
        ("epsilon", ctypes.c_double),
    )


DECAYS, GATED_NORM = np.dtype(Decays), np.dtype(GatedNorm)


@compiled
def set_decays(job: Any, row: int, like: Any) -> None:
    """Compute decays and rates of one row."""
    spare = np.empty((2, WIDTH), np.float32)
    for first in range(0, job.heads, WIDTH):
        _set_some(job, row, first, min(WIDTH, job.heads - first), spare, like)


@compiled
def _set_some(job: Any, row: int, first: int, count: int, spare: Any, like: Any) -> None:
    """Compute the heads of one vector; see ``linear_kernel`` for why ``spare`` is an argument."""
    wide, steps, strengths = bytes_of(like), spare.ctypes.data, spare.ctypes.data + WIDTH * 4
    target = (row * job.heads + first) * 4
    store(steps, load(job.steps + row * job.steps_row + first * wide, like), _FLOAT)
    if job.strengths == 0:
        copy_bytes(steps, job.decay + target, count * 4)
        copy_bytes(steps, job.rate + target, count * 4)
        return
    store(strengths, load(job.strengths + row * job.strengths_row + first * wide, like), _FLOAT)
    bias = carray(address_of(job.bias + first * 4), count, np.float32)
    rates = carray(address_of(job.rates + first * 4), count, np.float32)
    for head in range(count):
        # softplus of the step; the exponential of a non-positive number cannot overflow.
        x = float(spare[0, head] + bias[head])
        spare[0, head] = rates[head] * np.float32(max(x, 0.0) + math.log1p(math.exp(-abs(x))))
        spare[1, head] = np.float32(1.0 / (1.0 + math.exp(-float(spare[1, head]))))
    store(strengths, stored(load(strengths, _FLOAT), like), _FLOAT)  # a sigmoid has the model's dtype
    copy_bytes(steps, job.decay + target, count * 4)
    copy_bytes(strengths, job.rate + target, count * 4)


@compiled
def norm_and_gate(job: Any, row: int, like: Any) -> None:
    """Normalize and gate one row."""
    wide, whole = bytes_of(like), job.parts * job.size
    gate, output = job.gate + row * job.gate_row, job.output + row * whole * wide
    for part in range(job.parts):
        first = part * job.size
        if job.gate_first:
            _gate_then_norm(
                job.input + (row * whole + first) * 4, gate + first * wide, job.weight + first * wide, output + first * wide,
                job.size, job.epsilon, like,
            )  # fmt: skip
        else:
            _norm_then_gate(
                job.input + (row * whole + first) * wide, gate + first * wide, job.weight, output + first * wide, job.size,
                job.epsilon, like,
            )  # fmt: skip


@compiled
def _norm_then_gate(input: int, gate: int, weight: int, output: int, size: int, epsilon: float, like: Any) -> None:
    """Compute ``norm(x) * silu(gate)`` with Llama's norm; the gate is not rounded."""
    wide = bytes_of(like)
    normalise(input, weight, output, size, epsilon, False, like)
    for first in range(0, size, WIDTH):
        place = output + first * wide
        store(place, multiply(load(place, like), silu(load(gate + first * wide, like))), like)


@compiled
def _gate_then_norm(input: int, gate: int, weight: int, output: int, size: int, epsilon: float, like: Any) -> None:
    """Compute ``norm(x * silu(gate))`` in float32, rounded once."""
    wide, squares = bytes_of(like), splat(_FLOAT)
    for first in range(0, size, WIDTH):
        numbers = multiply(load(input + first * 4, _FLOAT), silu(load(gate + first * wide, like)))
        store(input + first * 4, numbers, _FLOAT)
        squares = multiply_add(numbers, numbers, squares)
    scale = splat(_ONE / np.sqrt(total(squares) / np.float32(size) + np.float32(epsilon)))
    for first in range(0, size, WIDTH):
        numbers = multiply(load(input + first * 4, _FLOAT), scale)
        store(output + first * wide, multiply(numbers, load(weight + first * wide, like)), like)
