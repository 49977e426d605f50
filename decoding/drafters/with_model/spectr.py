"""Strategy ``spectr`` (SpecTr): several sequences drawn independently from a small model, verified together."""

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


class SpectrDrafter(ModelDrafter):
    """``sequences`` continuations of ``num_draft_tokens``, drawn independently (arXiv 2310.15141, sections 4 and 5).

    Sequences with a common prefix share rows of one tree. They are verified by ``KSeqRule``: the output has exactly the target's
    distribution, but differs from plain decoding with the same seed, except for greedy requests, whose sequences are all equal.
    With a small budget fewer sequences are drafted, at last a single shorter one.

    Args:
        num_draft_tokens: length of a sequence, at least 1.
        sequences: at least 1.
    """

    own_rules = True

    def __init__(self, num_draft_tokens: int = 4, sequences: int = 4) -> None:
        super().__init__(num_draft_tokens)
        check_options("spectr", sequences=sequences)
        self._sequences = sequences
        self.draft_rows = self.published_rows = sequences * num_draft_tokens  # all sequences without shared rows

    def draft(self, requests: Sequence[Request], depths: Sequence[int], budgets: Sequence[int]) -> list[DraftTree]:
        """See ``ModelDrafter``. All sequences of a request have the same length: none is cut at an end token."""
        from outrider.decoding.verify.rules import KSeqRule

        counts = [
            # Greedy sequences are all equal.
            1 if request.params.greedy else max(1, min(self._sequences, budget // depth))
            for request, depth, budget in zip(requests, depths, budgets, strict=True)
        ]
        drafts = [_Sequences(request, count) for request, count in zip(requests, counts, strict=True)]
        for level in range(max(depths)):
            active = [at for at, depth in enumerate(depths) if level < depth]
            found = self.model.tree_logits([requests[at] for at in active], [drafts[at].tree for at in active])
            for at, logits in zip(active, found, strict=True):
                self._extend(drafts[at], logits)
        for draft in drafts:
            if not draft.request.params.greedy:
                draft.tree.rule = KSeqRule(draft.tokens, draft.rows, draft.probs)
        return [draft.tree for draft in drafts]

    def _extend(self, draft: _Sequences, logits: torch.Tensor) -> None:
        """Draw the next token of each sequence from the [rows, vocab] logits of its tree."""
        request, drawn = draft.request, []
        for number, tokens in enumerate(draft.tokens):
            row = draft.rows[number][-1] if tokens else 0
            if row not in draft.probs:
                draft.probs[row] = self.distributions.warped(request, tokens, logits[row])
            drawn.append(self.distributions.pick(request, len(tokens), draft.probs[row], number))
        draft.extend(drawn)


class _Sequences:
    """Growing sequences of one request, and their tree. Rows keep their numbers while it grows."""

    def __init__(self, request: Request, count: int) -> None:
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.rows: list[list[int]] = [[] for _ in range(count)]  # tree rows by sequence and depth
        self.probs: dict[int, Float64Array] = {}  # by row: distribution of the tokens below it
        self.tree = DraftTree.chain(request.root, ())
        self._children: dict[tuple[int, int], int] = {}

    def extend(self, drawn: Sequence[int]) -> None:
        tokens, parents = self.tree.tokens.tolist(), self.tree.parents.tolist()
        for number, token in enumerate(drawn):
            parent = self.rows[number][-1] if self.rows[number] else 0
            row = self._children.setdefault((parent, token), len(tokens))
            if row == len(tokens):
                tokens.append(token)
                parents.append(parent)
            self.tokens[number].append(token)
            self.rows[number].append(row)
        self.tree = DraftTree.of(tokens, parents, SOURCE)
