"""Elastic groups: the replicas of a node serve one request together, or several requests separately, depending on the load."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from outrider.actors.description import GroupState
from outrider.actors.lookahead.executor import LookaheadParallelExecutor
from outrider.actors.lookahead.link import LINK_ERRORS, Address, Link, connect
from outrider.actors.lookahead.messages import Heartbeat
from outrider.actors.lookahead.rank import RankServer
from outrider.actors.placement.pinning import allowed_cores, own_cores, pin_thread
from outrider.actors.ranks import GroupError, Ranks
from outrider.configs.slices import ParallelismOptions
from outrider.engine.emulation.device import local_executor
from outrider.engine.errors import DeviceError
from outrider.engine.executor import Executor
from outrider.engine.forward.runner import ModelRunner

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # a replica without own requests follows others after this time: the next request often arrives soon
REFILL_ROWS = 128  # most rows of one message that refills a rank, so that a request arriving there does not wait long
_HOST = "127.0.0.1"  # all replicas of a group are on one node
_TEND_S = 0.25
_AWAY_S = 0.1  # before a rank that follows another leader is asked again
_LOST_S = 5.0  # before a rank that failed in a step is asked again
# Backoff: a replica that was suspended finds all connections of that time when it continues.
_REDIAL_S, _LONGEST_REDIAL_S = 0.5, 4.0


class Peer:
    """Listener to the beats of one replica's ``RankServer``, in a thread that reconnects when they end."""

    def __init__(self, address: Address, secret: bytes, timeout_s: float, changed: Callable[[], None]) -> None:
        """Start the thread. A peer without a sign of life for ``timeout_s`` is absent. ``changed``: presence or load changed."""
        self.address, self._secret, self._timeout_s, self._changed = address, secret, timeout_s, changed
        self._busy: bool | None = None  # None: absent
        self._link: Link | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=f"peer-{address[1]}", daemon=True)
        self._thread.start()

    @property
    def present(self) -> bool:
        """Return whether the peer sends signs of life."""
        return self._busy is not None

    @property
    def busy(self) -> bool:
        """Return whether the peer last reported own requests."""
        return self._busy is True

    def dial(self) -> Link:
        """Return a new link, over which the peer can be led. Raises one of ``LINK_ERRORS`` if it does not answer."""
        return connect(self.address, self._secret, self._timeout_s)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._over.set()
        if self._link is not None:
            self._link.end()

    def _listen(self) -> None:
        pause_s = _REDIAL_S
        while not self._over.is_set():
            try:
                self._link = self.dial()
                if not self._over.is_set():  # otherwise `close` was called before the link existed
                    self._hear(self._link)
            except LINK_ERRORS as error:
                if self.present and not self._over.is_set():
                    logger.warning("lost the replica at %s:%d: %s: %s", *self.address, type(error).__name__, error)
            finally:
                if self._link is not None:
                    self._link.close()
            pause_s = _REDIAL_S if self.present else min(2.0 * pause_s, _LONGEST_REDIAL_S)
            self._set(None)
            self._over.wait(pause_s)

    def _hear(self, link: Link) -> None:
        while (message := link.receive(self._timeout_s)) is not None:
            if isinstance(message, Heartbeat):
                self._set(message.busy)
        raise TimeoutError(f"nothing received for {self._timeout_s:g} s")

    def _set(self, busy: bool | None) -> None:
        if busy is not self._busy:
            self._busy = busy
            self._changed()


@dataclass(slots=True)
class Member:
    """Peer, and whether this replica leads it. Used by the supervisor's thread of ``ElasticGroup`` only."""

    peer: Peer
    number: int  # the executor's number for it; its first rank, if that was free
    link: Link | None = None  # set while this replica leads it
    leaving: bool = False  # removal requested; a step may still include it
    not_before_s: float = 0.0  # earliest time of the next attempt


