"""Buddy allocation of ranks to leaders, for replicas of one node that share their work.

Every replica computes the same result from the set of busy ranks and the set of present ranks, so no coordinator is needed.
"""

from __future__ import annotations

from collections.abc import Collection


def block(rank: int, busy: Collection[int], world: int) -> range:
    """Return the largest aligned block of ranks (below ``world``) that contains ``rank`` and no other busy rank.

    A block is ``size`` ranks from a multiple of ``size`` on, clipped to the world; ``size`` is a power of two. This is buddy
    allocation (Knowlton, CACM 8(10), 1965).

    Example: of 8 ranks of which 0, 4 and 6 are busy, 0 has ``range(0, 4)``, 4 has ``range(4, 6)`` and 6 has ``range(6, 8)``.
    """
    assert 0 <= rank < world, (rank, world)
    others = [other for other in busy if other != rank]
    size = 1
    while size < world:
        wider = rank // (2 * size)
        if any(other // (2 * size) == wider for other in others):
            break
        size *= 2
    first = rank // size * size
    return range(first, min(first + size, world))


def share_ranks(busy: Collection[int], present: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each busy rank's group, ascending. Every present rank is in exactly one group.

    Each busy rank gets its ``block``. Idle ranks outside all blocks go one by one to the smallest group (ties: lowest rank).
    Numbers missing in ``present`` are lost ranks; they widen no group.

    Example: of 4 ranks 0 and 1 are busy, and neither block is wider than one rank: ``{0: (0, 2), 1: (1, 3)}``.
    """
    assert set(busy) <= set(present), (busy, present)
    if not busy:
        return {}
    world = max(present) + 1
    groups = {rank: [other for other in block(rank, busy, world) if other in present] for rank in sorted(busy)}
    taken = {rank for group in groups.values() for rank in group}
    for rank in sorted(set(present) - taken):
        min(groups.values(), key=len).append(rank)
    return {rank: tuple(sorted(group)) for rank, group in groups.items()}
