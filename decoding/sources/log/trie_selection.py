"""Retrieval of branches from the implicit trie, as in Alipay's Lookahead, over occurrences in token logs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider.decoding.arrays import Float64Array, Int32Array, Int64Array
from outrider.decoding.budget.candidates import HASH_SLOTS, MAX_CHILDREN, clear_slots, pop, push, slot_of
from outrider.decoding.jit import compiled
from outrider.decoding.sources.log.chains import Log, LogArrays, LogTokens, follower, gather_chain

MAX_NODES = 16384  # per retrieval
MAX_FOUND = 8192  # occurrences per retrieval
# Frequencies. In the mixed one an occurrence in the prompt counts 9,999 times as much as one in an output.
INPUT, OUTPUT, MIXED = range(3)
# Columns of a node: token, parent node (-1: the root), depth, row in the draft (-1: none), first occurrence, first child (-1: not
# opened) and number of children.
TOKEN, PARENT, DEPTH, ROW, FIRST, CHILDREN, COUNT = range(7)
# Columns of an occurrence: slot in its log, place (0: prompt, 1: reference, 2: outputs of the tenant, 3: public log), next
# occurrence of the same node, and a prefetched token (see ``occurrences``).
SLOT, PLACE, LINK, AHEAD = range(4)


class Nodes(NamedTuple):
    """Working memory of a retrieval, reused between calls."""

    # Few arrays, because each costs time to pass, and a node within one cache line.
    nodes: Int32Array  # [nodes, 8]
    frequencies: Float64Array  # [3, nodes] by ``INPUT``, ``OUTPUT``, ``MIXED``
    heap: Int32Array  # [nodes + 1]
    queue: Int32Array  # [nodes]
    slots: Int32Array  # [HASH_SLOTS]
    found: Int32Array  # [occurrences, 4]
    positions: Int64Array  # [occurrences]
    lengths: Int32Array  # [occurrences] number of agreeing tokens

    @classmethod
    def empty(cls) -> Nodes:
        """Allocate memory for one thread."""
        return cls(
            nodes=np.empty((MAX_NODES, 8), np.int32),
            frequencies=np.empty((3, MAX_NODES)),
            heap=np.empty(MAX_NODES + 1, np.int32),
            queue=np.empty(MAX_NODES, np.int32),
            slots=np.full(HASH_SLOTS, -1, np.int32),
            found=np.empty((MAX_FOUND, 4), np.int32),
            positions=np.empty(MAX_FOUND, np.int64),
            lengths=np.empty(MAX_FOUND, np.int32),
        )


# ``Nodes`` as a plain tuple, because passing it to compiled code takes half the time.
PlainNodes = tuple[Int32Array, Float64Array, Int32Array, Int32Array, Int32Array, Int32Array, Int64Array, Int32Array]
# Logs of the request's prompt and references (never evicted); of the outputs of its tenant, or its own alone; and the public log,
# which counts as outputs.
Logs = tuple[Log, Log, Log]
# Frequency (``INPUT``, ``OUTPUT`` or ``MIXED``); first position of the references in the request's log (they count as outputs);
# maximum tokens of a suffix, tokens of a branch, and occurrences per log.
Query = tuple[int, int, int, int, int]
# Rows that are enough to stop at a suffix (``branch_length`` as published); rows per suffix for the best by prompt frequency, and
# then by output frequency.
Quotas = tuple[int, int, int]


@compiled
def text_at(texts: LogTokens, place: int) -> Int32Array:
    """Return the tokens of the log that contains an occurrence."""
    return texts[0] if place < 2 else (texts[1] if place == 2 else texts[2])


@compiled
def add_node(memory: Nodes, node: int, token: int, parent: int, depth: int) -> None:
    """Write a new node without row, occurrences or opened children."""
    nodes, frequencies = memory.nodes, memory.frequencies
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, DEPTH] = token, parent, depth
    nodes[node, ROW], nodes[node, FIRST], nodes[node, CHILDREN], nodes[node, COUNT] = -1, -1, -1, 0
    frequencies[INPUT, node] = frequencies[OUTPUT, node] = frequencies[MIXED, node] = 0.0


@compiled
def open_children(texts: LogTokens, first: int, parent: int, depth: int, count: int, memory: Nodes) -> int:
    """Create the children of a node (-1: the root) from its occurrences; return the number of nodes in use, before ``count``."""
    nodes, frequencies, slots, found = memory.nodes, memory.frequencies, memory.slots, memory.found
    begin, at = count, first
    names = nodes[:, TOKEN]
    while at >= 0:
        after, place = found[at, LINK], found[at, PLACE]
        token = follower(text_at(texts, place), found[at, SLOT] + 1 + depth)
        if token >= 0:
            slot = slot_of(token, slots, names)
            child = slots[slot]
            if child < 0 and count < len(nodes) and count - begin < MAX_CHILDREN:
                child, count = count, count + 1
                slots[slot] = child
                add_node(memory, child, token, parent, depth + 1)
            if child >= 0:
                frequencies[min(place, 1), child] += 1.0
                frequencies[MIXED, child] += 1e-4 if place else 0.9999
                found[at, LINK] = nodes[child, FIRST]
                nodes[child, FIRST] = at
        at = after
    clear_slots(begin, count, slots, names)
    return count


@compiled
def open_only_child(texts: LogTokens, node: int, count: int, memory: Nodes) -> int:
    """Do the same as ``open_children`` for a node with one occurrence: it has at most one child, with equal frequencies."""
    nodes, frequencies, found = memory.nodes, memory.frequencies, memory.found
    first, depth = nodes[node, FIRST], nodes[node, DEPTH]
    token = follower(text_at(texts, found[first, PLACE]), found[first, SLOT] + 1 + depth)
    if token < 0 or count == len(nodes):
        return count
    add_node(memory, count, token, node, depth + 1)
    nodes[count, FIRST] = first
    for frequency in range(3):
        frequencies[frequency, count] = frequencies[frequency, node]
    return count + 1


@compiled
def find_rows(nodes: Int32Array, begin: int, end: int, row: int, since: int, tokens: Int32Array, parents: Int32Array) -> None:
    """Link the nodes ``begin:end``, the children of the node in ``row``, to their existing rows before ``since``."""
    for below in range(row + 1, since):
        if parents[below] == row:
            for child in range(begin, end):
                if nodes[child, TOKEN] == tokens[below]:
                    nodes[child, ROW] = below


@compiled
def gather_all(log: Log, context: Int32Array, length: int, cap: int, used: int, memory: Nodes) -> int:
    """Append up to ``cap`` occurrences in one log after ``used`` entries, long n-grams first; return the entries in use."""
    plain, oldest, owner = log
    if oldest < 0:
        return used
    begin, arrays = used, LogArrays(*plain)
    shortest, limit = (0 if length < 2 else (1 if length < 4 else 2)), max(4, length)
    for chain in range(2, shortest - 1, -1):
        room = cap - (used - begin)
        used = gather_chain(arrays, chain, oldest, owner, context, room, limit, used, memory.positions, memory.lengths)
    return used


@compiled
def occurrences(logs: Logs, query: Query, context: Int32Array, length: int, memory: Nodes) -> tuple[int, bool]:
    """Link the occurrences agreeing in ``length`` or more tokens; return the first (-1: none), and whether one is a prompt's."""
    mode, references, cap = query[0], query[1], query[4]
    found, positions, lengths = memory.found, memory.positions, memory.lengths
    in_own = in_shared = used = gather_all(logs[0], context, length, cap, 0, memory)
    if mode != INPUT:
        in_shared = gather_all(logs[1], context, length, cap, used, memory)
        used = gather_all(logs[2], context, length, cap, in_shared, memory)
    first, any_prompt = -1, False
    own, shared, public = logs[0][0][0], logs[1][0][0], logs[2][0][0]
    own_mask, shared_mask, public_mask = len(own) - 1, len(shared) - 1, len(public) - 1
    for at in range(used):
        place = 2 if at < in_shared else 3
        if at < in_own:
            place = 1 if positions[at] >= references else 0
        if lengths[at] >= length and (mode == MIXED or min(place, 1) == mode):
            slot, ahead = positions[at] & own_mask, 0
            # Prefetch a later token of the branch: reads overlap here, and its cache line is loaded when the branch is followed.
            if place == 2:
                slot = positions[at] & shared_mask
                ahead = shared[(slot + 12) & shared_mask]
            elif place == 3:
                slot = positions[at] & public_mask
                ahead = public[(slot + 12) & public_mask]
            found[at, SLOT], found[at, PLACE], found[at, LINK], found[at, AHEAD] = slot, place, first, ahead
            first = at
            any_prompt = any_prompt or place == 0
    return first, any_prompt


