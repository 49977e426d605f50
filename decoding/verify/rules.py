"""How a draft tree is verified where ``verify_exact`` is not the rule: drafts that were drawn from a known distribution, and
lossy rules.

A rule is made for one tree by who drafted it. It emits as many tokens as ``TargetDistributions.remaining`` allows and nothing
after an end token, and verifies the beginning of a chain where the engine computed no more of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from decoding.request import Acceptance
from decoding.sampling.probabilities import Float64Array, residual
from decoding.tree import DraftTree, Int32Array
from decoding.verify.kseq import KSeq

if TYPE_CHECKING:
    from decoding.verify.target_probabilities import TargetDistributions  # has torch, which those who only name rules do not need


class Rule(Protocol):
    """Decides what is kept of one tree."""

    def accept(self, tree: DraftTree, distributions: TargetDistributions) -> Acceptance:
        """The accepted rows and the token after them: between 1 and ``distributions.remaining`` tokens.

        Args:
            tree: as it was computed.
            distributions: what the target says at its rows.
        """
        ...


class RejectionRule:
    """Speculative sampling: a chain of tokens drawn from a known distribution (arXiv 2211.17192, section 2.3; 2302.01318,
    Algorithm 2).

    A draft token is accepted with probability ``min(1, target / draft)``. The first that is not gives way to a draw from
    ``max(target - draft, 0)``, normalised; after a chain that is accepted whole comes the target's own choice. The distribution
    of the output is exactly the target's, whatever the draft distribution.

    Example: draft distribution 0.5, 0.5, target 0.8, 0.2. Token 0 is always accepted. Token 1 is with probability 0.4; otherwise
    token 0 takes its place, the only one of which the draft distribution gives too little. So token 0 comes with 0.5 + 0.5 * 0.6
    = 0.8.
    """

    def __init__(self, draft_probs: Float64Array | Sequence[Float64Array]) -> None:
        """
        Args:
            draft_probs: [gamma, vocab] the distributions from which the tokens of the chain were drawn.
        """
        self._draft_probs = draft_probs

    def accept(self, tree: DraftTree, distributions: TargetDistributions) -> Acceptance:
        """See ``Rule``."""

        def token_at(row: int) -> int:
            drafted, draft_probs, target_probs = int(tree.tokens[row + 1]), self._draft_probs[row], distributions.warped(row)
            assert draft_probs[drafted] > 0.0, (row, drafted)
            if distributions.accepts(row, float(target_probs[drafted] / draft_probs[drafted])):
                return drafted
            return distributions.draw(row, residual(target_probs, draft_probs))

        return _follow_chain(tree, distributions, token_at)


class KSeqRule:
    """SpecTr: several sequences drawn independently from a draft model, verified as one tree (arXiv 2310.15141, section 5).

    At each row the tokens of the sequences that are still alive are candidates of K-SEQ (see ``decoding.verify.kseq``), which
    makes one token of the target's distribution of them. The sequences that hold this token live on. Where none does, or all are
    at their end, the block ends. The distribution of the output is exactly the target's.

    Departure from the paper, which stops where all candidates are rejected: if the token drawn instead is that of a sequence,
    the walk goes on with it. What the sequences hold further down had no part in the decision.

    Example: sequences 1 2, 1 3, 4 2. At the root the candidates are 1, 1, 4; say 1 is accepted. The first two live on, with the
    candidates 2, 3; both are rejected and 5 is drawn from the residual: the output is 1 5.
    """

    def __init__(
        self,
        sequences: Int32Array | Sequence[Sequence[int]],
        rows: Int32Array | Sequence[Sequence[int]],
        draft_probs: Mapping[int, Float64Array],
    ) -> None:
        """
        Args:
            sequences: [k, gamma] drafted tokens, drawn independently.
            rows: [k, gamma] the row of the tree that holds each. Sequences that begin alike share rows, or have their own.
            draft_probs: [vocab] by row, leaves apart: the distribution from which the tokens below the row were drawn.
        """
        self._sequences, self._rows = np.asarray(sequences).tolist(), np.asarray(rows).tolist()
        self._draft_probs = draft_probs

    def accept(self, tree: DraftTree, distributions: TargetDistributions) -> Acceptance:
        """See ``Rule``. The tree holds all of the sequences: those of a clipped tree would no longer be independent."""
        alive = list(range(len(self._sequences)))
        depth = max(map(len, self._rows), default=0)
        assert all(0 < row < tree.num_candidates for rows in self._rows for row in rows), (self._rows, tree.num_candidates)
        accepted: list[int] = []  # the rows of one that is alive
        while len(accepted) < depth:
            token = self._token(alive, len(accepted), accepted[-1] if accepted else 0, distributions)
            alive = [one for one in alive if self._sequences[one][len(accepted)] == token]
            if not alive or token in distributions.end_tokens or len(accepted) + 1 >= distributions.remaining:
                return Acceptance(tuple(accepted), token)
            accepted = self._rows[alive[0]][: len(accepted) + 1]
        return Acceptance(tuple(accepted), distributions.choose(accepted[-1] if accepted else 0))

    def _token(self, alive: Sequence[int], depth: int, row: int, distributions: TargetDistributions) -> int:
        target_probs, draft_probs = distributions.warped(row), self._draft_probs[row]
        coupling = KSeq.of(target_probs, draft_probs, len(alive))
        for index, one in enumerate(alive):
            token: int = self._sequences[one][depth]
            if distributions.accepts(row, coupling.accept_prob(token), index):
                return token
        return distributions.draw(row, coupling.residual())


class BildRule:
    """Big little decoder: the target replaces the first draft token that it finds too unlikely (arXiv 2302.07863, section 3.3).

    A draft token is too unlikely where ``-log target`` exceeds the rollback threshold. The target's own token comes in its place,
    and the rest of the draft goes, unless it is the same token. Where none is replaced the target adds one. The output is not
    the target's: lossy.

    Example: threshold 5, target probabilities 0.6, 0.001, 0.9 of three draft tokens. ``-log 0.001 = 6.9``: the first is kept, the
    second replaced, the third dropped.
    """

    def __init__(self, rollback: float, variant: Literal["original", "mjsd"] = "original") -> None:
        """
        Args:
            rollback: the threshold, in nats.
            variant: "original" tests probabilities before temperature and truncation. "mjsd", the baseline of arXiv 2407.09722,
                tests those of the distribution that a plain request draws from, which has none for tokens outside the nucleus.
        """
        self._rollback, self._variant = rollback, variant

    def accept(self, tree: DraftTree, distributions: TargetDistributions) -> Acceptance:
        """See ``Rule``."""

        def token_at(row: int) -> int:
            drafted = int(tree.tokens[row + 1])
            logprob = _logprob(distributions, row, drafted, "raw" if self._variant == "original" else "warped")
            return drafted if -logprob <= self._rollback else distributions.choose(row)

        return _follow_chain(tree, distributions, token_at)


class MjsdRule:
    """Multi-token joint speculative decoding: the longest prefix that is likely enough (arXiv 2407.09722, section 4).

    A prefix of the draft passes where ``min(1, target / draft)`` of its joint probabilities exceeds the threshold. The longest
    one that passes is accepted, though a shorter one may fail, and the target's own choice follows. The output is not the
    target's: lossy. With a threshold of 1 or more nothing passes, and the output is plain decoding's.

    A draft is cut behind its first end token: no text goes on there, so what follows has no say in it.

    Example: threshold 0.5, target 0.2, 0.9, draft 0.5, 0.3. The ratios are 0.4 and 0.4 * 3 = 1.2: the first prefix fails, the
    second passes, so both tokens are accepted.
    """

    def __init__(self, draft_logprobs: Sequence[float], threshold: float, joint_law: Literal["raw", "warped"] = "raw") -> None:
        """
        Args:
            draft_logprobs: [gamma] log-probability of each draft token after those before it.
            threshold: of the ratio of joint probabilities; below 0 everything passes.
            joint_law: of the target: "raw", before temperature and truncation, or "warped", what a plain request draws from.
        """
        self._draft_logprobs, self._threshold, self._joint_law = draft_logprobs, threshold, joint_law

    def accept(self, tree: DraftTree, distributions: TargetDistributions) -> Acceptance:
        """See ``Rule``."""
        joint, kept = 0.0, 0  # log of the ratio
        for row in range(min(tree.num_candidates - 1, distributions.remaining)):
            assert tree.parents[row + 1] == row, tree.parents
            drafted = int(tree.tokens[row + 1])
            joint += _logprob(distributions, row, drafted, self._joint_law) - self._draft_logprobs[row]
            if math.exp(min(joint, 0.0)) > self._threshold:
                kept = row + 1
            if drafted in distributions.end_tokens:
                break
        accepted = tuple(range(1, kept + 1))
        if kept and (kept == distributions.remaining or int(tree.tokens[kept]) in distributions.end_tokens):
            return Acceptance(accepted[:-1], int(tree.tokens[kept]))
        return Acceptance(accepted, distributions.choose(kept))


def _logprob(distributions: TargetDistributions, row: int, token: int, distribution: Literal["raw", "warped"]) -> float:
    if distribution == "raw":
        return float(distributions.raw_logprobs(row)[token])
    prob = float(distributions.warped(row)[token])
    return math.log(prob) if prob > 0.0 else -math.inf


def _follow_chain(tree: DraftTree, distributions: TargetDistributions, token_at: Callable[[int], int]) -> Acceptance:
    """Emits ``token_at(row)`` from the root down as long as the chain's next row holds it, and the target's choice at its end."""
    last = tree.num_candidates - 1
    for row in range(last):
        assert tree.parents[row + 1] == row, tree.parents
        token = token_at(row)
        if token != tree.tokens[row + 1] or token in distributions.end_tokens or row + 1 >= distributions.remaining:
            return Acceptance(tuple(range(1, row + 1)), token)
    return Acceptance(tuple(range(1, last + 1)), distributions.choose(last))
