"""Merging of the ranks' replies for their parts of one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from outrider.actors.lookahead.messages import OutcomeMessage
from outrider.actors.lookahead.rank_state import RankKVState
from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.request import Acceptance
from outrider.decoding.tree import DraftTree, TreePart
from outrider.engine.executor import VerifyResult


@dataclass(frozen=True, slots=True)
class RankResult:
    """Rank's part of a tree, and its outcome."""

    part: TreePart
    held: RankKVState  # the request as the rank holds it
    said: OutcomeMessage

    def tokens(self) -> list[int]:
        """Return the tokens that the rank's walk emits."""
        walked = self.said.acceptance
        return [*self.part.tree.tokens[list(walked.rows)].tolist(), walked.next_token]


def merge_results(tree: DraftTree, end: int, shares: Sequence[RankResult]) -> tuple[VerifyResult, int]:
    """Return the outcome of the longest walk (ties: lowest rank), and the number of walks dropped as different from rank 0's.

    ``shares`` are of the ranks that replied, rank 0 first. The outcome has the target's tokens for all computed rows and lacks
    the others. Each rank's computed count becomes ``end`` plus the common prefix of its walk and the longest one.
    """
    walks = [share.tokens() for share in shares]
    same = [at for at, walk in enumerate(walks) if walk[0] == walks[0][0]]
    best = max(same, key=lambda at: (len(walks[at]), -at))
    winner, longest = shares[best].said, walks[best]
    for share, walk in zip(shares, walks, strict=True):
        same_drafts = takewhile(lambda pair: pair[0] == pair[1], zip(walk[:-1], longest[:-1], strict=False))
        share.held.computed = end + sum(1 for _ in same_drafts)
    kept = np.zeros(len(tree), np.bool_)
    for share in shares:
        kept[share.part.rows] = True
    places = None
    if not kept.all():
        tree = tree.take(np.flatnonzero(kept).astype(np.int32))
        places = np.cumsum(kept, dtype=np.int32) - 1
    target = _target(len(tree), shares, places)
    rows = shares[best].part.rows[list(winner.acceptance.rows)]
    accepted = tuple((rows if places is None else places[rows]).tolist())
    return VerifyResult(tree, Acceptance(accepted, winner.acceptance.next_token), target, winner.logprobs), len(shares) - len(
        same
    )


def _target(count: int, shares: Sequence[RankResult], places: Int32Array | None) -> TargetRows:
    """Return the target's tokens for each row. If several ranks computed a row, the lowest rank's result is used."""
    ids = np.empty(count, np.int32)
    own = shares[0].said.ranked
    ranked = None if own is None else np.empty((count, own.shape[1]), np.int32)
    for share in reversed(shares):
        rows = share.part.rows if places is None else places[share.part.rows]
        ids[rows] = share.said.ids
        if ranked is not None:
            assert share.said.ranked is not None
            ranked[rows] = share.said.ranked
    return TargetRows(ids, None, ranked)
