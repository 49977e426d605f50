"""Waiting queue: weighted fair queueing between accounts."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator

from decoding.request import Request


class FairQueue:
    """Those who wait, by account, and how much each account has.

    Of the most urgent that wait, it is the turn of the account that holds the fewest slots for its weight; of such, of the one
    that was served the least, where an admission serves an account its prompt and ``max_tokens`` over its weight (start-time fair
    queueing, Goyal, Vin and Cheng 1996). Who comes anew begins where the others are: turns are not saved up. Within an account
    the order is that of priority and arrival.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, int, Request]]] = {}  # heaps by (priority, arrival)
        self._held: defaultdict[str, int] = defaultdict(int)  # slots
        self._served: defaultdict[str, float] = defaultdict(float)
        self._now = 0.0  # what the account was served before that was admitted last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Request]:
        return (request for heap in self._waiting.values() for _, _, request in heap)

    def push(self, request: Request) -> None:
        """Someone waits, whose ``arrival`` is set."""
        account = request.account
        if account not in self._waiting:
            self._waiting[account] = []
            if not self._held[account]:
                self._served[account] = max(self._served[account], self._now)
        heapq.heappush(self._waiting[account], (request.priority, request.arrival, request))

    def first(self) -> Request:
        """Whose turn it is."""

        def order(top: tuple[int, int, Request]) -> tuple[int, float, float, int]:
            priority, arrival, request = top
            return priority, self.load(request), self._served[request.account], arrival

        return min((heap[0] for heap in self._waiting.values()), key=order)[2]

    def remove(self, request: Request) -> None:
        """Someone waits no more."""
        heap = self._waiting[request.account]
        if heap[0][2] is request:
            heapq.heappop(heap)
        else:
            heap[:] = (entry for entry in heap if entry[2] is not request)
            heapq.heapify(heap)
        if not heap:
            del self._waiting[request.account]

    def admit(self, request: Request) -> None:
        """Someone who waited has a slot."""
        self.remove(request)
        self._now = self._served[request.account]
        self._served[request.account] += _cost(request)
        self._held[request.account] += 1

    def release(self, request: Request, unserved: bool = False) -> None:
        """Someone has a slot no more; unserved, it will wait for another one."""
        self._held[request.account] -= 1
        if unserved:
            self._served[request.account] -= _cost(request)

    def slots(self, account: str) -> int:
        """How many an account holds."""
        return self._held.get(account, 0)

    def load(self, request: Request, more: int = 0) -> float:
        """The slots of a request's account, and so many more, for its weight."""
        return (self._held[request.account] + more) / request.weight


def _cost(request: Request) -> float:
    return (request.num_prompt + request.params.max_tokens) / request.weight
