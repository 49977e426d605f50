"""Histories of past outputs: one for each tenant, and the public corpus that all share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from decoding.budget.candidates import Float64Array
from decoding.request import PUBLIC, Request, request_of
from decoding.sources.log.chains import BLOCK
from decoding.sources.log.held_pieces import HeldPieces
from decoding.sources.log.token_log import TokenLog
from decoding.sources.passages import Passages, compile_passages
from decoding.sources.similar import SKETCH_TOKENS, SimilarRequests, as_tokens, compile_similar, of_tokens, sketch_of
from decoding.sources.text_keys import MAX_PASSAGES, is_note, is_passage, output_key, passage_key, passages_of, sketch_key
from decoding.tree import Int32Array

_MOST_UNCOUNTED = 1 << 16
_REMOVED_REQUESTS = 1 << 16  # hashes to remember
_FEWEST_TEXTS = 1024  # known by name before any is forgotten
_CHOICES = 2  # outputs of a past request that are recalled
_NOTHING = np.zeros(0, np.int32)


class Recalled(NamedTuple):
    """A text that a request may repeat, as it resembles one of which the text is an output, or which brought it along."""

    tokens: Int32Array  # [n], n >= 1
    similarity: float  # of the prompts, above 0 and up to 1
    is_output: bool


@dataclass(slots=True)
class _Text:
    """What is known of a text by its key."""

    length: int = 0  # tokens from its beginning on that have come
    end: int | None = None  # its length when it is complete, once known
    dead: bool = False  # removed: nothing of it comes in
    numbers: list[int] = field(default_factory=list)  # owners in the log of its parts, and of earlier texts of its name

    @property
    def complete(self) -> bool:
        """Whether all of it has come."""
        return self.end is not None and self.length >= self.end


class History:
    """The texts of one tenant, and how often each token is in them.

    A text comes in pieces, from this process or from others. Pieces may come twice and in any order: the result is the same. A
    piece is drafted from when all that comes before it is there. Beside the outputs it has notes of requests, by which those are
    found again that resemble a new one (``decoding.sources.text_keys``).

    Example: the pieces (offset 0) ``1 2``, (offset 3) ``4`` and (offset 1) ``2 3`` make ``1 2``, again ``1 2``, and ``1 2 3 4``.
    """

    def __init__(self, capacity: int, end_tokens: tuple[int, ...] = ()) -> None:
        """
        Args:
            capacity: tokens to hold, at least 1.
            end_tokens: a text is parted at them; they are in no branch and are not counted.

        Raises:
            ValueError: a capacity below one token.
        """
        self.log = TokenLog(capacity)
        self.end_tokens = frozenset(end_tokens)
        self._frequencies: Float64Array = np.zeros(0)
        self._uncounted: list[int] = []  # what came since frequencies were asked for: counting at each step takes longer
        self.edition: object = object()  # another one once texts are deleted: what was derived from them before has to go too
        self._texts: dict[int, _Text] = {}  # the one that was begun first comes first
        self._most_texts = _FEWEST_TEXTS
        self._removed: dict[int, None] = {}  # request hashes, the one removed first comes first
        self._held = HeldPieces()
        self._similar, self._passages = SimilarRequests(max(1, capacity // BLOCK)), Passages(capacity)

    @property
    def num_tokens(self) -> int:
        """Tokens that can be drafted from."""
        return self.log.num_tokens

    @property
    def frequencies(self) -> Float64Array:
        """[vocab seen so far] how often each token came."""
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
        """Bytes of the arrays."""
        arrays = self.log.nbytes + self.frequencies.nbytes + self._similar.nbytes + self._passages.nbytes
        return arrays + 4 * self._held.num_tokens

    def start(self, text: int) -> None:
        """Says that this process begins to write a text.

        If one of this key is complete, or was removed, it is another text: its tokens stay, if any, and this one begins at
        offset 0. If not, another process has begun it and this one goes on with it.
        """
        entry = self._texts.get(text)
        if entry is None:
            self._bound_texts()
            self._texts[text] = _Text()
        elif entry.complete or entry.dead:
            self._held.drop(text)
            here = np.isin(entry.numbers, self.log.arrays.owners)
            del self._texts[text]
            self._texts[text] = _Text(numbers=np.asarray(entry.numbers, np.int64)[here].tolist())

    def extend(self, text: int, offset: int, tokens: Sequence[int] | Int32Array, final: bool = False) -> None:
        """Takes in a piece of a text.

        Args:
            text: key of the text.
            offset: tokens of the text before this piece.
            tokens: [m] token ids, not negative.
            final: the text ends with this piece. A note comes whole, or is not taken in.
        """
        if is_note(text):
            if offset == 0 and final:
                self._note(text, np.asarray(tokens, np.int32))
            return
        entry = self._texts.get(text)
        goes_on = entry is not None and entry.length == offset and entry.end is None and not entry.dead
        if goes_on and not (final or self._held.num_tokens):  # nearly always: what a step emits
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
        if offset > entry.length:
            if len(new):
                self._held.hold(text, offset, new)
            return
        self._append(text, entry, offset, new)
        while piece := self._held.take(text, entry.length):
            self._append(text, entry, *piece)
        if entry.complete:
            self._held.drop(text)
            self.log.close(text)

    def _append(self, text: int, entry: _Text, offset: int, tokens: Int32Array) -> None:
        """Writes what is new of a piece that begins no later than the text ends."""
        new = tokens[entry.length - offset :] if entry.length > offset else tokens
        listed = new.tolist()
        entry.length += len(listed)
        if self.end_tokens and not self.end_tokens.isdisjoint(listed):
            ends = np.flatnonzero(np.isin(new, list(self.end_tokens)))
            for start, end in zip((0, *(ends + 1)), ends, strict=False):
                self._write(text, entry, new[start:end], listed[start:end])
                self.log.close(text)
            new, listed = new[ends[-1] + 1 :], listed[ends[-1] + 1 :]
        self._write(text, entry, new, listed)

    def _write(self, text: int, entry: _Text, new: Int32Array, listed: list[int]) -> None:
        """Writes tokens, given as an array and as a list."""
        if not listed:
            return
        number = self.log.extend(text, new)
        if not entry.numbers or entry.numbers[-1] != number:
            entry.numbers.append(number)
        self._uncounted += listed
        if len(self._uncounted) > _MOST_UNCOUNTED:
            self._count()

    def _bound_texts(self) -> None:
        """Forgets the names of texts whose blocks have left the ring when there are far more names than blocks.

        Complete and removed texts go first, then those that have not grown for so long.
        """
        if len(self._texts) < self._most_texts:
            return
        owners = self.log.arrays.owners
        here = set(owners.tolist())
        gone = [(text, entry) for text, entry in self._texts.items() if here.isdisjoint(entry.numbers)]
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
        """Notes a request of a tenant whose output is complete here: what its prompt resembles, and which passages it brought."""
        name = request_of(request.text)
        if name in self._removed or request.tenant is None:
            return
        self._similar.add(name, sketch_of(request.prompt_ids, request.embedding))
        passages = [passage for reference in request.references for passage in passages_of(reference)]
        for place, passage in enumerate(passages[:MAX_PASSAGES]):
            self._passages.add(passage_key(name, place), passage, self._removed)
        self._passages.look(name, request.prompt_ids, self._removed)

    def notes(self, request: Request) -> list[tuple[int, Int32Array]]:
        """The notes of a request by their keys, as far as they are its own and not earlier requests'."""
        name = request_of(request.text)
        notes = self._passages.of_request(name)
        if self._similar.knows(name):
            notes.append((sketch_key(name), as_tokens(sketch_of(request.prompt_ids, request.embedding))))
        return notes

    def recall(self, request: Request, most: int) -> list[Recalled]:
        """Outputs and passages of up to ``most`` others whose prompts resemble a request's, the most similar first."""
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
        """The owner number in the log of the text's part that grows; -1 for none."""
        return self.log.number(text)

    def removed(self, text: int) -> bool:
        """Whether a text was taken out, and not started since: what comes of it is dropped."""
        entry = self._texts.get(text)
        return entry is not None and entry.dead

    def remove(self, text: int, rescued: bool = True) -> None:
        """Takes a text out, and all before it of the same key: they are never drafted from again.

        Args:
            text: key; pieces that come later are dropped until ``start``.
            rescued: runs that outlived the block they stood in go too, as they may be of this text.
        """
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
        """Takes out all texts of requests, and such as come later; or documents, whoever brought them (``passages.names_of``)."""
        for name in hashes:
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
        """Takes out what may be left of a deleted text without its name."""
        self.log.remove(-1, rescued=True)
        self.edition = object()

    def clear(self, dead: bool) -> None:
        """Takes everything out.

        Args:
            dead: nothing more comes in of texts that are not complete, until ``start``; else all may come again but what was
                removed before.
        """
        for entry in self._texts.values():
            entry.dead |= dead and not entry.complete
        self._texts = {text: _Text(dead=True) for text, entry in self._texts.items() if entry.dead}
        self._held.clear()
        self._frequencies, self.edition = np.zeros(0), object()
        self._uncounted.clear()
        self.log.clear()
        self._similar.clear()
        self._passages.clear()


