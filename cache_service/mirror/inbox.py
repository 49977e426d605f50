"""Inbox: arrivals from Redis that wait for the engine's thread, which alone changes histories."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache_service.texts import Admitted
from decoding.sources.text_keys import is_note

if TYPE_CHECKING:
    from decoding.sources.history import Histories

PIECE_TOKENS = 1024  # of one tenant before it is the next one's turn
_REMOVALS = 16  # at once: a document has many hashes, and each look at all texts takes its time
_REMOVAL_TOKENS = 64  # that take as long as one removal, roughly


@dataclass(slots=True)
class _Arrival:
    """What is left of an admitted batch or snapshot."""

    weight: int
    pieces: Iterator[tuple[int, int]]  # applies the next one, and says its weight and its tokens


def _weight(admitted: Admitted, reload: bool) -> int:
    """The sum over the pieces of an arrival."""
    tokens = sum(max(1, len(delta.tokens)) for delta in admitted.deltas)
    return tokens + _REMOVAL_TOKENS * (len(admitted.removed) + len(admitted.evicted)) + (reload or admitted.cleared)


def _pieces(admitted: Admitted, reload: bool, memory: Histories, tenant: str) -> Iterator[tuple[int, int]]:
    """Applies an arrival piece by piece."""
    history = memory.of(tenant)
    assert history is not None
    if reload or admitted.cleared:
        history.clear(dead=admitted.cleared)
        yield 1, 0
    for at in range(0, len(admitted.removed), _REMOVALS):
        some = frozenset(admitted.removed[at : at + _REMOVALS])
        history.remove_requests(some)
        yield _REMOVAL_TOKENS * len(admitted.removed[at : at + _REMOVALS]), 0
    for text in admitted.evicted:
        history.remove(text, rescued=False)
        yield _REMOVAL_TOKENS, 0
    for delta in admitted.deltas:
        count = len(delta.tokens)
        size = count if is_note(delta.text) else PIECE_TOKENS  # a note comes whole
        for start in range(0, max(1, count), max(1, size)):
            piece = delta.tokens[start : start + size]
            history.extend(delta.text, delta.offset + start, piece, delta.final and start + size >= count)
            yield max(1, len(piece)), len(piece)


class Inbox:
    """Arrivals by tenant. One thread puts, the engine's thread applies, a piece of each tenant in turn."""

    def __init__(self, memory: Histories) -> None:
        """
        Args:
            memory: the engine's histories, which ``apply`` changes.
        """
        self._memory, self._lock = memory, threading.Lock()
        self._waiting: dict[str, deque[_Arrival]] = {}  # whoever was served last comes last
        self._weights: dict[str, int] = {}
        self.applied_tokens = 0

    def put(self, tenant: str, admitted: Admitted, reload: bool = False) -> None:
        """Adds what the ledger admitted; ``reload``: all that was there before goes first, and may come again."""
        weight = _weight(admitted, reload)
        if not weight:
            return
        with self._lock:
            arrival = _Arrival(weight, _pieces(admitted, reload, self._memory, tenant))
            self._waiting.setdefault(tenant, deque()).append(arrival)
            self._weights[tenant] = self._weights.get(tenant, 0) + weight

    def weight(self, tenant: str) -> int:
        """How much waits of a tenant, as a number of tokens."""
        return self._weights.get(tenant, 0)

    @property
    def waiting_tokens(self) -> int:
        """How much waits of all tenants; from any thread."""
        return sum(list(self._weights.values()))

    def apply(self, max_tokens: int) -> bool:
        """Applies about ``max_tokens``; whether more waits."""
        while max_tokens > 0:
            with self._lock:
                tenant = next(iter(self._waiting), None)
                if tenant is None:
                    return False
                queue = self._waiting[tenant] = self._waiting.pop(tenant)
            max_tokens -= self._apply_piece(tenant, queue, min(max_tokens, PIECE_TOKENS))
        return bool(self._waiting)

    def _apply_piece(self, tenant: str, queue: deque[_Arrival], most: int) -> int:
        """Small arrivals together, long ones in pieces."""
        total = 0
        while queue and total < most:
            arrival = queue[0]
            weight, tokens = next(arrival.pieces)
            total += weight
            self.applied_tokens += tokens
            arrival.weight -= weight
            with self._lock:
                self._weights[tenant] -= weight
                if not arrival.weight:
                    queue.popleft()
                if not queue:
                    del self._waiting[tenant]
        return total
