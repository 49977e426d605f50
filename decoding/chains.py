"""Chains of n-gram occurrences in a ring of tokens: how they are written, read and thinned out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from decoding.jit import compiled
from decoding.tree import Int32Array

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

BLOCK = 64  # tokens; a block belongs to one text
MOVED = -2  # a token t that moved to another block stands as MOVED - t: it follows, but is not found
MAX_MATCH = 32  # agreement is not measured beyond so many tokens


class LogArrays(NamedTuple):
    """The arrays of a log; ``size`` is a power of two and position p stands at ``p & (size - 1)``."""

    tokens: Int32Array  # [size], -1 where nothing stands, below for a token that moved
    back: Int32Array  # [3, size] distance to the previous n-gram of the same bucket, 0 for none
    heads1: Int64Array  # [buckets] the latest position of each bucket of 1-grams, -1 for none
    heads2: Int64Array
    heads4: Int64Array
    counts: UInt8Array  # [size] how often the 4-gram that ends here was seen, at its latest occurrence; 0 elsewhere
    owners: Int64Array  # [size / BLOCK] number of the text in each block


@compiled
def bucket(tokens: Int32Array, end: int, order: int, mask: int, buckets: int) -> int:
    """The bucket of the ``order`` tokens that end at slot ``end``; ``buckets`` is a power of two."""
    key = 0
    for back in range(order):
        key = key * 1000003 + int(tokens[(end - back) & mask]) + 1
        key = (key ^ (key >> 23)) & 0xFFFFFFFFFF
    return (key ^ (key >> 17)) & (buckets - 1)


@compiled
def unigram_bucket(token: int, buckets: int) -> int:
    """What ``bucket`` gives for one token."""
    key = int(token) + 1
    return (key ^ (key >> 17)) & (buckets - 1)


@compiled
def same_gram(tokens: Int32Array, a: int, b: int, order: int, mask: int) -> bool:
    """Whether the ``order`` tokens that end at two positions are the same."""
    same = True
    for back in range(order):
        same = same and tokens[(a - back) & mask] == tokens[(b - back) & mask]
    return same


@compiled
def follower(tokens: Int32Array, position: int) -> int:
    """The token at a position, -1 for none."""
    token = int(tokens[position & (len(tokens) - 1)])
    return MOVED - token if token <= MOVED else token


@compiled
def append(log: LogArrays, oldest: int, position: int, new: Int32Array, count: int) -> None:
    """Writes tokens from ``position`` on and chains the n-grams that end at each.

    The count of a 4-gram moves from the occurrence before to this one, so that only the latest carries it.

    Args:
        new: [m] tokens; they fit into the blocks that were taken.
        count: what a 4-gram seen for the first time counts.
    """
    tokens, back, counts = log.tokens, log.back, log.counts
    mask = len(tokens) - 1
    for index in range(len(new)):
        p = position + index
        tokens[p & mask] = new[index]
        known = 0  # tokens of this text up to here, as far as chains need them
        while known < 4 and tokens[(p - known) & mask] >= 0:
            known += 1
        counts[p & mask] = count
        for chain in range(3):
            order = 1 << chain
            back[chain, p & mask] = 0
            if known < order:
                continue
            heads = log.heads1 if chain == 0 else (log.heads2 if chain == 1 else log.heads4)
            h = bucket(tokens, p & mask, order, mask, len(heads))
            before = heads[h]
            heads[h] = p
            if before >= oldest and p - before < 2147483647:
                back[chain, p & mask] = p - before
                if chain == 2 and same_gram(tokens, p, before, 4, mask):
                    counts[p & mask] = min(255, int(counts[before & mask]) + count)
                    counts[before & mask] = 0


@compiled
def match_length(tokens: Int32Array, position: int, context: Int32Array, limit: int) -> int:
    """How many tokens that end at ``position`` agree with the end of ``context``."""
    mask, n = len(tokens) - 1, len(context)
    length = 0
    while length < limit and length < n and tokens[(position - length) & mask] == context[n - 1 - length]:
        length += 1
    return length


@compiled
def gather(
    log: LogArrays, oldest: int, after: int, owner: int, context: Int32Array, caps: Int64Array, found: int, positions: Int64Array,
    matches: Int32Array,
) -> int:  # fmt: skip
    """Collects occurrences of the end of ``context`` that a token follows, those of long n-grams first, the latest first.

    Args:
        oldest: positions before it are gone.
        after: positions before it are passed over.
        owner: the blocks of this text are passed over; -1 for none.
        context: [c] int32, the last one is the root. -1 in it matches nothing.
        caps: [3] the most occurrences to take for the 1-, 2- and 4-grams. Twice as many are looked at.
        found: entries of ``positions`` that are taken already.
        positions: [m] out: where the root occurs.
        matches: [m] out: how many tokens agree there, up to ``MAX_MATCH``.

    Returns:
        Entries that are taken now.
    """
    tokens, back, owners = log.tokens, log.back, log.owners
    mask, n = len(tokens) - 1, len(context)
    query = np.empty(4, np.int32)
    for chain in range(2, -1, -1):
        order = 1 << chain
        if n < order or caps[chain] == 0:
            continue
        for offset in range(order):
            query[order - 1 - offset] = context[n - 1 - offset]
        heads = log.heads1 if chain == 0 else (log.heads2 if chain == 1 else log.heads4)
        p = heads[bucket(query, order - 1, order, 3, len(heads))]
        taken = looked = 0
        while p >= oldest and p >= after and taken < caps[chain] and looked < 2 * caps[chain] and found < len(positions):
            looked += 1
            if tokens[(p + 1) & mask] != -1 and tokens[p & mask] == context[n - 1] and owners[(p & mask) // BLOCK] != owner:
                length = match_length(tokens, p, context, MAX_MATCH)
                if length >= order and (chain == 2 or length < 2 * order):
                    positions[found] = p
                    matches[found] = length
                    found += 1
                    taken += 1
            step = back[chain, p & mask]
            if step == 0:
                break
            p -= step
    return found


@compiled
def survivors(tokens: Int32Array, counts: UInt8Array, oldest: int, start: int, out: Int32Array, out_counts: UInt8Array) -> int:
    """The runs of a leaving block that were seen more than once, each closed by -1, with half their count.

    Args:
        oldest: the first position that is still there.
        start: of the block.
        out: [m] their tokens; what does not fit is dropped.
        out_counts: [m] the count of the 4-gram that ends at each, 1 where it only is context.

    Returns:
        Entries of ``out`` in use.
    """
    mask = len(tokens) - 1
    used, written = 0, start - 1  # positions up to ``written`` are in ``out``
    for p in range(start, start + BLOCK):
        if counts[p & mask] < 2 or tokens[p & mask] < 0:
            continue
        first = p - 3
        if first <= written:
            first = written + 1
        elif used:
            out[used] = -1
            used += 1
        last = p + 16
        for q in range(first, last + 1):
            if used >= len(out) - 1:
                return used
            token = tokens[q & mask]
            if q < oldest or token < 0:
                if q >= p:
                    break
                continue
            out[used] = token
            carried = counts[q & mask] // 2 if q < start + BLOCK else 0
            out_counts[used] = max(1, carried)
            used += 1
            written = q
    return used
