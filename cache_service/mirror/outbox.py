"""Outbox: what this replica generated and Redis does not have yet, bounded and fair among tenants."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from cache_service.records import CacheDelta

PIECE_TOKENS = 4096  # of one tenant before it is the next one's turn
_RUN_BYTES = 64  # what a run costs besides 4 bytes a token
_MAX_KNOWN = 1 << 16  # texts of a tenant that began and did not end, and such as are dropped; the oldest are forgotten


class _Run:
    """Contiguous tokens of a text."""

    __slots__ = ("final", "offset", "tokens")

    def __init__(self, delta: CacheDelta) -> None:
        self.offset, self.final = delta.offset, delta.final
        self.tokens = array("i", np.asarray(delta.tokens, np.int32).tobytes())

    @property
    def nbytes(self) -> int:
        return _RUN_BYTES + 4 * len(self.tokens)

    def extend(self, other: _Run) -> bool:
        """Takes in what goes on where this ends; False if the other does not."""
        if self.final or self.offset + len(self.tokens) != other.offset:
            return False
        self.tokens.extend(other.tokens)
        self.final = other.final
        return True

    def split(self, text: int, count: int) -> CacheDelta:
        """Takes the first tokens off; the rest stays, if there is any."""
        head, rest = self.tokens[:count], self.tokens[count:]
        delta = CacheDelta(text, self.offset, np.frombuffer(head.tobytes(), np.int32), self.final and not rest)
        self.offset += len(head)
        self.tokens = rest
        return delta


class _Share:
    """What waits of one tenant, the oldest text first."""

    __slots__ = ("dead", "nbytes", "open", "texts")

    def __init__(self) -> None:
        self.texts: dict[int, list[_Run]] = {}
        self.nbytes = 0
        self.open: dict[int, None] = {}  # begun, not ended
        self.dead: dict[int, None] = {}  # of these nothing is taken any more: a part of them was dropped

    def add(self, text: int, run: _Run) -> None:
        runs = self.texts.setdefault(text, [])
        if runs and runs[-1].extend(run):
            self.nbytes += 4 * len(run.tokens)
        else:
            runs.append(run)
            self.nbytes += run.nbytes

    def take(self) -> CacheDelta:
        """The first piece of the oldest text."""
        text, runs = next(iter(self.texts.items()))
        run = runs[0]
        self.nbytes -= run.nbytes
        delta = run.split(text, PIECE_TOKENS)
        if run.tokens:
            self.nbytes += run.nbytes
            return delta
        runs.pop(0)
        if not runs:
            del self.texts[text]
        return delta

    def drop(self, text: int) -> int:
        """Drops a text whole, what comes later of it included; how many tokens that were."""
        runs = self.texts.pop(text, [])
        self.nbytes -= sum(run.nbytes for run in runs)
        if text in self.open:
            del self.open[text]
            _note(self.dead, text)
        return sum(len(run.tokens) for run in runs)


class Outbox:
    """Texts on their way to Redis. The engine's thread puts, one other thread takes.

    Contiguous pieces of a text are joined, so that a Redis that is away costs memory for tokens, not for steps. Each tenant has a
    share of its own; when it is full its oldest texts go, whole, as a text with a hole is of no use to anyone. No method waits
    for anything but the lock, which is held while a few small objects move.

    Example: the pieces (text 7, offset 0) ``1 2`` and (text 7, offset 2) ``3`` leave as one, (text 7, offset 0) ``1 2 3``.
    """

    def __init__(self, limit_bytes_per_tenant: int) -> None:
        """
        Args:
            limit_bytes_per_tenant: 4 bytes a token and 64 for each run of tokens.
        """
        self._limit = limit_bytes_per_tenant
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._shares: dict[str, _Share] = {}  # whoever was served last comes last
        self._out: set[str] = set()  # tenants whose deltas were taken and are neither delivered nor given back
        self._forgotten: set[tuple[str, int | None]] = set()  # since the last take: (tenant, request hash or all)
        self.dropped_texts = 0
        self.dropped_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes that wait."""
        with self._lock:
            return sum(share.nbytes for share in self._shares.values())

    @property
    def idle(self) -> bool:
        """Whether everything that was put is delivered or dropped."""
        with self._lock:
            return not self._out and not any(share.texts for share in self._shares.values())

    def put(self, tenant: str, delta: CacheDelta) -> None:
        """Adds a piece; it never waits and never fails."""
        if not (len(delta.tokens) or delta.final):
            return
        run = _Run(delta)
        with self._lock:
            share = self._shares.get(tenant)
            if share is None:
                share = self._shares[tenant] = _Share()
            if delta.text in share.dead:
                self.dropped_tokens += len(run.tokens)
                if delta.final:
                    del share.dead[delta.text]
                return
            if delta.final:
                share.open.pop(delta.text, None)
            else:
                _note(share.open, delta.text)
            share.add(delta.text, run)
            self._bound(share)
        if not self._filled.is_set():
            self._filled.set()

    def wait(self, timeout_s: float) -> bool:
        """Waits until there is something to take; False if there is not after ``timeout_s``."""
        return self._filled.wait(timeout_s)

    def wake(self) -> None:
        """Ends a wait, although there may be nothing to take."""
        self._filled.set()

    def take(self, max_tokens: int) -> dict[str, list[CacheDelta]]:
        """Takes pieces out, one of each tenant in turn, until they hold ``max_tokens`` or nothing is left.

        Whoever took says ``delivered`` or ``give_back`` before the next take.
        """
        with self._lock:
            assert not self._out, "taken twice"
            self._forgotten.clear()
            taken: dict[str, list[CacheDelta]] = {}
            while max_tokens > 0:
                tenant = next((name for name, share in self._shares.items() if share.texts), None)
                if tenant is None:
                    self._filled.clear()
                    break
                share = self._shares.pop(tenant)
                self._shares[tenant] = share
                delta = share.take()
                taken.setdefault(tenant, []).append(delta)
                max_tokens -= max(1, len(delta.tokens))
            self._out = set(taken)
            return taken

    def delivered(self) -> None:
        """What was taken has arrived."""
        with self._lock:
            self._out.clear()

    def give_back(self, taken: Mapping[str, Sequence[CacheDelta]]) -> None:
        """Puts what was taken to where it was, but for what was forgotten since."""
        with self._lock:
            self._out.clear()
            for tenant, deltas in taken.items():
                if (tenant, None) in self._forgotten:
                    continue
                share = self._shares[tenant]
                newer, share.texts = share.texts, {}
                for delta in deltas:
                    if (tenant, delta.text >> 16) not in self._forgotten and delta.text not in share.dead:
                        share.add(delta.text, _Run(delta))
                for text, runs in newer.items():
                    for run in runs:
                        share.nbytes -= run.nbytes
                        share.add(text, run)
                self._bound(share)
            if any(share.texts for share in self._shares.values()):
                self._filled.set()

    def forget(self, tenant: str, request: int | None = None) -> None:
        """Drops a tenant's texts, or those of one request by its hash, and what is still to come of those that have begun."""
        with self._lock:
            self._forgotten.add((tenant, request))
            share = self._shares.get(tenant)
            if share is not None:
                for text in [text for text in {**share.texts, **share.open} if request in (None, text >> 16)]:
                    share.drop(text)

    def _bound(self, share: _Share) -> None:
        while share.nbytes > self._limit:
            self.dropped_tokens += share.drop(next(iter(share.texts)))
            self.dropped_texts += 1


def _note(texts: dict[int, None], text: int) -> None:
    if text not in texts and len(texts) >= _MAX_KNOWN:
        del texts[next(iter(texts))]
    texts[text] = None
