"""Membership of a node's replicas: an actor that assigns ranks and sends each replica the addresses of the others."""
# State lasts only while replicas repeat it: a restarted actor knows everything a second later, and replicas keep their ranks.

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

from outrider.actors.lookahead.link import Address
from outrider.cluster.serving.handles import for_threads

logger = logging.getLogger(__name__)

JOIN_PERIOD_S = 1.0
FORGET_S = 5.0  # seconds of silence after which a replica is forgotten
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Rank of a replica on its node, and its peers' addresses."""

    rank: int
    peers: dict[int, Address]  # by rank


@dataclass(slots=True)
class _Member:
    rank: int
    seen_s: float


@dataclass(slots=True)
class NodeMembership:
    """Replicas by node. A new replica gets the lowest free rank and keeps it while it stays."""

    _nodes: dict[str, dict[Address, _Member]] = field(default_factory=dict)

    def join(self, node: str, address: Address, rank: int | None, now_s: float) -> NodeAddress:
        """Add a replica, or renew its membership: the first is rank 0 without peers, the second rank 1 with the first as peer.

        Args:
            node: node and model version; only replicas with the same value meet.
            address: address for peers. A restarted replica has a new one.
            rank: its previous rank, kept if free (the actor may have been restarted).
            now_s: time of a monotonic clock.
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
        return NodeAddress(member.rank, peers)

    def _forget(self, now_s: float) -> None:
        for node, members in list(self._nodes.items()):
            kept = {address: member for address, member in members.items() if now_s - member.seen_s <= FORGET_S}
            self._nodes[node] = kept
            if not kept:
                del self._nodes[node]


class MembershipActor:
    """``NodeMembership`` as an actor."""

    def __init__(self) -> None:
        self._membership = NodeMembership()

    async def join(self, node: str, address: Address, rank: int | None) -> NodeAddress:
        """See ``NodeMembership.join``."""
        return self._membership.join(node, address, rank, time.monotonic())


@dataclass(frozen=True, slots=True)
class MembershipOptions:
    """Options by which a replica finds the others of its node."""

    actor: Any  # bound ``MembershipActor``, which arrives as a handle
    world_size: int  # most ranks of a group


class MembershipClient:
    """Thread that keeps a replica's membership alive and passes on its peers."""

    def __init__(
        self,
        membership: DeploymentHandle[Any],
        version: str,
        address: Address,
        meet: Callable[[int, dict[int, Address]], None],
    ) -> None:
        """Start the thread, which calls ``meet`` with rank and peers after each renewal. Only equal versions meet."""
        self._membership, self._address, self._meet = for_threads(membership), address, meet
        self._node = f"{ray.get_runtime_context().get_node_id()} {version}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing; the actor then forgets the replica. May be called repeatedly."""
        self._over.set()

    def _run(self) -> None:
        rank: int | None = None
        missing = False
        while not self._over.wait(0.0 if rank is None and not missing else JOIN_PERIOD_S):
            try:
                place: NodeAddress = self._membership.join.remote(self._node, self._address, rank).result(
                    timeout_s=_JOIN_TIMEOUT_S
                )
            except (RayError, RayServeException, TimeoutError) as error:
                if not missing:  # known peers stay in touch meanwhile
                    logger.warning("the membership actor does not answer (%s); retrying", type(error).__name__)
                missing = True
                continue
            missing, rank = False, place.rank
            self._meet(place.rank, place.peers)
