"""The arrays of a token log: made empty, and made larger.

A small log is copied where it doubles. From ``LARGE`` positions on it has memory for all that it may hold, of which the system
gives what is written to: it grows where it lies, and no step copies all of it. Its buckets are as many as its tokens ask for
(linear hashing): with each block some more are split off.
"""

from __future__ import annotations

import numpy as np

from decoding.sources.log.chains import BLOCK, WAYS, Int64Array, LogArrays

LARGE = 1 << 16  # positions; up to here a copy takes a millisecond or two


def _buckets(size: int) -> tuple[int, int, int]:
    """Buckets of 1-, 2- and 4-grams of a log of ``size`` positions."""
    return min(size, 2**17), max(64, size // 4), max(64, size // 2)


def memory_for(size: int) -> LogArrays:
    """Memory for so many positions, a power of two, without a log in it."""
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
    """The arrays of a log of ``size`` positions, with so many buckets, at the beginning of some memory."""
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
    """An empty log of ``size`` positions, a power of two, at the beginning of some memory."""
    arrays = _beginning(memory, size, *_buckets(size))
    arrays.tokens.fill(-1)
    arrays.owners.fill(-1)
    for heads in arrays[2:5]:
        heads.fill(-1)
    return arrays


def copied(arrays: LogArrays, memory: LogArrays) -> LogArrays:
    """A log at the beginning of larger memory."""
    copy = _beginning(memory, len(arrays.tokens), len(arrays.heads1), len(arrays.heads2), len(arrays.heads4))
    for name in LogArrays._fields:
        getattr(copy, name)[:] = getattr(arrays, name)
    return copy


def enlarged(arrays: LogArrays, memory: LogArrays, size: int, bucket_size: int) -> LogArrays:
    """A log that grows to ``size`` positions within its memory, none of which has been taken twice yet.

    Args:
        arrays: as they are, at the beginning of the memory.
        memory: of at least ``size`` positions.
        size: a power of two.
        bucket_size: there are to be as many buckets as a log of so many positions has, at least as many as there are.
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
    """Makes ``count`` buckets of ``held``. A new one begins with the chains of the one of which it was a part (see
    ``decoding.sources.log.chains.place``): what comes is chained by the new buckets, what was there stays as findable as
    it was."""
    while held < count:
        half = 1 << (held.bit_length() - 1)
        end = min(count, 2 * half)
        heads[held:end] = heads[held - half : end - half]
        held = end
