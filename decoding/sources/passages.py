"""Passages of a tenant, each stored once: documents that requests brought, and recurring parts of prompts.

A prompt is cut at *anchors*: n-grams with the smallest hash in a window (winnowing, Schleimer, Wilkerson and Aiken 2003, section
4.2, "robust"). The text between two anchors is a *stretch*. Consecutive stretches that prompts of other requests also contained
form a passage, unless they belong to one already.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from outrider.decoding.arrays import BoolArray, Int32Array, Int64Array
from outrider.decoding.jit import compiled
from outrider.decoding.sources.text_keys import MAX_RECURRING, document_hash, is_recurring, passages_of, recurring_key, request_of

_FEWEST_TOKENS = 16  # minimum length of a stored document
LEAST_RECURRING = 64  # minimum tokens of a recurring passage
_GRAM, _WINDOW = 8, 32  # tokens per n-gram, and n-grams per window
_STRETCH, _PROMPT = 1, 2  # salts of hashes
_KEPT = -1  # owner of the stretches of stored passages
_WAYS = 4  # stretches per bucket, the latest first
_TOKENS_PER_PLACE = 4  # tokens of the capacity per table entry; a prompt has a stretch per 16 tokens or so


@compiled
def _mixed(key: int, token: int) -> int:
    """Extend a 40-bit hash by one token."""
    return ((key ^ (key >> 19)) * 1000003 + token + 1) & 0xFFFFFFFFFF


@compiled
def _scattered(key: int) -> int:
    """Finalise a 40-bit hash so that all bits depend on all tokens; the result is above 0."""
    key = ((key ^ (key >> 17)) * 0x9E377) & 0xFFFFFFFFFF
    key = ((key ^ (key >> 23)) * 0x85EBD) & 0xFFFFFFFFFF
    return (key ^ (key >> 21)) | 1


@compiled
def _anchors(tokens: Int32Array, places: Int32Array, marks: Int64Array) -> int:
    """Fill positions and hashes of the anchor n-grams, both [tokens], and return their number."""
    count, used, best = len(tokens) - _GRAM + 1, 0, -1
    hashes = np.zeros(max(count, 0), np.int64)
    for start in range(count):
        key = 0
        for at in range(start, start + _GRAM):
            key = _mixed(key, int(tokens[at]))
        hashes[start] = _scattered(key)
        first = start - _WINDOW + 1
        if first < 0:
            continue
        chosen = best
        if best < first:
            # Robust winnowing: the last of equal hashes, and an anchor stays while it is in the window.
            chosen = first
            for at in range(first + 1, start + 1):
                if hashes[at] <= hashes[chosen]:
                    chosen = at
        elif hashes[start] < hashes[best]:
            chosen = start
        if chosen != best:
            best = chosen
            places[used], marks[used] = best, hashes[best]
            used += 1
    return used


@compiled
def _names(tokens: Int32Array, places: Int32Array, names: Int64Array) -> None:
    """Fill the hashes of the stretches, each from one anchor to the end of the next; one fewer than anchors."""
    for number in range(len(places) - 1):
        key = _STRETCH
        for at in range(places[number], places[number + 1] + _GRAM):
            key = _mixed(key, int(tokens[at]))
        names[number] = _scattered(key)


@compiled
def _way(name: int, known: Int64Array) -> int:
    """Return the index of a stretch in its bucket; -1 if absent."""
    for way in range(_WAYS):
        if known[name & (len(known) - 1), way] == name:
            return way
    return -1


@compiled
def _put(name: int, owner: int, known: Int64Array, owners: Int32Array) -> None:
    """Insert an absent stretch, evicting the oldest one of its bucket that belongs to no passage."""
    bucket, last = name & (len(known) - 1), _WAYS - 1
    while last >= 0 and owners[bucket, last] == _KEPT:
        last -= 1
    if last < 0:
        return
    for way in range(last, 0, -1):
        known[bucket, way], owners[bucket, way] = known[bucket, way - 1], owners[bucket, way - 1]
    known[bucket, 0], owners[bucket, 0] = name, owner


@compiled
def _compare(
    tokens: Int32Array, places: Int32Array, names: Int64Array, request: int, known: Int64Array, owners: Int32Array,
    recurs: BoolArray,
) -> None:  # fmt: skip
    """Mark the stretches that a prompt of another request contained, and record those of this prompt.

    Args:
        places, names: anchors and stretches of the prompt.
        request: number of the request, above 0.
        known, owners: [buckets, _WAYS] hashes of stretches and whole prompts (0 if empty), and the request that had them first.
        recurs: [stretches] out, initially false.
    """
    # Ignore a prefix that was the whole prompt of an earlier request: it is the same conversation one turn later.
    key, continued, whole = _PROMPT, 0, 0
    for at in range(len(tokens)):
        key = _mixed(key, int(tokens[at]))
        whole = _scattered(key)
        way = _way(whole, known)
        if way >= 0 and owners[whole & (len(known) - 1), way] != request:
            continued = at + 1
    if _way(whole, known) < 0:
        _put(whole, request, known, owners)
    for number in range(len(names)):
        way = _way(names[number], known)
        if way < 0:
            _put(names[number], request, known, owners)
        else:
            owner = owners[names[number] & (len(known) - 1), way]
            recurs[number] = owner != _KEPT and owner != request and places[number] >= continued


@compiled
def _own(names: Int64Array, known: Int64Array, owners: Int32Array) -> None:
    """Record that stretches belong to a passage."""
    for name in names:
        way = _way(name, known)
        if way < 0:
            _put(name, _KEPT, known, owners)
        else:
            owners[name & (len(known) - 1), way] = _KEPT


@compiled
def _disown(names: Int64Array, known: Int64Array, owners: Int32Array) -> None:
    """Remove stretches that belong to a passage."""
    for name in names:
        way, bucket = _way(name, known), name & (len(known) - 1)
        if way >= 0 and owners[bucket, way] == _KEPT:
            known[bucket, way], owners[bucket, way] = 0, 0


def _cut(tokens: Int32Array) -> tuple[Int32Array, Int64Array, Int64Array]:
    """Return positions and hashes of a text's anchors, and the hashes of its stretches."""
    places, marks = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int64)
    count = _anchors(np.ascontiguousarray(tokens, np.int32), places, marks)
    names = np.empty(max(count - 1, 0), np.int64)
    _names(tokens, places[:count], names)
    return places[:count], marks[:count], names


