"""Waiting queue: weighted fair queueing between accounts."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator

from outrider.decoding.request import Request


class FairQueue:
    """Waiting requests by account, with the slots that each account holds.

    Among the most urgent requests, the account with the fewest slots for its weight is next, then the least served one: an
    admission adds prompt length and ``max_tokens``, over the weight, to the service of its account (start-time fair queueing,
    Goyal, Vin and Cheng 1996). Idle time earns no credit. Within an account the order is priority, then arrival.
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
