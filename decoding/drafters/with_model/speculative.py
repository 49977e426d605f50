"""Strategy ``speculative`` (speculative decoding and sampling): a small model drafts a chain, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.decoding.drafters.options import check_options
from outrider.decoding.drafters.with_model.base import SOURCE, ModelDrafter
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from outrider.decoding.arrays import Float64Array


class SpeculativeDrafter(ModelDrafter):
    """Chain of ``num_draft_tokens`` from the draft model (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).

    - ``coupled``: tokens are chosen as the target chooses, by the same function with the same noise of (seed, position), and with
      the request's penalties. Verified by ``verify_exact``: the output is that of the seed, whatever the draft model.
    - ``greedy``: the draft model's likeliest token, verified by ``verify_exact``.
    - ``rejection``: as published. Tokens are drawn from the draft model's warped distribution with separate randomness, and
      verified by rejection sampling. The output has exactly the target's distribution, but differs from plain decoding with the
      same seed. For a greedy request it equals the others.

    Example: draft distribution 0.6, 0.4, target 0.5, 0.5 at temperature 1. ``rejection`` accepts with 0.5 + 0.4 = 0.9, ``greedy``
    with 0.5, ``coupled`` with 0.83, the chance that both argmaxes of log-probability and noise agree.

    Args:
        num_draft_tokens: length of the chain, at least 1; it ends with an end token.
        sampling: ``coupled``, ``greedy`` or ``rejection``.
    """

    def __init__(self, num_draft_tokens: int = 4, sampling: str = "coupled") -> None:
        super().__init__(num_draft_tokens)
        check_options("speculative", sampling=sampling)
        self._sampling = sampling
        self.own_rules = sampling == "rejection"

    def draft(self, requests: Sequence[Request], depths: Sequence[int], budgets: Sequence[int]) -> list[DraftTree]:
        """See ``ModelDrafter``."""
        drawn: list[list[Float64Array]] = [[] for _ in requests]

        def next_tokens(
            active: Sequence[int], chains: Sequence[Sequence[int]], logits: torch.Tensor
        ) -> list[tuple[int | None, bool]]:
            from outrider.decoding.sampling.ranking import argmax_rows

            likeliest = [self._takes_likeliest(requests[at]) for at in active]
            # One argmax for all rows; drawn tokens replace its results below.
            tokens: list[int] = argmax_rows(logits).tolist() if any(likeliest) else [0] * len(active)
            for row, at in enumerate(active):
                if likeliest[row]:
                    continue
                if self._sampling == "rejection" and not requests[at].params.greedy:
                    tokens[row], probs = self.distributions.draw(requests[at], chains[at], logits[row])
                    drawn[at].append(probs)
                else:
                    tokens[row] = self.distributions.choose(requests[at], chains[at], logits[row])
            return [(token, True) for token in tokens]

        chains = self.chains(requests, depths, next_tokens)
        trees = [DraftTree.chain(request.root, chain, SOURCE) for request, chain in zip(requests, chains, strict=True)]
        for tree, probs in zip(trees, drawn, strict=True):
            if probs:
                from outrider.decoding.verify.rules import RejectionRule

                tree.rule = RejectionRule(probs)
        return trees

    def _takes_likeliest(self, request: Request) -> bool:
        """Return whether the argmax of the raw draft logits is drafted."""
        return self._sampling == "greedy" or (request.params.greedy and not request.params.alters_logits)
