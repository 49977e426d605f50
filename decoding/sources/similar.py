"""Past requests of a tenant that resemble a new one, whose outputs it may repeat (LLMA, arXiv 2304.04487, section 2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outrider.decoding.arrays import BoolArray, Float64Array, Int32Array, Int64Array, UInt64Array
from outrider.decoding.jit import NATIVE, compiled
from outrider.decoding.sources.embeddings import EMBEDDING, WORDS, nearness, words_of

# A *sketch* consists of the smallest hashes of a prompt's n-grams (bottom-k sketch, Broder 1997). The overlap of two sketches
# estimates that of the n-grams. A client-supplied embedding (``decoding.sources.embeddings``) finds paraphrased prompts.

# (tokens, n-gram order, hashes to keep) for a prompt's beginning, its end (negative), and all of it (0).
_PARTS = ((96, 2, 8), (-48, 2, 12), (0, 3, 12))
SKETCH = sum(kept for *_, kept in _PARTS)  # values; 0 if a short prompt has fewer
# Lengths of an encoded sketch, without and with an embedding: a value is two token ids below 4096, which nearly all models have.
SKETCH_TOKENS = 2 * SKETCH, 2 * (SKETCH + EMBEDDING)
LEAST_SIMILARITY = 0.2  # minimum similarity of a search result
_DIGIT = 12  # bits
_WAYS = 8  # latest requests per value to compare
_FEW = 256  # requests of the first allocation; the second has the full capacity


class Similar(NamedTuple):
    """Past request similar to a given one."""

    request: int  # hash, see ``decoding.request.request_hash``
    # At most 1: weighted overlap of the prompts' sketches, or similarity of the embeddings.
    similarity: float


@compiled
def _fill(tokens: Int32Array, order: int, salt: int, out: Int32Array) -> None:
    """Fill ``out`` with the smallest distinct hashes of the n-grams, ascending."""
    used = 0
    for end in range(order, len(tokens) + 1):
        key = salt
        for at in range(end - order, end):
            key = ((key ^ (key >> 19)) * 1000003 + int(tokens[at]) + 1) & 0xFFFFFFFFFF
        key = ((key ^ (key >> 17)) * 0x9E377) & 0xFFFFFFFFFF
        key = ((key ^ (key >> 23)) * 0x85EBD) & 0xFFFFFFFFFF
        value = 1 + (key ^ (key >> 21)) % 0xFFFFFF
        if used == len(out) and value >= out[used - 1]:
            continue
        at = used
        while at > 0 and out[at - 1] > value:
            at -= 1
        if at > 0 and out[at - 1] == value:
            continue
        used = min(used + 1, len(out))
        for later in range(used - 1, at, -1):
            out[later] = out[later - 1]
        out[at] = value


def sketch_of(prompt_ids: Int32Array, embedding: Int32Array | None = None) -> Int32Array:
    """Return the sketch of a prompt, [SKETCH] values below 2**24, followed by its embedding (``embeddings.signs_of``), if any."""
    sketch, at = np.zeros(SKETCH, np.int32), 0
    for salt, (size, order, kept) in enumerate(_PARTS, start=1):
        part = prompt_ids[:size] if size > 0 else prompt_ids[size:]
        _fill(part.astype(np.int32), order, salt, sketch[at : at + kept])
        at += kept
    return sketch if embedding is None else np.concatenate([sketch, embedding])


def as_tokens(sketch: Int32Array) -> Int32Array:
    """Encode a sketch as token ids, for transport like a text."""
    tokens: Int32Array = np.stack((sketch >> _DIGIT, sketch & ((1 << _DIGIT) - 1)), axis=1).ravel()
    return tokens


def of_tokens(tokens: Int32Array) -> Int32Array:
    """Decode the result of ``as_tokens``."""
    digits = tokens.reshape(-1, 2) & ((1 << _DIGIT) - 1)
    sketch: Int32Array = digits[:, 0] << _DIGIT | digits[:, 1]
    return sketch


@compiled
def _count(sketch: Int32Array, counts: Int32Array, change: int) -> None:
    """Add ``change`` to the count of each value of a sketch."""
    for value in sketch:
        if value:
            counts[value & (len(counts) - 1)] += change


@compiled
def _post(sketch: Int32Array, place: int, postings: Int32Array) -> None:
    """Insert the place of a request as the latest of each of its values."""
    for value in sketch:
        bucket = value & (len(postings) - 1)
        if value and postings[bucket, 0] != place + 1:
            for way in range(_WAYS - 1, 0, -1):
                postings[bucket, way] = postings[bucket, way - 1]
            postings[bucket, 0] = place + 1


@compiled
def _compare(
    wanted: Int32Array, live: int, sketches: Int32Array, postings: Int32Array, counts: Int32Array, marks: BoolArray,
    places: Int32Array, similarities: Float64Array,
) -> int:  # fmt: skip
    """Compare a prompt with the latest requests that share a value with it, and return their number.

    Args:
        wanted, live: sketch of the prompt, and number of stored requests, n.
        marks: [places] scratch space, all false.
        places, similarities: [SKETCH * _WAYS] out.
    """
    used, total = 0, 0.0
    worths = np.zeros(len(wanted))
    for at in range(len(wanted)):
        value = wanted[at]
        if value == 0:
            continue
        count = min(counts[value & (len(counts) - 1)], live)
        # A value of k of n requests weighs as much as a word in BM25 (Robertson and Zaragoza 2009).
        worths[at] = np.log(1.0 + (live - count + 0.5) / (count + 0.5))
        total += worths[at]
        for way in range(_WAYS):
            place = postings[value & (len(postings) - 1), way] - 1
            if place < 0:
                break
            if not marks[place]:
                marks[place], places[used] = True, place
                used += 1
    for found in range(used):
        shared = 0.0
        for at in range(len(wanted)):
            if wanted[at] != 0:
                for other in range(sketches.shape[1]):
                    if sketches[places[found], other] == wanted[at]:
                        shared += worths[at]
                        break
        marks[places[found]] = False
        # The weight of the shared values over that of all values of the prompt.
        similarities[found] = shared / total
    return used


def popcount(bits: int) -> int:
    """Return the number of ones among the bits of a 64-bit integer."""
    return (int(bits) & (1 << 64) - 1).bit_count()


if NATIVE:
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def popcount(context: Any, bits: Any) -> Any:
        """Compile ``popcount`` to one instruction."""
        return types.int64(types.int64), lambda _context, builder, _signature, arguments: builder.ctpop(arguments[0])


@compiled
def _nearest(wanted: Int64Array, words: Int64Array, added: int, places: Int32Array, distances: Int32Array) -> int:
    """Find the nearest embeddings of the same length, the nearest first, of equal ones the latest; return how many were found.

    Args:
        wanted: [WORDS].
        words: [places, WORDS] stored ones, 0 if empty, in a ring to which ``added`` were ever added.
        places, distances: [most] out: places, and numbers of differing signs.
    """
    used = 0
    place = added % len(words)
    for _ in range(min(added, len(words))):
        place = (place if place > 0 else len(words)) - 1
        if words[place, 0] != wanted[0]:
            continue
        distance = 0
        for at in range(1, len(wanted)):
            distance += popcount(words[place, at] ^ wanted[at])
        if used == len(distances) and distance >= distances[used - 1]:
            continue
        used = min(used + 1, len(distances))
        to = used - 1
        while to > 0 and distances[to - 1] > distance:
            distances[to], places[to] = distances[to - 1], places[to - 1]
            to -= 1
        distances[to], places[to] = distance, place
    return used


class SimilarRequests:
    """Ring of the latest requests of a tenant, of 530 bytes each, and 72 more once any has an embedding."""

    def __init__(self, capacity: int) -> None:
        self._capacity = 1 << max(capacity - 1, 0).bit_length()
        self.clear()

    def clear(self) -> None:
        """Remove all requests."""
        self._next = self._live = 0
        self._make(0)

    def _make(self, size: int) -> None:
        """Allocate empty arrays for ``size`` requests, a power of two or 0."""
        buckets = max(size, _FEW) * SKETCH if size else 0
        self._requests: UInt64Array = np.zeros(size, np.uint64)  # request hash by place
        self._sketches = np.zeros((size, SKETCH), np.int32)  # by place; all 0 if empty
        self._postings = np.zeros((buckets // 4, _WAYS), np.int32)  # place + 1 by value, the latest first
        self._counts = np.zeros(buckets, np.int32)  # stored requests by value
        self._marks = np.zeros(size, np.bool_)
        self._words = np.zeros((0, WORDS), np.int64)  # embeddings by place; allocated at the first one

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        arrays = self._requests, self._sketches, self._postings, self._counts, self._marks, self._words
        return sum(array.nbytes for array in arrays)

    def __len__(self) -> int:
        """Return the number of stored requests."""
        return self._live

    def knows(self, request: int) -> bool:
        """Return whether a request is stored, by its hash."""
        return len(self._places(request)) > 0

    def add(self, request: int, sketch: Int32Array) -> None:
        """Store a request by its hash, replacing the oldest one if there is no room."""
        if not sketch[:SKETCH].any() or self.knows(request):
            return
        if self._next == len(self._requests) < self._capacity:
            # Places depend on the size of the arrays, so that all requests are stored again.
            requests, sketches, words = self._requests, self._sketches, self._words
            self._make(self._capacity if len(requests) else min(_FEW, self._capacity))
            self._next = self._live = 0
            for place, known in enumerate(requests.tolist()):
                if sketches[place].any():
                    self._put(known, sketches[place], words[place] if len(words) and words[place, 0] else None)
        self._put(request, sketch[:SKETCH], words_of(sketch[SKETCH:]) if len(sketch) > SKETCH else None)

    def _put(self, request: int, sketch: Int32Array, words: Int64Array | None) -> None:
        place = self._next % len(self._requests)
        self._next += 1
        self._empty(place)
        self._requests[place], self._sketches[place] = request, sketch
        if words is not None:
            if not len(self._words):
                self._words = np.zeros((len(self._requests), WORDS), np.int64)
            self._words[place] = words
        self._live += 1
        _count(sketch, self._counts, 1)
        _post(sketch, place, self._postings)

    def _places(self, request: int) -> Int64Array:
        # An empty place has the hash 0, which a request may have too.
        places = np.flatnonzero(self._requests == np.uint64(request))
        return places[self._sketches[places].any(axis=1)]

    def _empty(self, place: int) -> None:
        if self._sketches[place].any():
            _count(self._sketches[place], self._counts, -1)
            self._live -= 1
        self._requests[place], self._sketches[place] = 0, 0
        if len(self._words):
            self._words[place] = 0

    def remove(self, request: int) -> None:
        """Remove a request by its hash, if present."""
        for place in self._places(request).tolist():
            self._empty(place)

    def find(self, sketch: Int32Array, most: int) -> list[Similar]:
        """Return at most ``most`` similar requests, the most similar first, of equal ones the latest."""
        if not self._live:
            return []
        places, found = np.empty(SKETCH * _WAYS, np.int32), np.empty(SKETCH * _WAYS)
        count = _compare(
            sketch[:SKETCH], self._live, self._sketches, self._postings, self._counts, self._marks, places, found
        )  # fmt: skip
        places, found = places[:count], found[:count]
        if len(sketch) > SKETCH and len(self._words) and most:
            places, found = self._with_nearest(sketch[SKETCH:], most, places, found)
        ages = (self._next - 1 - places) % len(self._requests)
        best = np.lexsort((ages, -found))[:most]
        return [
            Similar(int(self._requests[places[at]]), min(float(found[at]), 1.0)) for at in best if found[at] >= LEAST_SIMILARITY
        ]

    def _with_nearest(
        self, embedding: Int32Array, most: int, places: Int32Array, found: Float64Array
    ) -> tuple[Int32Array, Float64Array]:
        """Merge the nearest embeddings into places and similarities; the larger similarity of a request counts."""
        near, distances = np.empty(most, np.int32), np.empty(most, np.int32)
        count = _nearest(words_of(embedding), self._words, self._next, near, distances)
        better = dict(zip(places.tolist(), found.tolist(), strict=True))
        for place, similarity in zip(near[:count].tolist(), nearness(distances[:count]).tolist(), strict=True):
            better[place] = max(better.get(place, 0.0), similarity)
        return np.array(list(better), np.int32), np.array(list(better.values()))


def compile_similar() -> None:
    """Compile the functions of this module before the first request."""
    requests, sketch = SimilarRequests(1), sketch_of(np.arange(4, dtype=np.int32), np.ones(EMBEDDING, np.int32))
    for number in range(2):  # the second one replaces the first
        requests.add(number, sketch)
    requests.find(sketch, 1)
