"""Texts of a tenant, and the rules for applying stream batches to them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from outrider.cache_service.records import CacheDelta, TextBatch
from outrider.cache_service.server.eviction import worths
from outrider.cache_service.server.snapshot import Snapshot, SnapshotText, TextTable
from outrider.decoding.arrays import Int32Array
from outrider.decoding.sources.text_keys import is_passage

MAX_EVICTED = 1 << 14  # text keys whose late pieces are still refused; the oldest are forgotten
_PASSAGE_WORTH = 0.1  # worth of a passage relative to an output: prompts usually contain it again
MAX_HELD = 256  # pieces of a text that wait for earlier ones; more are dropped


@dataclass(frozen=True, slots=True)
class AdmittedBatch:
    """Parts of a batch to apply, in this order."""

    cleared: bool = False  # the tenant was deleted: drop all its texts first
    removed: tuple[int, ...] = ()  # hashes of requests and of documents
    evicted: tuple[int, ...] = ()  # text keys
    deltas: tuple[CacheDelta, ...] = ()


class Ledger:
    """Deletions of a tenant. Cache client and service share these rules, so both keep the same texts in any order of batches.

    Example: a batch that removes request 5 and one with a delta of text ``5 << 16`` leave nothing of it, whichever comes first.
    """

    # A batch of an older epoch is dropped; one of a newer epoch clears everything first. Within an epoch the sets of removed
    # requests and evicted texts only grow (2P-set of Shapiro et al., INRIA RR-7506: removal always wins, and nothing removed
    # returns, which is right because request ids are used once and deleted documents must stay deleted). So the result depends
    # only on the set of batches, not on duplicates or order.

    def __init__(self, epoch: int = 0, removed: Iterable[tuple[int, float]] = (), evicted: Iterable[int] = ()) -> None:
        self.epoch = epoch
        self.removed: dict[int, float] = dict(removed)  # hashes of requests and documents, and their times of removal
        self.evicted: dict[int, None] = dict.fromkeys(evicted)  # text keys in order of eviction

    def allows(self, text: int, tokens: Int32Array | None = None) -> bool:
        """Return whether pieces of this text are applied. For a passage, which arrives whole, ``tokens`` are checked too."""
        return text not in self.evicted and not self.deleted(text, tokens)

    def deleted(self, text: int, tokens: Int32Array | None = None) -> bool:
        """Return whether the text's request, or the document of a passage with these tokens, was deleted."""
        if text >> 16 in self.removed:
            return True
        return bool(self.removed) and tokens is not None and is_passage(text) and _is_of(text, tokens, self.removed)

    def admit(self, batch: TextBatch, now_s: float = 0.0) -> AdmittedBatch:
        """Return the parts of a batch to apply. ``now_s`` is recorded with removed requests."""
        if batch.epoch < self.epoch:
            return AdmittedBatch()
        cleared = self._enter(batch.epoch)
        for request in batch.removed:
            self.removed.setdefault(request, now_s)
        self.evict(batch.evicted)
        deltas = tuple(delta for delta in batch.deltas if self.allows(delta.text, delta.tokens))
        return AdmittedBatch(cleared, batch.removed, batch.evicted, deltas)

    def admit_snapshot(self, snapshot: Snapshot) -> AdmittedBatch | None:
        """Return the parts of a snapshot for a cache client that reloads its history; None if its epoch is older."""
        # `cleared` means a newer epoch, so texts growing here were deleted. Removals of both sides stay. `removed` and `evicted`
        # are those not known here, and matter only for texts growing here, since no delta belongs to them.
        if snapshot.epoch < self.epoch:
            return None
        cleared = self._enter(snapshot.epoch)
        removed = tuple(request for request, _ in snapshot.removed if request not in self.removed)
        evicted = tuple(key for key in snapshot.evicted if key not in self.evicted)
        for request, at_s in snapshot.removed:
            self.removed.setdefault(request, at_s)
        self.evict(evicted)
        pieces = (CacheDelta(text.text, text.offset, text.tokens, text.final) for text in snapshot.texts)
        return AdmittedBatch(cleared, removed, evicted, tuple(piece for piece in pieces if self.allows(piece.text, piece.tokens)))

    def evict(self, keys: Iterable[int]) -> None:
        """Record evicted texts."""
        self.evicted.update(dict.fromkeys(keys))
        if len(self.evicted) > MAX_EVICTED:
            for key in list(self.evicted)[: len(self.evicted) - MAX_EVICTED]:
                del self.evicted[key]

    def forget(self, before_s: float) -> None:
        """Drop removals recorded before a time, after which no piece of them can arrive."""
        self.removed = {request: at_s for request, at_s in self.removed.items() if at_s >= before_s}

    def _enter(self, epoch: int) -> bool:
        if epoch == self.epoch:
            return False
        self.epoch = epoch
        self.removed.clear()
        self.evicted.clear()
        return True


