"""Next-token probabilities, the random numbers that decide by them, and the computations of the verification rules.

Every random number is a function of (seed, position, stream, index).
"""

from __future__ import annotations

import numpy as np

from outrider.decoding.arrays import Float64Array
from outrider.decoding.sampling.philox import raw_stream

# Streams are independent, so drafting a token, accepting it and choosing its replacement are separate draws. Drawing again at a
# position below another prefix is sound: draft tokens behind a rejection were never examined, so they carry no information about
# the output.
# Stream 0 is for the target's own choice (``decoding.sampling.sampler.choose``).
ACCEPT = 1  # whether a draft token is accepted; the index numbers the candidates of a position
RESIDUAL = 2  # the token that replaces a rejected one
DRAFT = 16  # the draft token; DRAFT + k for the k-th of several draft sequences


def uniform(seed: int, position: int, stream: int, index: int = 0) -> float:
    """Return a random number in (0, 1), both ends excluded: number ``index`` of a stream for the token at ``position``."""
    raw = int(raw_stream(seed, position, index + 1, stream)[index])
    # 53 bits with the half, exact in a float64: neither 0 nor 1.
    return ((raw >> 12) + 0.5) * 2.0**-52


def pick(distribution: Float64Array, number: float) -> int:
    """Return the first token at which the cumulated [vocab] distribution, of any sum, exceeds ``number`` in (0, 1)."""
    cumulated = distribution.cumsum()
    return int(cumulated.searchsorted(number * cumulated[-1], side="right"))


def residual(target_probs: Float64Array, covered: Float64Array) -> Float64Array:
    """Return the normalised residual ``max(target_probs - covered, 0)``, [vocab]."""
    left = np.maximum(target_probs - covered, 0.0)
    total = left.sum()
    # A total of 0 can only come from rounding.
    return left / total if total > 0.0 else target_probs
