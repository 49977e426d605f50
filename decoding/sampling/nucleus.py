"""Which tokens min-p, top-k and top-p leave of a row of scores, found in one compiled call.

No vocabulary is sorted: tokens near the most likely one are few and, most often, all that can be left.
``decoding.sampling.sampler.warp`` says what the rules are. Sums of probabilities in another order round in another way, so a
decision that rounding could turn is not made here.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from decoding.jit import compiled
from decoding.request import SamplingParams

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

MOST = 512  # tokens that may be left
UNDECIDED = -1  # the long way is needed: it is close, too many tokens may be left, or the scores are unusual
CLOSE = 1e-5  # sums of float32 probabilities in different order differ by less than a third of this, whatever the vocabulary
_NEAR = 7.0  # distance from the highest score: a probability of 1/1100 of the highest one
_NEAREST = 0.2  # no shorter distance is tried where too many are near
_MARGIN = 0.01  # of a distance that has to hold all that min-p leaves
_LARGEST = 1e4  # score: beyond it float32 cannot tell the margin
_BLOCK = 128  # scores whose highest is found before any is looked at alone


@compiled
def collect(scores: Float32Array, least: np.float32, ids: Int64Array) -> int:
    """Fills ``ids``, ascending, with the tokens whose score is above ``least``; how many, one more than fit where they do not."""
    count, whole = 0, len(scores) // _BLOCK
    for block in range(whole + 1):  # the last one is what is left
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
    """How many of the most likely tokens, the most likely first, are left; or ``UNDECIDED``.

    ``all_near``: tokens that are not among them are certain to fall to min-p or top-k. Otherwise there is top-p alone, and
    ``total`` is the mass of all tokens.
    """
    count = len(ordered)
    if min_p > 0.0:
        while math.exp(ordered[count - 1] - top) < min_p * (1.0 - CLOSE):
            count -= 1
        if math.exp(ordered[count - 1] - top) < min_p * (1.0 + CLOSE):
            return UNDECIDED
    if 0 < top_k < count:
        last = ordered[top_k - 1]
        while ordered[count - 1] < last:
            count -= 1
    if top_p == 1.0:
        return count
    if all_near:
        total = 0.0
        for at in range(count):
            total += math.exp(ordered[at] - top)
    before = 0.0  # the mass of the tokens that are more likely
    for at in range(count):
        if abs(before / total - top_p) < CLOSE:
            return UNDECIDED
        if before / total > top_p:
            return at
        before += math.exp(ordered[at] - top)
    if all_near:
        return count
    return at + 1 if before / total > top_p + CLOSE else UNDECIDED


@compiled
def fill_left(
    scores: Float32Array, top: np.float32, total: float, min_p: float, top_k: int, top_p: float, ids: Int64Array,
    left_scores: Float32Array,
) -> int:  # fmt: skip
    """Fills the last two arrays with what ``survivors`` returns; how many, or ``UNDECIDED``."""
    if abs(top) > _LARGEST:
        return UNDECIDED
    reach = -math.log(min_p) + _MARGIN if min_p > 0.0 else math.inf  # of min-p, from the highest score
    distance = min(_NEAR, reach)
    count = collect(scores, np.float32(top - distance), ids)
    while count > len(ids) and distance > _NEAREST:
        distance *= 0.75
        count = collect(scores, np.float32(top - distance), ids)
    if count > len(ids):
        return UNDECIDED
    near = ids[:count].copy()
    order = np.argsort(-scores[near], kind="mergesort")  # stable: equals by id
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
    """The tokens that are left, ascending, at most ``MOST``, with their scores; None where they cannot be told.

    Args:
        scores: [vocab], all numbers.
        top: the highest of them.
        total: sum of ``exp(score - top)``; used with top-p alone.
        params: with a truncation.
    """
    ids, left = np.empty(MOST, np.int64), np.empty(MOST, np.float32)
    count = fill_left(scores, top, total, params.min_p, params.top_k, params.top_p, ids, left)
    return None if count < 0 else (ids[:count], left[:count])


def compile_nucleus() -> None:
    """Calls what is compiled once, so that no request waits for the compiler."""
    survivors(np.zeros(2, np.float32), np.float32(0.0), 2.0, SamplingParams(temperature=1.0, top_k=1))
