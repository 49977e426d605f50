"""Chains of n-gram occurrences in a ring of tokens: how they are written and read."""

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
COPIED = -(2**31)  # in ``back[:, 0]`` of a token that is only there for matching backwards: it is in no chain
WAYS = 4  # interleaved chains of a bucket of 2- or 4-grams: a walk waits for memory once where it would wait four times
MAX_MATCH = 32  # agreement is not measured beyond so many tokens


class LogArrays(NamedTuple):
    """The arrays of a log; ``size`` is a power of two and position p stands at ``p & (size - 1)``."""

    tokens: Int32Array  # [size], -1 where nothing stands, below for a token that moved
    back: Int32Array  # [size, 3] distance to the n-gram before in the same bucket, of 2- and 4-grams the WAYS-th before; 0: none
    heads1: Int64Array  # [buckets] the latest position of each bucket of 1-grams, -1 for none; of any number of buckets
    heads2: Int64Array  # [buckets, WAYS] the latest positions, the latest first
    heads4: Int64Array
    counts: UInt8Array  # [size] how often the 4-gram that ends here was seen, at its latest occurrence; 0 elsewhere
    owners: Int64Array  # [size / BLOCK] number of the text in each block


# ``LogArrays`` as a plain tuple, which is passed to compiled code in half the time.
PlainArrays = tuple[Int32Array, Int32Array, Int64Array, Int64Array, Int64Array, UInt8Array, Int64Array]
# A log as it is read: its arrays, its first position that is still there, -1 where there is none, and the number of a text in it
# that is passed over, -1 for none.
Log = tuple[PlainArrays, int, int]
LogTokens = tuple[Int32Array, Int32Array, Int32Array]  # of three logs that are read together


@compiled
def place(key: int, buckets: int) -> int:
    """The bucket of a key. Of 2**n + m buckets the first m are split: a key of theirs has one bit more that counts.

    Example: of 4 buckets, the keys 4 and 6 have the buckets 0 and 2. Of 5 buckets, 4 and 2.
    """
    mask = buckets - 1
    mask |= mask >> 1
    mask |= mask >> 2
    mask |= mask >> 4
    mask |= mask >> 8
    mask |= mask >> 16
    at = key & mask
    return at if at < buckets else at & (mask >> 1)


@compiled
def bucket(tokens: Int32Array, end: int, order: int, mask: int, buckets: int) -> int:
    """The bucket of the ``order`` tokens that end at slot ``end``."""
    key = 0
    for back in range(order):
        key = key * 1000003 + int(tokens[(end - back) & mask]) + 1
        key = (key ^ (key >> 23)) & 0xFFFFFFFFFF
    return place(key ^ (key >> 17), buckets)


@compiled
def unigram_bucket(token: int, buckets: int) -> int:
    """What ``bucket`` gives for one token."""
    key = int(token) + 1
    return place(key ^ (key >> 17), buckets)


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
def append(log: PlainArrays, oldest: int, position: int, new: Int32Array, count: int) -> None:
    """Writes tokens from ``position`` on and chains the n-grams that end at each.

    The count of a 4-gram moves from the occurrence before to this one, so that only the latest carries it.

    Args:
        log: see ``LogArrays``.
        new: [m] tokens; they fit into the blocks that were taken.
        count: what a 4-gram seen for the first time counts.
    """
    tokens, back, heads1, heads2, heads4, counts, _ = log
    mask = len(tokens) - 1
    for index in range(len(new)):
        p = position + index
        tokens[p & mask] = new[index]
        known = 0  # tokens of this text up to here, as far as chains need them
        while known < 4 and tokens[(p - known) & mask] >= 0:
            known += 1
        counts[p & mask] = count
        back[p & mask, 0] = back[p & mask, 1] = back[p & mask, 2] = 0
        if known == 0:
            continue
        h = unigram_bucket(tokens[p & mask], len(heads1))
        link(back, 0, p, heads1[h], oldest, mask)
        heads1[h] = p
        if known >= 2:
            push_head(back, 1, p, heads2, bucket(tokens, p & mask, 2, mask, len(heads2)), oldest, mask)
        if known >= 4:
            before = push_head(back, 2, p, heads4, bucket(tokens, p & mask, 4, mask, len(heads4)), oldest, mask)
            if before >= oldest and same_gram(tokens, p, before, 4, mask):
                counts[p & mask] = min(255, int(counts[before & mask]) + count)
                counts[before & mask] = 0