def _is_of(passage: int, tokens: Int32Array, documents: Container[int]) -> bool:
    from outrider.decoding.sources.passages import names_of  # loads the compiler: import only when needed

    return any(name in documents for name in names_of(passage, tokens))


class CachedText:
    """Text without gaps, and pieces after a gap."""

    __slots__ = ("_buffer", "final", "held", "length", "updated_s")

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.int32)
        self.length = 0
        self.final = False
        self.held: dict[int, tuple[Int32Array, bool]] = {}  # by offset; of pieces with equal offset, the longer one
        self.updated_s = 0.0  # time of last growth

    @property
    def tokens(self) -> Int32Array:
        """Return the [length] tokens before the first gap."""
        return self._buffer[: self.length]

    @property
    def num_tokens(self) -> int:
        """Return the number of kept tokens, including those after gaps."""
        return self.length + (sum(len(tokens) for tokens, _ in self.held.values()) if self.held else 0)

    def extend(self, offset: int, tokens: Int32Array, final: bool) -> bool:
        """Add a piece. Return whether anything changed. Overlaps agree, because the request determines its text."""
        if self.final:
            return False
        if offset > self.length:
            return self._hold(offset, tokens, final)
        changed = self._append(offset, tokens, final)
        while changed and self.held and (first := min(self.held)) <= self.length:
            self._append(first, *self.held.pop(first))
        return changed

    def _append(self, offset: int, tokens: Int32Array, final: bool) -> bool:
        new = tokens[self.length - offset :]
        end = self.length + len(new)
        if self.final or not (len(new) or (final and offset + len(tokens) == end)):
            return False
        if end > len(self._buffer):
            # The first piece may be the only one: allocate no spare room.
            grown = np.empty(max(end, 2 * self.length if not final else 0), np.int32)
            grown[: self.length] = self.tokens
            self._buffer = grown
        self._buffer[self.length : end] = new
        self.length = end
        if final:
            self.final, self._buffer, self.held = True, self.tokens.copy(), {}
        return True

    def _hold(self, offset: int, tokens: Int32Array, final: bool) -> bool:
        known = self.held.get(offset)
        if len(self.held) >= MAX_HELD if known is None else (len(known[0]), known[1]) >= (len(tokens), final):
            return False
        self.held[offset] = np.array(tokens, np.int32), final  # a copy: the piece may be a view of a long array
        return True


