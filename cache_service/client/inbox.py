"""Inbox: updates from Redis that wait for the engine's thread, the only one that changes histories."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.cache_service.texts import AdmittedBatch
from outrider.decoding.sources.text_keys import is_note

if TYPE_CHECKING:
    from outrider.decoding.sources.history import Histories

PIECE_TOKENS = 1024  # tokens of one tenant per turn
_REMOVALS = 16  # at once: a document has many hashes, and each scan of all texts takes time
_REMOVAL_TOKENS = 64  # tokens that take about as long to apply as one removal


@dataclass(slots=True)
class _Arrival:
    """Unapplied rest of an admitted batch or snapshot."""

    weight: int
    pieces: Iterator[tuple[int, int]]  # applies the next piece and yields its weight and its number of tokens


def _weight(admitted: AdmittedBatch, reload: bool) -> int:
    tokens = sum(max(1, len(delta.tokens)) for delta in admitted.deltas)
    return tokens + _REMOVAL_TOKENS * (len(admitted.removed) + len(admitted.evicted)) + (reload or admitted.cleared)


def _pieces(admitted: AdmittedBatch, reload: bool, memory: Histories, tenant: str) -> Iterator[tuple[int, int]]:
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
        size = count if is_note(delta.text) else PIECE_TOKENS  # notes cannot be split
        for start in range(0, max(1, count), max(1, size)):
            piece = delta.tokens[start : start + size]
            history.extend(delta.text, delta.offset + start, piece, delta.final and start + size >= count)
            yield max(1, len(piece)), len(piece)


class Inbox:
    """Updates by tenant. One thread puts, the engine's thread applies a piece of each tenant in turn."""

    def __init__(self, memory: Histories) -> None:
        self._memory, self._lock = memory, threading.Lock()
        self._waiting: dict[str, deque[_Arrival]] = {}  # least recently served tenant first
        self._weights: dict[str, int] = {}
        self.applied_tokens = 0

    def put(self, tenant: str, admitted: AdmittedBatch, reload: bool = False) -> None:
        """Add an admitted update. ``reload`` clears the tenant's history first; its texts may arrive again."""
        weight = _weight(admitted, reload)
        if not weight:
            return
        with self._lock:
            arrival = _Arrival(weight, _pieces(admitted, reload, self._memory, tenant))
            self._waiting.setdefault(tenant, deque()).append(arrival)
            self._weights[tenant] = self._weights.get(tenant, 0) + weight

    def weight(self, tenant: str) -> int:
        """Return the weight of a tenant's waiting updates, in tokens."""
        return self._weights.get(tenant, 0)

    @property
    def waiting_tokens(self) -> int:
        """Return the weight of all waiting updates, from any thread."""
        return sum(list(self._weights.values()))

    def apply(self, max_tokens: int) -> bool:
        """Apply about ``max_tokens``. Return whether more waits."""
        while max_tokens > 0:
            with self._lock:
                tenant = next(iter(self._waiting), None)
                if tenant is None:
                    return False
                # Move the tenant to the end: the first one was served least recently.
                queue = self._waiting[tenant] = self._waiting.pop(tenant)
            max_tokens -= self._apply_piece(tenant, queue, min(max_tokens, PIECE_TOKENS))
        return bool(self._waiting)

    def _apply_piece(self, tenant: str, queue: deque[_Arrival], most: int) -> int:
        """Apply several small updates or one piece of a long one. Return the weight."""
        total = 0
        while queue and total < most:
            arrival = queue[0]
            # Without the lock: only this thread takes from a queue, and `put` must not wait while a piece is applied.
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
