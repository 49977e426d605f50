"""Interface of a small model that drafts for the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from decoding.request import Request
from decoding.tree import DraftTree

if TYPE_CHECKING:
    import torch  # only where there are models: a strategy's options are checked without it


class DraftModel(Protocol):
    """A second, smaller causal language model over the same tokens, with KV of its own in the slots of the requests.

    What it has of a request is known by the tokens it was computed from, so that refused drafts, preemptions and slots that
    change hands need no word to it: the next call computes what is missing.

    Example: the request holds 10 tokens, the draft model computed 9 of them and drafted 4 more, of which it computed 3. The
    target accepts all 4 and adds one: of 15 tokens the draft model has 12, and the next call computes 3 rows.
    """

    vocab_size: int  # of the target: logits have as many entries, -inf where the draft model has no token
    max_model_len: int  # tokens of a sequence, its draft included

    def catch_up(self, requests: Sequence[Request]) -> list[bool]:
        """Whether each request can be drafted for now.

        One that lacks more than fits into a step is computed in part, and is asked for again in a later step; it is decoded
        plainly until then, and so is one that is longer than the draft model's context.

        Args:
            requests: with slots.
        """
        ...

    def next_logits(self, requests: Sequence[Request], chains: Sequence[Sequence[int]]) -> torch.Tensor:
        """[n, vocab] what the draft model says after each request's tokens and its chain: one forward for all.

        Args:
            requests: at least one, all of them ready (see ``catch_up``).
            chains: drafted tokens behind each request's own. What was computed of a chain before is not computed again.
        """
        ...

    def tree_logits(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """[len(tree), vocab] of each request, what the draft model says after each row of its tree: one forward for all.

        Args:
            requests: at least one, all of them ready (see ``catch_up``).
            trees: below each request's last token. Rows are computed in each call; of the next one, those first ones of which
                each continues the one before it need not be.
        """
        ...
