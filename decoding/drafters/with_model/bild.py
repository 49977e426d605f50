"""Strategy ``bild`` (Big little decoder): the small model continues as long as it is confident. Lossy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from outrider.decoding.drafters.options import check_options
from outrider.decoding.drafters.with_model.base import SOURCE, ModelDrafter
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree

if TYPE_CHECKING:
    import torch


class BildDrafter(ModelDrafter):
    """Chain that ends when the draft model is unsure (BiLD, arXiv 2302.07863, sections 3.2 and 3.3).

    - ``original``: the likeliest tokens while their probability, before temperature and truncation, is at least ``fallback``; the
      first less likely one is left to the target. The defaults are the settings of its code.
    - ``mjsd``: the baseline of arXiv 2407.09722. Tokens are drawn from the request's sampling distribution, and the chain ends
      with the first token at which no token has the probability ``fallback``. Its settings: fallback 0.9, rollback 1 to 3
      (Llama); fallback 0.3, rollback 2 (OPT).

    **The output is not the target's**: see ``BildRule``. The request's logits processors apply to drafts too.

    Departure from the original, whose first token is the target's: here the prefill always ends with the target's token.

    Args:
        num_draft_tokens: maximum tokens between two target forwards, at least 1.
        fallback: minimum confidence of the draft model to continue, 0 to 1.
        rollback: a draft token is replaced if ``-log`` of its target probability is above this, 0 or more.
        variant: ``original`` or ``mjsd``.
    """

    own_rules = True

    def __init__(
        self, num_draft_tokens: int = 10, fallback: float = 0.6, rollback: float = 5.0, variant: str = "original"
    ) -> None:
        super().__init__(num_draft_tokens)
        check_options("bild", fallback=fallback, rollback=rollback, variant=variant)
        self._fallback, self._rollback = fallback, rollback
        self._variant = cast(Literal["original", "mjsd"], variant)

    def draft(self, requests: Sequence[Request], depths: Sequence[int], budgets: Sequence[int]) -> list[DraftTree]:
        """See ``ModelDrafter``."""
        from outrider.decoding.verify.rules import BildRule

        step = self._likeliest if self._variant == "original" else self._drawn

        def next_tokens(
            active: Sequence[int], chains: Sequence[Sequence[int]], logits: torch.Tensor
        ) -> list[tuple[int | None, bool]]:
            return [step(requests[at], chains[at], logits[row]) for row, at in enumerate(active)]

        chains = self.chains(requests, depths, next_tokens)
        trees = [DraftTree.chain(request.root, chain, SOURCE) for request, chain in zip(requests, chains, strict=True)]
        for tree in trees:
            tree.rule = BildRule(self._rollback, self._variant)
        return trees

    def _likeliest(self, request: Request, chain: Sequence[int], logits: torch.Tensor) -> tuple[int | None, bool]:
        sure, token = _confidence(self.distributions.altered(request, chain, logits))
        return (token, True) if sure >= self._fallback else (None, False)

    def _drawn(self, request: Request, chain: Sequence[int], logits: torch.Tensor) -> tuple[int | None, bool]:
        if request.params.greedy:
            sure, token = _confidence(self.distributions.altered(request, chain, logits))
        else:
            token, probs = self.distributions.draw(request, chain, logits)
            sure = float(probs.max())
        return token, sure >= self._fallback


def _confidence(scores: torch.Tensor) -> tuple[float, int]:
    """Return the highest probability of a row of logits, and its token."""
    # The highest softmax probability, without computing the others.
    best = scores.max(dim=-1)
    return float((best.values - scores.logsumexp(dim=-1)).exp()), int(best.indices)