@compiled
def link(back: Int32Array, chain: int, position: int, before: int, oldest: int, mask: int) -> None:
    """Chains a position to one before, where that is still there."""
    if before >= oldest and position - before < 2147483647:
        back[position & mask, chain] = position - before


@compiled
def push_head(back: Int32Array, chain: int, position: int, heads: Int64Array, bucket_at: int, oldest: int, mask: int) -> int:
    """Makes a position the latest of a bucket; returns the one that was the latest."""
    latest = int(heads[bucket_at, 0])
    link(back, chain, position, heads[bucket_at, WAYS - 1], oldest, mask)
    for way in range(WAYS - 1, 0, -1):
        heads[bucket_at, way] = heads[bucket_at, way - 1]
    heads[bucket_at, 0] = position
    return latest


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
    log: LogArrays, oldest: int, owner: int, context: Int32Array, caps: Int64Array, found: int, positions: Int64Array,
    matches: Int32Array,
) -> int:  # fmt: skip
    """Collects occurrences of the end of ``context`` that a token follows, those of long n-grams first, the latest first.

    Args:
        oldest: positions before it are gone.
        owner: the blocks of this text are passed over; -1 for none.
        context: [c] int32, the last one is the root. -1 in it matches nothing.
        caps: [3] the most occurrences to take for the 1-, 2- and 4-grams. Twice as many are looked at.
        found: entries of ``positions`` that are taken already.
        positions: [m] out: where the root occurs.
        matches: [m] out: how many tokens agree there, up to ``MAX_MATCH``.

    Returns:
        Entries that are taken now.
    """
    for chain in range(2, -1, -1):
        found = gather_chain(log, chain, oldest, owner, context, caps[chain], MAX_MATCH, found, positions, matches)
    return found


@compiled
def gather_chain(
    log: LogArrays, chain: int, oldest: int, owner: int, context: Int32Array, cap: int, limit: int, found: int,
    positions: Int64Array, matches: Int32Array,
) -> int:  # fmt: skip
    """The occurrences of one of ``gather``'s n-grams, without those that the next longer n-gram finds.

    Args:
        chain: 0, 1, 2 for the 1-, 2- and 4-grams.
        cap: the most occurrences to take; twice as many are looked at.
        limit: agreement is measured up to so many tokens, at least 4.
    """
    tokens, back, owners = log.tokens, log.back, log.owners
    mask, n, order = len(tokens) - 1, len(context), 1 << chain
    if n < order:
        return found
    if chain == 0:
        p = log.heads1[unigram_bucket(context[n - 1], len(log.heads1))]
        p1 = p2 = p3 = -1
    else:
        heads = log.heads2 if chain == 1 else log.heads4
        h = bucket(context, n - 1, order, -1, len(heads))
        p, p1, p2, p3 = heads[h, 0], heads[h, 1], heads[h, 2], heads[h, 3]
    looked, full = 0, min(found + cap, len(positions))
    while found < full and looked < 2 * cap:
        # Collected first, without a branch that waits for a token: so the reads of several occurrences overlap.
        end = found
        while end < full and p >= oldest:
            positions[end], matches[end] = p, tokens[(p + 1) & mask]
            end += 1
            step = back[p & mask, chain]
            before = p - step if step != 0 else -1
            if chain == 0:
                p = before
            else:
                p, p1, p2, p3 = p1, p2, p3, before
        if end == found:
            break
        looked += end - found
        for at in range(found, end):
            q = positions[at]
            if matches[at] == -1 or tokens[q & mask] != context[n - 1]:
                continue
            if owner != -1 and owners[(q & mask) // BLOCK] == owner:
                continue
            length = match_length(tokens, q, context, limit)
            if length >= order and (chain == 2 or length < 2 * order):
                positions[found], matches[found] = q, length
                found += 1
    return found