def marks_of(tokens: Int32Array) -> list[int]:
    """Return the hashes, below 2**40, of a text's anchors; texts that share 39 or more tokens share some."""
    marks: list[int] = _cut(np.asarray(tokens, np.int32))[1].tolist()
    return marks


def names_of(key: int, tokens: Int32Array) -> list[int]:
    """Return the hashes by which a passage is deleted: of its text and, if it recurred in prompts, of its anchors."""
    return list(dict.fromkeys([document_hash(tokens), *(marks_of(tokens) if is_recurring(key) else ())]))


def _owner(request: int) -> int:
    return 1 + (request & 0x3FFFFFFF)


class Passages:
    """Latest passages, of ``capacity`` tokens, by the key of the request that first brought each or whose prompt repeated it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Remove all passages."""
        self.num_tokens = 0
        self._passages: dict[int, Int32Array] = {}  # in order of insertion
        self._by_request: dict[int, list[int]] = {}  # keys
        self._keys: dict[int, list[int]] = {}  # by the hashes of ``names_of``
        self._known, self._owners = np.zeros((0, _WAYS), np.int64), np.zeros((0, _WAYS), np.int32)  # see ``_compare``

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        return 4 * self.num_tokens + self._known.nbytes + self._owners.nbytes

    def add(self, key: int, tokens: Int32Array, removed: Collection[int]) -> bool:
        """Store a passage unless it is present, of unsuitable length, or matches a removed hash; return whether it was stored."""
        if key in self._passages or not _FEWEST_TOKENS <= len(tokens) <= self._capacity:
            return False
        names = names_of(key, tokens)
        if names[0] in self._keys or any(name in removed for name in names):
            return False
        self._passages[key] = tokens.copy()
        for name in names:
            self._keys.setdefault(name, []).append(key)
        self._by_request.setdefault(request_of(key), []).append(key)
        self.num_tokens += len(tokens)
        self._make()
        _own(_cut(tokens)[2], self._known, self._owners)
        while self.num_tokens > self._capacity:
            self.remove(next(iter(self._passages)))
        return True

    def look(self, request: int, prompt_ids: Int32Array, removed: Collection[int]) -> None:
        """Store the parts of a prompt that also stood in the prompt of another request, by this request's hash."""
        if len(prompt_ids) < LEAST_RECURRING:
            return
        self._make()
        places, marks, names = _cut(prompt_ids)
        recurs = np.zeros(len(names), np.bool_)
        _compare(prompt_ids, places, names, _owner(request), self._known, self._owners, recurs)
        if not recurs.any():
            return
        if removed:
            # A stretch with a removed anchor at either end is not stored.
            gone = np.array([mark in removed for mark in marks.tolist()], np.bool_)
            recurs &= ~(gone[1:] | gone[:-1])
        edges = np.flatnonzero(np.diff(recurs, prepend=False, append=False)).reshape(-1, 2)
        number = sum(map(is_recurring, self._by_request.get(request, ())))
        for first, last in edges.tolist():
            passage = prompt_ids[places[first] : places[last] + _GRAM]
            if len(passage) < LEAST_RECURRING:
                continue
            for part in passages_of(passage):
                if number == MAX_RECURRING:
                    return
                number += self.add(recurring_key(request, number), part, removed)
            _own(names[first:last], self._known, self._owners)

    def _make(self) -> None:
        if not len(self._known):
            # The search tables take three to six bytes per token of the capacity.
            buckets = 1 << max(self._capacity // _TOKENS_PER_PLACE // _WAYS, 1).bit_length()
            self._known, self._owners = np.zeros((buckets, _WAYS), np.int64), np.zeros((buckets, _WAYS), np.int32)

    def of_request(self, request: int) -> list[tuple[int, Int32Array]]:
        """Return the passages that a request brought first, by its hash."""
        return [(key, self._passages[key]) for key in self._by_request.get(request, ())]

    def remove(self, key: int) -> None:
        """Remove a passage, if present."""
        tokens = self._passages.pop(key, None)
        if tokens is None:
            return
        self.num_tokens -= len(tokens)
        _disown(_cut(tokens)[2], self._known, self._owners)
        for table, name in [(self._by_request, request_of(key)), *((self._keys, name) for name in names_of(key, tokens))]:
            keys = table[name]
            keys.remove(key)
            if not keys:
                del table[name]

    def remove_request(self, name: int) -> None:
        """Remove the passages of a request by its hash, or those that match a document by one of its hashes (``names_of``)."""
        for key in {*self._by_request.get(name, ()), *self._keys.get(name, ())}:
            self.remove(key)

    def forget_prompts(self, requests: Collection[int]) -> None:
        """Remove the stretches of the prompts of requests, given their hashes."""
        if len(self._known):
            gone = np.isin(self._owners, [_owner(request) for request in requests])
            self._known[gone], self._owners[gone] = 0, 0


def compile_passages() -> None:
    """Compile the functions of this module before the first request."""
    passages = Passages(1024)
    for request in range(2):
        passages.look(request, np.arange(request, 2 * LEAST_RECURRING, dtype=np.int32), ())
    passages.remove_request(1)
