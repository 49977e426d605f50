"""Membership of a node's replicas: a deployment that numbers them and tells each who the others are.

Only addresses and numbers are kept, for as long as they are repeated: an actor that is started anew knows everything a second
later, and everybody keeps the number that it had.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.lookahead.link import Address
from cluster.serving.handles import for_threads

logger = logging.getLogger(__name__)

JOIN_PERIOD_S = 1.0
FORGET_S = 5.0  # who has said nothing for so long is gone
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A replica's number among those of its node, and where the others are."""

    rank: int
    peers: dict[int, Address]  # by rank


@dataclass(slots=True)
class _Member:
    rank: int
    seen_s: float


@dataclass(slots=True)
class NodeMembership:
    """Who is there, by node. Numbers are small and stable: the lowest free one when somebody comes, kept while it stays."""

    _nodes: dict[str, dict[Address, _Member]] = field(default_factory=dict)

    def join(self, node: str, address: Address, rank: int | None, now_s: float) -> NodePlace:
        """Enters a replica, or says that it is still there.

        Example: the first replica of a node is rank 0 without peers, the second rank 1 with ``{0: address of the first}``.

        Args:
            node: where it runs, and with what; replicas of different nodes do not meet.
            address: where it listens. A replica that is started anew has another one.
            rank: the number that it had, which it keeps if nobody else has it (the actor may have forgotten).
            now_s: of a clock that only goes forward.
        """
        self._forget(now_s)
        members = self._nodes.setdefault(node, {})
        member = members.get(address)
        if member is None:
            taken = {other.rank for other in members.values()}
            if rank is None or rank in taken:
                rank = min(set(range(len(taken) + 1)) - taken)
            member = members[address] = _Member(rank, now_s)
        member.seen_s = now_s
        peers = {other.rank: where for where, other in sorted(members.items()) if where != address}
        return NodePlace(member.rank, peers)

    def _forget(self, now_s: float) -> None:
        for node, members in list(self._nodes.items()):
            kept = {address: member for address, member in members.items() if now_s - member.seen_s <= FORGET_S}
            self._nodes[node] = kept
            if not kept:
                del self._nodes[node]


class MembershipActor:
    """A ``NodeMembership`` as an actor."""

    def __init__(self) -> None:
        self._membership = NodeMembership()

    async def join(self, node: str, address: Address, rank: int | None) -> NodePlace:
        """See ``NodeMembership.join``."""
        return self._membership.join(node, address, rank, time.monotonic())


@dataclass(frozen=True, slots=True)
class MembershipOptions:
    """What a replica needs in order to meet the others of its node."""

    actor: Any  # of ``MembershipActor``: as it is bound, and a handle when it arrives
    world_size: int  # the most ranks of a group


class MembershipClient:
    """Keeps a replica among the members and passes on who they are, in a thread of its own."""

    def __init__(
        self,
        membership: DeploymentHandle[Any],
        version: str,
        address: Address,
        meet: Callable[[int, dict[int, Address]], None],
    ) -> None:
        """
        Args:
            membership: of ``MembershipActor``.
            version: of what is served: replicas of different ones do not meet.
            address: where this replica listens for its peers.
            meet: is told the own rank and the peers' addresses, again and again.
        """
        self._membership, self._address, self._meet = for_threads(membership), address, meet
        self._node = f"{ray.get_runtime_context().get_node_id()} {version}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Says nothing any more; the actor forgets the replica. Harmless when repeated."""
        self._over.set()

    def _run(self) -> None:
        rank: int | None = None
        missing = False
        while not self._over.wait(0.0 if rank is None and not missing else JOIN_PERIOD_S):
            try:
                place: NodePlace = self._membership.join.remote(self._node, self._address, rank).result(timeout_s=_JOIN_TIMEOUT_S)
            except (RayError, RayServeException, TimeoutError) as error:
                if not missing:  # those who know each other go on meanwhile
                    logger.warning("the actor of the membership does not answer (%s); asking again", type(error).__name__)
                missing = True
                continue
            missing, rank = False, place.rank
            self._meet(place.rank, place.peers)
