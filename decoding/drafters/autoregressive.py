"""Plain decoding: the tree of one row."""

from __future__ import annotations

from collections.abc import Sequence

from decoding.request import Acceptance, Request
from decoding.tree import DraftTree, Int32Array


class AutoregressiveDrafter:
    """Drafts nothing, so that every step emits one token: the baseline of all comparisons."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        """The root of each request."""
        return [DraftTree.chain(request.root, ()) for request in requests]

    def observe(self, request: Request, tree: DraftTree, target_ids: Int32Array | None, acceptance: Acceptance) -> None:
        """Learns nothing."""

    def finish(self, request_id: str) -> None:
        """Keeps nothing."""
