"""The ranks that follow one leader: who shares the next step, who answers, and who is lost."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from actors.lookahead.link import LINK_ERRORS, Link, readable
from actors.lookahead.rank_state import READY_LAG, Seat
from actors.lookahead.wire import Away, Beat, Failure, Reply
from configs.slices import ParallelismOptions
from engine.errors import one_line
from engine.forward.batch import Work

logger = logging.getLogger(__name__)

_TEND_S = 0.25  # while steps follow one another, silent ranks are looked for that often


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that does not take part any more."""

    rank: int
    reason: str
    noticed_s: float  # time.monotonic
    away: bool = False  # it lives, but does not follow this leader


class Roster:
    """The seats of a group, and what becomes of them.

    A rank is lost when its connection ends, when it says that it failed, when it gives no sign of life for ``rank_timeout_s``, or
    when it lives but does not answer a step for ``step_timeout_s``. Not thread-safe, but for ``changes`` and ``lost``.
    """

    def __init__(self, options: ParallelismOptions, chunk: int) -> None:
        """
        Args:
            options: of the group.
            chunk: most tokens of a message that refills a rank.
        """
        self._options, self._chunk = options, chunk
        self.seats: dict[int, Seat] = {}
        self.changes: deque[tuple[int, Link | None]] = deque()  # (rank, its link, or None to leave)
        self.lost: deque[LostRank] = deque()
        self.losses = self.disagreements = 0
        self.last_loss: str | None = None
        self._tended_s = 0.0
        self._sequences = itertools.count()  # of all seats: what answers a former one is not taken for an answer to the next

    def ready(self, works: Sequence[Work]) -> list[Seat]:
        """The seats that share this step; the others are sent what they lack."""
        if time.monotonic() - self._tended_s > _TEND_S:
            self.tend()
        ready = []
        for seat in list(self.seats.values()):
            if seat.refilling and seat.unanswered:
                self._read(seat)
            lag = seat.lag(works)
            if seat.rank not in self.seats:
                continue
            if seat.refilling and not seat.unanswered:
                if lag <= READY_LAG:
                    seat.refilling = False
                else:
                    try:
                        seat.refill(works, self._chunk)
                    except LINK_ERRORS as error:
                        self.lose(seat, f"it takes no message: {one_line(error)}")
            elif not seat.refilling and lag > max(self._chunk, READY_LAG):
                seat.refilling = True
            if not seat.refilling:
                ready.append(seat)
        return ready

    def gather(self, seats: Sequence[Seat]) -> dict[Seat, Reply]:
        """The answers to what was sent last, of the seats that live to give them."""
        replies: dict[Seat, Reply] = {}
        missing = {seat.link: (seat, seat.unanswered[-1][0]) for seat in seats}
        while missing:
            waited = readable(list(missing), self._patience([seat for seat, _ in missing.values()]))
            for link in waited:
                seat, sequence = missing[link]
                reply = self._take(seat)
                if reply is not None and reply.sequence == sequence:
                    replies[seat] = reply
                if seat in replies or seat.rank not in self.seats:
                    del missing[link]
            if not waited:
                for seat, _ in list(missing.values()):
                    if self._overdue(seat):
                        del missing[seat.link]
        return replies

    def _patience(self, seats: Sequence[Seat]) -> float:
        """Seconds until the first of some seats is overdue."""
        now = time.monotonic()
        beat = min(seat.link.heard_s for seat in seats) + self._options.rank_timeout_s
        step = min(seat.unanswered[0][1] for seat in seats) + self._options.step_timeout_s
        return max(0.001, min(beat, step) - now)

    def _overdue(self, seat: Seat) -> bool:
        """Whether a seat was silent, or at one step, for too long; it is lost then. What it said must have been read."""
        now = time.monotonic()
        if now - seat.link.heard_s >= self._options.rank_timeout_s:
            self.lose(seat, f"no sign of it for {now - seat.link.heard_s:.1f} s")
        elif seat.unanswered and now - seat.unanswered[0][1] >= self._options.step_timeout_s:
            self.lose(seat, f"it lives, but has been computing one step for {now - seat.unanswered[0][1]:.1f} s")
        else:
            return False
        return True

    def _read(self, seat: Seat) -> Reply | None:
        """Takes one message if there is one; see ``_take``."""
        return self._take(seat) if readable([seat.link], 0.0) else None

    def _take(self, seat: Seat) -> Reply | None:
        """Takes the message that is there; the seat is out afterwards if it is bad news."""
        try:
            message = seat.link.take()
        except LINK_ERRORS as error:
            self.lose(seat, f"the connection ended: {one_line(error)}")
            return None
        if isinstance(message, Reply):
            while seat.unanswered and seat.unanswered[0][0] <= message.sequence:
                seat.unanswered.popleft()
            return message
        if isinstance(message, Failure):
            self.disagreements += message.disagrees
            self.lose(seat, message.reason)
        elif isinstance(message, Away):
            del self.seats[seat.rank]
            self.lost.append(LostRank(seat.rank, "it is away", time.monotonic(), away=True))
        elif not isinstance(message, Beat):
            self.lose(seat, f"it sent a {type(message).__name__}")
        return None

    def tend(self) -> None:
        """Reads what came unasked, and looks for silent ranks."""
        self._tended_s = time.monotonic()
        while self.seats:
            spoke = readable([seat.link for seat in self.seats.values()], 0.0)
            if not spoke:
                break
            for seat in list(self.seats.values()):
                if seat.link in spoke:
                    self._take(seat)
        for seat in list(self.seats.values()):
            self._overdue(seat)

    def change(self) -> None:
        """Takes ranks in and out, as other threads asked."""
        while self.changes:
            rank, link = self.changes.popleft()
            former = self.seats.pop(rank, None)
            if former is not None:
                try:
                    former.leave()
                except LINK_ERRORS as error:
                    logger.info("rank %d went without a word: %s", rank, one_line(error))
            if link is not None:
                self.seats[rank] = Seat(rank, link, self._sequences)

    def settle(self) -> None:
        """Where no request lives there is nothing to refill a rank with: those that have answered are ready."""
        for seat in self.seats.values():
            if not seat.unanswered:
                seat.refilling = False

    def lose(self, seat: Seat, reason: str) -> None:
        logger.error("rank %d is lost: %s", seat.rank, reason)
        del self.seats[seat.rank]
        seat.link.close()
        self.losses += 1
        self.last_loss = f"rank {seat.rank}: {reason}"
        self.lost.append(LostRank(seat.rank, reason, time.monotonic()))
