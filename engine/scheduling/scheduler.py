"""Scheduler: which requests run, and how many rows each gets in the next step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from configs.slices import EngineOptions
from decoding.request import Request, RequestState
from engine.errors import QueueFullError, RequestError
from engine.kv.prefix_cache import WORTH_COPYING, common_prefix
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.quarantine import QuarantineTurns


@dataclass(slots=True)  # not frozen, which would take longer to make: there is one for each request in each step
class Share:
    """A request's part of a step: the committed tokens up to ``end`` (exclusive), and the most rows to draft behind them."""

    request: Request
    end: int
    draft_rows: int


# Which of some slots a request gets, its own if it has one, and how many of its first tokens are computed there by now.
Place = Callable[[Request, Sequence[int]], tuple[int, int]]


OF_LATE_S = 10.0
RECOVERY_STEPS = 100  # computed after one that ran out of memory, until the next ones may hold more again


def check_options(options: EngineOptions) -> None:
    """Says whether a scheduler can do with some options.

    Raises:
        ValueError: a value below 1, or too few rows for all requests to decode in one step.
    """
    if options.max_running < 1:
        raise ValueError(f"engine.max_running must be at least 1, got {options.max_running}")
    if options.kv_slots is not None and options.kv_slots < options.max_running:
        raise ValueError(f"engine.kv_slots must be at least engine.max_running, got {options.kv_slots} and {options.max_running}")
    if options.max_waiting < 0:
        raise ValueError(f"engine.max_waiting must not be negative, got {options.max_waiting}")
    if options.max_wait_s < 0:
        raise ValueError(f"engine.max_wait_s must not be negative, got {options.max_wait_s}")
    if options.max_step_tokens < 2 * options.max_running:
        raise ValueError(
            f"engine.max_step_tokens must be at least twice engine.max_running, "
            f"got {options.max_step_tokens} and {options.max_running}"
        )


