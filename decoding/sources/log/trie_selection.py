"""Retrieval of branches from the implicit trie, as in Alipay's Lookahead, over occurrences in token logs."""

from __future__ import annotations

from decoding.budget.candidates import MAX_CHILDREN, Float64Array, clear_slots, pop, push, slot_of
from decoding.jit import compiled
from decoding.sources.log.chains import LogArrays, PlainArrays, follower, gather_chain
from decoding.sources.log.trie_memory import (
    AHEAD,
    CHILDREN,
    COUNT,
    DEPTH,
    FIRST,
    INPUT,
    LINK,
    MIXED,
    PARENT,
    PLACE,
    ROW,
    SLOT,
    TOKEN,
    Nodes,
    PlainNodes,
    add_node,
)  # fmt: skip
from decoding.tree import Int32Array


@compiled
def open_children(
    own: Int32Array, shared: Int32Array, public: Int32Array, first: int, parent: int, depth: int, count: int, nodes: Int32Array,
    frequencies: Float64Array, slots: Int32Array, found: Int32Array,
) -> int:  # fmt: skip
    """Makes the children of a node from its occurrences.

    Args:
        own: tokens of the log of the request's texts, ``shared`` of that of outputs, ``public`` of the public one.
        first: occurrence in the node's list.
        parent: the node, -1 for the root.

    Returns:
        Nodes in use.
    """
    begin, at = count, first
    names = nodes[:, TOKEN]
    while at >= 0:
        after, place = found[at, LINK], found[at, PLACE]
        log_tokens = own if place < 2 else (shared if place == 2 else public)
        token = follower(log_tokens, found[at, SLOT] + 1 + depth)
        if token >= 0:
            slot = slot_of(token, slots, names)
            child = slots[slot]
            if child < 0 and count < len(nodes) and count - begin < MAX_CHILDREN:
                child, count = count, count + 1
                slots[slot] = child
                add_node(nodes, frequencies, child, token, parent, depth + 1)
            if child >= 0:
                frequencies[min(place, 1), child] += 1.0
                frequencies[MIXED, child] += 1e-4 if place else 0.9999
                found[at, LINK] = nodes[child, FIRST]
                nodes[child, FIRST] = at
        at = after
    clear_slots(begin, count, slots, names)
    return count


@compiled
def find_rows(nodes: Int32Array, begin: int, end: int, row: int, since: int, tokens: Int32Array, parents: Int32Array) -> None:
    """Tells the children of the node in a row, which are the nodes from ``begin`` to ``end``, their rows before ``since``."""
    for below in range(row + 1, since):
        if parents[below] == row:
            for child in range(begin, end):
                if nodes[child, TOKEN] == tokens[below]:
                    nodes[child, ROW] = below


@compiled
def occurrences(
    own: LogArrays, references: int, shared: LogArrays, shared_oldest: int, public: LogArrays, public_oldest: int,
    context: Int32Array, length: int, mode: int, cap: int, memory: Nodes,
) -> tuple[int, bool]:  # fmt: skip
    """Links the occurrences at which ``length`` or more tokens agree, ``cap`` of each log: of the longest n-grams, the latest.

    Returns:
        The first of the list, -1 for none, and whether one is in the prompt.
    """
    found, positions, lengths = memory.found, memory.positions, memory.lengths
    shortest, limit = (0 if length < 2 else (1 if length < 4 else 2)), max(4, length)
    used = 0
    for chain in range(2, shortest - 1, -1):
        used = gather_chain(own, chain, 0, -1, context, cap - used, limit, used, positions, lengths)
    in_own = in_shared = used
    if mode != INPUT:
        for chain in range(2, shortest - 1, -1):
            room = cap - (used - in_own)
            used = gather_chain(shared, chain, shared_oldest, -1, context, room, limit, used, positions, lengths)
        in_shared = used
        for chain in range(2, shortest - 1 if public_oldest >= 0 else 2, -1):
            room = cap - (used - in_shared)
            used = gather_chain(public, chain, public_oldest, -1, context, room, limit, used, positions, lengths)
    first, any_prompt = -1, False
    own_mask, shared_mask, public_mask = len(own.tokens) - 1, len(shared.tokens) - 1, len(public.tokens) - 1
    for at in range(used):
        place = 2 if at < in_shared else 3
        if at < in_own:
            place = 1 if positions[at] >= references else 0
        if lengths[at] >= length and (mode == MIXED or min(place, 1) == mode):
            slot, ahead = positions[at] & own_mask, 0
            # A branch further on: read here, where reads overlap, so that its cache line is near when the branch is followed.
            if place == 2:
                slot = positions[at] & shared_mask
                ahead = shared.tokens[(slot + 12) & shared_mask]
            elif place == 3:
                slot = positions[at] & public_mask
                ahead = public.tokens[(slot + 12) & public_mask]
            found[at, SLOT], found[at, PLACE], found[at, LINK], found[at, AHEAD] = slot, place, first, ahead
            first = at
            any_prompt = any_prompt or place == 0
    return first, any_prompt


