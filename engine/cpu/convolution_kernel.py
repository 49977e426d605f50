"""Short convolutions in compiled code, along the paths of ``walk_kernel``: a row sees the rows before it on its own path."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from outrider.decoding.jit import compiled, compiled_callback
from outrider.engine.cpu.simd import (
    TYPES,
    WIDTH,
    address_of,
    bytes_of,
    claim,
    copy_bytes,
    int_at,
    load,
    multiply_add,
    silu,
    splat,
    store,
    stored,
)
from outrider.engine.cpu.walk_kernel import WALK

_CHANNELS = 8 * WIDTH  # channels that a thread takes at once
_FLOAT = np.float32(0)  # stands for its type


class NativeConvolution(ctypes.Structure):
    """Job of a convolution, with the conventions of ``NativeRule``."""

    _fields_ = (
        ("input", ctypes.c_int64),  # [rows, channels]
        ("input_row", ctypes.c_int64),
        ("weight", ctypes.c_int64),  # [taps + 1, channels] float32, the row's own last
        ("bias", ctypes.c_int64),  # [channels] float32; 0: none
        ("output", ctypes.c_int64),  # [rows, channels]
        ("channels", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("taps", ctypes.c_int64),  # rows before each that are used
        ("silu", ctypes.c_int64),  # whether SiLU is applied to the outputs
        ("states", ctypes.c_int64),  # per place, [taps, channels]: the last rows, nearest first
        ("place_bytes", ctypes.c_int64),
        ("kept", ctypes.c_int64),  # [slots, kept_rows, channels]
        ("kept_rows", ctypes.c_int64),
        ("walks", ctypes.c_int64),
        ("num_walks", ctypes.c_int64),
        ("taken", ctypes.c_int64),  # parts that threads have claimed; starts at 0
    )


CONVOLUTION = np.dtype(NativeConvolution)
_TAKEN = NativeConvolution.taken.offset


@compiled
def _column(conv: Any, walk: Any, code: int, wide: int) -> int:
    """Return the address of a row: of this forward pass, or for negative codes of the slot's window, then of the kept rows."""
    if code >= 0:
        return conv.input + (walk.offset + code) * conv.input_row
    back = -1 - code
    if back < conv.taps:
        return conv.states + walk.slot * conv.place_bytes + back * conv.channels * wide
    return conv.kept + (walk.slot * conv.kept_rows + back - conv.taps) * conv.channels * wide


@compiled
def _convolve(conv: Any, walk: Any, first: int, last: int, like: Any) -> None:
    wide, taps = bytes_of(like), conv.taps
    if walk.fresh:
        for tap in range(taps):
            at = conv.states + walk.slot * conv.place_bytes + tap * conv.channels * wide
            for channel in range(first, last, WIDTH):
                store(at + channel * wide, splat(_FLOAT), like)
    for row in range(walk.rows):
        codes = walk.taps + row * walk.most_taps * 8
        own = conv.input + (walk.offset + row) * conv.input_row
        output = conv.output + (walk.offset + row) * conv.channels * wide
        for channel in range(first, last, WIDTH):
            place, weight = channel * wide, conv.weight + channel * 4
            sums = load(conv.bias + channel * 4, _FLOAT) if conv.bias else splat(_FLOAT)
            for tap in range(taps - 1, -1, -1):
                numbers = load(_column(conv, walk, int_at(codes + tap * 8), wide) + place, like)
                sums = multiply_add(numbers, load(weight + (taps - 1 - tap) * conv.channels * 4, _FLOAT), sums)
            sums = multiply_add(load(own + place, like), load(weight + taps * conv.channels * 4, _FLOAT), sums)
            sums = stored(sums, like)
            if conv.silu:
                sums = silu(sums)
            store(output + place, sums, like)
    # The new windows are copied through a buffer, since they overlap the old ones.
    held = np.empty(taps * (last - first), np.float32)
    for number in range(walk.num_windows):
        window = walk.windows + number * (1 + walk.most_taps) * 8
        target = conv.states + int_at(window) * conv.place_bytes
        for tap in range(taps):
            source = _column(conv, walk, int_at(window + (1 + tap) * 8), wide)
            for channel in range(first, last, WIDTH):
                numbers = load(source + channel * wide, like)
                store(held.ctypes.data + (tap * (last - first) + channel - first) * 4, numbers, _FLOAT)
        for tap in range(taps):
            for channel in range(first, last, WIDTH):
                numbers = load(held.ctypes.data + (tap * (last - first) + channel - first) * 4, _FLOAT)
                store(target + (tap * conv.channels + channel) * wide, numbers, like)
    for kept_row in range(walk.keep_count):
        source = conv.input + (walk.offset + walk.keep_first + kept_row) * conv.input_row + first * wide
        target = conv.kept + ((walk.slot * conv.kept_rows + kept_row) * conv.channels + first) * wide
        copy_bytes(source, target, (last - first) * wide)


@compiled
def channel_parts(conv: Any) -> int:
    """Return the number of parts into which a request's channels are split."""
    return (conv.channels + _CHANNELS - 1) // _CHANNELS


@compiled
def convolve_channels(conv: Any, walks: Any, taken: int, like: Any) -> int:
    """Convolve channel parts until none is left; return the number computed by this thread."""
    parts, done = channel_parts(conv), 0
    while True:
        item = claim(taken)
        if item >= parts * len(walks):
            return done
        first = item % parts * _CHANNELS
        _convolve(conv, walks[item // parts], first, min(first + _CHANNELS, conv.channels), like)
        done += 1


@compiled
def _run(job: Any, like: Any) -> None:
    convs = carray(job, 1)
    conv = convs[0]
    convolve_channels(conv, carray(address_of(conv.walks), conv.num_walks, WALK), convs.ctypes.data + _TAKEN, like)


_SIGNATURE = types.void(types.CPointer(from_dtype(CONVOLUTION)))


@cache
def convolution_entry(dtype: str) -> Any:
    """Return the C function ``void (NativeConvolution *)``, with its ``address``; see ``attention_kernel.entry_point``."""
    like = TYPES[dtype]

    def run(job: Any) -> None:
        _run(job, like)

    run.__qualname__ = f"run_{dtype}"  # key of the cache on disk
    return compiled_callback(_SIGNATURE)(run)
