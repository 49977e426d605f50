"""K-SEQ: one token of the target's distribution from k draft tokens (SpecTr, arXiv 2310.15141, section 4, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.decoding.sampling.probabilities import Float64Array, residual

_HALVINGS = 60  # bisection steps: the remaining interval is below the rounding of a double


@dataclass(frozen=True, slots=True)
class KSeq:
    """Coupling that turns k independent draft tokens of one distribution into one token with exactly the target's distribution.

    The draft tokens are tested in turn. A token is accepted with probability ``min(1, target / (rho * draft))``; if none is
    accepted, the token is drawn from ``residual``. A smaller ``rho`` accepts more. The smallest valid one is the smallest with
    ``1 - (1 - beta)^k <= rho * beta``, where ``beta = sum(min(draft, target / rho))`` is the acceptance probability of one draft
    token.

    Example: draft 1, 0, target 0.5, 0.5, k = 2. ``beta`` is ``0.5 / rho``, and ``1 - (1 - 0.5 / rho)^2 <= 0.5`` gives
    ``rho = 1.7071``: token 0 is accepted with probability 0.2929 at each of two tries, which makes 0.5, and the residual is 0, 1.
    """

    target_probs: Float64Array  # [vocab]
    draft_probs: Float64Array  # [vocab]
    k: int
    rho: float
    beta: float
    covered: Float64Array  # [vocab] probability that one draft token is this token and is accepted

    @classmethod
    def of(cls, target_probs: Float64Array, draft_probs: Float64Array, k: int) -> KSeq:
        """Build the coupling for k >= 1 draft tokens. With k = 1 it is the rule of speculative sampling."""
        assert k >= 1 and target_probs.shape == draft_probs.shape, (k, target_probs.shape, draft_probs.shape)
        rho = rho_star(target_probs, draft_probs, k)
        covered = np.minimum(draft_probs, target_probs / rho)
        return cls(target_probs, draft_probs, k, rho, min(float(covered.sum()), 1.0), covered)

    def accept_prob(self, token: int) -> float:
        """Return the acceptance probability of a draft token, whose draft probability must be positive."""
        assert self.draft_probs[token] > 0.0, token
        return float(self.covered[token] / self.draft_probs[token])

    def residual(self) -> Float64Array:
        """Return [vocab] the distribution of the token if no draft token is accepted."""
        return residual(self.target_probs, self.covered * _tries(self.beta, self.k))


def rho_star(target_probs: Float64Array, draft_probs: Float64Array, k: int) -> float:
    """Return the smallest ``rho`` in [1, k] with ``1 - (1 - beta(rho))^k <= rho * beta(rho)``, by bisection; see ``KSeq``."""
    if k == 1 or _tries(float(np.minimum(draft_probs, target_probs).sum()), k) <= 1.0:
        return 1.0
    # Tokens whose min(draft, target / rho) is decided on the whole remaining interval are summed once, so that all bisection
    # steps together take few passes over the vocabulary.
    target, draft = target_probs, draft_probs  # undecided tokens
    drafts_sum = targets_sum = 0.0  # sums over tokens whose minimum is the draft's, and the target's
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
    """Return ``(1 - (1 - beta)^k) / beta`` as a geometric sum; k for ``beta`` 0."""
    rejected = max(1.0 - beta, 0.0)
    return sum(rejected**tries for tries in range(k))
