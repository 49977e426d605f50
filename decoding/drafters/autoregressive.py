"""Strategy ``autoregressive``: plain decoding, the tree of one row."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree


class AutoregressiveDrafter(Drafter):
    """Drafter that drafts nothing, so that every step emits one token: the baseline of all comparisons."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """Return the root of each request."""
        return [DraftTree.chain(request.root, ()) for request in requests]
