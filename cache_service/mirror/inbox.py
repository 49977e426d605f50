"""Inbox: arrivals from Redis that wait for the engine's thread, which alone changes histories."""

from __future__ import annotations

import threading
from collections import deque

from cache_service.texts import Admitted
from decoding.sources.history import Histories, History

PIECE_TOKENS = 1024  # of one tenant before it is the next one's turn
_REMOVAL_TOKENS = 64  # that take as long as one removal, roughly


class _Arrival:
    """One admitted batch or snapshot, and how far it is applied."""

    __slots__ = ("_at", "_delta", "_done", "_tokens", "admitted", "reload", "weight")

    def __init__(self, admitted: Admitted, reload: bool) -> None:
        self.admitted, self.reload = admitted, reload
        self.weight = sum(len(delta.tokens) for delta in admitted.deltas)
        self.weight += _REMOVAL_TOKENS * (len(admitted.removed) + len(admitted.evicted))
        self._at = 0  # among removed, evicted, then deltas
        self._done = 0  # tokens of the delta at hand

    def step(self, history: History) -> tuple[bool, int, int]:
        """Applies the next piece: (whether that was all, what it weighed, tokens among it)."""
        admitted = self.admitted
        if self.reload or admitted.cleared:
            history.clear(dead=admitted.cleared)
            self.reload, self.admitted = False, Admitted(False, admitted.removed, admitted.evicted, admitted.deltas)
        at, self._at = self._at, self._at + 1
        if at < len(admitted.removed):
            history.remove_request(admitted.removed[at])
            return self._finished, _REMOVAL_TOKENS, 0
        at -= len(admitted.removed)
        if at < len(admitted.evicted):
            history.remove(admitted.evicted[at], rescued=False)
            return self._finished, _REMOVAL_TOKENS, 0
        at -= len(admitted.evicted)
        if at >= len(admitted.deltas):
            return True, 0, 0
        delta = admitted.deltas[at]
        start, end = self._done, min(len(delta.tokens), self._done + PIECE_TOKENS)
        last = end == len(delta.tokens)
        history.extend(delta.text, delta.offset + start, delta.tokens[start:end], delta.final and last)
        if last:
            self._done = 0
        else:
            self._done, self._at = end, self._at - 1
        return self._finished, end - start, end - start

    @property
    def _finished(self) -> bool:
        return self._at >= len(self.admitted.removed) + len(self.admitted.evicted) + len(self.admitted.deltas)


class Inbox:
    """Arrivals by tenant. One thread puts, the engine's thread applies, a piece of each tenant in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Arrival]] = {}  # whoever was served last comes last
        self._weights: dict[str, int] = {}
        self.applied_tokens = 0

    def put(self, tenant: str, admitted: Admitted, reload: bool = False) -> None:
        """Adds what the ledger admitted; ``reload``: all that was there before goes first, and may come again."""
        arrival = _Arrival(admitted, reload)
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(arrival)
            self._weights[tenant] = self._weights.get(tenant, 0) + arrival.weight

    def weight(self, tenant: str) -> int:
        """How much waits of a tenant, as a number of tokens."""
        return self._weights.get(tenant, 0)

    @property
    def waiting_tokens(self) -> int:
        """How much waits of all tenants; from any thread."""
        return sum(list(self._weights.values()))

    def apply(self, memory: Histories, max_tokens: int) -> bool:
        """Applies about ``max_tokens``; whether more waits."""
        while max_tokens > 0:
            with self._lock:
                tenant = next(iter(self._waiting), None)
                if tenant is None:
                    return False
                queue = self._waiting.pop(tenant)
                self._waiting[tenant] = queue
            history = memory.of(tenant)
            assert history is not None
            max_tokens -= self._apply_piece(tenant, queue, history, min(max_tokens, PIECE_TOKENS))
        return bool(self._waiting)

    def _apply_piece(self, tenant: str, queue: deque[_Arrival], history: History, most: int) -> int:
        """Small arrivals together, long ones in pieces."""
        total = 0
        while queue and total < most:
            finished, weight, tokens = queue[0].step(history)
            total += max(1, weight)
            self.applied_tokens += tokens
            with self._lock:
                self._weights[tenant] -= weight
                if finished:
                    queue.popleft()
                if not queue:
                    del self._waiting[tenant]
        return total
