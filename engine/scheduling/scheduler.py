"""Scheduler: the requests that run, and the rows of each in the next step."""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.configs.slices import EngineOptions
from outrider.decoding.request import Request, RequestState
from outrider.engine.errors import QueueFullError, RequestError
from outrider.engine.kv.prefix_cache import WORTH_COPYING, common_prefix


@dataclass(slots=True)  # not frozen, because creation is faster: one per request and step
class RowAllotment:
    """Part of a step for one request: its committed tokens up to ``end`` (exclusive) and at most ``draft_rows`` draft rows."""

    request: Request
    end: int
    draft_rows: int


# (request, candidate slots) -> (slot, number of its first tokens already computed there)
Place = Callable[[Request, Sequence[int]], tuple[int, int]]


OF_LATE_S = 10.0  # seconds for which an account counts as recently active
RECOVERY_STEPS = 100  # computed steps after one that ran out of memory, until limits rise again


def check_options(options: EngineOptions) -> None:
    """Raise ``ValueError`` if an option is out of range or the rows do not suffice for all requests to decode in one step."""
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


class FairQueue:
    """Waiting requests by account, with the slots that each account holds.

    Among the most urgent requests, the account with the fewest slots for its weight is next, then the least served one: an
    admission adds prompt length and ``max_tokens``, over the weight, to the service of its account (start-time fair queueing,
    Goyal, Vin and Cheng 1996).
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, int, Request]]] = {}  # heaps of (priority, arrival, request)
        self._held: defaultdict[str, int] = defaultdict(int)  # slots by account
        self._served: defaultdict[str, float] = defaultdict(float)
        self._now = 0.0  # service of the last admitted account before its admission

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Request]:
        return (request for heap in self._waiting.values() for _, _, request in heap)

    def push(self, request: Request) -> None:
        """Queue a request whose ``arrival`` is set."""
        account = request.account
        if account not in self._waiting:
            self._waiting[account] = []
            # Idle time earns no credit.
            if not self._held[account]:
                self._served[account] = max(self._served[account], self._now)
        heapq.heappush(self._waiting[account], (request.priority, request.arrival, request))

    def first(self) -> Request:
        """Return the request that is next."""

        def order(top: tuple[int, int, Request]) -> tuple[int, float, float, int]:
            priority, arrival, request = top
            return priority, self.load(request), self._served[request.account], arrival

        return min((heap[0] for heap in self._waiting.values()), key=order)[2]

    def remove(self, request: Request) -> None:
        """Remove a waiting request."""
        heap = self._waiting[request.account]
        if heap[0][2] is request:
            heapq.heappop(heap)
        else:
            heap[:] = (entry for entry in heap if entry[2] is not request)
            heapq.heapify(heap)
        if not heap:
            del self._waiting[request.account]

    def admit(self, request: Request) -> None:
        """Remove a waiting request because it received a slot."""
        self.remove(request)
        self._now = self._served[request.account]
        self._served[request.account] += _cost(request)
        self._held[request.account] += 1

    def release(self, request: Request, unserved: bool = False) -> None:
        """Record that a request lost its slot; ``unserved`` refunds its service because it will wait again."""
        self._held[request.account] -= 1
        if unserved:
            self._served[request.account] -= _cost(request)

    def slots(self, account: str) -> int:
        """Return the number of slots that an account holds."""
        return self._held.get(account, 0)

    def load(self, request: Request, more: int = 0) -> float:
        """Return the slots of a request's account, plus ``more``, over its weight."""
        return (self._held[request.account] + more) / request.weight


def _cost(request: Request) -> float:
    return (request.num_prompt + request.params.max_tokens) / request.weight


