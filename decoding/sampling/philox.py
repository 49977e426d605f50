"""Philox random numbers at any position of a stream (Salmon et al., SC 2011, section 4.3), which numpy does not offer."""

from __future__ import annotations

import numpy as np

from outrider.decoding.arrays import Int64Array, UInt64Array
from outrider.decoding.jit import compiled

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FACTORS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)  # added to the key in each round
_ROUNDS = 10


@compiled
def _high(a: np.uint64, b: np.uint64) -> np.uint64:
    """Return the upper 64 bits of the 128-bit product."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a_high * b_low + ((a_low * b_low) >> _HALF)
    return a_high * b_high + (middle >> _HALF) + ((a_low * b_high + (middle & _LOW)) >> _HALF)


@compiled
def fill_raw(
    key: np.uint64, position: np.uint64, places: Int64Array, found: UInt64Array, stream: int = 0
) -> None:  # fmt: skip
    """Fill ``found`` with ``raw_stream(key, position, n, stream)[places]`` for any sufficient n, computing only these numbers."""
    first, second, first_step, second_step = _FACTORS[0], _FACTORS[1], _STEPS[0], _STEPS[1]
    for at in range(len(places)):
        # numpy increments the counter before each block, so the first block has number 1.
        a, b, c, d = np.uint64((places[at] >> 2) + 1), position, np.uint64(stream), np.uint64(0)
        k, other = key, np.uint64(0)
        for _ in range(_ROUNDS):
            a, b, c, d = _high(second, c) ^ b ^ k, second * c, _high(first, a) ^ d ^ other, first * a
            k, other = k + first_step, other + second_step
        lane = places[at] & 3
        found[at] = a if lane == 0 else b if lane == 1 else c if lane == 2 else d


@compiled
def fill_stream(key: np.uint64, position: np.uint64, lanes: UInt64Array) -> None:
    """Fill [4, n] ``lanes`` with the first 4 n numbers of ``raw_stream(key, position, ...)``: number i is ``[i % 4, i // 4]``."""
    first, second, first_step, second_step = _FACTORS[0], _FACTORS[1], _STEPS[0], _STEPS[1]
    k, other = key, np.uint64(0)
    for at in range(lanes.shape[1]):
        lanes[0, at], lanes[1, at], lanes[2, at], lanes[3, at] = np.uint64(at + 1), position, np.uint64(0), np.uint64(0)
    for _ in range(_ROUNDS):
        for at in range(lanes.shape[1]):
            a, b, c, d = lanes[0, at], lanes[1, at], lanes[2, at], lanes[3, at]
            lanes[0, at], lanes[1, at] = _high(second, c) ^ b ^ k, second * c
            lanes[2, at], lanes[3, at] = _high(first, a) ^ d ^ other, first * a
        k, other = k + first_step, other + second_step


def raw_stream(seed: int, position: int, count: int, stream: int = 0) -> UInt64Array:
    """Return [count] numbers of numpy's Philox stream for the key ``seed``, one of several independent streams per position."""
    raw: UInt64Array = np.random.Philox(key=seed, counter=[0, position, stream, 0]).random_raw(count)
    return raw
