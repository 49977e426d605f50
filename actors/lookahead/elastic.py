"""Groups that follow the load: the replicas of a node serve one request together, and several each on its own."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time

import torch

from actors.description import GroupState
from actors.lookahead.executor import LookaheadParallelExecutor
from actors.lookahead.link import LINK_ERRORS, Address
from actors.lookahead.peer import Member, Peer
from actors.lookahead.rank import RankServer
from actors.placement.blocks import share_ranks
from actors.placement.pinning import allowed_cores, own_cores, pin_thread
from actors.ranks import GroupError, Ranks
from configs.slices import ParallelismOptions
from engine.errors import DeviceError
from engine.executor import Executor, LocalExecutor
from engine.forward.runner import ModelRunner

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # a replica without requests of its own follows others after that: the next request is often close behind
REFILL_ROWS = 128  # most of one message that refills a rank, so that a request that arrives there does not wait long
_TEND_S = 0.25
_AWAY_S = 0.1  # before a rank that follows somebody else is asked again
_LOST_S = 5.0  # before a rank that failed in a step is asked again


class Elastic(Ranks):
    """The ``Ranks`` of one replica of several, each of which leads its own requests and follows others while it has none.

    A replica with requests is *busy*. Everybody hears who is (the beats of ``RankServer``) and computes the same groups from it
    (``share_ranks``); each busy replica takes in the ranks of its group and lets go of the others, between two steps. Nobody
    decides for others: a replica that gets requests of its own turns its leader away at once and waits for one step at most, and
    where two leaders ask for the same rank for a moment, the later one has it. Every rank's part of a step is a whole step, so
    that neither costs a token or computes anything twice.

    A request's width follows the load while it runs. Were it settled when the request is admitted, the next request would wait
    for a wide one to end, and one that was admitted among others would stay narrow when they have ended.

    Example: replicas 0 to 3, one request at 2: it has ranks 0 1 2 3. Another comes to 0: that one has 0 1, the first 2 3. When it
    has ended for half a second, the first has all four again.

    It tells no devices: whose requests a replica computes changes from step to step, so that its counter is nobody's alone.
    """

    def __init__(
        self, options: ParallelismOptions, secret: bytes, world_size: int, host: str = "127.0.0.1", idle_s: float = IDLE_S
    ) -> None:
        """
        Args:
            options: of the groups.
            secret: shared by the replicas.
            world_size: the most ranks of a group.
            host: address to listen at for the others.
            idle_s: a replica counts as busy for so long after its last request.

        Raises:
            GroupError: threads are to be pinned, and this system cannot do that.
        """
        self.world_size = world_size
        self._options, self._secret, self._host, self._idle_s = options, secret, host, idle_s
        self._executor: LookaheadParallelExecutor | None = None
        self._server: RankServer | None = None
        self._cores = allowed_cores() if options.pin_threads else ()
        self._pinned: int | None = None  # the rank whose cores the engine's thread has
        self._turn = threading.Lock()  # of the four fields below
        self._busy = False
        self._idle_since: float | None = None
        self._rank = 0
        self._known: dict[int, Address] = {}  # by rank; replaced, never changed
        self._members: dict[Address, Member] = {}  # replaced, never changed; the supervisor's thread alone does so
        self._wake, self._over = threading.Event(), threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="elastic", daemon=True)

    @property
    def address(self) -> Address:
        """Where the others reach this replica, once ``executor`` was called."""
        assert self._server is not None
        return self._server.address

    def executor(self, runner: ModelRunner) -> Executor:
        """See ``Ranks``. The same model and slots serve as a rank of other replicas, in turn."""
        self._executor = LookaheadParallelExecutor(LocalExecutor(runner), self._options, REFILL_ROWS)
        self._server = RankServer(LocalExecutor(runner), self._secret, self._options, self._host, self._pin, self._fail)
        return self._executor

    def start(self) -> None:
        """See ``Ranks``. Does not wait: the group is this replica alone until ``meet`` tells of others."""
        self._supervisor.start()

    def meet(self, own_rank: int, peers: dict[int, Address]) -> None:
        """Says this replica's number, and where the others are by theirs, as often as that is known; who is not named is gone."""
        assert own_rank not in peers, (own_rank, peers)
        with self._turn:
            self._rank, self._known = own_rank, dict(peers)
        self._wake.set()

    def occupied(self, busy: bool) -> None:
        """See ``Ranks``. Returns when no leader's step is being computed."""
        assert self._server is not None
        if busy and self._pinned != self._rank:
            self._pinned = self._rank
            self._pin()
        with self._turn:
            self._idle_since = None if busy else time.monotonic()
            begins, self._busy = busy and not self._busy, self._busy or busy
        if begins:  # not with the lock held: it may take a leader's step, and `state` is asked meanwhile
            self._server.occupy(True)
        self._wake.set()

    def state(self) -> GroupState | None:
        """See ``Ranks``: the replicas of the node, whomever they follow at the moment. Those that do not answer are missing."""
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
        """Report that the device failed in another leader's step."""
        if self.device_failed is not None:
            self.device_failed(error)

    def _pin(self) -> None:
        """Keeps the calling thread, which computes, on the cores of this replica's number, where that is asked for."""
        if not self._cores:
            return
        try:
            pin_thread(own_cores(self._rank, torch.get_num_threads(), self._cores))
        except GroupError as error:  # more replicas than cores: they serve all the same
            logger.warning("threads are not pinned: %s", error)

    def _view(self) -> tuple[int, dict[int, Member | None]]:
        """The own rank, and the others by rank; None for one that discovery has only just named."""
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
                self._executor.tend()
                self._dismiss()
            except Exception:  # without this thread the group would stay as it is: the next round may do better
                logger.exception("the group could not be made up")
            self._wake.wait(pause_s)
            self._wake.clear()

    def _let_go(self) -> float:
        """Is free for others when there was nothing to do for a while; returns the seconds after which to look again."""
        assert self._server is not None
        with self._turn:
            if not self._busy or self._idle_since is None:
                return _TEND_S
            left_s = self._idle_since + self._idle_s - time.monotonic()
            if left_s > 0.0:
                return min(_TEND_S, left_s)
            self._busy = False
            self._server.occupy(False)
            return _TEND_S

    def _meet_known(self) -> None:
        """Listens to replicas that are new, and no longer to those that are gone for good."""
        assert self._executor is not None
        with self._turn:
            ranks = self._known
        known = set(ranks.values())
        if known == self._members.keys():
            return
        # Who is still led stays until the next round, when it is out of the group.
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
        """Takes in the ranks that this replica should have by now, and lets go of the others, at the next step."""
        assert self._executor is not None
        group = self._group()
        for member in self._members.values():
            if member.link is None and member.number in group and time.monotonic() >= member.not_before_s:
                try:
                    member.link = member.peer.dial()
                except LINK_ERRORS as error:
                    logger.info("the replica at %s:%d cannot be led: %s", *member.peer.address, type(error).__name__)
                    member.not_before_s = time.monotonic() + _LOST_S
                    continue
                self._executor.add_rank(member.number, member.link)
            elif member.link is not None and not member.leaving and member.number not in group:
                member.leaving = True
                self._executor.remove_rank(member.number)

    def _group(self) -> set[int]:
        """The executor's numbers of those who should share the steps of this replica."""
        own, ranks = self._view()
        with self._turn:
            if not self._busy:
                return set()
        there = {rank: member for rank, member in ranks.items() if member is not None and member.peer.present}
        busy = {own, *(rank for rank, member in there.items() if member.peer.busy)}
        group = share_ranks(busy, {own, *there})[own]
        return {there[rank].number for rank in [rank for rank in group if rank != own][: self.world_size - 1]}

    def _dismiss(self) -> None:
        """Closes the links of those who are out of the group, as they were told or by themselves."""
        assert self._executor is not None
        led = {member.number: member for member in self._members.values() if member.link is not None}
        for lost in self._executor.take_lost():
            if lost.rank in led:
                self._executor.remove_rank(lost.rank)
                led[lost.rank].leaving = True
                led[lost.rank].not_before_s = lost.noticed_s + (_AWAY_S if lost.away else _LOST_S)
        inner = self._executor.state(1)
        seated = {*inner.ready[1:], *inner.refilling}  # first is this replica itself, always 0
        for member in led.values():
            # A link is closed only when no step can be waiting on it.
            if member.leaving and member.link is not None and member.number not in seated:
                member.link.close()
                member.link, member.leaving = None, False
