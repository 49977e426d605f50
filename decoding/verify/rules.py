"""Verification rules other than ``verify_exact``: for drafts drawn from a known distribution, and lossy rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from outrider.decoding.arrays import Float64Array, Int32Array
from outrider.decoding.sampling.probabilities import residual
from outrider.decoding.tree import Acceptance, DraftTree, RowDistributions

_HALVINGS = 60  # bisection steps: the remaining interval is below the rounding of a double


class RejectionRule:
    """Speculative sampling of a chain (arXiv 2211.17192, section 2.3; 2302.01318, Algorithm 2).

    A draft token is accepted with probability ``min(1, target / draft)``. The first rejected one is replaced by a draw from the
    normalized ``max(target - draft, 0)``; a fully accepted chain is followed by the target's own choice. The output has exactly
    the target's distribution, whatever the draft distribution.

    Example: draft 0.5, 0.5, target 0.8, 0.2. Token 0 is always accepted, token 1 with probability 0.4, else token 0 replaces it:
    token 0 comes with 0.5 + 0.5 * 0.6 = 0.8.

    Args:
        draft_probs: [gamma, vocab] distributions from which the tokens of the chain were drawn.
    """

    def __init__(self, draft_probs: Float64Array | Sequence[Float64Array]) -> None:
        self._draft_probs = draft_probs

    def accept(self, tree: DraftTree, distributions: RowDistributions) -> Acceptance:
        """See ``Rule``."""

        def token_at(row: int) -> int:
            drafted, draft_probs, target_probs = int(tree.tokens[row + 1]), self._draft_probs[row], distributions.warped(row)
            assert draft_probs[drafted] > 0.0, (row, drafted)
            if distributions.accepts(row, float(target_probs[drafted] / draft_probs[drafted])):
                return drafted
            return distributions.draw(row, residual(target_probs, draft_probs))

        return _follow_chain(tree, distributions, token_at)


@dataclass(frozen=True, slots=True)
class KSeq:
    """K-SEQ: one token of the target's distribution from k independent draft tokens (arXiv 2310.15141, Algorithm 2).

    The draft tokens are tested in turn. A token is accepted with probability ``min(1, target / (rho * draft))``; if none is
    accepted, the token is drawn from ``residual``. A smaller ``rho`` accepts more; the smallest valid one has
    ``1 - (1 - beta)^k <= rho * beta``, where ``beta = sum(min(draft, target / rho))`` is the acceptance probability of one token.

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
        # Rounding may take the sum above 1.
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


class KSeqRule:
    """SpecTr: verification of several independently drawn sequences as one tree (arXiv 2310.15141, section 5).

    At each row the tokens of the live sequences are candidates of ``KSeq``, which turns them into one token of the target's
    distribution. Sequences that hold this token stay alive. The output has exactly the target's distribution.

    Example: sequences 1 2, 1 3, 4 2. At the root the candidates are 1, 1, 4; say 1 is accepted. The first two live on, with the
    candidates 2, 3; both are rejected and 5 is drawn from the residual: the output is 1 5.

    Args:
        sequences: [k, gamma] drafted tokens, drawn independently.
        rows: [k, gamma] tree row of each token. Sequences with a common prefix may share rows.
        draft_probs: [vocab] by row, without leaves: the distribution of the tokens below the row.
    """

    def __init__(
        self,
        sequences: Int32Array | Sequence[Sequence[int]],
        rows: Int32Array | Sequence[Sequence[int]],
        draft_probs: Mapping[int, Float64Array],
    ) -> None:
        self._sequences, self._rows = np.asarray(sequences).tolist(), np.asarray(rows).tolist()
        self._draft_probs = draft_probs

    def accept(self, tree: DraftTree, distributions: RowDistributions) -> Acceptance:
        """Verify a tree that holds all sequences: those of a clipped tree would not be independent."""
        alive = list(range(len(self._sequences)))
        depth = max(map(len, self._rows), default=0)
        assert all(0 < row < tree.num_candidates for rows in self._rows for row in rows), (self._rows, tree.num_candidates)
        accepted: list[int] = []  # rows of a live sequence
        while len(accepted) < depth:
            token = self._token(alive, len(accepted), accepted[-1] if accepted else 0, distributions)
            # Departure from the paper, which stops if all candidates are rejected: if a live sequence holds the token drawn
            # instead, the walk continues with it. The later tokens of the sequences had no influence on that decision.
            alive = [one for one in alive if self._sequences[one][len(accepted)] == token]
            if not alive or token in distributions.end_tokens or len(accepted) + 1 >= distributions.remaining:
                return Acceptance(tuple(accepted), token)
            accepted = self._rows[alive[0]][: len(accepted) + 1]
        return Acceptance(tuple(accepted), distributions.choose(accepted[-1] if accepted else 0))

    def _token(self, alive: Sequence[int], depth: int, row: int, distributions: RowDistributions) -> int:
        target_probs, draft_probs = distributions.warped(row), self._draft_probs[row]
        coupling = KSeq.of(target_probs, draft_probs, len(alive))
        for index, one in enumerate(alive):
            token: int = self._sequences[one][depth]
            if distributions.accepts(row, coupling.accept_prob(token), index):
                return token
        return distributions.draw(row, coupling.residual())


