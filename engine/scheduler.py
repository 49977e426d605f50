"""Which requests run, and how many rows each gets in the next step."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from configs.slices import EngineOptions
from decoding.request import Request, RequestState
from engine.errors import QueueFullError


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part of a step: the committed tokens up to ``end`` (exclusive), and the most rows to draft behind them."""

    request: Request
    end: int
    draft_rows: int


class Scheduler:
    """Admission by slots, order by priority and arrival, one row budget per step.

    Decoding requests come first, one row and their drafts each; what is left of ``max_step_tokens``, and at least a quarter of
    it, goes to prefills in order of admission, in chunks. A more urgent request that finds no slot preempts the least urgent one,
    which later computes its tokens again: with position-keyed choices its output is the same.
    """

    def __init__(self, options: EngineOptions, max_draft_rows: int) -> None:
        """
        Args:
            options: of the engine.
            max_draft_rows: most rows drafted for one request in a step, for each rank that shares the step.

        Raises:
            ValueError: a value below 1, or too few rows for all requests to decode in one step.
        """
        if options.max_running < 1:
            raise ValueError(f"engine.max_running must be at least 1, got {options.max_running}")
        if options.max_waiting < 0:
            raise ValueError(f"engine.max_waiting must not be negative, got {options.max_waiting}")
        if options.max_step_tokens < 2 * options.max_running:
            raise ValueError(
                f"engine.max_step_tokens must be at least twice engine.max_running, "
                f"got {options.max_step_tokens} and {options.max_running}"
            )
        self._options, self._max_draft_rows = options, max_draft_rows
        self._waiting: list[tuple[int, int, Request]] = []  # heap by (priority, arrival)
        self._arrivals = 0
        self._free_slots = list(range(options.max_running))[::-1]
        self.running: list[Request] = []  # in order of admission

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free_slots)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            QueueFullError: no slot is free for it and ``max_waiting`` requests wait already.
        """
        if len(self._waiting) >= self._options.max_waiting + len(self._free_slots):
            raise QueueFullError(f"{len(self._waiting)} requests wait already (engine.max_waiting): try again later")
        self._arrivals += 1
        request.arrival = self._arrivals
        heapq.heappush(self._waiting, (request.priority, request.arrival, request))

    def remove(self, request: Request) -> None:
        """Takes a request out, waiting or running; its slot is free at once."""
        if request.slot is None:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
        else:
            self.running.remove(request)
            self._free_slots.append(request.slot)
            request.slot = None
        request.state = RequestState.FINISHED

    def preempt(self, request: Request) -> None:
        """Takes the slot from a running request, which waits in its old place in the order and recomputes its tokens."""
        assert request.slot is not None, request.request_id
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot, request.num_computed, request.state = None, 0, RequestState.WAITING
        request.stats.preemptions += 1
        heapq.heappush(self._waiting, (request.priority, request.arrival, request))

    def schedule(self, width: int = 1) -> list[Share]:
        """The shares of the next step; empty when there is nothing to do.

        ``max_step_tokens`` are the rows of one rank. Trees are dealt to the ranks, so ``width`` times as many rows are drafted;
        the root of a tree and all of a prefill are rows of every rank. What a rank repeats of a tree so that its rows have their
        ancestors, and tokens that were accepted elsewhere, come on top: at most the depth of the tree and the last step's.

        Example: 16 rows a step, two requests that decode, one prefill of 100: 12 rows are for decoding, so 5 are drafted for
        each request, and 4 tokens of the prefill are computed. With width 2 it is 10 drafted rows each, 5 of them on each rank.

        Args:
            width: ranks that share the step's trees, at least 1.
        """
        self._admit()
        decoding = [request for request in self.running if request.num_computed == request.num_tokens - 1]
        prefilling = [request for request in self.running if request.num_computed < request.num_tokens - 1]
        budget = self._options.max_step_tokens
        for_decoding = budget - budget // 4 if prefilling else budget
        draft_rows = min(self._max_draft_rows, for_decoding // len(decoding) - 1) if decoding else 0  # on each rank
        # The bonus token takes the last place: a request that may emit one token needs no draft.
        drafts = [max(0, draft_rows) if request.remaining > 1 else 0 for request in decoding]
        shares = [Share(request, request.num_tokens, rows * width) for request, rows in zip(decoding, drafts, strict=True)]
        budget -= len(decoding) + sum(drafts)
        for request in prefilling:
            end = min(request.num_tokens, request.num_computed + budget)
            if end == request.num_computed:
                break
            shares.append(Share(request, end, 0))
            budget -= end - request.num_computed
        return shares

    def _admit(self) -> None:
        while self._waiting:
            priority, _, request = self._waiting[0]
            if not self._free_slots:
                victim = max(self.running, key=lambda other: (other.priority, other.arrival))
                if victim.priority <= priority:
                    return
                self.preempt(victim)
            heapq.heappop(self._waiting)
            request.slot = self._free_slots.pop()
            request.state = RequestState.RUNNING
            self.running.append(request)