@compiled
def choose_best(
    own: Int32Array, shared: Int32Array, public: Int32Array, by: int, quota: int, top: int, branch_length: int, count: int,
    nodes: Int32Array, frequencies: Float64Array, heap: Int32Array, queue: Int32Array, slots: Int32Array, found: Int32Array,
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
    keys, size, waiting, served, begin, end = frequencies[by], 0, 0, 0, 0, top
    least = 1e-4 if by == MIXED else 1.0  # the nodes that were seen once, which are most, wait in line for all others
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
            if found[first, LINK] < 0 and row >= since:  # one occurrence: at most one child, as frequent
                place = found[first, PLACE]
                log_tokens = own if place < 2 else (shared if place == 2 else public)
                token = follower(log_tokens, found[first, SLOT] + 1 + depth)
                if token >= 0 and count < len(nodes):
                    add_node(nodes, frequencies, count, token, best, depth + 1)
                    nodes[count, FIRST] = first
                    for frequency in range(3):
                        frequencies[frequency, count] = frequencies[frequency, best]
                    count += 1
            else:
                count = open_children(own, shared, public, first, best, depth, count, nodes, frequencies, slots, found)
                find_rows(nodes, nodes[best, CHILDREN], count, row, since, tokens, parents)
            nodes[best, COUNT] = count - nodes[best, CHILDREN]
        begin, end = nodes[best, CHILDREN], nodes[best, CHILDREN] + nodes[best, COUNT]
    return count, drafted


@compiled
def hierarchical(
    own: PlainArrays, references: int, shared: PlainArrays, shared_oldest: int, public: PlainArrays, public_oldest: int,
    context: Int32Array, max_query_length: int, branch_length: int, enough: int, min_input: int, min_output: int, mode: int,
    cap: int, memory: PlainNodes, tokens: Int32Array, parents: Int32Array,
) -> int:  # fmt: skip
    """The draft tree for the end of ``context``: the published multi-stage retrieval and selection, its defects mended.

    Suffixes are looked up from the longest on until there are ``enough`` rows; a shorter one adds to what longer ones gave. Of
    each, the ``min_input`` best by the prompt's frequency are taken, then the ``min_output`` best by that of outputs, then the
    best by both.

    Args:
        own: log of the request's prompt and references; it never lets go of a block.
        references: positions of ``own`` from here on are references, which count as outputs.
        shared: log of outputs, of the request's tenant or of the request alone; its positions before ``shared_oldest`` are gone.
        public: log of what every tenant drafts from, which counts as outputs; not looked into with a ``public_oldest`` of -1.
        enough: rows, ``branch_length`` as published.
        mode: INPUT, OUTPUT or MIXED, which frequencies count.
        tokens: [decoding length] out; row 0 is the root.
        parents: [decoding length] out.

    Returns:
        Rows of the draft, the root included.
    """
    own_log, shared_log, public_log, working = LogArrays(*own), LogArrays(*shared), LogArrays(*public), Nodes(*memory)
    nodes, frequencies, heap, queue, slots, found, _, _ = memory
    tokens[0], parents[0], drafted = context[-1], -1, 1
    for length in range(min(max_query_length, len(context)), 0, -1):
        first, any_prompt = occurrences(
            own_log, references, shared_log, shared_oldest, public_log, public_oldest, context, length, mode, cap, working
        )
        if first < 0:
            continue
        since = drafted
        count = top = open_children(own[0], shared[0], public[0], first, -1, 0, 0, nodes, frequencies, slots, found)
        find_rows(nodes, 0, top, 0, since, tokens, parents)
        for by in range(3):
            # Without an occurrence in the prompt the mixed order is that of outputs: nothing has to be reserved.
            if by != mode and (mode != MIXED or not any_prompt):
                continue
            quota = len(tokens) if by == mode else (min_input if by == INPUT else min_output)
            count, drafted = choose_best(
                own[0], shared[0], public[0], by, quota, top, branch_length, count, nodes, frequencies, heap, queue, slots, found,
                tokens, parents, since, drafted,
            )  # fmt: skip
        if drafted == len(tokens) or 1 < drafted >= enough:
            break
    return drafted


@compiled
def single(
    own: PlainArrays, references: int, shared: PlainArrays, shared_oldest: int, public: PlainArrays, public_oldest: int,
    context: Int32Array, max_query_length: int, branch_length: int, mode: int, cap: int, memory: PlainNodes, tokens: Int32Array,
    parents: Int32Array,
) -> int:  # fmt: skip
    """One chain: the most frequent child of the most frequent child. Arguments and result as in ``hierarchical``.

    A shorter suffix goes on where a longer one knew no more; suffixes are tried until there are ``branch_length // 2`` rows.
    """
    own_log, shared_log, public_log, working = LogArrays(*own), LogArrays(*shared), LogArrays(*public), Nodes(*memory)
    nodes, frequencies, _, _, slots, found, _, _ = memory
    tokens[0], parents[0], drafted = context[-1], -1, 1
    for length in range(min(max_query_length, len(context)), 0, -1):
        first, _ = occurrences(
            own_log, references, shared_log, shared_oldest, public_log, public_oldest, context, length, mode, cap, working
        )
        depth = count = 0
        while first >= 0 and depth < branch_length and drafted < len(tokens):
            begin = count
            count = open_children(own[0], shared[0], public[0], first, -1, depth, count, nodes, frequencies, slots, found)
            best = -1
            for child in range(begin, count):
                if depth + 1 < drafted:  # on the way down what the longer suffix gave
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