class TenantTexts:
    """Texts of one tenant in the service, bounded in time and size."""

    def __init__(self, epoch: int = 0) -> None:
        self.ledger = Ledger(epoch)
        self.num_tokens = 0  # all texts, including pieces after gaps
        self._texts: dict[int, CachedText] = {}

    @property
    def texts(self) -> Mapping[int, CachedText]:
        """Return the texts by key."""
        return MappingProxyType(self._texts)

    def apply(self, batch: TextBatch, now_s: float) -> AdmittedBatch:
        """Apply a batch, repeatedly and in any order. Return the admitted parts."""
        admitted = self.ledger.admit(batch, now_s)
        if admitted.cleared:
            self._texts.clear()
            self.num_tokens = 0
        if admitted.removed:
            gone = set(admitted.removed)
            passages = [key for key in self._texts if is_passage(key) and _is_of(key, self._texts[key].tokens, gone)]
            self._drop([*passages, *(key for key in self._texts if key >> 16 in gone)])
        self._drop(admitted.evicted)
        for delta in admitted.deltas:
            self._extend(delta.text, delta.offset, delta.tokens, delta.final, now_s)
        return admitted

    def expire(self, ttl_s: float, now_s: float, share: float = 0.1) -> list[int]:
        """Drop up to a fraction ``share`` of the texts, oldest first, that did not grow for ``ttl_s``. Return their keys."""
        # Unfinished texts and old removals, too; at least one text; not all at once, so that a wrong clock is noticed in time.
        old = [key for key, text in self._texts.items() if text.updated_s < now_s - ttl_s]
        keys = sorted(old, key=lambda key: (self._texts[key].updated_s, key))[: max(1, int(share * len(self._texts)))]
        self._drop(keys)
        self.ledger.evict(keys)
        self.ledger.forget(now_s - ttl_s)
        return keys

    def evict(self, max_tokens: int, half_life_s: float, now_s: float) -> list[int]:
        """Drop the texts of least ``worths`` until at most ``max_tokens`` are left; return their keys. Raises ``ValueError``."""
        if not half_life_s > 0:
            raise ValueError(f"half_life_s must be above 0, got {half_life_s}")
        if self.num_tokens <= max_tokens:
            return []
        # All texts are examined, so callers evict somewhat more than the quota requires. Ties: the older text, then the smaller
        # key.
        keys = sorted(self._texts, key=lambda key: (self._texts[key].updated_s, key))
        texts = [self._texts[key] for key in keys]
        ages_s = now_s - np.array([text.updated_s for text in texts])
        growing = np.array([not text.final for text in texts])
        worth = worths([text.tokens for text in texts], ages_s, half_life_s)
        worth *= np.where([is_passage(key) for key in keys], _PASSAGE_WORTH, 1.0)
        # Unfinished texts go last: dropping one also loses the pieces that are still to come.
        order = np.lexsort((np.arange(len(keys)), worth, growing))
        freed = np.cumsum([texts[index].num_tokens for index in order])
        count = int(np.searchsorted(freed, self.num_tokens - max_tokens)) + 1
        evicted = [keys[index] for index in order[:count]]
        self._drop(evicted)
        self.ledger.evict(evicted)
        return evicted

    def snapshot(self, stream_id: str, vocab_size: int, tokenizer_revision: str, created_s: float) -> Snapshot:
        """Return a snapshot as of a stream entry."""
        pieces = []
        for key, text in self._texts.items():
            if text.length or text.final:
                pieces.append(SnapshotText(key, text.tokens, text.final, text.updated_s))
            for offset, (tokens, final) in text.held.items():
                pieces.append(SnapshotText(key, tokens, final, text.updated_s, offset))
        epoch, removed, evicted = self.ledger.epoch, tuple(self.ledger.removed.items()), tuple(self.ledger.evicted)
        return Snapshot(stream_id, epoch, vocab_size, tokenizer_revision, created_s, TextTable.of(pieces), removed, evicted)

    @classmethod
    def restore(cls, snapshot: Snapshot) -> TenantTexts:
        """Return the texts of a snapshot."""
        restored = cls()
        restored.ledger = Ledger(snapshot.epoch, snapshot.removed, snapshot.evicted)
        for text in snapshot.texts:
            if restored.ledger.allows(text.text, text.tokens):
                restored._extend(text.text, text.offset, text.tokens, text.final, text.updated_s)
        return restored

    def _extend(self, key: int, offset: int, tokens: Int32Array, final: bool, now_s: float) -> None:
        text = self._texts.get(key)
        if text is None:
            if not (len(tokens) or final):
                return
            text = self._texts[key] = CachedText()
        before = text.num_tokens
        if text.extend(offset, tokens, final):
            text.updated_s = max(text.updated_s, now_s)
            self.num_tokens += text.num_tokens - before

    def _drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            text = self._texts.pop(key, None)
            if text is not None:
                self.num_tokens -= text.num_tokens