class Histories:
    """A history for each tenant, and the public one. What is in one is never in another."""

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: tokens for each tenant, at least 1.

        Raises:
            ValueError: a capacity below one token.
        """
        self.capacity = capacity
        self._end_tokens: tuple[int, ...] = ()
        self.public = History(capacity)
        self._by_tenant = {PUBLIC: self.public}

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Texts are parted at them. To be set before the first text comes."""
        return self._end_tokens

    @end_tokens.setter
    def end_tokens(self, end_tokens: tuple[int, ...]) -> None:
        self._end_tokens = end_tokens
        for history in self._by_tenant.values():
            history.end_tokens = frozenset(end_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of all histories."""
        return sum(history.nbytes for history in self._by_tenant.values())

    @property
    def log_bytes(self) -> int:
        """Bytes of their logs alone, which is nearly all; from any thread."""
        return sum(history.log.nbytes for history in list(self._by_tenant.values()))

    def of(self, tenant: str | None) -> History | None:
        """The history of a tenant, which is made at the first call; None for no tenant."""
        if tenant is None:
            return None
        history = self._by_tenant.get(tenant)
        if history is None:
            history = self._by_tenant[tenant] = History(self.capacity, self._end_tokens)
        return history


def compile_recall() -> None:
    """Calls what is compiled at its first call, of what finds similar requests and passages, so that no request waits for it."""
    compile_similar()
    compile_passages()