class ElasticGroup(Ranks):
    """``Ranks`` of one of several replicas; each leads its own requests, and follows others while it has none.

    A replica with requests is *busy*. All replicas learn which ones are busy from the beats of ``RankServer`` and compute the
    same groups (``share_ranks``) without a coordinator. Between two steps each busy replica adds the ranks of its group and
    removes the others. A replica that gets requests turns its leader away and waits for at most one step. If two leaders ask for
    the same rank, the later one gets it. Each rank's part of a step is a valid step by itself, so no token is lost or recomputed.

    Example: replicas 0 to 3, one request at 2: it has ranks 0 1 2 3. Another comes to 0: that one has 0 1, the first 2 3. When it
    has ended for half a second, the first has all four again.
    """

    # A request's width follows the load while it runs: with a fixed one, the next request would wait for a wide one.
    # `devices` stays None: a device computes for changing leaders, so its energy cannot be attributed to one replica.

    def __init__(self, options: ParallelismOptions, secret: bytes, world_size: int) -> None:
        """Store the options. Raises GroupError if threads are to be pinned and the system does not support that.

        ``world_size`` is the most ranks of a group. A replica counts as busy for ``IDLE_S`` after its last request.
        """
        self.world_size = world_size
        self._options, self._secret = options, secret
        self._executor: LookaheadParallelExecutor | None = None
        self._server: RankServer | None = None
        self._cores = allowed_cores() if options.pin_threads else ()
        self._pinned: int | None = None  # rank whose cores the engine's thread is pinned to
        self._turn = threading.Lock()  # guards the four fields below
        self._busy = False
        self._idle_since: float | None = None
        self._rank = 0
        self._known: dict[int, Address] = {}  # by rank; replaced, never mutated
        self._members: dict[Address, Member] = {}  # replaced, never mutated; written by the supervisor's thread only
        self._wake, self._over = threading.Event(), threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="elastic", daemon=True)

    @property
    def address(self) -> Address:
        """Return the address at which other replicas reach this one. Available after ``executor``."""
        assert self._server is not None
        return self._server.address

    def executor(self, runner: ModelRunner) -> Executor:
        """See ``Ranks``. The same model and slots also serve as a rank of other replicas, one at a time."""
        self._executor = LookaheadParallelExecutor(local_executor(runner), self._options, REFILL_ROWS)
        self._server = RankServer(local_executor(runner), self._secret, self._options, _HOST, self._pin, self._fail)
        return self._executor

    def start(self) -> None:
        """See ``Ranks``. Returns at once: the group is this replica alone until ``meet`` reports others."""
        self._supervisor.start()

    def update_peers(self, own_rank: int, peers: dict[int, Address]) -> None:
        """Update this replica's rank and its peers' addresses by rank. Peers that are not listed are dropped."""
        assert own_rank not in peers, (own_rank, peers)
        with self._turn:
            self._rank, self._known = own_rank, dict(peers)
        self._wake.set()

    def occupied(self, busy: bool) -> None:
        """See ``Ranks``. Returns when no step of another leader is running."""
        assert self._server is not None
        if busy and self._pinned != self._rank:
            self._pinned = self._rank
            self._pin()
        with self._turn:
            self._idle_since = None if busy else time.monotonic()
            begins, self._busy = busy and not self._busy, self._busy or busy
        if begins:  # without the lock: this waits for a leader's step, and `state` needs the lock
            self._server.attach(True)
        self._wake.set()

    def state(self) -> GroupState | None:
        """See ``Ranks``. Lists the node's replicas, whichever leader they follow; those that do not answer are missing."""
        if self._executor is None:
            return None
        own, ranks = self._view()
        inner = self._executor.state(1 + len(ranks))
        ready = (own, *(rank for rank, member in ranks.items() if member is not None and member.peer.present))
        numbers = {member.number: rank for rank, member in ranks.items() if member is not None}
        refilling = tuple(sorted(numbers[number] for number in inner.refilling if number in numbers))
        return dataclasses.replace(inner, ready=tuple(sorted(ready)), refilling=refilling, width=len(inner.ready))

    def close(self) -> None:
        """See ``Ranks``."""
        self._over.set()
        self._wake.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        if self._server is not None:
            self._server.close()
        for member in self._members.values():
            member.peer.close()
            if member.link is not None:
                member.link.close()

    def _fail(self, error: DeviceError) -> None:
        if self.device_failed is not None:
            self.device_failed(error)

    def _pin(self) -> None:
        if not self._cores:
            return
        try:
            pin_thread(own_cores(self._rank, torch.get_num_threads(), self._cores))
        except GroupError as error:  # more replicas than cores: continue without pinning
            logger.warning("threads are not pinned: %s", error)

    def _view(self) -> tuple[int, dict[int, Member | None]]:
        """Return this replica's rank, and the other members by rank; None for one that the supervisor has not added yet."""
        with self._turn:
            own, known = self._rank, self._known
        members = self._members
        return own, {rank: members.get(address) for rank, address in known.items()}

    # ---- below: the supervisor's thread ---------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        assert self._executor is not None
        while not self._over.is_set():
            pause_s = _TEND_S
            try:
                pause_s = self._let_go()
                self._meet_known()
                self._regroup()
                self._executor.check_liveness()
                self._dismiss()
            except Exception:  # keep the thread alive: the next round may succeed
                logger.exception("updating the group failed, retrying")
            self._wake.wait(pause_s)
            self._wake.clear()

    def _let_go(self) -> float:
        """Free this replica for other leaders after ``IDLE_S`` without requests. Return seconds until the next check."""
        assert self._server is not None
        with self._turn:
            if not self._busy or self._idle_since is None:
                return _TEND_S
            left_s = self._idle_since + IDLE_S - time.monotonic()
            if left_s > 0.0:
                return min(_TEND_S, left_s)
            self._busy = False
            self._server.attach(False)
            return _TEND_S

    def _meet_known(self) -> None:
        assert self._executor is not None
        with self._turn:
            ranks = self._known
        known = set(ranks.values())
        if known == self._members.keys():
            return
        # A removed replica that is still in the group stays until a later round.
        members = {address: member for address, member in self._members.items() if address in known or member.link is not None}
        taken = {member.number for member in members.values()}
        for rank, address in ranks.items():
            if address not in members:
                number = min(set(range(rank, rank + len(taken) + 1)) - taken)
                taken.add(number)
                members[address] = Member(Peer(address, self._secret, self._options.rank_timeout_s, self._wake.set), number)
        former, self._members = self._members, members
        for address in former.keys() - members.keys():
            former[address].peer.close()

    def _regroup(self) -> None:
        """Add the ranks of this replica's group and remove the others, at the next step."""
        assert self._executor is not None
        group = self._group()
        for member in self._members.values():
            if member.link is None and member.number in group and time.monotonic() >= member.not_before_s:
                try:
                    member.link = member.peer.dial()
                except LINK_ERRORS as error:
                    logger.info(
                        "cannot connect to the replica at %s:%d as a rank: %s", *member.peer.address, type(error).__name__
                    )
                    member.not_before_s = time.monotonic() + _LOST_S
                    continue
                self._executor.add_rank(member.number, member.link)
            elif member.link is not None and not member.leaving and member.number not in group:
                member.leaving = True
                self._executor.remove_rank(member.number)

    def _group(self) -> set[int]:
        """Return the executor's numbers of the ranks that should share this replica's steps."""
        own, ranks = self._view()
        with self._turn:
            if not self._busy:
                return set()
        there = {rank: member for rank, member in ranks.items() if member is not None and member.peer.present}
        busy = {own, *(rank for rank, member in there.items() if member.peer.busy)}
        group = share_ranks(busy, {own, *there})[own]
        return {there[rank].number for rank in [rank for rank in group if rank != own][: self.world_size - 1]}

    def _dismiss(self) -> None:
        assert self._executor is not None
        led = {member.number: member for member in self._members.values() if member.link is not None}
        for lost in self._executor.take_lost():
            if lost.rank in led:
                self._executor.remove_rank(lost.rank)
                led[lost.rank].leaving = True
                led[lost.rank].not_before_s = lost.noticed_s + (_AWAY_S if lost.detached else _LOST_S)
        inner = self._executor.state(1)
        seated = {*inner.ready[1:], *inner.refilling}  # the first one, 0, is this replica
        for member in led.values():
            # A link is closed only when no step can be waiting on it.
            if member.leaving and member.link is not None and member.number not in seated:
                member.link.close()
                member.link, member.leaving = None, False


def block(rank: int, busy: Collection[int], world: int) -> range:
    """Return the largest aligned block of ranks (below ``world``) that contains ``rank`` and no other busy rank.

    Buddy allocation (Knowlton, CACM 8(10), 1965): a block is ``2**n`` ranks from a multiple of ``2**n`` on, clipped to the world.
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

    Each busy rank gets its ``block``, and idle ranks outside all blocks go one by one to the smallest group (ties: lowest rank).
    Example: of 4 ranks 0 and 1 are busy, and neither block is wider than one rank: ``{0: (0, 2), 1: (1, 3)}``.
    """
    # Numbers missing in `present` are lost ranks; they widen no group.
    assert set(busy) <= set(present), (busy, present)
    if not busy:
        return {}
    world = max(present) + 1
    groups = {rank: [other for other in block(rank, busy, world) if other in present] for rank in sorted(busy)}
    taken = {rank for group in groups.values() for rank in group}
    for rank in sorted(set(present) - taken):
        min(groups.values(), key=len).append(rank)
    return {rank: tuple(sorted(group)) for rank, group in groups.items()}