@compiled
def choose_best(
    texts: LogTokens, by: int, quota: int, top: int, branch_length: int, count: int, memory: Nodes, tokens: Int32Array,
    parents: Int32Array, since: int, drafted: int,
) -> tuple[int, int]:  # fmt: skip
    """Ensure that the draft has the ``quota`` best nodes by frequency ``by``; return the nodes in use and rows of the draft.

    Args:
        top: number of children of the root, which are the first nodes.
        since: nodes with rows before it, from longer suffixes, do not count towards the quota.
    """
    nodes, heap, queue = memory.nodes, memory.heap, memory.queue
    keys, size, waiting, served, begin, end = memory.frequencies[by], 0, 0, 0, 0, top
    # Frequencies never rise along a path, so a best-first search finds the best nodes.
    least = 1e-4 if by == MIXED else 1.0  # nodes seen once, the majority, use a queue behind the heap
    while quota > 0 and drafted < len(tokens):
        for child in range(begin, end):
            if keys[child] > least:
                size = push(heap, size, keys, child)
            elif keys[child] > 0.0:
                queue[waiting] = child
                waiting += 1
        if size > 0:
            size = pop(heap, size, keys)
            best = heap[size]
        elif served < waiting:
            best = queue[served]
            served += 1
        else:
            break
        depth, row = nodes[best, DEPTH], nodes[best, ROW]
        if row < 0:
            above = nodes[best, PARENT]
            tokens[drafted], parents[drafted] = nodes[best, TOKEN], (0 if above < 0 else nodes[above, ROW])
            row = nodes[best, ROW] = drafted
            drafted += 1
        if row >= since:
            quota -= 1
        begin = end = 0
        if depth >= branch_length:
            continue
        if nodes[best, CHILDREN] < 0:
            nodes[best, CHILDREN], first = count, nodes[best, FIRST]
            if memory.found[first, LINK] < 0 and row >= since:
                count = open_only_child(texts, best, count, memory)
            else:
                count = open_children(texts, first, best, depth, count, memory)
                find_rows(nodes, nodes[best, CHILDREN], count, row, since, tokens, parents)
            nodes[best, COUNT] = count - nodes[best, CHILDREN]
        begin, end = nodes[best, CHILDREN], nodes[best, CHILDREN] + nodes[best, COUNT]
    return count, drafted


