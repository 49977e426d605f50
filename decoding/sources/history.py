"""Histories of past outputs: one per tenant, and the public one that all tenants share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from outrider.decoding.arrays import Float64Array, Int32Array
from outrider.decoding.request import PUBLIC, Request
from outrider.decoding.sources.log.chains import BLOCK
from outrider.decoding.sources.log.token_log import TokenLog
from outrider.decoding.sources.passages import Passages, compile_passages
from outrider.decoding.sources.similar import SKETCH_TOKENS, SimilarRequests, as_tokens, compile_similar, of_tokens, sketch_of
from outrider.decoding.sources.text_keys import (
    MAX_PASSAGES,
    is_note,
    is_passage,
    output_key,
    passage_key,
    passages_of,
    request_of,
    sketch_key,
)

_MOST_UNCOUNTED = 1 << 16
_REMOVED_REQUESTS = 1 << 16  # hashes to remember
_FEWEST_TEXTS = 1024  # keys held before any is dropped
_CHOICES = 2  # recalled outputs per past request
HELD_TEXTS, HELD_TOKENS = 256, 1 << 16  # limits per history
_NOTHING = np.zeros(0, np.int32)


class Recalled(NamedTuple):
    """Text that a request may repeat: an output or a document of a similar past request."""

    tokens: Int32Array  # [n], n >= 1
    similarity: float  # similarity of the prompts, in (0, 1]
    is_output: bool


class HeldPieces:
    """Out-of-order pieces, held until the gap before them is filled; beyond the limits the longest-waiting text is dropped."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[tuple[int, Int32Array]]] = {}  # pieces by offset; the longest-waiting text first
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of texts with pieces behind a gap."""
        return len(self._pieces)

    def hold(self, text: int, offset: int, tokens: Int32Array) -> None:
        """Store a copy of a piece; of two pieces with one offset the longer is kept."""
        pieces = self._pieces.setdefault(text, [])
        at = bisect_left(pieces, offset, key=lambda piece: piece[0])
        known = len(pieces[at][1]) if at < len(pieces) and pieces[at][0] == offset else 0
        if len(tokens) > known:
            pieces[at : at + (known > 0)] = [(offset, tokens.copy())]
            self.num_tokens += len(tokens) - known
        while len(self._pieces) > HELD_TEXTS or self.num_tokens > HELD_TOKENS:
            self.drop(next(iter(self._pieces)))

    def take(self, text: int, length: int) -> tuple[int, Int32Array] | None:
        """Pop the first piece if it starts within or directly behind the first ``length`` tokens; None otherwise."""
        pieces = self._pieces.get(text)
        if pieces is None or pieces[0][0] > length:
            return None
        piece = pieces.pop(0)
        self.num_tokens -= len(piece[1])
        if not pieces:
            del self._pieces[text]
        return piece

    def drop(self, text: int) -> None:
        """Discard the pieces of a text."""
        self.num_tokens -= sum(len(tokens) for _, tokens in self._pieces.pop(text, ()))

    def clear(self) -> None:
        """Discard all pieces."""
        self._pieces.clear()
        self.num_tokens = 0


@dataclass(slots=True)
class _Text:
    """State of a text, by its key."""

    length: int = 0  # contiguous tokens received from the beginning
    end: int | None = None  # final length, None if unknown
    dead: bool = False  # removed: later pieces are dropped
    numbers: list[int] = field(default_factory=list)  # owner numbers in the log, including earlier texts of this key

    @property
    def complete(self) -> bool:
        """Return whether all tokens have arrived."""
        return self.end is not None and self.length >= self.end


class History:
    """Texts of one tenant, and the frequency of each token in them.

    Texts arrive in pieces, from this process or others, twice or in any order, with the same result. Notes of requests are stored
    too, to find similar ones (``decoding.sources.text_keys``).

    Raises:
        ValueError: ``capacity``, in tokens, is below 1.
    """

    def __init__(self, capacity: int, end_tokens: tuple[int, ...] = ()) -> None:
        self.log = TokenLog(capacity)
        self.end_tokens = frozenset(end_tokens)
        self._frequencies: Float64Array = np.zeros(0)
        self._uncounted: list[int] = []  # tokens not yet in the frequencies: counting at each step is slower
        self.version: object = object()  # replaced when texts are deleted: data derived from them is invalid
        self._texts: dict[int, _Text] = {}  # in order of their beginning
        self._most_texts = _FEWEST_TEXTS
        self._removed: dict[int, None] = {}  # request hashes in order of removal
        self._held = HeldPieces()
        self._similar, self._passages = SimilarRequests(max(1, capacity // BLOCK)), Passages(capacity)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens available for drafting."""
        return self.log.num_tokens

    @property
    def frequencies(self) -> Float64Array:
        """Return the count of each token id seen so far, [max id + 1]."""
        self._count()
        return self._frequencies

    def _count(self) -> None:
        if self._uncounted:
            counts = np.bincount(self._uncounted, minlength=len(self._frequencies)).astype(np.float64)
            counts[: len(self._frequencies)] += self._frequencies
            self._frequencies = counts
            self._uncounted.clear()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        arrays = self.log.nbytes + self.frequencies.nbytes + self._similar.nbytes + self._passages.nbytes
        return arrays + 4 * self._held.num_tokens

    def start(self, text: int) -> None:
        """Begin a text that this process writes (a new one, if the last of this key is complete or removed), or continue one."""
        entry = self._texts.get(text)
        if entry is None:
            self._bound_texts()
            self._texts[text] = _Text()
        elif entry.complete or entry.dead:
            self._held.drop(text)
            # Numbers whose blocks have all left the ring are forgotten.
            here = np.isin(entry.numbers, self.log.arrays.owners)
            del self._texts[text]
            self._texts[text] = _Text(numbers=np.asarray(entry.numbers, np.int64)[here].tolist())

    def extend(self, text: int, offset: int, tokens: Sequence[int] | Int32Array, final: bool = False) -> None:
        """Add a piece of a text, behind its first ``offset`` tokens; a note is accepted only as one whole piece."""
        if is_note(text):
            if offset == 0 and final:
                self._note(text, np.asarray(tokens, np.int32))
            return
        entry = self._texts.get(text)
        goes_on = entry is not None and entry.length == offset and entry.end is None and not entry.dead
        if goes_on and not (final or self._held.num_tokens):  # fast path: tokens emitted by a step
            assert entry is not None
            self._append(text, entry, offset, np.asarray(tokens, np.int32))
            return
        if entry is None:
            if request_of(text) in self._removed or not (len(tokens) or final):
                return
            self._bound_texts()
            entry = self._texts[text] = _Text()
        if entry.dead or entry.complete:
            return
        new = np.asarray(tokens, np.int32)
        if final:
            entry.end = offset + len(new)
        # A piece is used for drafting once all tokens before it have arrived.
        if offset > entry.length:
            if len(new):
                self._held.hold(text, offset, new)
            return
        self._append(text, entry, offset, new)
        while piece := self._held.take(text, entry.length):
            self._append(text, entry, *piece)
        if entry.complete:
            # Pieces behind the end never connect.
            self._held.drop(text)
            self.log.close(text)

    def _append(self, text: int, entry: _Text, offset: int, tokens: Int32Array) -> None:
        """Append the new tokens of a piece that starts no later than the text ends."""
        new = tokens[entry.length - offset :] if entry.length > offset else tokens
        listed = new.tolist()
        entry.length += len(listed)
        # Texts are split at end tokens, which are in no branch and are not counted.
        if self.end_tokens and not self.end_tokens.isdisjoint(listed):
            ends = np.flatnonzero(np.isin(new, list(self.end_tokens)))
            for start, end in zip((0, *(ends + 1)), ends, strict=False):
                self._write(text, entry, new[start:end], listed[start:end])
                self.log.close(text)
            new, listed = new[ends[-1] + 1 :], listed[ends[-1] + 1 :]
        self._write(text, entry, new, listed)

    def _write(self, text: int, entry: _Text, new: Int32Array, listed: list[int]) -> None:
        if not listed:
            return
        number = self.log.extend(text, new)
        if not entry.numbers or entry.numbers[-1] != number:
            entry.numbers.append(number)
        self._uncounted += listed
        if len(self._uncounted) > _MOST_UNCOUNTED:
            self._count()

    def _bound_texts(self) -> None:
        """Drop the keys of texts whose blocks have left the ring, once there are far more keys than blocks."""
        if len(self._texts) < self._most_texts:
            return
        owners = self.log.arrays.owners
        here = set(owners.tolist())
        gone = [(text, entry) for text, entry in self._texts.items() if here.isdisjoint(entry.numbers)]
        # Complete and removed texts go first, then those begun first.
        excess = len(self._texts) - max(_FEWEST_TEXTS // 2, len(owners))
        for text, _ in sorted(gone, key=lambda item: not (item[1].complete or item[1].dead))[: max(0, excess)]:
            self._held.drop(text)
            self.log.close(text)
            del self._texts[text]
        self._most_texts = max(_FEWEST_TEXTS, 2 * len(self._texts), 2 * len(owners))

    def _note(self, text: int, tokens: Int32Array) -> None:
        request = request_of(text)
        if request in self._removed:
            return
        if is_passage(text):
            self._passages.add(text, tokens, self._removed)
        elif len(tokens) in SKETCH_TOKENS:
            self._similar.add(request, of_tokens(tokens))

    def remember(self, request: Request) -> None:
        """Store the sketch and the passages of a tenant's request whose output is complete."""
        name = request_of(request.text)
        if name in self._removed or request.tenant is None:
            return
        self._similar.add(name, sketch_of(request.prompt_ids, request.embedding))
        passages = [passage for reference in request.references for passage in passages_of(reference)]
        for place, passage in enumerate(passages[:MAX_PASSAGES]):
            self._passages.add(passage_key(name, place), passage, self._removed)
        self._passages.look(name, request.prompt_ids, self._removed)

    def notes(self, request: Request) -> list[tuple[int, Int32Array]]:
        """Return the notes of a request with their keys, except passages that an earlier request already brought."""
        name = request_of(request.text)
        notes = self._passages.of_request(name)
        if self._similar.knows(name):
            notes.append((sketch_key(name), as_tokens(sketch_of(request.prompt_ids, request.embedding))))
        return notes

    def recall(self, request: Request, most: int) -> list[Recalled]:
        """Return outputs and passages of up to ``most`` similar past requests, the most similar first."""
        found: list[Recalled] = []
        for name, similarity in self._similar.find(sketch_of(request.prompt_ids, request.embedding), most) if most else ():
            if name == request_of(request.text):
                continue
            for choice in range(_CHOICES):
                entry = self._texts.get(output_key(name, choice))
                parts = [self.log.tokens_of(number) for number in ([] if entry is None else entry.numbers)]
                tokens = np.concatenate(parts) if parts else _NOTHING
                if len(tokens):
                    found.append(Recalled(tokens, similarity, True))
            found += [Recalled(tokens, similarity, False) for _, tokens in self._passages.of_request(name)]
        return found

    def number(self, text: int) -> int:
        """Return the owner number in the log of the open part of a text; -1 if there is none."""
        return self.log.number(text)

    def removed(self, text: int) -> bool:
        """Return whether a text was removed and not started since; its later pieces are dropped."""
        entry = self._texts.get(text)
        return entry is not None and entry.dead

    def remove(self, text: int, rescued: bool = True) -> None:
        """Remove a text and all earlier ones of the same key, with ``rescued`` all surviving runs, too; drop later pieces."""
        if is_note(text):
            if is_passage(text):
                self._passages.remove(text)
            else:
                self._similar.remove(request_of(text))
            return
        entry = self._texts.get(text)
        if entry is None:
            self._bound_texts()
            entry = self._texts[text] = _Text()
        self._held.drop(text)
        entry.dead = True
        for number in entry.numbers:
            left = self.log.tokens_of(number)
            self.frequencies[: int(left.max(initial=-1)) + 1] -= np.bincount(left)
            self.log.remove(number, rescued=False)
        entry.numbers.clear()
        if rescued:
            self._delete_survivors()

    def remove_requests(self, hashes: Collection[int]) -> None:
        """Remove the present and future texts of requests, or documents by their hashes (``passages.names_of``)."""
        for name in hashes:
            # Reinserted at the end: the oldest removals are forgotten first.
            self._removed.pop(name, None)
            self._removed[name] = None
            self._similar.remove(name)
            self._passages.remove_request(name)
        self._passages.forget_prompts(hashes)
        while len(self._removed) > _REMOVED_REQUESTS:
            del self._removed[next(iter(self._removed))]
        for text in [text for text in self._texts if request_of(text) in hashes]:
            self.remove(text, rescued=False)
        self._delete_survivors()

    def _delete_survivors(self) -> None:
        """Remove the surviving runs, which have no owner and may belong to a deleted text."""
        self.log.remove(-1, rescued=True)
        self.version = object()

    def clear(self, dead: bool) -> None:
        """Remove everything; with ``dead``, later pieces of incomplete texts are dropped until ``start``."""
        for entry in self._texts.values():
            entry.dead |= dead and not entry.complete
        self._texts = {text: _Text(dead=True) for text, entry in self._texts.items() if entry.dead}
        self._held.clear()
        self._frequencies, self.version = np.zeros(0), object()
        self._uncounted.clear()
        self.log.clear()
        self._similar.clear()
        self._passages.clear()


class Histories:
    """One isolated history per tenant, each of up to ``capacity`` tokens (at least 1), and the public one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._end_tokens: tuple[int, ...] = ()
        self.public = History(capacity)
        self._by_tenant = {PUBLIC: self.public}

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens at which texts are split; set them before the first text arrives."""
        return self._end_tokens

    @end_tokens.setter
    def end_tokens(self, end_tokens: tuple[int, ...]) -> None:
        self._end_tokens = end_tokens
        for history in self._by_tenant.values():
            history.end_tokens = frozenset(end_tokens)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all histories."""
        return sum(history.nbytes for history in self._by_tenant.values())

    @property
    def log_bytes(self) -> int:
        """Return the bytes of the logs alone, nearly all of the memory; callable from any thread."""
        # A copy, because the engine's thread may add a tenant meanwhile.
        return sum(history.log.nbytes for history in list(self._by_tenant.values()))

    def of(self, tenant: str | None) -> History | None:
        """Return the history of a tenant, created at the first call; None for no tenant."""
        if tenant is None:
            return None
        history = self._by_tenant.get(tenant)
        if history is None:
            history = self._by_tenant[tenant] = History(self.capacity, self._end_tokens)
        return history


def compile_recall() -> None:
    """Compile the search for similar requests and passages before the first request."""
    compile_similar()
    compile_passages()
