"""Truncation of a row of scores by min-p, top-k and top-p (``decoding.sampling.sampler.warp``) in one compiled call."""

from __future__ import annotations

import math

import numpy as np

from outrider.decoding.arrays import Float32Array, Int64Array
from outrider.decoding.jit import compiled
from outrider.decoding.request import SamplingParams

MOST = 512  # most tokens that may survive
UNDECIDED = -1  # fall back to ``warp``: a close decision, too many survivors, or unusual scores
CLOSE = 1e-5  # sums of float32 probabilities in different order differ by less than a third of this, for any vocabulary size
_NEAR = 7.0  # first distance tried from the highest score: 1/1100 of the highest probability
_NEAREST = 0.2  # distance at which shrinking stops if too many tokens are near
_MARGIN = 0.01  # added to the distance within which all survivors of min-p lie
_LARGEST = 1e4  # absolute score; beyond it float32 cannot resolve the margin
_BLOCK = 128  # scores per block; single scores are read only if the maximum of the block is above the threshold


@compiled
def collect(scores: Float32Array, least: np.float32, ids: Int64Array) -> int:
    """Fill ``ids`` with the tokens scoring above ``least``, ascending; return the count, ``len(ids) + 1`` on overflow."""
    count, whole = 0, len(scores) // _BLOCK
    for block in range(whole + 1):  # the last block may be shorter
        if block < whole:
            best = scores[block * _BLOCK]
            for at in range(_BLOCK):
                score = scores[block * _BLOCK + at]
                if score > best:
                    best = score
            if best <= least:
                continue
        for at in range(block * _BLOCK, min((block + 1) * _BLOCK, len(scores))):
            if scores[at] > least:
                if count == len(ids):
                    return count + 1
                ids[count] = at
                count += 1
    return count


@compiled
def _cut(ordered: Float32Array, top: float, total: float, min_p: float, top_k: int, top_p: float, all_near: bool) -> int:
    """Return how many of the most likely tokens survive, or ``UNDECIDED``; ``ordered`` are scores, the highest first."""
    count = len(ordered)
    if min_p > 0.0:
        while math.exp(ordered[count - 1] - top) < min_p * (1.0 - CLOSE):
            count -= 1
        if math.exp(ordered[count - 1] - top) < min_p * (1.0 + CLOSE):
            return UNDECIDED
    if 0 < top_k < count:
        last = ordered[top_k - 1]
        # Ties at the edge of top-k are all kept.
        while ordered[count - 1] < last:
            count -= 1
    if top_p == 1.0:
        return count
    # If all other tokens are certain to fail min-p or top-k, top-p counts these tokens alone; otherwise ``total`` is the mass
    # of the whole vocabulary.
    if all_near:
        total = 0.0
        for at in range(count):
            total += math.exp(ordered[at] - top)
    before = 0.0  # mass of the more likely tokens
    for at in range(count):
        if abs(before / total - top_p) < CLOSE:
            return UNDECIDED
        if before / total > top_p:
            return at
        before += math.exp(ordered[at] - top)
    if all_near:
        return count
    # More of the nucleus may follow, unless its mass is reached.
    return at + 1 if before / total > top_p + CLOSE else UNDECIDED


@compiled
def fill_left(
    scores: Float32Array, top: np.float32, total: float, min_p: float, top_k: int, top_p: float, ids: Int64Array,
    left_scores: Float32Array,
) -> int:  # fmt: skip
    """Fill ``ids`` and ``left_scores`` with the result of ``surviving_tokens`` and return their number, or ``UNDECIDED``."""
    if abs(top) > _LARGEST:
        return UNDECIDED
    reach = -math.log(min_p) + _MARGIN if min_p > 0.0 else math.inf  # distance from the highest score at which min-p cuts
    distance = min(_NEAR, reach)
    count = collect(scores, np.float32(top - distance), ids)
    while count > len(ids) and distance > _NEAREST:
        distance *= 0.75
        count = collect(scores, np.float32(top - distance), ids)
    if count > len(ids):
        return UNDECIDED
    near = ids[:count].copy()
    order = np.argsort(-scores[near], kind="mergesort")  # stable: equal scores by token id
    all_near = distance >= reach or 0 < top_k <= count
    if not all_near and (min_p > 0.0 or top_k > 0):
        return UNDECIDED
    left = _cut(scores[near][order], float(top), total, min_p, top_k, top_p, all_near)
    if left < 0:
        return left
    ids[:left] = np.sort(near[order[:left]])
    left_scores[:left] = scores[ids[:left]]
    return left


def survivors(
    scores: Float32Array, top: np.float32, total: float, params: SamplingParams
) -> tuple[Int64Array, Float32Array] | None:
    """Return the surviving tokens, ascending, and their scores; None if undecided or if there are more than ``MOST``.

    ``scores`` are [vocab] numbers with ``top`` the highest; ``total`` is the sum of ``exp(score - top)``, used with top-p alone.
    """
    ids, left = np.empty(MOST, np.int64), np.empty(MOST, np.float32)
    count = fill_left(scores, top, total, params.min_p, params.top_k, params.top_p, ids, left)
    return None if count < 0 else (ids[:count], left[:count])


def compile_nucleus() -> None:
    """Compile the functions of this module before the first request."""
    survivors(np.zeros(2, np.float32), np.float32(0.0), 2.0, SamplingParams(temperature=1.0, top_k=1))