@compiled
def hierarchical(
    logs: Logs, query: Query, quotas: Quotas, context: Int32Array, plain_memory: PlainNodes, tokens: Int32Array,
    parents: Int32Array,
) -> int:  # fmt: skip
    """Fill the draft tree for the end of ``context`` by the published multi-stage retrieval, fixed; return the number of rows."""
    memory, texts = Nodes(*plain_memory), (logs[0][0][0], logs[1][0][0], logs[2][0][0])
    mode, max_query_length, branch_length = query[0], query[2], query[3]
    enough, min_input, min_output = quotas
    tokens[0], parents[0], drafted = context[-1], -1, 1
    # Suffixes are looked up from the longest on. Of each, the best nodes by prompt, output, then mixed frequency are added.
    for length in range(min(max_query_length, len(context)), 0, -1):
        first, any_prompt = occurrences(logs, query, context, length, memory)
        if first < 0:
            continue
        since = drafted
        count = top = open_children(texts, first, -1, 0, 0, memory)
        find_rows(memory.nodes, 0, top, 0, since, tokens, parents)
        for by in range(3):
            # Without an occurrence in the prompt the mixed order equals that of outputs: no quota is needed.
            if by != mode and (mode != MIXED or not any_prompt):
                continue
            quota = len(tokens) if by == mode else (min_input if by == INPUT else min_output)
            count, drafted = choose_best(
                texts, by, quota, top, branch_length, count, memory, tokens, parents, since, drafted
            )  # fmt: skip
        if drafted == len(tokens) or 1 < drafted >= enough:
            break
    return drafted


@compiled
def single(
    logs: Logs, query: Query, context: Int32Array, plain_memory: PlainNodes, tokens: Int32Array, parents: Int32Array
) -> int:
    """Build one chain by following the most frequent child, extended by shorter suffixes up to half of the branch length."""
    memory, texts = Nodes(*plain_memory), (logs[0][0][0], logs[1][0][0], logs[2][0][0])
    nodes, frequencies = memory.nodes, memory.frequencies
    mode, max_query_length, branch_length = query[0], query[2], query[3]
    tokens[0], parents[0], drafted = context[-1], -1, 1
    for length in range(min(max_query_length, len(context)), 0, -1):
        first, _ = occurrences(logs, query, context, length, memory)
        depth = count = 0
        while first >= 0 and depth < branch_length and drafted < len(tokens):
            begin = count
            count = open_children(texts, first, -1, depth, count, memory)
            best = -1
            for child in range(begin, count):
                if depth + 1 < drafted:  # follow the chain of the longer suffix
                    if nodes[child, TOKEN] == tokens[depth + 1]:
                        best = child
                elif best < 0 or frequencies[mode, child] > frequencies[mode, best]:
                    best = child
            if best < 0:
                break
            depth += 1
            if depth == drafted:
                tokens[drafted], parents[drafted] = nodes[best, TOKEN], drafted - 1
                drafted += 1
            first = nodes[best, FIRST]
        if 1 < drafted >= branch_length // 2:
            break
    return drafted