class QuarantineTurns:
    """Selection of the steps that compute one quarantined request alone, at most every second one while others run.

    Each account gets at most its weighted share of the steps: in start-time fair queueing a turn costs an account 1 / weight of a
    virtual time that advances by 1 / (all weights) per step.

    Example: of two accounts with the same weight one has a quarantined request, and this has every second step. One of four has
    every fourth step; three of four have every sixth each.
    """

    def __init__(self) -> None:
        self._now = 0.0  # virtual time
        self._due: dict[str, float] = {}  # by account: virtual time of its next turn
        self._was_alone = False  # whether the last step was a turn

    def next(self, running: Sequence[Request]) -> Request | None:
        """Return the request that is computed alone in the next step; None if the step is for the other requests."""
        quarantined = [request for request in running if request.quarantined]
        was_alone, self._was_alone = self._was_alone, False
        if not quarantined:
            return None
        has_others = len(quarantined) < len(running)
        weights, own = ({one.account: one.weight for one in some} for some in (running, quarantined))
        self._now += 1 / max(sum(weights.values()), 2 * sum(own.values()))
        first = min(quarantined, key=lambda one: self._due.get(one.account, self._now))
        due = self._due.get(first.account, self._now)
        if has_others and (was_alone or due > self._now):
            return None
        self._now = max(self._now, due)
        self._due = {account: at for account, at in self._due.items() if account in own or at > self._now}
        self._due[first.account] = max(due + 1 / first.weight, self._now)
        self._was_alone = True
        return first


