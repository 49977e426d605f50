"""Eviction: the choice of texts to drop when a tenant exceeds its quota."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.decoding.arrays import Int32Array

Float64Array = npt.NDArray[np.float64]
GRAM = 4  # tokens; about the length that drafters look up
MAX_GRAMS = 1 << 22  # n-grams examined: bounds the time, because the service has to renew its lease
_TEXTS = 1 << 10  # hashed at a time, so that the arrays fit the CPU cache
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, with well-mixed bits: base of the polynomial hash modulo 2**64
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def worths(texts: Sequence[Int32Array], ages_s: Float64Array, half_life_s: float) -> Float64Array:
    """Return the [n] values of texts for their tenant's drafts: n-gram frequency with age decay.

    The value of a text is the mean over its 4-grams (a shorter text is one n-gram) of
    ``2 ** (-age / half_life) * (number of texts that contain the 4-gram if this is the latest of them, else 1)``.

    Example, with a half-life of 7 days: A ``1 2 3 4 5`` of 14 days ago, B ``1 2 3 4 6`` of 7 days ago and C ``7 8 9 10`` of
    today. ``1 2 3 4`` is in two texts, of which B is the latest. A is worth 0.25 * (1 + 1) / 2 = 0.25, B 0.5 * (2 + 1) / 2 = 0.75
    and C 1 * 1 = 1: first A goes, though it holds what is frequent, because B holds it too.

    Source: node pruning of Lookahead (arXiv 2312.12728, section 4.3.1), which removes the least frequent trie nodes.

    Args:
        texts: their tokens, least recently grown first.
        ages_s: [n] seconds since each text grew.
        half_life_s: age at which a text counts half.
    """
    # Differences from the source: whole texts are evicted, because texts are stored and deletable as units; frequency counts
    # texts instead of occurrences, so that a repetitive text is not frequent; frequencies decay with age instead of being halved
    # at each pruning; and a copy does not keep its copies alive.
    if not len(texts):
        return np.zeros(0)
    bits = np.uint64(max(1, len(texts).bit_length()))
    grams = _placed_grams(texts, bits)
    place = (np.uint64(1) << bits) - np.uint64(1)
    num_grams = np.bincount((grams & place).astype(np.int64), minlength=len(texts))
    grams.sort()  # equal n-grams are adjacent, the latest text last
    changed = np.empty(len(grams), np.bool_)
    changed[:1] = True
    np.not_equal(grams[1:], grams[:-1], out=changed[1:])
    firsts = np.flatnonzero(changed)  # start of each (n-gram, text) pair
    np.not_equal(grams[1:] >> bits, grams[:-1] >> bits, out=changed[1:])
    starts = np.flatnonzero(changed)  # start of each n-gram
    ends = np.append(starts[1:], len(grams))
    holders = np.diff(np.append(np.searchsorted(firsts, starts), len(firsts)))  # number of texts that contain the n-gram
    # Of several texts with the same n-gram, the latest one keeps the count: old copies go before it.
    latest = firsts[np.cumsum(holders) - 1]
    extra = np.bincount((grams[latest] & place).astype(np.int64), (holders - 1) * (ends - latest), minlength=len(texts))
    # Integer sums before the division: equal inputs give equal values everywhere.
    frequency = 1.0 + extra / np.maximum(num_grams, 1)
    decayed: Float64Array = frequency * np.exp2(-np.maximum(ages_s, 0.0) / half_life_s)
    return decayed


def _placed_grams(texts: Sequence[Int32Array], bits: np.uint64) -> npt.NDArray[np.uint64]:
    """Return the sampled n-grams: hashes whose lowest ``bits`` bits hold the index of the text."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    counts = _num_grams(lengths)
    # A sample chosen by hash is the same in all texts: counts of sampled n-grams are exact. N-grams are compared by hash, too:
    # the chance of a collision is about tokens**2 * n / 2**65, 0.04 % for a million tokens in 10,000 texts.
    share = int(counts.sum()) // MAX_GRAMS + 1
    parts = []
    for first in range(0, len(texts), _TEXTS):
        chunk = slice(first, first + _TEXTS)
        grams = _hashes(np.concatenate(texts[chunk]), lengths[chunk])
        ranks = np.repeat(np.arange(first, first + len(lengths[chunk]), dtype=np.uint64), counts[chunk])
        if share > 1:
            looked_at = grams < np.uint64(2**64 // share)
            grams, ranks = grams[looked_at] * np.uint64(share), ranks[looked_at]
        grams >>= bits
        grams <<= bits
        grams |= ranks
        parts.append(grams)
    return np.concatenate(parts)


def _num_grams(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the [n] n-gram counts: 1 for a text shorter than ``GRAM``, 0 for an empty one."""
    return np.maximum(lengths - (GRAM - 1), np.minimum(lengths, 1))


def _hashes(tokens: Int32Array, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the [sum of _num_grams] hashes of all n-grams, text by text. Texts shorter than ``GRAM`` are padded."""
    codes = np.zeros(len(tokens) + GRAM, np.uint64)
    codes[: len(tokens)] = tokens
    codes[: len(tokens)] += np.uint64(1)  # 0 is padding
    hashes = np.zeros(len(tokens), np.uint64)
    for at in range(GRAM):
        hashes *= _BASE
        hashes += codes[at : at + len(tokens)]
    ends = np.cumsum(lengths)
    short = np.flatnonzero((lengths > 0) & (lengths < GRAM))
    begins = ends[short] - lengths[short]
    of_short = np.zeros(len(short), np.uint64)
    for at in range(GRAM):
        of_short = of_short * _BASE + np.where(at < lengths[short], codes[begins + at], np.uint64(0))
    hashes[begins] = of_short
    whole = np.ones(len(tokens), np.bool_)  # whether the n-gram that starts here ends in the same text
    for at in range(1, GRAM):
        whole[ends[lengths > at] - at] = False  # except for the first n-gram of a text
    hashes = hashes[whole]
    for shift, factor in ((np.uint64(32), _MIX), (np.uint64(29), _BASE)):
        hashes ^= hashes >> shift
        hashes *= factor
    return hashes
