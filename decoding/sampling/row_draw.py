"""Draw of a token from a row of logits on a CPU, with warps and noise in one compiled call.

The result equals that of ``warp`` and noise over the whole vocabulary, but only surviving tokens need noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from outrider.decoding.arrays import BoolArray, Float32Array, Int64Array, UInt64Array
from outrider.decoding.jit import NATIVE, compiled
from outrider.decoding.request import SamplingParams
from outrider.decoding.sampling.nucleus import CLOSE, MOST, UNDECIDED, collect, fill_left
from outrider.decoding.sampling.philox import fill_raw, fill_stream
from outrider.decoding.sampling.ranking import pointer

if NATIVE:
    from numba import carray

LANES = 64  # numbers per iteration, for vectorisation
_FAR = 200.0  # distance below the highest score at which a token has no weight
_LEAST_LOG2 = np.float32(-100.0)  # lower bound of log2(weight / highest weight)
_LOG2_E, _HALF = np.float32(1.0 / math.log(2.0)), np.float32(0.5)
_TERMS = tuple(np.float32(math.log(2.0) ** power / math.factorial(power)) for power in range(7))  # Taylor series of 2 ** x
_SIGN, _INFINITY = np.int32(0x7FFFFFFF), 0x7F800000  # float32 bits: all but the sign; infinity
_DISTANCES = 1.0, 2.5, 4.5, 7.0  # from the highest score, tried in turn to find the nucleus
_TURNS = 64  # tokens outside the nucleus to pass over before the slow path is taken
_SLACK = 1.0 + 1e-4  # factor on a bound, for the error of weights and for ties
_EVEN = 1e-9  # sums of score and noise that differ by less may swap if a logarithm rounds differently
# By dtype: zero in the integer type of the same size, and the left shift that makes float32 bits of it.
_KINDS: dict[torch.dtype, tuple[Any, int]] = {torch.float32: (np.int32(0), 0), torch.bfloat16: (np.int16(0), 16)}


@compiled
def _fill_scores(address: int, zero: np.signedinteger, shift: int, temperature: np.float32, scores: Float32Array) -> None:
    """Fill [vocab] ``scores`` with the logits as float32, divided by the temperature."""
    numbers = carray(pointer(address, zero), len(scores))
    bits = scores.view(np.int32)
    for at in range(len(scores)):
        bits[at] = np.int32(numbers[at]) << shift
    for at in range(len(scores)):
        scores[at] = scores[at] / temperature


@compiled
def _highest(scores: Float32Array) -> tuple[np.float32, bool]:
    """Return the highest score, and whether it is finite and no score is NaN or +inf; barred tokens may be -inf."""
    bits = scores.view(np.int32)
    best, largest = -_SIGN, np.int32(0)
    for at in range(len(bits)):
        number = bits[at]
        size = number & _SIGN
        best = max(best, number if number >= 0 else -size)
        largest = max(largest, number if number >= 0 else size - 1)
    key = np.empty(1, np.int32)
    key[0] = best if best >= 0 else -best - _SIGN - 1  # back to sign and magnitude
    return key.view(np.float32)[0], bool(largest < _INFINITY and best > -_INFINITY)


@compiled
def fill_weights(scores: Float32Array, top: np.float32, weights: Float32Array) -> float:
    """Fill [n] ``weights`` with ``exp(score - top)`` (error about 1e-6) and return their sum; n is a multiple of ``LANES``."""
    sums, wholes, bits = np.zeros(LANES), np.empty(LANES, np.int32), weights.view(np.int32)
    for start in range(0, len(scores), LANES):
        for lane in range(LANES):
            # 2 ** x: the nearest integer goes into the exponent bits, and a polynomial computes the rest.
            x = max((scores[start + lane] - top) * _LOG2_E, _LEAST_LOG2)
            whole = np.int32(x - _HALF)
            rest = x - np.float32(whole)
            power = _TERMS[6] * rest + _TERMS[5]
            power = power * rest + _TERMS[4]
            power = power * rest + _TERMS[3]
            power = power * rest + _TERMS[2]
            power = power * rest + _TERMS[1]
            weights[start + lane] = power * rest + _TERMS[0]
            wholes[lane] = whole << 23
        for lane in range(LANES):
            bits[start + lane] += wholes[lane]
        for lane in range(LANES):
            sums[lane] += weights[start + lane]
    return float(sums.sum())


@compiled
def _candidates(scores: Float32Array, weights: Float32Array, top: np.float32, least: float, ids: Int64Array) -> int:
    """Fill ``ids`` with the likeliest tokens of a mass above ``least``, ascending; return the count, -1 on overflow."""
    for distance in _DISTANCES:
        count, held = collect(scores, np.float32(top - distance), ids), 0.0
        if count > len(ids):
            return -1
        for at in range(count):
            held += weights[ids[at]]
        if held > least:
            return count
    return -1


@compiled
def _likelier(scores: Float32Array, weights: Float32Array, token: int) -> float:
    """Return the mass of the tokens before ``token`` in the order of scores, equal scores by id."""
    sums, score = np.zeros(LANES), scores[token]
    for start in range(0, len(scores), LANES):
        for lane in range(LANES):
            sums[lane] += weights[start + lane] if scores[start + lane] > score else np.float32(0.0)
    for at in range(token):
        if scores[at] == score:
            sums[0] += weights[at]
    return float(sums.sum())


@compiled
def _winner(scores: Float32Array, weights: Float32Array, ids: Int64Array, raw: UInt64Array, passed: BoolArray) -> int:
    """Return the index (without ``ids``: the token) of the highest score plus noise that is not ``passed``, or ``UNDECIDED``."""
    best, second, place, least = -math.inf, -math.inf, UNDECIDED, math.inf
    for at in range(len(raw)):
        token = ids[at] if len(ids) else at
        uniform = (float(raw[at] >> np.uint64(11)) + 0.5) * 2.0**-53
        # Noise is -log(-log(u)), and -log(u) >= 1 - u: most tokens are ruled out without a logarithm.
        if 1.0 - uniform > least * weights[token] or passed[at]:
            continue
        value = scores[token] - math.log(-math.log(uniform))
        if value > best:
            best, second, place = value, best, at
            least = -math.log(uniform) / weights[token] * _SLACK
        elif value > second:
            second = value
    # A decision that rounding could change is ``UNDECIDED``.
    return place if best - second > _EVEN * (1.0 + abs(best)) else UNDECIDED


@compiled
def _draw_nucleus(scores: Float32Array, vocab: int, top: np.float32, top_p: float, seed: np.uint64, position: np.uint64) -> int:
    """Return the winner within the nucleus of mass ``top_p`` (1.0: all tokens) without sorting, or ``UNDECIDED``."""
    ids, weights = np.empty(MOST, np.int64), np.empty(len(scores), np.float32)
    total = fill_weights(scores, top, weights)
    # With a margin, so that no token of the nucleus is missing.
    count = _candidates(scores, weights, top, (top_p + 2.0 * CLOSE) * total, ids) if top_p < 1.0 else -1
    if count < 0:
        lanes = np.empty((4, (vocab + 3) // 4), np.uint64)
        fill_stream(seed, position, lanes)
        raw = np.empty(vocab, np.uint64)
        for at in range(vocab):
            raw[at] = lanes[at & 3, at >> 2]
        ids = ids[:0]
    else:
        raw, ids = np.empty(count, np.uint64), ids[:count]
        fill_raw(seed, position, ids, raw)
    passed = np.zeros(len(raw), np.bool_)
    # If the nucleus is wide, the winner among all tokens is tested first, then the next best while they lie outside.
    for _ in range(_TURNS):
        place = _winner(scores, weights, ids, raw, passed)
        if place < 0:
            return UNDECIDED
        token = ids[place] if len(ids) else place
        if top_p == 1.0:
            return token
        before = _likelier(scores, weights, token) / total
        if abs(before - top_p) < CLOSE:
            return UNDECIDED
        if before < top_p:
            return token
        passed[place] = True
    return UNDECIDED


@compiled
def _draw_left(
    scores: Float32Array, top: np.float32, min_p: float, top_k: int, top_p: float, seed: np.uint64, position: np.uint64
) -> int:
    """Return the winner among the survivors of min-p, top-k and top-p, or ``UNDECIDED``."""
    ids, left, raw = np.empty(MOST, np.int64), np.empty(MOST, np.float32), np.empty(MOST, np.uint64)
    count = fill_left(scores, top, 0.0, min_p, top_k, top_p, ids, left)
    if count < 0:
        return UNDECIDED
    fill_raw(seed, position, ids[:count], raw[:count])
    weights = np.exp(left[:count] - top)
    place = _winner(left[:count], weights, ids[:0], raw[:count], np.zeros(count, np.bool_))
    return UNDECIDED if place < 0 else ids[place]


# One compiled call beats several numpy calls, because the instruction cache is cold after a forward.
@compiled
def _draw(
    address: int, zero: np.signedinteger, shift: int, vocab: int, temperature: float, min_p: float, top_k: int, top_p: float,
    seed: int, position: int,
) -> int:  # fmt: skip
    padded = np.empty(-(-vocab // LANES) * LANES, np.float32)
    scores = padded[:vocab]
    _fill_scores(address, zero, shift, np.float32(temperature), scores)
    top, finite = _highest(scores)
    # Padding to whole vectors that no draw can choose.
    padded[vocab:] = top - np.float32(_FAR)
    if not finite:
        return UNDECIDED
    if min_p == 0.0 and top_k == 0:
        return _draw_nucleus(padded, vocab, top, top_p, np.uint64(seed), np.uint64(position))
    return _draw_left(scores, top, min_p, top_k, top_p, np.uint64(seed), np.uint64(position))


def draw_row(logits: torch.Tensor, params: SamplingParams, position: int) -> int | None:
    """Return the token of ``sampler.choose`` for [vocab] processed logits of a sampled request; None if undecided."""
    if logits.dtype == torch.float16:
        logits = logits.float()
    kind = _KINDS.get(logits.dtype)
    # Other dtypes, devices and layouts are left to ``warp``.
    if kind is None or not NATIVE or not logits.is_cpu or logits.stride()[0] != 1:
        return None
    token = _draw(
        logits.data_ptr(), *kind, len(logits), params.temperature, params.min_p, params.top_k, params.top_p, params.seed, position
    )  # fmt: skip
    return token if token >= 0 else None


def compile_draws(dtype: torch.dtype) -> None:
    """Compile the functions for one dtype before the first request."""
    draw_row(torch.tensor([0.0, 9.0], dtype=dtype), SamplingParams(temperature=1.0, top_p=0.5), 0)
