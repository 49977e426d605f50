"""Texts of a tenant, and the rule by which batches of a stream are applied to them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cache_service.keeper.eviction import worths
from cache_service.keeper.snapshot import Snapshot, SnapshotText, TextTable
from cache_service.records import CacheDelta, TextBatch
from decoding.sources.text_keys import is_passage
from decoding.tree import Int32Array

MAX_EVICTED = 1 << 14  # text keys whose late pieces are still recognised; the oldest are forgotten
_PASSAGE_WORTH = 0.1  # of a passage beside an output: prompts bring most of theirs along again
MAX_HELD = 256  # pieces of a text that wait for those before them; more are dropped


@dataclass(frozen=True, slots=True)
class Admitted:
    """What of a batch is to be applied, in this order."""

    cleared: bool = False  # the tenant was deleted: forget all of it first
    removed: tuple[int, ...] = ()  # hashes of requests and of documents
    evicted: tuple[int, ...] = ()  # text keys
    deltas: tuple[CacheDelta, ...] = ()


class Ledger:
    """Which deletions a tenant has seen. Mirror and service ask it alike: both keep the same, in whatever order batches come.

    A batch of an older epoch is dropped whole; one of a newer epoch clears everything first. Within an epoch the removed requests
    and the evicted texts only grow (a 2P set of Shapiro et al., INRIA RR-7506: removal wins whatever the order, and what was
    removed never comes back, which is right because a request's id is used once, and as a deleted document is not to be
    remembered again). What survives is therefore a function of the
    set of batches: duplicates and order do not matter.

    Example: a batch that removes request 5 and one with a delta of text ``5 << 16`` leave nothing of it, whichever comes first.
    """

    def __init__(self, epoch: int = 0, removed: Iterable[tuple[int, float]] = (), evicted: Iterable[int] = ()) -> None:
        self.epoch = epoch
        self.removed: dict[int, float] = dict(removed)  # hashes of requests and documents, and when each was removed
        self.evicted: dict[int, None] = dict.fromkeys(evicted)  # text keys in the order of eviction

    def allows(self, text: int, tokens: Int32Array | None = None) -> bool:
        """Whether pieces of this text are applied; of a passage, which comes whole, the tokens say it, too."""
        return text not in self.evicted and not self.deleted(text, tokens)

    def deleted(self, text: int, tokens: Int32Array | None = None) -> bool:
        """Whether the text's request or, where the tokens of a passage are given, the document was deleted."""
        if text >> 16 in self.removed:
            return True
        return bool(self.removed) and tokens is not None and is_passage(text) and _is_of(text, tokens, self.removed)

    def admit(self, batch: TextBatch, now_s: float = 0.0) -> Admitted:
        """What of a batch is to be applied. ``now_s``: the time that is noted with removed requests."""
        if batch.epoch < self.epoch:
            return Admitted()
        cleared = self._enter(batch.epoch)
        for request in batch.removed:
            self.removed.setdefault(request, now_s)
        self.evict(batch.evicted)
        deltas = tuple(delta for delta in batch.deltas if self.allows(delta.text, delta.tokens))
        return Admitted(cleared, batch.removed, batch.evicted, deltas)

    def admit_snapshot(self, snapshot: Snapshot) -> Admitted | None:
        """What a mirror that starts again from a snapshot applies to its emptied history; None: it is of an older epoch.

        ``cleared`` says that it is of a newer epoch, so that texts which are growing here were deleted. What was removed before,
        here or there, stays removed; ``removed`` and ``evicted`` hold what was not known here, and concern only texts that grow
        here, as no delta is of them.
        """
        if snapshot.epoch < self.epoch:
            return None
        cleared = self._enter(snapshot.epoch)
        removed = tuple(request for request, _ in snapshot.removed if request not in self.removed)
        evicted = tuple(key for key in snapshot.evicted if key not in self.evicted)
        for request, at_s in snapshot.removed:
            self.removed.setdefault(request, at_s)
        self.evict(evicted)
        pieces = (CacheDelta(text.text, text.offset, text.tokens, text.final) for text in snapshot.texts)
        return Admitted(cleared, removed, evicted, tuple(piece for piece in pieces if self.allows(piece.text, piece.tokens)))

    def evict(self, keys: Iterable[int]) -> None:
        """Notes texts that were let go of."""
        self.evicted.update(dict.fromkeys(keys))
        if len(self.evicted) > MAX_EVICTED:
            for key in list(self.evicted)[: len(self.evicted) - MAX_EVICTED]:
                del self.evicted[key]

    def forget(self, before_s: float) -> None:
        """Drops removed requests that were noted before a time, when no piece of them can come any more."""
        self.removed = {request: at_s for request, at_s in self.removed.items() if at_s >= before_s}

    def _enter(self, epoch: int) -> bool:
        if epoch == self.epoch:
            return False
        self.epoch = epoch
        self.removed.clear()
        self.evicted.clear()
        return True


