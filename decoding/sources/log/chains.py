"""Chains of n-gram occurrences in a ring of tokens: writing and reading."""

from __future__ import annotations

from typing import NamedTuple

from outrider.decoding.arrays import Int32Array, Int64Array, UInt8Array
from outrider.decoding.jit import compiled

BLOCK = 64  # tokens; a block belongs to one text
MOVED = -2  # a token t moved to another block is stored as MOVED - t: readable as a follower, not searchable
COPIED = -(2**31)  # value of ``back[:, 0]`` for a token that only serves backward matching: it is in no chain
WAYS = 4  # interleaved chains per bucket of 2- or 4-grams, so that a walk overlaps four memory reads
MAX_MATCH = 32  # longest agreement that is measured


class LogArrays(NamedTuple):
    """Arrays of a log; ``size`` is a power of two and position p is stored at ``p & (size - 1)``."""

    tokens: Int32Array  # [size], -1 if empty, lower for a moved token
    back: Int32Array  # [size, 3] distance to the previous 1-gram, or WAYS-th previous 2-/4-gram, of the same bucket; 0: none
    heads1: Int64Array  # [buckets] latest position of each bucket of 1-grams, -1 for none; any number of buckets
    heads2: Int64Array  # [buckets, WAYS] latest positions, the latest first
    heads4: Int64Array
    counts: UInt8Array  # [size] count of the 4-gram that ends here, at its latest occurrence; 0 elsewhere
    owners: Int64Array  # [size / BLOCK] owner number of the text in each block


# ``LogArrays`` as a plain tuple, because passing it to compiled code takes half the time.
PlainArrays = tuple[Int32Array, Int32Array, Int64Array, Int64Array, Int64Array, UInt8Array, Int64Array]
# A log for reading: its arrays, its oldest position (-1 if it is empty), and the owner number of a text to skip (-1 for none).
Log = tuple[PlainArrays, int, int]
LogTokens = tuple[Int32Array, Int32Array, Int32Array]  # tokens of three logs that are read together


@compiled
def place(key: int, buckets: int) -> int:
    """Return the bucket of a key under linear hashing: of 2**n + m buckets the first m are split by one more bit of the key."""
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
    """Return the bucket of the ``order`` tokens that end at slot ``end``."""
    key = 0
    for back in range(order):
        key = key * 1000003 + int(tokens[(end - back) & mask]) + 1
        key = (key ^ (key >> 23)) & 0xFFFFFFFFFF
    return place(key ^ (key >> 17), buckets)


@compiled
def unigram_bucket(token: int, buckets: int) -> int:
    """Return ``bucket`` for one token."""
    key = int(token) + 1
    return place(key ^ (key >> 17), buckets)


@compiled
def same_gram(tokens: Int32Array, a: int, b: int, order: int, mask: int) -> bool:
    """Return whether the ``order`` tokens that end at two positions are equal."""
    same = True
    for back in range(order):
        same = same and tokens[(a - back) & mask] == tokens[(b - back) & mask]
    return same


@compiled
def follower(tokens: Int32Array, position: int) -> int:
    """Return the token at a position; -1 if there is none."""
    token = int(tokens[position & (len(tokens) - 1)])
    return MOVED - token if token <= MOVED else token


@compiled
def append(log: PlainArrays, oldest: int, position: int, new: Int32Array, count: int) -> None:
    """Write [m] tokens from ``position`` on, within allocated blocks, and chain their n-grams; new 4-grams have ``count``."""
    tokens, back, heads1, heads2, heads4, counts, _ = log
    mask = len(tokens) - 1
    for index in range(len(new)):
        p = position + index
        tokens[p & mask] = new[index]
        known = 0  # contiguous tokens of this text up to here, at most 4
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
                # Only the latest occurrence of a 4-gram carries its count.
                counts[p & mask] = min(255, int(counts[before & mask]) + count)
                counts[before & mask] = 0


@compiled
def link(back: Int32Array, chain: int, position: int, before: int, oldest: int, mask: int) -> None:
    """Chain a position to an earlier one that is still in the log."""
    # Distances are stored in 32 bits.
    if before >= oldest and position - before < 2147483647:
        back[position & mask, chain] = position - before


@compiled
def push_head(back: Int32Array, chain: int, position: int, heads: Int64Array, bucket_at: int, oldest: int, mask: int) -> int:
    """Make a position the latest of a bucket and return the previous latest."""
    latest = int(heads[bucket_at, 0])
    link(back, chain, position, heads[bucket_at, WAYS - 1], oldest, mask)
    for way in range(WAYS - 1, 0, -1):
        heads[bucket_at, way] = heads[bucket_at, way - 1]
    heads[bucket_at, 0] = position
    return latest


@compiled
def match_length(tokens: Int32Array, position: int, context: Int32Array, limit: int) -> int:
    """Return how many tokens that end at ``position`` agree with the end of ``context``."""
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
    """Collect occurrences of the end of ``context`` that a token follows, those of long n-grams first, the latest first.

    Args:
        oldest: first position still in the log.
        owner: text whose blocks are skipped; -1 for none.
        context: [c] int32, the last token is the root. -1 matches nothing.
        caps: [3] maximum occurrences of the 1-, 2- and 4-grams. Up to twice as many are examined.
        found: used entries of ``positions``; the result is their new number.
        positions, matches: [m] out: positions of the root token, and numbers of agreeing tokens, up to ``MAX_MATCH``.
    """
    for chain in range(2, -1, -1):
        found = gather_chain(log, chain, oldest, owner, context, caps[chain], MAX_MATCH, found, positions, matches)
    return found


@compiled
def gather_chain(
    log: LogArrays, chain: int, oldest: int, owner: int, context: Int32Array, cap: int, limit: int, found: int,
    positions: Int64Array, matches: Int32Array,
) -> int:  # fmt: skip
    """Collect up to ``cap`` occurrences of one n-gram that agree in up to ``limit`` (at least 4) tokens, for ``gather``."""
    tokens, back, owners = log.tokens, log.back, log.owners
    # Chains 0, 1 and 2 are those of 1-, 2- and 4-grams.
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
        # Collect first, without a branch on a loaded token, so that the reads of several occurrences overlap.
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
            # The chain of the next longer n-gram has found the longer agreements.
            if length >= order and (chain == 2 or length < 2 * order):
                positions[found], matches[found] = q, length
                found += 1
    return found
