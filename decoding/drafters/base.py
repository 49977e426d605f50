"""What a drafter is, and the names of those who propose rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from decoding.request import Acceptance, Request
from decoding.tree import DraftTree, Int32Array

# ``DraftTree.sources`` holds indices into this tuple. Append only: they are kept in records.
SOURCES = ("root", "prompt_lookup", "llma")


class Drafter(Protocol):
    """Guesses continuations. It may be wrong in any way without changing the output, and never changes a request."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        """One tree per request, in order.

        Args:
            requests: requests whose next tokens are wanted; the root of each tree is the request's last committed token.
            budgets: the most rows to draft for each, the root not counted; 0 asks for the root alone.
        """
        ...

    def observe(self, request: Request, tree: DraftTree, target_ids: Int32Array | None, acceptance: Acceptance) -> None:
        """What a step taught, after the emitted tokens were committed.

        Args:
            request: the request as it is now.
            tree: the tree that was computed.
            target_ids: [n] the target's greedy token after each row, or None where rows were chosen one by one (sampling).
            acceptance: what was kept. It may hold tokens beyond the request's end, which were not committed.
        """
        ...

    def finish(self, request_id: str) -> None:
        """Forgets a request. Called once for each request, whatever became of it."""
        ...
