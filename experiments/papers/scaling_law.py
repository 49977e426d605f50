"""The law by which Lookahead Decoding scales (arXiv 2402.02057, section 4), and its fit to measured compressions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_ALPHAS = np.arange(0.001, 1.0, 0.001)


def expected_tokens(alpha: float, guesses: int, length: int) -> float:
    """Tokens of a step with ``guesses`` good speculations of ``length`` tokens (equation 5).

    Example: one guess of one token that is accepted with chance 0.5 gives 2 - 0.5 = 1.5 tokens.

    Args:
        alpha: chance that a token is accepted.
        guesses: b of the paper, W = G.
        length: gamma of the paper, N - 1.
    """
    depths = np.arange(1, length + 1)
    return float(length + 1 - np.sum((1.0 - alpha**depths) ** guesses))


def compression(alpha: float, steps: float, window: int, ngram: int) -> float:
    """S of the paper (equation 7): one step in ``steps`` has good speculations, the others emit one token.

    Example: alpha 0.425, f 3.106, W = G = 15 and N = 5 give (2.106 + 4.04) / 3.106 = 1.98; the paper measured 1.96.
    """
    return (steps - 1.0 + expected_tokens(alpha, window, ngram - 1)) / steps


def fitted(measured: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """The alpha and f of the law that come nearest to measured compressions, by least squares.

    For each alpha, S - 1 is proportional to the expected tokens - 1, so that the best f follows; f is at least 1.

    Args:
        measured: (W = G, N) -> S.

    Raises:
        ValueError: nothing was measured, or nowhere was more than a token emitted in a step.
    """
    gains = np.array([reached - 1.0 for reached in measured.values()])
    if not len(gains) or gains.max() <= 0.0:
        raise ValueError("the law has no fit: no setting emitted more than one token a step")
    found = []
    for alpha in _ALPHAS:
        more = np.array([expected_tokens(float(alpha), window, ngram - 1) - 1.0 for window, ngram in measured])
        share = min(1.0, max(1e-9, float(more @ gains) / float(more @ more)))  # 1 / f
        found.append((float(np.sum((share * more - gains) ** 2)), float(alpha), 1.0 / share))
    _, alpha, steps = min(found)
    return round(alpha, 3), round(steps, 3)
