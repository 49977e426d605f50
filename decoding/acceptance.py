"""How often drafted rows are accepted, by the evidence behind them: learned while serving, with a prior to start from."""

from __future__ import annotations

import numpy as np

from decoding.candidates import Float64Array
from decoding.evidence import (
    BIGRAM,
    COPY,
    COPY_FRESH,
    HISTORY,
    HISTORY_FRESH,
    MATCH_BUCKETS,
    NUM_FEATURES,
    NUM_KINDS,
    RECYCLING,
    SHARE_BUCKETS,
    UNIGRAM,
)
from decoding.jit import compiled
from decoding.tree import Int32Array

# Rounded from replays of retrieval, summary, code and chat texts. They only order the first steps: counts replace them.
_SHARE = np.array([0.015, 0.06, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0])  # by share bucket
_MATCH = np.array([0.5, 0.72, 0.8, 0.83, 0.85, 0.87, 0.88, 0.89, 0.9, 0.93, 0.97, 0.99])  # by match bucket
_HISTORY_MATCH = np.array([0.2, 0.5, 0.7, 0.82, 0.85, 0.87, 0.88, 0.89, 0.9, 0.93, 0.95, 0.97])
_CONTEXT = np.array([1.0, 0.45, 0.22, 0.15, 0.12, 0.1, 0.08, 0.06])  # by context bucket, for ranked tokens
_UNIGRAM = 0.04 / (1.0 + 0.5 * np.arange(MATCH_BUCKETS))  # by rank, two ranks a bucket
_RECYCLING = 0.3 / (1.0 + np.arange(MATCH_BUCKETS)) ** 1.3  # by rank
_BIGRAM = 0.25 / (1.0 + np.arange(MATCH_BUCKETS)) ** 1.3
_PRIOR_WEIGHT = 4.0  # observations that the prior counts for
_HALVE_AT = 4096.0  # observations of one feature after which the older ones count half


def prior() -> Float64Array:
    """[NUM_FEATURES] chance of a child given its parent, before anything was observed."""
    table = np.empty((NUM_KINDS, MATCH_BUCKETS, SHARE_BUCKETS))
    table[[COPY, COPY_FRESH]] = _MATCH[:, None] * _SHARE
    table[[HISTORY, HISTORY_FRESH]] = _HISTORY_MATCH[:, None] * _SHARE
    table[UNIGRAM] = _UNIGRAM[:, None] * _CONTEXT
    table[RECYCLING] = _RECYCLING[:, None] * _CONTEXT
    table[BIGRAM] = _BIGRAM[:, None] * _CONTEXT
    return table.ravel()


@compiled
def count(
    parents: Int32Array, features: Int32Array, reached: Int32Array, prior: Float64Array, weight: float, limit: float,
    seen: Float64Array, accepted: Float64Array, chances: Float64Array,
) -> None:  # fmt: skip
    """Counts the children of reached rows, of which those reached themselves were accepted.

    Args:
        parents: [n] of each row of the tree.
        features: [n] of each row; the root's is not read.
        reached: [m] the root and the accepted rows, in order of depth.
    """
    step = 0
    for row in range(1, len(parents)):
        while step + 1 < len(reached) and reached[step + 1] < row:
            step += 1
        hit = step + 1 < len(reached) and reached[step + 1] == row
        below = False
        for at in range(len(reached)):
            below = below or parents[row] == reached[at]
        if not below:
            continue
        entry = features[row]
        seen[entry] += 1.0
        accepted[entry] += 1.0 if hit else 0.0
        if seen[entry] > limit:
            seen[entry] *= 0.5
            accepted[entry] *= 0.5
        chances[entry] = (accepted[entry] + weight * prior[entry]) / (seen[entry] + weight)


class AcceptanceTable:
    """Beta means of acceptance given the parent's acceptance, one for each feature of ``decoding.evidence``.

    Example: a feature with prior 0.5 that was seen 6 times and accepted 5 times has chance (5 + 4 * 0.5) / (6 + 4) = 0.7.
    """

    def __init__(self) -> None:
        self._prior = prior()
        self._seen, self._accepted = np.zeros(NUM_FEATURES), np.zeros(NUM_FEATURES)
        self.chances = self._prior.copy()  # [NUM_FEATURES]

    def observe(self, parents: Int32Array, features: Int32Array, accepted_rows: tuple[int, ...]) -> None:
        """Counts one verified tree.

        Args:
            parents: [n] of the tree.
            features: [n] of its rows.
            accepted_rows: in order of depth.
        """
        reached = np.array((0, *accepted_rows), np.int32)
        count(
            parents, features, reached, self._prior, _PRIOR_WEIGHT, _HALVE_AT, self._seen, self._accepted, self.chances
        )  # fmt: skip
