"""Allocation and growth of the arrays of a token log.

A small log is copied when it doubles. From ``LARGE`` positions on, virtual memory is reserved for the full capacity, so no step
copies all of it. Buckets grow with the tokens by linear hashing: each block splits a few.
"""

from __future__ import annotations

import numpy as np

from outrider.decoding.sources.log.chains import BLOCK, WAYS, Int64Array, LogArrays

LARGE = 1 << 16  # positions; a copy of fewer takes a millisecond or two


def _buckets(size: int) -> tuple[int, int, int]:
    """Return the numbers of buckets for the 1-, 2- and 4-grams of a log of ``size`` positions."""
    return min(size, 2**17), max(64, size // 4), max(64, size // 2)


def memory_for(size: int) -> LogArrays:
    """Allocate memory for ``size`` positions, a power of two."""
    one, two, four = _buckets(size)
    return LogArrays(
        tokens=np.empty(size, np.int32),
        back=np.zeros((size, 3), np.int32),
        heads1=np.empty(one, np.int64),
        heads2=np.empty((two, WAYS), np.int64),
        heads4=np.empty((four, WAYS), np.int64),
        counts=np.zeros(size, np.uint8),
        owners=np.empty(size // BLOCK, np.int64),
    )


def _beginning(memory: LogArrays, size: int, one: int, two: int, four: int) -> LogArrays:
    """Return views of the first ``size`` positions and of the given numbers of buckets."""
    return LogArrays(
        tokens=memory.tokens[:size],
        back=memory.back[:size],
        heads1=memory.heads1[:one],
        heads2=memory.heads2[:two],
        heads4=memory.heads4[:four],
        counts=memory.counts[:size],
        owners=memory.owners[: size // BLOCK],
    )


def empty_log(memory: LogArrays, size: int) -> LogArrays:
    """Initialise an empty log of ``size`` positions, a power of two, at the beginning of ``memory``."""
    arrays = _beginning(memory, size, *_buckets(size))
    arrays.tokens.fill(-1)
    arrays.owners.fill(-1)
    for heads in arrays[2:5]:
        heads.fill(-1)
    return arrays


def copied(arrays: LogArrays, memory: LogArrays) -> LogArrays:
    """Copy a log to the beginning of larger memory."""
    copy = _beginning(memory, len(arrays.tokens), len(arrays.heads1), len(arrays.heads2), len(arrays.heads4))
    for name in LogArrays._fields:
        getattr(copy, name)[:] = getattr(arrays, name)
    return copy


def enlarged(arrays: LogArrays, memory: LogArrays, size: int, bucket_size: int) -> LogArrays:
    """Grow a log in place to ``size`` positions, a power of two; its ring must not have wrapped yet.

    The buckets become those of a log of ``bucket_size`` positions; their number must not decrease.
    """
    held, (one, two, four) = len(arrays.tokens), _buckets(bucket_size)
    if size > held:
        memory.tokens[held:size] = -1
        memory.owners[held // BLOCK : size // BLOCK] = -1
    _split(memory.heads1, len(arrays.heads1), one)
    _split(memory.heads2, len(arrays.heads2), two)
    _split(memory.heads4, len(arrays.heads4), four)
    return _beginning(memory, size, one, two, four)


def _split(heads: Int64Array, held: int, count: int) -> None:
    """Grow the buckets from ``held`` to ``count``, initialising each new bucket with the chain of the one it is split from."""
    while held < count:
        half = 1 << (held.bit_length() - 1)
        end = min(count, 2 * half)
        # See ``chains.place``: new tokens use the new buckets, and older tokens stay findable from both.
        heads[held:end] = heads[held - half : end - half]
        held = end