class Scheduler:
    """Admission of up to ``max_running`` requests by priority and arrival, with one row budget per step.

    *Decoding* requests are in every step, with one row and their drafts each. The remaining rows of ``max_step_tokens``, at least
    a quarter, go to *prefills* in chunks. The prefill admitted first gets at least half of them, so that every prefill ends; the
    rest is for prefills that may pass it: more urgent ones, and equally urgent ones that lack at most half as many tokens.

    Under the policy ``priority`` a more urgent request without a slot preempts the least urgent one. A request that has waited
    ``max_wait_s`` in total takes the next free slot in order of arrival and is not preempted again.

    Accounts share slots (``FairQueue``, ``_victim``), prefill rows (``_prefill_shares``) and steps (``_going_ahead``) by weight.

    Args:
        max_draft_rows: most rows drafted for one request in a step, per rank that shares the step.
        largest_tree: the same for requests that are drafted for as published; None: the same number.
        clock: seconds, used to measure waits.
        slots: number of slots; those beyond ``max_running`` keep the KV of ended requests. ``max_running`` if None.
    """

    def __init__(
        self,
        options: EngineOptions,
        max_draft_rows: int,
        place: Place,
        clock: Callable[[], float] = time.monotonic,
        slots: int | None = None,
        largest_tree: int | None = None,
    ) -> None:
        check_options(options)
        self._largest_tree = max_draft_rows if largest_tree is None else largest_tree
        self.options, self._max_draft_rows, self._place, self._clock = options, max_draft_rows, place, clock
        self._max_wait_s = options.max_wait_s if options.scheduling_policy == "priority" else math.inf
        self._waiting = FairQueue()
        self._arrivals = 0
        self.num_preemptions = 0  # since the start of the engine
        self._free_slots = list(range(slots or options.max_running))  # in order of release
        self.running: list[Request] = []  # in order of admission
        self._most_running, self._most_rows = options.max_running, options.max_step_tokens  # less after ``shrink``
        self._since_shrunk = 0  # computed steps since ``shrink``
        self._came_s: dict[str, float] = {}  # by account: time of its last request, if recent
        self._quarantine = QuarantineTurns()
        self._ahead = False  # whether the last step, except quarantine turns, excluded accounts
        self._decoding = 0  # decoding requests of the step
        self._prefilling: list[Request] = []  # prefills of the step
        self._followers: list[Request] = []  # prefills without rows in the last step, which may copy what others computed

    @property
    def num_waiting(self) -> int:
        """Return the number of requests without a slot."""
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Return the number of requests that may run in addition: fewer than ``max_running`` allows after ``shrink``."""
        return self._most_running - len(self.running)

    def requests(self) -> Iterator[Request]:
        """Yield all running and waiting requests."""
        yield from self.running
        yield from self._waiting

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: no slot is free and ``max_waiting`` requests wait, or its account already has a quarantined request.
            RequestError: it has a priority, but the policy is not ``priority``.
        """
        if request.priority and self.options.scheduling_policy != "priority":
            raise RequestError("priority", "requires engine.scheduling_policy=priority on the server: leave it out")
        if len(self._waiting) >= self.options.max_waiting + self.num_free_slots:
            raise QueueFullError(f"{len(self._waiting)} requests are already waiting (engine.max_waiting): try again later")
        if request.quarantined and any(one.quarantined and one.account == request.account for one in self.requests()):
            raise QueueFullError("a quarantined request of this tenant runs first: try again later")
        self._arrivals += 1
        request.arrival, request.queued_s = self._arrivals, self._clock()
        self._came_s[request.account] = request.queued_s
        self._waiting.push(request)

    def remove(self, request: Request) -> None:
        """Remove a waiting or running request; its slot is free at once."""
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
        """Take the slot from a running request, which waits in its old place in the order and recomputes its tokens."""
        self._vacate(request, unserved=True)
        request.num_computed, request.state = 0, RequestState.WAITING
        request.stats.preemptions += 1
        self.num_preemptions += 1
        request.queued_s = self._clock()
        self._waiting.push(request)

    def shrink(self, rows: int) -> bool:
        """Lower the limits after a step of ``rows`` rows ran out of memory; return False if they cannot be lower."""
        if len(self.running) == 1 and self._most_rows == 2:
            return False
        # The request admitted last is preempted, unless it is the only one; the rest becomes the maximum, with half the rows.
        if len(self.running) > 1:
            self.preempt(self.running[-1])
        self._most_running = len(self.running)
        self._most_rows = max(2 * self._most_running, min(rows or self._most_rows, self._most_rows) // 2)
        self._since_shrunk = 0
        return True

    def computed(self) -> None:
        """Count a computed step and raise lowered limits after ``RECOVERY_STEPS`` of them."""
        options = self.options
        if self._most_running == options.max_running and self._most_rows == options.max_step_tokens:
            return
        self._since_shrunk += 1
        if self._since_shrunk >= RECOVERY_STEPS:
            self._most_running = min(self._most_running + 1, options.max_running)
            self._most_rows = min(2 * self._most_rows, options.max_step_tokens)
            self._since_shrunk = 0

    def recompute(self, request: Request) -> None:
        """Discard the progress of a running request and recompute it in its slot."""
        assert request.slot is not None, request.request_id
        request.num_computed = 0
        request.num_computed = self._place(request, (request.slot,))[1]

    def schedule(self, width: int = 1) -> list[RowAllotment]:
        """Return the shares of the next step, which ``width`` ranks share; empty if there is nothing to do.

        Example: 16 rows a step, two requests that decode, one prefill of 100: 12 rows are for decoding, so 5 are drafted for each
        request, and 4 tokens of the prefill are computed. With width 2 it is 10 drafted rows each, 5 of them on each rank.
        """
        # A prefill waits for another one of its scope that computes tokens it needs, and copies them.
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
        budget = self._most_rows
        for_decoding = budget - budget // 4 if prefilling else budget
        decoding = _with_room(decoding, for_decoding)
        self._decoding, self._prefilling = len(decoding), prefilling
        # Draft trees are partitioned among the ranks; roots and prefill rows are computed on every rank. Ancestors that a rank
        # repeats and tokens accepted on other ranks in the last step are beyond ``max_step_tokens``.
        drafts = self._draft_rows(decoding, for_decoding)
        shares = [RowAllotment(request, request.num_tokens, rows * width) for request, rows in zip(decoding, drafts, strict=True)]
        return shares + self._prefill_shares(budget - len(decoding) - sum(drafts)) if prefilling else shares

    def draft_limit(self, request: Request) -> int:
        """Return the rows that may be drafted for a request in a step, on each rank, if the step has room."""
        return self._largest_tree if request.as_published else self._max_draft_rows

    @property
    def most_choice_rows(self) -> int:
        """Return the most rows of a tree of choices, below its root: a step has room for it beside all other requests."""
        return min(self._largest_tree, self.options.max_step_tokens - self.options.max_running)

    def _draft_rows(self, decoding: Sequence[Request], rows: int) -> list[int]:
        """Return the rows to draft for each request on each rank, for a step of ``rows`` rows with all roots.

        All get equally many. Those that are drafted for as published share what the others leave.
        """
        if not decoding:
            return []
        scored = sum(request.choices.rows for request in decoding if request.choices is not None)
        equal = max(0, (rows - scored) // len(decoding) - 1)
        drafts = [_bounded(request, min(self.draft_limit(request), equal)) for request in decoding]
        left = rows - len(decoding) - sum(drafts)
        wanting = [at for at, request in enumerate(decoding) if request.as_published]
        while wanting and left >= len(wanting):
            more = left // len(wanting)
            for at in wanting:
                request, had = decoding[at], drafts[at]
                drafts[at] = _bounded(request, min(self.draft_limit(request), had + more))
                left -= drafts[at] - had
            full = [at for at in wanting if drafts[at] == _bounded(decoding[at], self.draft_limit(decoding[at]))]
            if not full:
                break
            wanting = [at for at in wanting if at not in full]
        return drafts

    def _going_ahead(self, running: Sequence[Request]) -> list[Request]:
        """Return the requests to compute exclusively so that accounts with fewer slots catch up; empty if the step is for all."""
        # At most every second step excludes the accounts with the most slots for their weight.
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

    def top_up(self, shares: Sequence[RowAllotment], drafted: int) -> list[RowAllotment]:
        """Return the last shares with more prefill rows, if each rank drafted fewer rows than allowed.

        Example: as above, with 16 rows; nothing is drafted, so 14 tokens of the prefill are computed instead of 4.
        """
        if not self._prefilling:
            return list(shares)
        decoding = list(shares[: self._decoding])
        return decoding + self._prefill_shares(self._most_rows - len(decoding) - drafted)

    def _prefill_shares(self, budget: int) -> list[RowAllotment]:
        prefilling, budget = self._prefilling, max(0, budget)
        if len(self._came_s) > 1:
            since = self._clock() - OF_LATE_S
            self._came_s = {account: came_s for account, came_s in self._came_s.items() if came_s >= since}
        if len(self._came_s) > 1:
            slots = [self._waiting.slots(account) for account in self._came_s]
            # A new request waits for the running step: limit its prefill rows, more so if one account has several slots and
            # another fewer.
            floods = max(slots) > max(1, min(slots)) and not self._ahead
            budget = min(budget, max(self.options.max_step_tokens // (16 if floods else 4), 1))
        rows = _shared_prefill(prefilling, budget)
        self._followers = [request for request, count in zip(prefilling, rows, strict=True) if not count]
        return [RowAllotment(one, one.num_computed + count, 0) for one, count in zip(prefilling, rows, strict=True) if count]

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
        if len(self.running) < self._most_running and self._max_wait_s < math.inf:
            overdue = [one for one in self._waiting if one.waited_s + now - one.queued_s >= self._max_wait_s]
            if overdue:
                return min(overdue, key=lambda one: one.arrival)
        return self._waiting.first()

    def _victim(self, request: Request) -> Request | None:
        """Return the running request to preempt for a waiting one, if any; those that waited ``max_wait_s`` are exempt."""
        running = [one for one in self.running if one.priority >= request.priority and one.waited_s < self._max_wait_s]
        # The latest of the least urgent, or else of the account with the most slots for its weight, if that is above its share.
        below = [one for one in running if one.priority > request.priority]
        if below:
            return max(below, key=lambda one: (one.priority, one.arrival))
        # Its account must hold more slots for its weight than the request's own account would with the slot.
        load, fair = self._waiting.load, self._waiting.load(request, 1)
        above = [one for one in running if one.account != request.account and load(one) > fair]
        return max(above, key=lambda one: (load(one), one.arrival), default=None)

    def check_integrity(self) -> None:
        """Assert that every slot is free or has one request, and that requests are where their state says."""
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
    """Return the rows to draft for a request on each rank, at most ``rows``, or those of its choices."""
    if request.choices is not None:
        return request.choices.rows
    if request.remaining <= 1:  # the bonus token is the only one left: no draft is needed
        return 0
    return rows if request.max_draft_tokens is None else min(rows, request.max_draft_tokens)


def _with_room(decoding: Sequence[Request], rows: int) -> list[Request]:
    """Return the requests to compute in a step of ``rows`` rows: of those with choices the first, and others whose trees fit."""
    left, found, is_first = rows - len(decoding), list[Request](), True
    for request in decoding:
        if request.choices is not None:
            if request.choices.rows > left and not is_first:
                continue
            left, is_first = left - request.choices.rows, False
        found.append(request)
    return found


def _lacking_rows(request: Request) -> int:
    """Return the rows that a prefill lacks. Choices are scored in a step of their own, with the last token as the root."""
    return request.num_tokens - request.num_computed - (request.choices is not None)


def _shared_prefill(requests: Sequence[Request], budget: int) -> list[int]:
    """Share prefill rows among accounts by weight; rows that one account does not need go to the others.

    Example: 16 rows. One account's prefills lack 100 and 40, another's 6: this one gets its 6 rows, the first one 10.
    """
    groups: dict[str, list[int]] = {}
    for at, request in enumerate(requests):
        groups.setdefault(request.account, []).append(at)
    if len(groups) == 1:
        return _prefill(requests, budget)
    rows, wanting = [0] * len(requests), list(groups.values())
    wanting.sort(key=lambda own: _lacking(requests, own) / requests[own[0]].weight)  # least need for its weight first
    for number, own in enumerate(wanting):
        weight = requests[own[0]].weight / sum(requests[each[0]].weight for each in wanting[number:])
        given = _prefill([requests[at] for at in own], math.ceil(budget * weight))
        for at, count in zip(own, given, strict=True):
            rows[at] = count
        budget -= sum(given)
    return rows


def _lacking(requests: Sequence[Request], own: Sequence[int]) -> int:
    return sum(_lacking_rows(requests[at]) for at in own)


def _prefill(requests: Sequence[Request], budget: int) -> list[int]:
    """Share rows among the prefills of one account, given in order of admission. See ``Scheduler``.

    Example: 16 rows, and prefills that lack 100, 40 and 6 tokens: the third may pass, and so may the second, but the third lacks
    less. It gets 6 rows of the 8, the second gets 2, the first 8.
    """
    first, left = requests[0], list(map(_lacking_rows, requests))
    rows = [0] * len(requests)

    def give(at: int, most: int) -> int:
        if rows[at] or not any(rows[other] and _computes_for(requests[other], rows[other], requests[at]) for other in earlier):
            more = min(left[at] - rows[at], most)
            rows[at] += more
            return more
        return 0

    earlier: list[int] = []  # indices of requests already given rows
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
    """Return whether ``one``, with ``rows`` rows in a step, computes tokens that ``other`` lacks and can copy afterwards."""
    if one.scope is None or one.scope != other.scope:
        return False
    reached = one.num_computed + rows
    wanted = other.num_computed + WORTH_COPYING
    return reached >= wanted and common_prefix(one.tokens[:reached], other.tokens[:-1]) >= wanted
