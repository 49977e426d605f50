"""Which branches of the implicit trie to draft: the retrieval of Alipay's Lookahead over occurrences in token logs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from decoding.candidates import HASH_SLOTS, MAX_CHILDREN, Float64Array, clear_slots, pop, push, slot_of
from decoding.chains import Int64Array, LogArrays, follower, gather
from decoding.jit import compiled
from decoding.tree import Int32Array

MAX_NODES = 16384  # looked at in one retrieval
MAX_FOUND = 8192  # occurrences
# Frequencies to go by. Mixed, an occurrence in the prompt counts 9,999 times one in an output.
INPUT, OUTPUT, MIXED = range(3)


class Nodes(NamedTuple):
    """Working memory of a retrieval, kept between calls."""

    tokens: Int32Array  # [nodes]
    parents: Int32Array  # [nodes] node above, -1 below the root
    depths: Int32Array  # [nodes]
    rows: Int32Array  # [nodes] row in the draft, -1 for none
    firsts: Int32Array  # [nodes] first occurrence
    children: Int32Array  # [nodes] first child, -1 not looked at
    counts: Int32Array  # [nodes] children
    frequencies: Float64Array  # [3, nodes] prompt's, outputs', mixed
    heap: Int32Array  # [nodes + 1]
    slots: Int32Array  # [HASH_SLOTS]
    positions: Int64Array  # [occurrences]
    lengths: Int32Array  # [occurrences] agreement
    places: Int32Array  # [occurrences] 0: the prompt, 1: a reference, 2: the shared log of outputs
    links: Int32Array  # [occurrences] next of the same node

    @classmethod
    def empty(cls) -> Nodes:
        """Memory for one thread."""
        return cls(
            tokens=np.empty(MAX_NODES, np.int32),
            parents=np.empty(MAX_NODES, np.int32),
            depths=np.empty(MAX_NODES, np.int32),
            rows=np.empty(MAX_NODES, np.int32),
            firsts=np.empty(MAX_NODES, np.int32),
            children=np.empty(MAX_NODES, np.int32),
            counts=np.empty(MAX_NODES, np.int32),
            frequencies=np.empty((3, MAX_NODES)),
            heap=np.empty(MAX_NODES + 1, np.int32),
            slots=np.full(HASH_SLOTS, -1, np.int32),
            positions=np.empty(MAX_FOUND, np.int64),
            lengths=np.empty(MAX_FOUND, np.int32),
            places=np.empty(MAX_FOUND, np.int32),
            links=np.empty(MAX_FOUND, np.int32),
        )


@compiled
def open_children(
    own: LogArrays, shared: LogArrays, first: int, parent: int, depth: int, row: int, count: int, nodes: Nodes,
    tokens: Int32Array, parents: Int32Array, drafted: int,
) -> int:  # fmt: skip
    """Makes the children of a node from its occurrences; those that the draft holds know their row.

    Args:
        first: occurrence in the node's list.
        parent: the node, -1 for the root.
        row: the node's row in the draft, -1 when it has none.
        tokens: [drafted] of the draft, ``parents`` likewise.

    Returns:
        Nodes in use.
    """
    begin, at = count, first
    while at >= 0:
        after = nodes.links[at]
        place = nodes.places[at]
        log_tokens = shared.tokens if place == 2 else own.tokens
        token = follower(log_tokens, nodes.positions[at] + 1 + depth)
        if token >= 0:
            slot = slot_of(token, nodes.slots, nodes.tokens)
            child = nodes.slots[slot]
            if child < 0 and count < len(nodes.tokens) and count - begin < MAX_CHILDREN:
                child, count = count, count + 1
                nodes.slots[slot] = child
                nodes.tokens[child], nodes.parents[child], nodes.depths[child] = token, parent, depth + 1
                nodes.rows[child], nodes.firsts[child], nodes.children[child], nodes.counts[child] = -1, -1, -1, 0
                nodes.frequencies[:, child] = 0.0
            if child >= 0:
                nodes.frequencies[min(place, 1), child] += 1.0
                nodes.frequencies[2, child] += 1e-4 if place else 0.9999
                nodes.links[at] = nodes.firsts[child]
                nodes.firsts[child] = at
        at = after
    if row >= 0:
        for below in range(row + 1, drafted):
            if parents[below] == row:
                child = nodes.slots[slot_of(tokens[below], nodes.slots, nodes.tokens)]
                if child >= 0:
                    nodes.rows[child] = below
    clear_slots(begin, count, nodes.slots, nodes.tokens)
    return count


@compiled
def occurrences(
    own: LogArrays, references: int, shared: LogArrays, shared_oldest: int, context: Int32Array, length: int, mode: int,
    cap: int, nodes: Nodes,
) -> int:  # fmt: skip
    """Links the occurrences at which ``length`` or more tokens agree, the latest ``cap`` of each n-gram and log.

    Returns:
        The first of the list, -1 for none.
    """
    caps = np.zeros(3, np.int64)
    caps[2] = cap
    if length < 4:
        caps[1] = cap
    if length < 2:
        caps[0] = cap
    used = 0
    used = gather(own, 0, 0, -1, context, caps, used, nodes.positions, nodes.lengths)
    in_own = used
    if mode != 0:
        used = gather(shared, shared_oldest, 0, -1, context, caps, used, nodes.positions, nodes.lengths)
    first = -1
    for at in range(used):
        place = 2 if at >= in_own else (1 if nodes.positions[at] >= references else 0)
        if nodes.lengths[at] >= length and (mode == 2 or min(place, 1) == mode):
            nodes.places[at] = place
            nodes.links[at] = first
            first = at
    return first


@compiled
def choose_best(
    own: LogArrays, shared: LogArrays, by: int, quota: int, top: int, branch_length: int, count: int, nodes: Nodes,
    tokens: Int32Array, parents: Int32Array, since: int, drafted: int,
) -> tuple[int, int]:  # fmt: skip
    """Sees to it that the draft holds the ``quota`` nodes of the highest frequency; frequencies never rise along a path.

    Args:
        by: which frequency.
        since: nodes in rows before it, which longer suffixes gave, are not counted.
        top: children of the root; they are the first nodes.

    Returns:
        Nodes in use and rows of the draft.
    """
    keys, size = nodes.frequencies[by], 0
    for child in range(top):
        if keys[child] > 0.0:
            size = push(nodes.heap, size, keys, child)
    while size > 0 and quota > 0 and drafted < len(tokens):
        size = pop(nodes.heap, size, keys)
        best = nodes.heap[size]
        depth = nodes.depths[best]
        if nodes.rows[best] < 0:
            above = nodes.parents[best]
            tokens[drafted], parents[drafted] = nodes.tokens[best], (0 if above < 0 else nodes.rows[above])
            nodes.rows[best] = drafted
            drafted += 1
        if nodes.rows[best] >= since:
            quota -= 1
        if depth >= branch_length:
            continue
        if nodes.children[best] < 0:
            nodes.children[best] = count
            count = open_children(
                own, shared, nodes.firsts[best], best, depth, nodes.rows[best], count, nodes, tokens, parents, drafted
            )
            nodes.counts[best] = count - nodes.children[best]
        for child in range(nodes.children[best], nodes.children[best] + nodes.counts[best]):
            if keys[child] > 0.0:
                size = push(nodes.heap, size, keys, child)
    return count, drafted


@compiled
def hierarchical(
    own: LogArrays, references: int, shared: LogArrays, shared_oldest: int, context: Int32Array, max_query_length: int,
    branch_length: int, min_input: int, min_output: int, mode: int, cap: int, nodes: Nodes, tokens: Int32Array,
    parents: Int32Array,
) -> int:  # fmt: skip
    """The draft tree for the end of ``context``: the published multi-stage retrieval and selection, its defects mended.

    Suffixes are looked up from the longest on until there are ``branch_length`` rows; a shorter one adds to what longer ones
    gave. Of each, the ``min_input`` best by the prompt's frequency are taken, then the ``min_output`` best by that of outputs,
    then the best by both.

    Args:
        own: log of the request's prompt and references; it never lets go of a block.
        references: positions of ``own`` from here on are references, which count as outputs.
        shared: log of outputs; its positions before ``shared_oldest`` are gone.
        mode: INPUT, OUTPUT or MIXED, which frequencies count.
        tokens: [decoding length] out; row 0 is the root.
        parents: [decoding length] out.

    Returns:
        Rows of the draft, the root included.
    """
    tokens[0], parents[0], drafted = context[-1], -1, 1
    for length in range(min(max_query_length, len(context)), 0, -1):
        first = occurrences(own, references, shared, shared_oldest, context, length, mode, cap, nodes)
        if first < 0:
            continue
        top = open_children(own, shared, first, -1, 0, 0, 0, nodes, tokens, parents, drafted)
        count, since = top, drafted
        if mode == 2:
            count, drafted = choose_best(
                own, shared, 0, min_input, top, branch_length, count, nodes, tokens, parents, since, drafted
            )
            count, drafted = choose_best(
                own, shared, 1, min_output, top, branch_length, count, nodes, tokens, parents, since, drafted
            )
        count, drafted = choose_best(
            own, shared, mode, len(tokens), top, branch_length, count, nodes, tokens, parents, since, drafted
        )
        if drafted == len(tokens) or 1 < drafted >= branch_length:
            break
    return drafted


@compiled
def single(
    own: LogArrays, references: int, shared: LogArrays, shared_oldest: int, context: Int32Array, max_query_length: int,
    branch_length: int, mode: int, cap: int, nodes: Nodes, tokens: Int32Array, parents: Int32Array,
) -> int:  # fmt: skip
    """One chain: the most frequent child of the most frequent child. Arguments and result as in ``hierarchical``.

    A shorter suffix goes on where a longer one knew no more; suffixes are tried until there are ``branch_length // 2`` rows.
    """
    tokens[0], parents[0], drafted = context[-1], -1, 1
    for length in range(min(max_query_length, len(context)), 0, -1):
        first = occurrences(own, references, shared, shared_oldest, context, length, mode, cap, nodes)
        depth = count = 0
        while first >= 0 and depth < branch_length and drafted < len(tokens):
            begin = count
            count = open_children(own, shared, first, -1, depth, -1, count, nodes, tokens, parents, drafted)
            best = -1
            for child in range(begin, count):
                if depth + 1 < drafted:  # on the way down what the longer suffix gave
                    if nodes.tokens[child] == tokens[depth + 1]:
                        best = child
                elif best < 0 or nodes.frequencies[mode, child] > nodes.frequencies[mode, best]:
                    best = child
            if best < 0:
                break
            depth += 1
            if depth == drafted:
                tokens[drafted], parents[drafted] = nodes.tokens[best], drafted - 1
                drafted += 1
            first = nodes.firsts[best]
        if 1 < drafted >= branch_length // 2:
            break
    return drafted
