"""Candidates for the rows of a draft tree: a max-heap by key, and a hash of a node's children by token."""

from __future__ import annotations

from outrider.decoding.arrays import Float64Array, Int32Array
from outrider.decoding.jit import compiled

HASH_SLOTS = 4096  # hash slots for the children of one node
MAX_CHILDREN = HASH_SLOTS // 2  # children of one node; searches end at a free slot, so some must remain


@compiled
def push(heap: Int32Array, size: int, keys: Float64Array, candidate: int) -> int:
    """Add a candidate to the max-heap and return the new size."""
    at = size
    while at > 0:
        above = (at - 1) // 2
        if keys[heap[above]] >= keys[candidate]:
            break
        heap[at] = heap[above]
        at = above
    heap[at] = candidate
    return size + 1


@compiled
def pop(heap: Int32Array, size: int, keys: Float64Array) -> int:
    """Move the best candidate behind the heap, to ``heap[size - 1]``, and return the new size."""
    best, last, size = heap[0], heap[size - 1], size - 1
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and keys[heap[below + 1]] > keys[heap[below]]:
            below += 1
        if keys[heap[below]] <= keys[last]:
            break
        heap[at] = heap[below]
        at = below
    if size > 0:
        heap[at] = last
    heap[size] = best
    return size


@compiled
def slot_of(token: int, slots: Int32Array, tokens: Int32Array) -> int:
    """Return the slot of a token among a node's children, or the free slot for it."""
    # Multiplicative hashing (40503 is 2**16 over the golden ratio), then linear probing.
    mask = len(slots) - 1
    at = (int(token) * 40503) & mask
    while slots[at] >= 0 and tokens[slots[at]] != token:
        at = (at + 1) & mask
    return at


@compiled
def clear_slots(first: int, count: int, slots: Int32Array, tokens: Int32Array) -> None:
    """Clear the hash of a node's children, which are the candidates from ``first`` to ``count``."""
    if count - first > len(slots) // 8:
        slots[:] = -1
        return
    mask = len(slots) - 1
    # A run of used slots holds children of this node only, so that all of it is cleared.
    for child in range(first, count):
        at = (int(tokens[child]) * 40503) & mask
        while slots[at] >= 0:
            slots[at] = -1
            at = (at + 1) & mask