class BildRule:
    """Big little decoder: the target replaces the first draft token that it finds too unlikely (arXiv 2302.07863, section 3.3).

    A token is too unlikely if ``-log target`` exceeds the rollback threshold. The rest of the draft is dropped, unless the
    target's own token is equal. If none is replaced, the target adds one token. Lossy: the output is not the target's.

    Example: threshold 5, target probabilities 0.6, 0.001, 0.9 of three draft tokens. ``-log 0.001 = 6.9``: the first is kept, the
    second replaced, the third dropped.

    Args:
        rollback: the threshold, in nats.
        variant: "original" tests probabilities before temperature and truncation. "mjsd", the baseline of arXiv 2407.09722, tests
            those of the sampling distribution, which is 0 outside the nucleus.
    """

    def __init__(self, rollback: float, variant: Literal["original", "mjsd"] = "original") -> None:
        self._rollback, self._variant = rollback, variant

    def accept(self, tree: DraftTree, distributions: RowDistributions) -> Acceptance:
        """See ``Rule``."""

        def token_at(row: int) -> int:
            drafted = int(tree.tokens[row + 1])
            logprob = _logprob(distributions, row, drafted, "raw" if self._variant == "original" else "warped")
            return drafted if -logprob <= self._rollback else distributions.choose(row)

        return _follow_chain(tree, distributions, token_at)


class MjsdRule:
    """Multi-token joint speculative decoding: acceptance of the longest likely prefix (arXiv 2407.09722, section 4).

    A prefix passes if ``min(1, target / draft)`` of its joint probabilities exceeds the threshold. The longest passing prefix is
    accepted, even if a shorter one fails, and the target's own choice follows. Lossy: the output is not the target's.

    Example: threshold 0.5, target 0.2, 0.9, draft 0.5, 0.3: ratios 0.4 and 0.4 * 3 = 1.2, so that both tokens are accepted.

    Args:
        draft_logprobs: [gamma] log-probability of each draft token given those before it.
        threshold: on the ratio of joint probabilities; below 0 every prefix passes, from 1 on none, which is plain decoding.
        joint_law: target distribution: "raw", before temperature and truncation, or "warped", the sampling distribution.
    """

    def __init__(self, draft_logprobs: Sequence[float], threshold: float, joint_law: Literal["raw", "warped"] = "raw") -> None:
        self._draft_logprobs, self._threshold, self._joint_law = draft_logprobs, threshold, joint_law

    def accept(self, tree: DraftTree, distributions: RowDistributions) -> Acceptance:
        """See ``Rule``."""
        joint, kept = 0.0, 0  # log of the ratio
        for row in range(min(tree.num_candidates - 1, distributions.remaining)):
            assert tree.parents[row + 1] == row, tree.parents
            drafted = int(tree.tokens[row + 1])
            joint += _logprob(distributions, row, drafted, self._joint_law) - self._draft_logprobs[row]
            if math.exp(min(joint, 0.0)) > self._threshold:
                kept = row + 1
            # A draft is cut after its first end token.
            if drafted in distributions.end_tokens:
                break
        accepted = tuple(range(1, kept + 1))
        if kept and (kept == distributions.remaining or int(tree.tokens[kept]) in distributions.end_tokens):
            return Acceptance(accepted[:-1], int(tree.tokens[kept]))
        return Acceptance(accepted, distributions.choose(kept))


def _logprob(distributions: RowDistributions, row: int, token: int, distribution: Literal["raw", "warped"]) -> float:
    if distribution == "raw":
        return float(distributions.raw_logprobs(row)[token])
    prob = float(distributions.warped(row)[token])
    return math.log(prob) if prob > 0.0 else -math.inf


def _follow_chain(tree: DraftTree, distributions: RowDistributions, token_at: Callable[[int], int]) -> Acceptance:
    """Emit ``token_at(row)`` from the root down while the chain's next row holds it, and the target's choice at its end."""
    last = tree.num_candidates - 1
    for row in range(last):
        assert tree.parents[row + 1] == row, tree.parents
        token = token_at(row)
        if token != tree.tokens[row + 1] or token in distributions.end_tokens or row + 1 >= distributions.remaining:
            return Acceptance(tuple(range(1, row + 1)), token)
    return Acceptance(tuple(range(1, last + 1)), distributions.choose(last))
