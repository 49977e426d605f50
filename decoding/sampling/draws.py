"""Draw of a token from a row of scores on a CPU: the result of ``warp`` and noise over the whole vocabulary, for less.

Only tokens that min-p, top-k and top-p leave can be drawn, most often few, and only they need noise. Where the nucleus is wide,
the winner among all tokens is looked at first, and the next best while they lie outside it. Where a decision is so close that the
order of a sum's terms could turn it, nothing is decided here, and the caller takes the long way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from decoding.jit import NATIVE
from decoding.request import SamplingParams
from decoding.sampling.nucleus import CLOSE, WIDE, survivors
from decoding.sampling.philox import UInt64Array, raw_stream

Float64Array = npt.NDArray[np.float64]
Scores = npt.NDArray[np.floating]

_TURNS = 64  # tokens outside the nucleus that are passed over before the long way is taken


def gumbel(raw: UInt64Array) -> Float64Array:
    """Standard Gumbel noise from 64-bit random numbers, each by itself."""
    noise: Float64Array = (raw >> np.uint64(11)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-53  # uniform in (0, 1), both ends excluded
    for _ in range(2):  # in place: of a large vocabulary, new memory costs more than the logarithms
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
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
        return int(_sums(scores, params.seed, position).argmax())
    top = scores.max()
    if not NATIVE or scores.dtype != np.float32 or not np.isfinite(top):
        return None
    weights = np.exp(scores - top) if params.top_p < 1.0 else None
    total = 0.0 if weights is None else float(weights.sum())
    found = survivors(scores, top, total, params, position)
    if not isinstance(found, int):
        ids, left, raw = found
        sums = gumbel(raw)
        sums += left
        return int(ids[sums.argmax()])
    if found != WIDE or weights is None or params.min_p > 0.0 or params.top_k > 0:
        return None
    return _draw_wide(scores, weights, total, params, position)


def _sums(scores: Scores, seed: int, position: int) -> Float64Array:
    """[vocab] scores and noise."""
    sums = gumbel(raw_stream(seed, position, len(scores)))
    sums += scores
    return sums


def _draw_wide(scores: Scores, weights: Scores, total: float, params: SamplingParams, position: int) -> int | None:
    """The winner among the most likely, which together have the mass ``top_p``; None where it is close."""
    sums = _sums(scores, params.seed, position)
    for _ in range(_TURNS):
        best = int(sums.argmax())
        score = scores[best]
        before = float(weights[scores > score].sum() + weights[:best][scores[:best] == score].sum()) / total
        if abs(before - params.top_p) < CLOSE:
            return None
        if before < params.top_p:
            return best
        sums[best] = -np.inf
    return None
