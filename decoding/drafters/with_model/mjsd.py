"""Strategy ``mjsd`` (multi-token joint speculative decoding): the likeliest continuation, judged as a whole. Lossy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from outrider.decoding.drafters.options import check_options
from outrider.decoding.drafters.with_model.base import SOURCE, ModelDrafter
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree

if TYPE_CHECKING:
    import torch


class MjsdDrafter(ModelDrafter):
    """Best of ``beams`` beams of ``num_draft_tokens`` tokens (MJSD, arXiv 2407.09722, section 4), verified by ``MjsdRule``.

    **The output is not the target's**, but may be more likely. The defaults are the paper's.

    Departures from the published code, which draws its beams and compares with the probability that a place among them was drawn:
    beams are searched for, as in the paper, or drawn with ``do_sample``; they start with one beam, so that all differ; and the
    draft model's probability is that of the tokens.

    Args:
        num_draft_tokens: length of a beam, at least 1.
        beams: number of beams kept at each level, at least 1.
        threshold: on the ratio of joint probabilities; below 0 everything is kept, from 1 on nothing (plain decoding).
        joint_law: distribution of both models in beam search and test: ``raw``, before temperature and truncation, or ``warped``,
            the request's sampling distribution. Both include bias, minimum length and penalties.
        do_sample: draw beams from this distribution, with the request's seed, instead of searching.
    """

    own_rules = True

    def __init__(
        self,
        num_draft_tokens: int = 4,
        beams: int = 8,
        threshold: float = 0.1,
        joint_law: str = "raw",
        do_sample: bool = False,
    ) -> None:
        super().__init__(num_draft_tokens)
        check_options("mjsd", beams=beams, threshold=threshold, joint_law=joint_law)
        self.draft_rows = max(1, beams * (num_draft_tokens - 1))  # all beams, no shared rows; the last tokens are not computed
        self._beams, self._threshold = beams, threshold
        self._joint_law = cast(Literal["raw", "warped"], joint_law)
        self._do_sample = do_sample

    def draft(self, requests: Sequence[Request], depths: Sequence[int], budgets: Sequence[int]) -> list[DraftTree]:
        """See ``ModelDrafter``."""
        from outrider.decoding.drafters.with_model.beam import beam_search
        from outrider.decoding.verify.rules import MjsdRule

        score = self._raw_score if self._joint_law == "raw" else self._warped_score
        noise = self.distributions.noise if self._do_sample else None
        beams = beam_search(self.model, requests, depths, self._beams, score, SOURCE, noise)
        trees = [DraftTree.chain(request.root, beam.tokens, SOURCE) for request, beam in zip(requests, beams, strict=True)]
        for tree, beam in zip(trees, beams, strict=True):
            tree.rule = MjsdRule(beam.logprobs, self._threshold, self._joint_law)
        return trees

    def _raw_score(self, request: Request, chains: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        import torch

        from outrider.decoding.drafters.with_model.beam import raw_score

        if request.params.alters_logits:
            rows = [self.distributions.altered(request, chain, row) for chain, row in zip(chains, logits, strict=True)]
            logits = torch.stack(rows)
        return raw_score(request, chains, logits)

    def _warped_score(self, request: Request, chains: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        import torch

        rows = [self.distributions.warped(request, chain, row) for chain, row in zip(chains, logits, strict=True)]
        return torch.from_numpy(np.stack(rows)).log()
