"""Merging of what the ranks of a group answered for their parts of one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.lookahead.rank_state import Held
from actors.lookahead.wire import OutcomeMessage
from decoding.drafters.base import TargetRows
from decoding.request import Acceptance, TokenLogprob
from decoding.tree import DraftTree, Int32Array, Part
from engine.executor import Outcome


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's part of a tree, and what it came to."""

    part: Part
    held: Held  # the request, as the rank holds it
    rows: tuple[int, ...]  # accepted, of the part
    next_token: int
    ids: Int32Array  # [n] the likeliest token below each row of the part
    ranked: Int32Array | None  # [n, top_k]
    logprobs: tuple[TokenLogprob, ...] | None

    @classmethod
    def of_leader(cls, part: Part, held: Held, outcome: Outcome, ranked: Int32Array | None) -> RankShare:
        """What the leader computed itself."""
        acceptance = outcome.acceptance
        return cls(part, held, acceptance.rows, acceptance.next_token, outcome.target.ids, ranked, outcome.logprobs)

    @classmethod
    def of_rank(cls, part: Part, held: Held, told: OutcomeMessage) -> RankShare:
        """What another rank says."""
        return cls(part, held, told.rows, told.next_token, told.ids, told.ranked, told.logprobs)

    def tokens(self) -> list[int]:
        """What the rank's walk emits."""
        return [*self.part.tree.tokens[list(self.rows)].tolist(), self.next_token]


def merge(tree: DraftTree, end: int, shares: Sequence[RankShare]) -> tuple[Outcome, int]:
    """The longest walk, the lowest rank's among equals, and what the target said below all rows.

    Each rank counts as computed what its own walk and the longest have in common.

    Args:
        tree: that was partitioned.
        end: committed tokens.
        shares: of the ranks that answered, rank 0 first. The outcome's tree is without the rows that none of them computed.

    Returns:
        The outcome, and how many walks were left out because their first token is not rank 0's.
    """
    walks = [share.tokens() for share in shares]
    same = [at for at, walk in enumerate(walks) if walk[0] == walks[0][0]]
    best = max(same, key=lambda at: (len(walks[at]), -at))
    winner, emitted = shares[best], walks[best]
    for share, walk in zip(shares, walks, strict=True):
        common = 0
        while common < len(share.rows) and common < len(winner.rows) and walk[common] == emitted[common]:
            common += 1
        share.held.computed = end + common
    kept = np.zeros(len(tree), np.bool_)
    for share in shares:
        kept[share.part.rows] = True
    places = None
    if not kept.all():
        tree = tree.take(np.flatnonzero(kept).astype(np.int32))
        places = np.cumsum(kept, dtype=np.int32) - 1
    target = _target(len(tree), shares, places)
    rows = winner.part.rows[list(winner.rows)]
    accepted = tuple((rows if places is None else places[rows]).tolist())
    return Outcome(tree, Acceptance(accepted, winner.next_token), target, winner.logprobs), len(shares) - len(same)


def _target(count: int, shares: Sequence[RankShare], places: Int32Array | None) -> TargetRows:
    """What the target said below each row; where several ranks computed one, the lowest rank has the word."""
    ids = np.empty(count, np.int32)
    width = 0 if shares[0].ranked is None else shares[0].ranked.shape[1]
    ranked = np.empty((count, width), np.int32) if width else None
    for share in reversed(shares):
        rows = share.part.rows if places is None else places[share.part.rows]
        ids[rows] = share.ids
        if ranked is not None:
            assert share.ranked is not None
            ranked[rows] = share.ranked
    return TargetRows(ids, None, ranked)
