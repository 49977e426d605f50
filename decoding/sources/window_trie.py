"""Size-bounded trie of text windows: continuations of the suffixes of a text, with counts (RACER's retrieval)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outrider.decoding.arrays import Int32Array, Int64Array
from outrider.decoding.jit import compiled

_NUM_NODES, _FREE = 0, 1  # indices into ``_Nodes.state``: number of nodes without the root, and the first free node


class _Nodes(NamedTuple):
    """Arrays of trie nodes; node 0 is the root, without a token."""

    tokens: Int32Array  # [nodes] token of each node
    parents: Int32Array  # [nodes]; of a free node, the next free one
    counts: Int32Array  # [nodes] windows through each node
    children: Int32Array  # [nodes, 2] first and last child, 0 for none
    siblings: Int32Array  # [nodes, 2] previous and next sibling, 0 for none
    ages: Int32Array  # [nodes, 2] ring in order of visits: previous and next; the root lies between the latest and the oldest
    slots: Int32Array  # [slots] hash table of nodes by parent and token, 0 if empty
    state: Int64Array  # [2] see ``_NUM_NODES``


@compiled
def _home(parent: int, token: int, slots: int) -> int:
    """Return the first slot to probe for a node."""
    key = (int(parent) * 1000003 + int(token)) * 0x9E377
    return (key ^ (key >> 17)) & (slots - 1)


@compiled
def _slot_of(nodes: _Nodes, parent: int, token: int) -> int:
    """Return the slot of a node by parent and token, or the free slot for it."""
    slots = nodes.slots
    at = _home(parent, token, len(slots))
    while slots[at] > 0 and (nodes.parents[slots[at]] != parent or nodes.tokens[slots[at]] != token):
        at = (at + 1) & (len(slots) - 1)
    return at


@compiled
def _make(nodes: _Nodes, parent: int, token: int, slot: int) -> int:
    """Create a node as the last child of its parent and return it; the caller must visit it."""
    node = int(nodes.state[_FREE])
    nodes.state[_FREE] = nodes.parents[node]
    nodes.state[_NUM_NODES] += 1
    nodes.tokens[node], nodes.parents[node], nodes.counts[node] = token, parent, 0
    nodes.children[node, :] = 0
    last = nodes.children[parent, 1]
    nodes.siblings[node, 0], nodes.siblings[node, 1] = last, 0
    if last > 0:
        nodes.siblings[last, 1] = node
    else:
        nodes.children[parent, 0] = node
    nodes.children[parent, 1] = node
    nodes.slots[slot] = node
    nodes.ages[node, :] = node
    return node


@compiled
def _visit(nodes: _Nodes, node: int) -> None:
    """Make a node the latest one, and then each of its ancestors in turn."""
    ages = nodes.ages
    while node != 0:
        before, after = ages[node]
        ages[before, 1], ages[after, 0] = after, before
        latest = ages[0, 0]
        ages[latest, 1] = ages[0, 0] = node
        ages[node, 0], ages[node, 1] = latest, 0
        node = nodes.parents[node]


@compiled
def _drop_oldest(nodes: _Nodes) -> None:
    """Remove the node visited longest ago, which is a leaf."""
    node = nodes.ages[0, 1]
    parent, after = nodes.parents[node], nodes.ages[node, 1]
    nodes.ages[0, 1] = after
    nodes.ages[after, 0] = 0
    left, right = nodes.siblings[node]
    if left > 0:
        nodes.siblings[left, 1] = right
    else:
        nodes.children[parent, 0] = right
    if right > 0:
        nodes.siblings[right, 0] = left
    else:
        nodes.children[parent, 1] = left
    slots, mask = nodes.slots, len(nodes.slots) - 1
    gap = _slot_of(nodes, parent, nodes.tokens[node])
    at = gap
    while True:  # close the gap: move later entries up, unless that puts them before their first slot
        at = (at + 1) & mask
        if slots[at] == 0:
            break
        home = _home(nodes.parents[slots[at]], nodes.tokens[slots[at]], len(slots))
        if ((at - home) & mask) >= ((at - gap) & mask):
            slots[gap] = slots[at]
            gap = at
    slots[gap] = 0
    nodes.parents[node], nodes.state[_FREE] = nodes.state[_FREE], node
    nodes.state[_NUM_NODES] -= 1


@compiled
def _learn(nodes: _Nodes, tokens: Int32Array, known: int, window: int, capacity: int) -> None:
    for end in range(max(known + 1, window), len(tokens) + 1):
        node = 0
        for at in range(end - window, end):
            slot = _slot_of(nodes, node, tokens[at])
            child = int(nodes.slots[slot])
            node = child if child > 0 else _make(nodes, node, tokens[at], slot)
            nodes.counts[node] += 1
        _visit(nodes, node)
        # A visit makes a node's ancestors later than the node, so that none is removed before its descendants.
        while nodes.state[_NUM_NODES] > capacity:
            _drop_oldest(nodes)


@compiled
def _grow(nodes: _Nodes, tail: Int32Array, longest: int, least: int, count: int, tokens: Int32Array, parents: Int32Array) -> int:
    """Fill rows from 1 on (see ``WindowTrie.grow``); return the number of rows, with the root, row 0."""
    # Candidates: negative count, tokens below the suffix, order of entry, node, and row of its parent.
    # Empty, but of a type that numba can infer.
    heap = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]
    for length in range(longest, least - 1, -1):
        node = 0
        for at in range(len(tail) - length, len(tail)):
            node = int(nodes.slots[_slot_of(nodes, node, tail[at])])
            if node == 0:
                break
        if node > 0:
            _visit(nodes, node)
            heap.append((-np.int64(nodes.counts[node]), np.int64(0), np.int64(len(heap)), np.int64(node), np.int64(0)))
    heapq.heapify(heap)
    entered, rows = len(heap), 1
    for _ in range(count):
        if len(heap) == 0:
            break
        _, depth, _, opened, row = heapq.heappop(heap)
        if depth > 0:
            above, row = row, np.int64(1)
            # Equal paths below two suffixes are counted twice but share rows.
            while row < rows and (parents[row] != above or tokens[row] != nodes.tokens[opened]):
                row += 1
            if row == rows:
                tokens[row], parents[row] = nodes.tokens[opened], above
                rows += 1
        child = nodes.children[opened, 0]
        while child > 0:
            heapq.heappush(heap, (-np.int64(nodes.counts[child]), depth + 1, np.int64(entered), np.int64(child), row))
            entered += 1
            child = nodes.siblings[child, 1]
    return rows


class WindowTrie:
    """Trie of all windows of ``window`` (at least 2) tokens, with up to ``capacity`` (at least ``window``) nodes of 60 bytes."""

    def __init__(self, window: int, capacity: int) -> None:
        self._window, self._capacity = window, capacity
        places = capacity + window + 1  # plus the root, and a window that is added before others are removed
        following = np.arange(1, places + 1, dtype=np.int32)
        self._nodes = _Nodes(
            tokens=np.full(places, -1, np.int32),
            parents=following,
            counts=np.zeros(places, np.int32),
            children=np.zeros((places, 2), np.int32),
            siblings=np.zeros((places, 2), np.int32),
            ages=np.zeros((places, 2), np.int32),
            slots=np.zeros(1 << (2 * places).bit_length(), np.int32),
            state=np.array([0, 1], np.int64),
        )

    def __len__(self) -> int:
        return int(self._nodes.state[_NUM_NODES])

    def learn(self, tokens: Int32Array, known: int) -> None:
        """Add the windows of a text that end after its first ``known`` tokens."""
        _learn(self._nodes, np.array(tokens, np.int32), known, self._window, self._capacity)

    def grow(self, tail: Sequence[int], least: int, count: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of a tree of continuations of the suffixes of a text, the last token as the root.

        The ``count`` most frequent nodes at and below the suffixes of ``least`` or more tokens are taken.
        """
        rows = np.full((2, count + 1), -1, np.int32)
        rows[0, 0] = tail[-1]
        longest = min(self._window - 1, len(tail))
        used = _grow(self._nodes, np.array(tail, np.int32), longest, least, count, rows[0], rows[1])
        return rows[0, :used].tolist(), rows[1, :used].tolist()
