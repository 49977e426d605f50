"""Single numbers of a Philox stream, without those before them.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3) makes each block of four numbers from
a counter and a key alone. numpy gives a stream from its beginning; a draw among few tokens of a large vocabulary needs theirs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from decoding.jit import compiled

UInt64Array = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FACTORS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)  # added to the key in each round
_ROUNDS = 10


@compiled
def _high(a: np.uint64, b: np.uint64) -> np.uint64:
    """The upper 64 bits of a product of 128."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a_high * b_low + ((a_low * b_low) >> _HALF)
    return a_high * b_high + (middle >> _HALF) + ((a_low * b_high + (middle & _LOW)) >> _HALF)


@compiled
def fill_raw(key: np.uint64, position: np.uint64, places: npt.NDArray[np.int64], found: UInt64Array) -> None:
    """Fills [n] ``found`` with ``raw_stream(key, position, max(places) + 1)[places]``, at the price of the places alone."""
    first, second, first_step, second_step = _FACTORS[0], _FACTORS[1], _STEPS[0], _STEPS[1]
    for at in range(len(places)):
        # numpy counts up before each block, so that its first has the number 1.
        a, b, c, d = np.uint64((places[at] >> 2) + 1), position, np.uint64(0), np.uint64(0)
        k, other = key, np.uint64(0)
        for _ in range(_ROUNDS):
            a, b, c, d = _high(second, c) ^ b ^ k, second * c, _high(first, a) ^ d ^ other, first * a
            k, other = k + first_step, other + second_step
        lane = places[at] & 3
        found[at] = a if lane == 0 else b if lane == 1 else c if lane == 2 else d


def raw_stream(seed: int, position: int, count: int) -> UInt64Array:
    """[count] uint64: numpy's stream for the key ``seed`` from the counter ``position * 2**64`` on."""
    raw: UInt64Array = np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw(count)
    return raw
