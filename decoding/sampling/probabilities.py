"""Probabilities of the next token, the random numbers that decide by them, and what the rules of verification compute of them.

Every random number is a function of (seed, position, stream, index). Streams of one position are independent of each other, so
that what is drafted at a position, whether it is accepted and what comes in its place are separate draws. All that decides the
token at a position is drawn there: draft tokens that an earlier, rejected block held at the same position were never looked at,
so they tell nothing about what was emitted before, and drawing them again from the same numbers below another prefix is as good
as drawing them from new ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from decoding.sampling.philox import raw_stream

Float64Array = npt.NDArray[np.float64]

# Streams. 0 is that of the target's own choice (``decoding.sampling.sampler.choose``).
ACCEPT = 1  # whether a draft token is accepted; the index counts the candidates of a position
RESIDUAL = 2  # the token in place of a rejected one
DRAFT = 16  # the draft token; DRAFT + k in the k-th of several sequences


def uniform(seed: int, position: int, stream: int, index: int = 0) -> float:
    """A number in (0, 1), both ends excluded.

    Args:
        seed: of the request.
        position: absolute index of the token that it decides about.
        stream: one of those above.
        index: which number of the stream.
    """
    raw = int(raw_stream(seed, position, index + 1, stream)[index])
    return ((raw >> 12) + 0.5) * 2.0**-52


def pick(distribution: Float64Array, number: float) -> int:
    """The token at which the cumulated distribution exceeds a number in (0, 1); never one without probability.

    Example: of the distribution 0.2, 0.0, 0.8 the number 0.19 picks token 0, and 0.2 or more picks token 2.

    Args:
        distribution: [vocab] not negative, with a positive sum, which need not be 1.
        number: see ``uniform``.
    """
    cumulated = distribution.cumsum()
    return int(cumulated.searchsorted(number * cumulated[-1], side="right"))


def residual(target_probs: Float64Array, covered: Float64Array) -> Float64Array:
    """What is left of the target's distribution where another one has been given its share: ``max(target - covered, 0)``,
    normalised.

    Example: of the target's 0.5, 0.3, 0.2 a draft distribution 0.7, 0.2, 0.1 leaves 0, 0.1, 0.1, so 0, 0.5, 0.5.

    Args:
        target_probs: [vocab].
        covered: [vocab] what accepted draft tokens account for.

    Returns:
        [vocab]; the target's distribution where nothing is left, which only rounding can ask for.
    """
    left = np.maximum(target_probs - covered, 0.0)
    total = left.sum()
    return left / total if total > 0.0 else target_probs
