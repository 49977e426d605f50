"""The draw of one token from one row of scores on a CPU: what ``warp`` and noise over the whole vocabulary give, for less.

Only tokens that min-p, top-k and top-p leave can be drawn, most often few, and only they need noise. No vocabulary is sorted:
where the nucleus of top-p is wide, the winner among all tokens is looked at first, and the next best while they lie outside it.
Where a decision is so close that the order of a sum's terms could turn it, nothing is decided here, and the caller takes the long
way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from decoding.philox import UInt64Array, raw_at, raw_stream
from decoding.request import SamplingParams

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating]

_CLOSE = 1e-5  # sums of float32 probabilities in different order differ by less than a third of this, whatever the vocabulary
_LEAST_MIN_P = 1e-30  # below it float32 loses digits
_FLOORS = (0.02, 1e-3)  # shares of the highest probability: tokens above one of them are few, and often all that counts
_MANY = 512  # tokens of a nucleus that are no longer sorted
_TURNS = 64  # tokens outside the nucleus that are passed over before the long way is taken


def gumbel(raw: UInt64Array) -> Float64Array:
    """Standard Gumbel noise from 64-bit random numbers, each by itself."""
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), both ends excluded
    noise: Float64Array = -np.log(-np.log(uniform))
    return noise


def draw(scores: Scores, params: SamplingParams, position: int) -> int | None:
    """The token with the highest sum of score and noise, the lowest id among equals.

    Args:
        scores: [vocab] float32 or float64: logits over the temperature.
        params: of a request that is not greedy.
        position: absolute index of the token.

    Returns:
        None where rounding could decide who is left, or where a score is not a number.
    """
    if params.min_p == 0.0 and params.top_k == 0 and params.top_p == 1.0:
        return int(_sums(scores, None, params.seed, position).argmax())
    top = scores.max()
    if not np.isfinite(top):
        return None
    weights: Scores = np.exp(scores - top)
    ids: Int64Array | None = None  # those that are left, ascending; None: all
    if params.min_p > 0.0:
        ids = np.flatnonzero(weights > params.min_p * (1 - _CLOSE))
        if params.min_p < _LEAST_MIN_P or weights[ids].min() < params.min_p * (1 + _CLOSE):
            return None
    if 0 < params.top_k < (len(scores) if ids is None else len(ids)):
        ids = _most_likely(scores, weights, ids, params.top_k)
    if ids is not None:
        scores, weights = scores[ids], weights[ids]
    if params.top_p < 1.0:
        found = _draw_nucleus(scores, weights, ids, params, position)
    else:
        found = int(_sums(scores, ids, params.seed, position).argmax())
    return found if found is None or ids is None else int(ids[found])


def _sums(scores: Scores, ids: Int64Array | None, seed: int, position: int) -> Float64Array:
    """[n] scores and the noise of their tokens, which are ``ids``, or all."""
    raw = raw_stream(seed, position, len(scores)) if ids is None else raw_at(seed, position, ids)
    sums: Float64Array = scores.astype(np.float64) + gumbel(raw)
    return sums


def _most_likely(scores: Scores, weights: Scores, ids: Int64Array | None, count: int) -> Int64Array:
    """[m] ascending: of ``ids`` so many with the highest scores, and all that equal the last of them."""
    near = np.arange(len(scores)) if ids is None else ids
    for floor in _FLOORS:
        above = np.flatnonzero(weights > floor) if ids is None else ids[weights[ids] > floor]
        if len(above) >= count:
            near = above
            break
    values = scores[near]
    return near[values >= np.partition(values, len(near) - count)[len(near) - count]]


def _draw_nucleus(scores: Scores, weights: Scores, ids: Int64Array | None, params: SamplingParams, position: int) -> int | None:
    """The place of the winner among the most likely, which together have the mass ``top_p``; None where it is close."""
    top_p, total = params.top_p, float(weights.sum())
    nucleus = _nucleus(scores, weights, top_p, total)
    if nucleus is not None:
        tokens = nucleus if ids is None else ids[nucleus]
        return int(nucleus[_sums(scores[nucleus], tokens, params.seed, position).argmax()])
    sums = _sums(scores, ids, params.seed, position)
    for _ in range(_TURNS):
        best = int(sums.argmax())
        score = scores[best]
        before = float(weights[scores > score].sum() + weights[:best][scores[:best] == score].sum()) / total
        if abs(before - top_p) < _CLOSE:
            return None
        if before < top_p:
            return best
        sums[best] = -np.inf
    return None


def _nucleus(scores: Scores, weights: Scores, top_p: float, total: float) -> Int64Array | None:
    """[m] ascending: the places of the most likely, equals by place, until their mass reaches ``top_p``.

    None where they are many, or where it is close.
    """
    for floor in _FLOORS:
        near = np.flatnonzero(weights > floor)
        if len(near) > _MANY:
            return None
        if weights[near].sum() > (top_p + 2 * _CLOSE) * total:
            order = near[np.argsort(-scores[near], kind="stable")]
            shares = weights[order].astype(np.float64) / total
            before = np.cumsum(shares) - shares  # the mass before a token
            count = int(np.searchsorted(before, top_p))
            if before[count - 1] > top_p - _CLOSE or (count < len(before) and before[count] < top_p + _CLOSE):
                return None
            return np.sort(order[:count])
    return None