def _is_of(passage: int, tokens: Int32Array, documents: Container[int]) -> bool:
    """Whether a passage is a document, or has a part of one, by the hashes of the documents."""
    from decoding.sources.passages import names_of  # loads the compiler, which those who delete nothing do not need

    return any(name in documents for name in names_of(passage, tokens))


class KeptText:
    """One text as far as it is known without a gap, and the pieces beyond."""

    __slots__ = ("_buffer", "final", "held", "length", "updated_s")

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.int32)
        self.length = 0
        self.final = False
        self.held: dict[int, tuple[Int32Array, bool]] = {}  # by offset; of two pieces with one offset the longer
        self.updated_s = 0.0  # when it grew last

    @property
    def tokens(self) -> Int32Array:
        """[length] what is known without a gap."""
        return self._buffer[: self.length]

    @property
    def num_tokens(self) -> int:
        """All tokens that are kept, those beyond gaps included."""
        return self.length + (sum(len(tokens) for tokens, _ in self.held.values()) if self.held else 0)

    def extend(self, offset: int, tokens: Int32Array, final: bool) -> bool:
        """Adds a piece; whether that changed anything. Overlapping pieces agree, as a text is a function of its request."""
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
            # The first piece may be all there is: no room beyond it.
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
        self.held[offset] = np.array(tokens, np.int32), final  # a copy: the piece may be a part of something long
        return True


class TenantTexts:
    """The texts of one tenant as the service keeps them, bounded in time and size."""

    def __init__(self, epoch: int = 0) -> None:
        self.ledger = Ledger(epoch)
        self.num_tokens = 0  # of all texts, pieces beyond gaps included
        self._texts: dict[int, KeptText] = {}

    @property
    def texts(self) -> Mapping[int, KeptText]:
        """By text key."""
        return MappingProxyType(self._texts)

    def apply(self, batch: TextBatch, now_s: float) -> Admitted:
        """Applies a batch, any number of times and in any order; returns what of it was admitted."""
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
        """Drops texts, open ones too, that did not grow for ``ttl_s``, and forgets removals of that age; returns their keys.

        At most a share of all texts goes at once, or one: the oldest. A wrong clock is noticed before all are gone.
        """
        old = [key for key, text in self._texts.items() if text.updated_s < now_s - ttl_s]
        keys = sorted(old, key=lambda key: (self._texts[key].updated_s, key))[: max(1, int(share * len(self._texts)))]
        self._drop(keys)
        self.ledger.evict(keys)
        self.ledger.forget(now_s - ttl_s)
        return keys

    def evict(self, max_tokens: int, half_life_s: float, now_s: float) -> list[int]:
        """Drops the texts that are worth least (``eviction.worths``) until ``max_tokens`` or fewer are left; returns their keys.

        Passages count a tenth, and texts that are still growing go last. Of equal worth the older goes, then the smaller key.
        Every text is looked at: evict somewhat more than the quota asks, so that it is not needed again at once.

        Raises:
            ValueError: a half-life that is not positive.
        """
        if not half_life_s > 0:
            raise ValueError(f"half_life_s must be above 0, got {half_life_s}")
        if self.num_tokens <= max_tokens:
            return []
        keys = sorted(self._texts, key=lambda key: (self._texts[key].updated_s, key))
        texts = [self._texts[key] for key in keys]
        ages_s = now_s - np.array([text.updated_s for text in texts])
        growing = np.array([not text.final for text in texts])
        worth = worths([text.tokens for text in texts], ages_s, half_life_s)
        worth *= np.where([is_passage(key) for key in keys], _PASSAGE_WORTH, 1.0)
        order = np.lexsort((np.arange(len(keys)), worth, growing))
        freed = np.cumsum([texts[index].num_tokens for index in order])
        count = int(np.searchsorted(freed, self.num_tokens - max_tokens)) + 1
        evicted = [keys[index] for index in order[:count]]
        self._drop(evicted)
        self.ledger.evict(evicted)
        return evicted

    def snapshot(self, stream_id: str, vocab_size: int, tokenizer_revision: str, created_s: float) -> Snapshot:
        """All of it, as of a stream entry."""
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
        """What the snapshot was taken of."""
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
            text = self._texts[key] = KeptText()
        before = text.num_tokens
        if text.extend(offset, tokens, final):
            text.updated_s = max(text.updated_s, now_s)
            self.num_tokens += text.num_tokens - before

    def _drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            text = self._texts.pop(key, None)
            if text is not None:
                self.num_tokens -= text.num_tokens
