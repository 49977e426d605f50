"""Interface of a small model that drafts for the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree

if TYPE_CHECKING:
    import torch  # needed only with models: a strategy's options are checked without torch


class DraftModel(Protocol):
    """Second, smaller causal language model over the same tokens, with its own KV in the requests' slots.

    It tracks each request by the tokens that it has computed, so that it needs no notification of rejected drafts, preemptions or
    reassigned slots: the next call computes the missing tokens.

    Example: the request holds 10 tokens, the draft model computed 9 of them and drafted 4 more, of which it computed 3. The
    target accepts all 4 and adds one: of 15 tokens the draft model has 12, and the next call computes 3 rows.
    """

    vocab_size: int  # the target's, and the size of the logits: -inf for tokens that the draft model lacks
    max_model_len: int  # maximum tokens of a sequence, its draft included

    def catch_up(self, requests: Sequence[Request]) -> list[bool]:
        """Return whether each request can be drafted for now.

        A request that lacks more than one step's tokens is computed in part, decoded plainly, and continued in a later step. A
        request longer than the draft model's context is decoded plainly.
        """
        ...

    def next_logits(self, requests: Sequence[Request], chains: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [n, vocab] logits after each ready request's tokens and its chain, with one forward for all."""
        ...

    def tree_logits(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """Return [len(tree), vocab] logits after each row of each ready request's tree, with one forward for all.

        Each call computes all rows again, except a leading chain computed before.
        """
        ...
