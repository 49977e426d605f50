"""Known outputs that requests follow (LLMA, arXiv 2304.04487, section 3.2), shared by guided engines and simulations.

This module loads no library of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decoding.request import Acceptance, Request
from decoding.tree import DraftTree
from decoding.verify.exact import verify_exact


class KnownOutputs(dict[str, Sequence[int]]):
    """Outputs to follow by request id; set before a request is added."""

    def rest(self, request: Request) -> Sequence[int]:
        """Return the tokens of a request that are still to come."""
        return self[request.request_id][request.num_output :]

    def accept(self, request: Request, tree: DraftTree) -> Acceptance:
        """Verify a draft tree against the known output; ``decoding.replay.known_rows`` tells a drafter the result."""
        upcoming: Iterator[int] = iter(self.rest(request))
        return verify_exact(tree, lambda row: next(upcoming), request.remaining, frozenset())
