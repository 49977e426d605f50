"""Membership of the ranks that follow one leader: ready, refilling, lost."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.actors.lookahead.link import LINK_ERRORS, Link, readable
from outrider.actors.lookahead.messages import Detached, Failure, Heartbeat, Reply
from outrider.actors.lookahead.rank_state import READY_LAG, RankState
from outrider.configs.slices import ParallelismOptions
from outrider.engine.errors import one_line
from outrider.engine.forward.batch import ScheduledRequest

logger = logging.getLogger(__name__)

_TEND_S = 0.25  # period of the check for silent ranks while steps run


@dataclass(frozen=True, slots=True)
class LostRank:
    """Rank that has left the group."""

    rank: int
    reason: str
    noticed_s: float  # by time.monotonic
    detached: bool = False  # the rank works, but does not follow this leader


class RankMembership:
    """Ranks of a group and their states. Not thread-safe, except for ``changes`` and ``lost``."""

    # A rank is lost if its connection ends, if it reports a failure, if it sends no sign of life for `rank_timeout_s`, or if it
    # does not answer a step for `step_timeout_s`.

    def __init__(self, options: ParallelismOptions, chunk: int) -> None:
        self._options, self._chunk = options, chunk  # chunk: most tokens of a message that refills a rank
        self.rank_states: dict[int, RankState] = {}
        self.changes: deque[tuple[int, Link | None]] = deque()  # (rank, its link, or None to remove it)
        self.lost: deque[LostRank] = deque()
        self.losses = self.disagreements = 0
        self.last_loss: str | None = None
        self._tended_s = 0.0
        # shared by all ranks, so that a late reply of a former rank never matches its successor's
        self._sequences = itertools.count()

    def ready(self, works: Sequence[ScheduledRequest]) -> list[RankState]:
        """Return the ranks that share this step; send the others tokens that they lack."""
        if time.monotonic() - self._tended_s > _TEND_S:
            self.check_liveness()
        ready = []
        for rank_state in list(self.rank_states.values()):
            if rank_state.refilling and rank_state.unanswered:
                self._read(rank_state)
            lag = rank_state.lag(works)
            # Reading its messages may have shown that the rank is lost.
            if rank_state.rank not in self.rank_states:
                continue
            if rank_state.refilling and not rank_state.unanswered:
                if lag <= READY_LAG:
                    rank_state.refilling = False
                else:
                    try:
                        rank_state.refill(works, self._chunk)
                    except LINK_ERRORS as error:
                        self.lose(rank_state, f"sending a message failed: {one_line(error)}")
            elif not rank_state.refilling and lag > max(self._chunk, READY_LAG):
                rank_state.refilling = True
            if not rank_state.refilling:
                ready.append(rank_state)
        return ready

    def gather(self, rank_states: Sequence[RankState]) -> dict[RankState, Reply]:
        """Return the replies to the last messages, of all ranks that answer in time."""
        replies: dict[RankState, Reply] = {}
        missing = {rank_state.link: (rank_state, rank_state.unanswered[-1][0]) for rank_state in rank_states}
        while missing:
            waited = readable(list(missing), self._patience([rank_state for rank_state, _ in missing.values()]))
            for link in waited:
                rank_state, sequence = missing[link]
                reply = self._take(rank_state)
                # Replies to earlier messages, such as refills, are read and dropped.
                if reply is not None and reply.sequence == sequence:
                    replies[rank_state] = reply
                if rank_state in replies or rank_state.rank not in self.rank_states:
                    del missing[link]
            if not waited:
                for rank_state, _ in list(missing.values()):
                    if self._overdue(rank_state):
                        del missing[rank_state.link]
        return replies

    def _patience(self, rank_states: Sequence[RankState]) -> float:
        now = time.monotonic()
        beat = min(rank_state.link.heard_s for rank_state in rank_states) + self._options.rank_timeout_s
        step = min(rank_state.unanswered[0][1] for rank_state in rank_states) + self._options.step_timeout_s
        return max(0.001, min(beat, step) - now)

    def _overdue(self, rank_state: RankState) -> bool:
        """Return whether a rank exceeded a timeout, after removing it as lost."""
        now = time.monotonic()
        if now - rank_state.link.heard_s >= self._options.rank_timeout_s:
            self.lose(rank_state, f"nothing received for {now - rank_state.link.heard_s:.1f} s")
        elif rank_state.unanswered and now - rank_state.unanswered[0][1] >= self._options.step_timeout_s:
            self.lose(
                rank_state, f"it sends heartbeats, but has been computing one step for {now - rank_state.unanswered[0][1]:.1f} s"
            )
        else:
            return False
        return True

    def _read(self, rank_state: RankState) -> Reply | None:
        return self._take(rank_state) if readable([rank_state.link], 0.0) else None

    def _take(self, rank_state: RankState) -> Reply | None:
        """Take the next message. Removes the rank if the message reports a failure or the link has ended."""
        try:
            message = rank_state.link.take()
        except LINK_ERRORS as error:
            self.lose(rank_state, f"the connection ended: {one_line(error)}")
            return None
        if isinstance(message, Reply):
            while rank_state.unanswered and rank_state.unanswered[0][0] <= message.sequence:
                rank_state.unanswered.popleft()
            return message
        if isinstance(message, Failure):
            self.disagreements += message.disagrees
            self.lose(rank_state, message.reason)
        elif isinstance(message, Detached):
            del self.rank_states[rank_state.rank]
            self.lost.append(LostRank(rank_state.rank, "it is busy or follows another leader", time.monotonic(), detached=True))
        elif not isinstance(message, Heartbeat):
            self.lose(rank_state, f"it sent a {type(message).__name__}")
        return None

    def check_liveness(self) -> None:
        """Read pending messages and remove silent ranks."""
        self._tended_s = time.monotonic()
        # Before the times are compared: heartbeats may have waited in the sockets while the leader computed.
        while self.rank_states:
            spoke = readable([rank_state.link for rank_state in self.rank_states.values()], 0.0)
            if not spoke:
                break
            for rank_state in list(self.rank_states.values()):
                if rank_state.link in spoke:
                    self._take(rank_state)
        for rank_state in list(self.rank_states.values()):
            self._overdue(rank_state)

    def change(self) -> None:
        """Apply the additions and removals that other threads requested."""
        while self.changes:
            rank, link = self.changes.popleft()
            former = self.rank_states.pop(rank, None)
            if former is not None:
                try:
                    former.leave()
                except LINK_ERRORS as error:
                    logger.info("rank %d disconnected before it could be notified: %s", rank, one_line(error))
            if link is not None:
                self.rank_states[rank] = RankState(rank, link, self._sequences)

    def mark_ready(self) -> None:
        """Mark ranks without pending messages as ready: with no running request, nothing has to be refilled."""
        for rank_state in self.rank_states.values():
            if not rank_state.unanswered:
                rank_state.refilling = False

    def lose(self, rank_state: RankState, reason: str) -> None:
        logger.error("rank %d is lost: %s", rank_state.rank, reason)
        del self.rank_states[rank_state.rank]
        rank_state.link.close()
        self.losses += 1
        self.last_loss = f"rank {rank_state.rank}: {reason}"
        self.lost.append(LostRank(rank_state.rank, reason, time.monotonic()))
