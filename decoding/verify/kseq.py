"""K-SEQ: one token of the target's distribution from k draft tokens (SpecTr, arXiv 2310.15141, section 4, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decoding.sampling.probabilities import Float64Array, residual

_HALVINGS = 60  # of an interval of length k - 1: what is left is below the rounding of a double


@dataclass(frozen=True, slots=True)
class KSeq:
    """How k draft tokens, drawn independently from one distribution, become one token with exactly the target's distribution.

    They are looked at in turn. One is accepted with the probability ``min(1, target / (rho * draft))`` of its token; where none
    is, the token is drawn from ``residual``. A smaller ``rho`` accepts more, and the smallest for which that is a distribution is
    the smallest with ``1 - (1 - beta)^k <= rho * beta``, where ``beta = sum(min(draft, target / rho))`` is the chance that a
    draft token is accepted.

    Example: draft 1, 0, target 0.5, 0.5, k = 2. ``beta`` is ``0.5 / rho``, and ``1 - (1 - 0.5 / rho)^2 <= 0.5`` gives
    ``rho = 1.7071``: token 0 is accepted with probability 0.2929 at each of two tries, which makes 0.5, and the residual is 0, 1.
    """

    target_probs: Float64Array  # [vocab]
    draft_probs: Float64Array  # [vocab]
    k: int
    rho: float
    beta: float
    covered: Float64Array  # [vocab] the chance of one draft token to be this token, and accepted

    @classmethod
    def of(cls, target_probs: Float64Array, draft_probs: Float64Array, k: int) -> KSeq:
        """The coupling of two distributions for k draft tokens, k at least 1. With one it is the rule of speculative sampling."""
        assert k >= 1 and target_probs.shape == draft_probs.shape, (k, target_probs.shape, draft_probs.shape)
        rho = rho_star(target_probs, draft_probs, k)
        covered = np.minimum(draft_probs, target_probs / rho)
        return cls(target_probs, draft_probs, k, rho, min(float(covered.sum()), 1.0), covered)

    def accept_prob(self, token: int) -> float:
        """The chance that a draft token is accepted, given that it is this one, which the draft distribution does not exclude."""
        assert self.draft_probs[token] > 0.0, token
        return float(self.covered[token] / self.draft_probs[token])

    def residual(self) -> Float64Array:
        """[vocab] the distribution of the token where no draft token is accepted."""
        return residual(self.target_probs, self.covered * _tries(self.beta, self.k))


def rho_star(target_probs: Float64Array, draft_probs: Float64Array, k: int) -> float:
    """The smallest ``rho`` in [1, k] with ``1 - (1 - beta(rho))^k <= rho * beta(rho)``, by bisection. See ``KSeq``.

    Tokens whose ``min(draft, target / rho)`` is decided on the whole interval that is left are summed once, so that all halvings
    together cost few passes over the vocabulary.
    """
    if k == 1 or _tries(float(np.minimum(draft_probs, target_probs).sum()), k) <= 1.0:
        return 1.0
    target, draft = target_probs, draft_probs  # of tokens that are not decided yet
    drafts_sum = targets_sum = 0.0  # of those whose minimum is the draft's, and the target's
    low, high = 1.0, float(k)
    for _ in range(_HALVINGS):
        if len(draft):
            by_draft, by_target = target >= high * draft, target <= low * draft
            drafts_sum += float(draft[by_draft].sum())
            targets_sum += float(target[by_target & ~by_draft].sum())
            undecided = ~(by_draft | by_target)
            target, draft = target[undecided], draft[undecided]
        middle = 0.5 * (low + high)
        beta = drafts_sum + targets_sum / middle + float(np.minimum(draft, target / middle).sum() if len(draft) else 0.0)
        if _tries(beta, k) <= middle:
            high = middle
        else:
            low = middle
    return high


def _tries(beta: float, k: int) -> float:
    """``(1 - (1 - beta)^k) / beta`` as the sum of a geometric series, which is k where ``beta`` is 0."""
    rejected = max(1.0 - beta, 0.0)
    return sum(rejected**tries for tries in range(k))