class Scheduler:
    """Admission of up to ``max_running`` requests, order by priority and arrival, one row budget per step.

    *Decoding* requests are in every step, one row and their drafts each: none waits for a prefill. What they leave of
    ``max_step_tokens`` when they have drafted, at least a quarter of it, goes to *prefills* in chunks. The one that was admitted
    first has at least half of these rows, so each is the first one day and ends; the other half is for those that may pass it:
    more urgent ones, and those as urgent that lack at most half as many tokens, so that a question does not wait for a book. Who
    needs tokens that another one of its scope computes in this step waits for them and copies them: what came at once is computed
    once.

    Under the policy ``priority`` a more urgent request that finds no slot preempts the least urgent one, which later computes its
    tokens again: with position-keyed choices its output is the same. Nobody starves: who has waited ``max_wait_s``, all waits
    added, takes the next free slot whatever the priorities, in order of arrival, and is not preempted again. Under ``fcfs`` all
    are alike urgent.

    Between accounts slots are shared by weight (``FairQueue``): who waits takes a slot, where none is free, from the account that
    has more for its weight than this one would have with it. So an account loses no slot of its share, and nobody's requests are
    preempted where there is one account. Rows of prefills are shared alike in every step, and where requests of several accounts
    came of late a step has a quarter as many of them, a sixteenth where one account has several slots and another one fewer: who
    comes waits for the step that runs, whoever's prompt it computes. Prompts have a step without the accounts that have more
    slots for their weight than theirs, at most every second one: a first token does not wait for the rows of who floods.

    A quarantined request is computed alone, in its turns (``QuarantineTurns``). The others keep their slots meanwhile. An account
    has one such request at a time.

    After a step that ran out of memory fewer requests run, in steps of fewer rows (``shrink``); later, step by step, more again.
    """

    def __init__(
        self,
        options: EngineOptions,
        max_draft_rows: int,
        place: Place,
        clock: Callable[[], float] = time.monotonic,
        slots: int | None = None,
    ) -> None:
        """
        Args:
            options: see ``check_options``.
            max_draft_rows: most rows drafted for one request in a step, for each rank that shares the step.
            place: see ``Place``.
            clock: seconds, by which waits are measured.
            slots: among which it chooses; those beyond ``max_running`` keep what ended requests left. ``max_running`` when
                absent.
        """
        check_options(options)
        self.options, self._max_draft_rows, self._place, self._clock = options, max_draft_rows, place, clock
        self._max_wait_s = options.max_wait_s if options.scheduling_policy == "priority" else math.inf
        self._waiting = FairQueue()
        self._arrivals = 0
        self.num_preemptions = 0  # since the start
        self._free_slots = list(range(slots or options.max_running))  # the one that was released longest ago first
        self.running: list[Request] = []  # in order of admission
        self._most_running, self._most_rows = options.max_running, options.max_step_tokens  # less after ``shrink``
        self._since_shrunk = 0  # computed steps
        self._came_s: dict[str, float] = {}  # by account, when one of its requests came last; of late only
        self._quarantine = QuarantineTurns()
        self._ahead = False  # whether the last step but those of a quarantined request was one of prompts that went ahead
        self._decoding = 0  # requests of the step
        self._prefilling: list[Request] = []  # of the step
        self._followers: list[Request] = []  # prefills without rows in the last step: others may have computed what they need

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Requests that may run besides those that do."""
        return self.options.max_running - len(self.running)

    def requests(self) -> Iterator[Request]:
        """All that run or wait."""
        yield from self.running
        yield from self._waiting

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            QueueFullError: no slot is free for it and ``max_waiting`` requests wait already, or it is quarantined and so is
                another one of its account.
            RequestError: it has a priority, and the policy knows none.
        """
        if request.priority and self.options.scheduling_policy != "priority":
            raise RequestError("priority", "all requests are alike urgent here (engine.scheduling_policy is fcfs): leave it out")
        if len(self._waiting) >= self.options.max_waiting + self.num_free_slots:
            raise QueueFullError(f"{len(self._waiting)} requests wait already (engine.max_waiting): try again later")
        if request.quarantined and any(one.quarantined and one.account == request.account for one in self.requests()):
            raise QueueFullError("another request of this tenant is computed alone first: try again later")
        self._arrivals += 1
        request.arrival, request.queued_s = self._arrivals, self._clock()
        self._came_s[request.account] = request.queued_s
        self._waiting.push(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, waiting or running; its slot is free at once."""
        if request.slot is None:
            self._waiting.remove(request)
        else:
            self._vacate(request)
        request.state = RequestState.FINISHED

    def _vacate(self, request: Request, unserved: bool = False) -> None:
        assert request.slot is not None, request.request_id
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self._waiting.release(request, unserved)
        request.slot = None

    def preempt(self, request: Request) -> None:
        """Takes the slot from a running request, which waits in its old place in the order and recomputes its tokens."""
        self._vacate(request, unserved=True)
        request.num_computed, request.state = 0, RequestState.WAITING
        request.stats.preemptions += 1
        self.num_preemptions += 1
        request.queued_s = self._clock()
        self._waiting.push(request)

    def shrink(self, rows: int) -> bool:
        """Lower the rows and requests of steps after one of so many rows that ran out of memory.

        The request that was admitted last is preempted, unless it is the only one, and so many requests may run from now on as do
        then, in steps of half the rows. After ``RECOVERY_STEPS`` steps that were computed one more may run, and twice the rows.

        Returns:
            False where one request runs in steps of the fewest rows: nothing is lower.
        """
        if len(self.running) == 1 and self._most_rows == 2:
            return False
        if len(self.running) > 1:
            self.preempt(self.running[-1])
        self._most_running = len(self.running)
        self._most_rows = max(2 * self._most_running, min(rows or self._most_rows, self._most_rows) // 2)
        self._since_shrunk = 0
        return True

    def computed(self) -> None:
        """Count a computed step, and admit more again after ``RECOVERY_STEPS`` of them."""
        options = self.options
        if self._most_running == options.max_running and self._most_rows == options.max_step_tokens:
            return
        self._since_shrunk += 1
        if self._since_shrunk >= RECOVERY_STEPS:
            self._most_running = min(self._most_running + 1, options.max_running)
            self._most_rows = min(2 * self._most_rows, options.max_step_tokens)
            self._since_shrunk = 0

    def recompute(self, request: Request) -> None:
        """Has a running request computed anew, in its slot: none of what is there of it counts any more."""
        assert request.slot is not None, request.request_id
        request.num_computed = 0
        request.num_computed = self._place(request, (request.slot,))[1]

    def schedule(self, width: int = 1) -> list[Share]:
        """The shares of the next step; empty when there is nothing to do.

        ``max_step_tokens`` are the rows of one rank. Trees are partitioned among the ``width`` ranks that share the step, so that
        many times as many rows are drafted; the root of a tree and all of a prefill are rows of every rank. What a rank repeats
        of a tree so that its rows have their ancestors, and tokens that were accepted elsewhere, come on top: at most the depth
        of the tree and the last step's.

        Example: 16 rows a step, two requests that decode, one prefill of 100: 12 rows are for decoding, so 5 are drafted for
        each request, and 4 tokens of the prefill are computed. With width 2 it is 10 drafted rows each, 5 of them on each rank.
        """
        for request in self._followers:
            if request.slot is not None and request.scope is not None:
                request.num_computed = self._place(request, (request.slot,))[1]
        self._followers = []
        if self._waiting:
            self._admit()
        alone = self._quarantine.next(self.running)
        others = [request for request in self.running if not request.quarantined]
        computed = [alone] if alone is not None else self._going_ahead(others) or others
        decoding = [request for request in computed if request.num_computed == request.num_tokens - 1]
        prefilling = [request for request in computed if request.num_computed < request.num_tokens - 1]
        self._decoding, self._prefilling = len(decoding), prefilling
        budget = self._most_rows
        for_decoding = budget - budget // 4 if prefilling else budget
        draft_rows = max(0, min(self._max_draft_rows, for_decoding // len(decoding) - 1)) if decoding else 0  # on each rank
        drafts = [_bounded(request, draft_rows) for request in decoding]
        shares = [Share(request, request.num_tokens, rows * width) for request, rows in zip(decoding, drafts, strict=True)]
        return shares + self._prefill_shares(budget - len(decoding) - sum(drafts)) if prefilling else shares

    def _going_ahead(self, running: Sequence[Request]) -> list[Request]:
        """Who has the next step without the accounts that have more for their weight; nobody where it is everyone's turn."""
        turn = not self._ahead and len({request.account for request in running}) > 1
        going: list[Request] = []
        if turn:
            load = self._waiting.load
            most = max(map(load, running))
            prompts = [request for request in running if request.num_computed < request.num_tokens - 1]
            loads = [load(request) for request in prompts if load(request) < most]
            going = [request for request in running if load(request) <= max(loads)] if loads else []
        self._ahead = bool(going)
        return going

    def top_up(self, shares: Sequence[Share], drafted: int) -> list[Share]:
        """What ``schedule`` returned last, with more rows for prefills where each rank drafted fewer than there is room for.

        Example: as above, with 16 rows; nothing is drafted, so 14 tokens of the prefill are computed instead of 4.
        """
        if not self._prefilling:
            return list(shares)
        decoding = list(shares[: self._decoding])
        return decoding + self._prefill_shares(self._most_rows - len(decoding) - drafted)

    def _prefill_shares(self, budget: int) -> list[Share]:
        prefilling = self._prefilling
        if len(self._came_s) > 1:
            since = self._clock() - OF_LATE_S
            self._came_s = {account: came_s for account, came_s in self._came_s.items() if came_s >= since}
        if len(self._came_s) > 1:
            slots = [self._waiting.slots(account) for account in self._came_s]
            floods = max(slots) > max(1, min(slots)) and not self._ahead
            budget = min(budget, max(self.options.max_step_tokens // (16 if floods else 4), 1))
        rows = _shared_prefill(prefilling, budget)
        self._followers = [request for request, count in zip(prefilling, rows, strict=True) if not count]
        return [Share(one, one.num_computed + count, 0) for one, count in zip(prefilling, rows, strict=True) if count]

    def _admit(self) -> None:
        now = self._clock()
        while self._waiting:
            request = self._next(now)
            if len(self.running) >= self._most_running:
                victim = self._victim(request)
                if victim is None:
                    return
                self.preempt(victim)
            self._waiting.admit(request)
            slot, computed = self._place(request, self._free_slots)
            self._free_slots.remove(slot)
            request.slot, request.num_computed, request.state = slot, computed, RequestState.RUNNING
            request.waited_s += now - request.queued_s
            self.running.append(request)

    def _next(self, now: float) -> Request:
        """Who is to run next of those that wait."""
        if len(self.running) < self._most_running and self._max_wait_s < math.inf:
            overdue = [one for one in self._waiting if one.waited_s + now - one.queued_s >= self._max_wait_s]
            if overdue:
                return min(overdue, key=lambda one: one.arrival)
        return self._waiting.first()

    def _victim(self, request: Request) -> Request | None:
        """Who gives its slot to a request that waits: the latest of the least urgent, where they are less urgent, or else of the
        account with the most for its weight, where that is more than fair. Who has waited for too long before gives none."""
        running = [one for one in self.running if one.priority >= request.priority and one.waited_s < self._max_wait_s]
        below = [one for one in running if one.priority > request.priority]
        if below:
            return max(below, key=lambda one: (one.priority, one.arrival))
        load, fair = self._waiting.load, self._waiting.load(request, 1)
        above = [one for one in running if one.account != request.account and load(one) > fair]
        return max(above, key=lambda one: (load(one), one.arrival), default=None)

    def check_integrity(self) -> None:
        """Asserts that every slot is free or has one request, and that requests are where their state says."""
        held = [request.slot for request in self.running]
        slots = sorted((*self._free_slots, *(-1 if slot is None else slot for slot in held)))
        assert slots == list(range(len(slots))), (self._free_slots, held)
        assert len(held) <= self._most_running <= self.options.max_running, held
        waiting = list(self._waiting)
        for request in self.running:
            assert request.state is RequestState.RUNNING, (request.request_id, request.state)
            assert 0 <= request.num_computed < request.num_tokens, (request.request_id, request.num_computed, request.num_tokens)
        for request in waiting:
            assert request.state is RequestState.WAITING, (request.request_id, request.state)
            assert request.slot is None and not request.num_computed, (request.request_id, request.slot, request.num_computed)
        everyone = [request.request_id for request in (*self.running, *waiting)]
        assert len(set(everyone)) == len(everyone), everyone
        assert len(waiting) <= self.options.max_waiting + self.options.max_running, len(waiting)


def _bounded(request: Request, rows: int) -> int:
    """The rows to draft for a request on each rank, of those that there are for each."""
    if request.remaining <= 1:  # the bonus token takes the last place: a request that may emit one token needs no draft
        return 0
    return rows if request.max_draft_tokens is None else min(rows, request.max_draft_tokens)


def _shared_prefill(requests: Sequence[Request], budget: int) -> list[int]:
    """The rows of prefills, shared among accounts by weight: what one does not need is the others'.

    Example: 16 rows. One account's prefills lack 100 and 40, another's 6: this one gets its 6 rows, the first one 10.
    """
    groups: dict[str, list[int]] = {}
    for at, request in enumerate(requests):
        groups.setdefault(request.account, []).append(at)
    if len(groups) == 1:
        return _prefill(requests, budget)
    rows, wanting = [0] * len(requests), list(groups.values())
    wanting.sort(key=lambda own: _lacking(requests, own) / requests[own[0]].weight)  # who needs least for its weight
    for number, own in enumerate(wanting):
        weight = requests[own[0]].weight / sum(requests[each[0]].weight for each in wanting[number:])
        given = _prefill([requests[at] for at in own], math.ceil(budget * weight))
        for at, count in zip(own, given, strict=True):
            rows[at] = count
        budget -= sum(given)
    return rows


def _lacking(requests: Sequence[Request], own: Sequence[int]) -> int:
    return sum(requests[at].num_tokens - requests[at].num_computed for at in own)


def _prefill(requests: Sequence[Request], budget: int) -> list[int]:
    """The rows of one account's prefills, given in order of admission. See ``Scheduler``.

    Example: 16 rows, and prefills that lack 100, 40 and 6 tokens: the third may pass, and so may the second, but the third lacks
    less. It gets 6 rows of the 8, the second gets 2, the first 8.
    """
    first, left = requests[0], [request.num_tokens - request.num_computed for request in requests]
    rows = [0] * len(requests)

    def give(at: int, most: int) -> int:
        if rows[at] or not any(rows[other] and _computes_for(requests[other], rows[other], requests[at]) for other in earlier):
            more = min(left[at] - rows[at], most)
            rows[at] += more
            return more
        return 0

    earlier: list[int] = []  # that were given rows
    if sum(left) > budget:
        passing = [
            at
            for at, request in enumerate(requests)
            if request.priority < first.priority or (request.priority == first.priority and 2 * left[at] <= left[0])
        ]
        half = budget // 2
        for at in sorted(passing, key=lambda at: (requests[at].priority, left[at])):
            given = give(at, half)
            earlier.append(at)
            half -= given
            budget -= given
    for at in range(len(requests)):
        budget -= give(at, budget)
        earlier.append(at)
    return rows


def _computes_for(one: Request, rows: int, other: Request) -> bool:
    """Whether one request with so many rows in a step computes tokens that the other lacks and can copy afterwards."""
    if one.scope is None or one.scope != other.scope:
        return False
    reached = one.num_computed + rows
    wanted = other.num_computed + WORTH_COPYING
    return reached >= wanted and common_prefix(one.tokens[:reached], other.tokens[:-1]) >= wanted
