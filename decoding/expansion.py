"""Best-first growth of a draft tree from everything that is known about how a text goes on.

Each node of the implied tree has children from three kinds of evidence: occurrences of the node's context elsewhere, weighed by
how much of the context agrees; what the target ranks next after the node's token; and tokens that are frequent anyway. A child's
chance given its parent is read from a table of measured acceptance rates (``decoding.acceptance``), and the children with the
highest product of chances along their path become rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from decoding.candidates import HASH_SLOTS, MAX_CHILDREN, Float64Array, clear_slots, pop, push, slot_of
from decoding.chains import BLOCK, Int64Array, LogArrays, PlainArrays, follower, gather, unigram_bucket
from decoding.evidence import (
    BIGRAM,
    MATCH_BUCKETS,
    NUM_KINDS,
    RECYCLING,
    UNIGRAM,
    context_bucket,
    feature,
    match_bucket,
    share_bucket,
)
from decoding.jit import compiled
from decoding.tree import Int32Array

MAX_CANDIDATES = 8192  # nodes looked at for one tree
MAX_OCCURRENCES = 8192


class Pool(NamedTuple):
    """Working memory of one expansion, kept between calls: candidates, and the occurrences below them as linked lists."""

    tokens: Int32Array  # [candidates]
    parents: Int32Array  # [candidates] row of the parent
    depths: Int32Array  # [candidates]
    kinds: Int32Array  # [candidates] evidence
    features: Int32Array  # [candidates]
    matches: Int32Array  # [candidates] longest agreement of an occurrence, at depth 0
    weights: Float64Array  # [candidates] sum over occurrences
    chances: Float64Array  # [candidates] product of chances along the path
    firsts: Int32Array  # [candidates] first occurrence, -1 for none
    heap: Int32Array  # [candidates + 1]
    slots: Int32Array  # [HASH_SLOTS] candidates of the node at hand by token, -1 for none
    positions: Int64Array  # [occurrences] where the token of a node occurs
    lengths: Int32Array  # [occurrences] agreement there
    sources: Int32Array  # [occurrences] log: 0 the request's own texts, 1 its tenant's, 2 the public one
    starts: Int32Array  # [occurrences] depth of the node at which it was found
    links: Int32Array  # [occurrences] next in the list of its node

    @classmethod
    def empty(cls) -> Pool:
        """Memory for one thread."""
        nodes, found = MAX_CANDIDATES, MAX_OCCURRENCES
        return cls(
            tokens=np.empty(nodes, np.int32),
            parents=np.empty(nodes, np.int32),
            depths=np.empty(nodes, np.int32),
            kinds=np.empty(nodes, np.int32),
            features=np.empty(nodes, np.int32),
            matches=np.empty(nodes, np.int32),
            weights=np.empty(nodes),
            chances=np.empty(nodes),
            firsts=np.empty(nodes, np.int32),
            heap=np.empty(nodes + 1, np.int32),
            slots=np.full(HASH_SLOTS, -1, np.int32),
            positions=np.empty(found, np.int64),
            lengths=np.empty(found, np.int32),
            sources=np.empty(found, np.int32),
            starts=np.empty(found, np.int32),
            links=np.empty(found, np.int32),
        )


class Ranked(NamedTuple):
    """What comes next by rank rather than by occurrence."""

    frequent: Int32Array  # [n] tokens that are frequent anyway, the most frequent first
    recycled: Int32Array  # [vocab, k] what the target ranked after each token when it last saw it, -1 for nothing; [0, 0] without
    bigrams: Int32Array  # [vocab, k] what the target ranks after each token alone; [0, 0] without


class Rows(NamedTuple):
    """A grown tree: the first five begin with its root, so that they are the arrays of a ``DraftTree``."""

    tokens: Int32Array  # [budget + 1]
    parents: Int32Array  # [budget + 1]
    kinds: Int32Array  # [budget + 1] evidence; NUM_KINDS for the root
    features: Int32Array  # [budget + 1]; 0 for the root
    depths: Int32Array  # [budget + 1]
    chances: Float64Array  # [budget] of the rows below the root, non-increasing

    @classmethod
    def empty(cls, budget: int) -> Rows:
        """Memory for trees of up to ``budget`` rows below the root."""
        tokens, parents, kinds, features, depths = np.empty((5, budget + 1), np.int32)
        return cls(tokens, parents, kinds, features, depths, np.empty(budget))

    def first(self, count: int) -> Rows:
        """The root and the first rows below it."""
        end = count + 1
        ints = (self.tokens[:end], self.parents[:end], self.kinds[:end], self.features[:end], self.depths[:end])
        return Rows(*ints, self.chances[:count])


# The same as plain tuples, which are passed to compiled code in a tenth of the time.
PlainPool = tuple[
    Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Float64Array, Float64Array, Int32Array, Int32Array,
    Int32Array, Int64Array, Int32Array, Int32Array, Int32Array, Int32Array,
]  # fmt: skip
PlainRanked = tuple[Int32Array, Int32Array, Int32Array]
PlainRows = tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Float64Array]


@compiled
def fresh_occurrences(
    log: LogArrays, oldest: int, token: int, parent_token: int, cap: int, source: int, owner: int, depth: int, first: int,
    used: int, pool: Pool,
) -> tuple[int, int]:  # fmt: skip
    """Adds the latest occurrences of a node's token that do not follow its parent's token (those came with the parent).

    Returns:
        The new head of the node's list of occurrences, and how many entries are used in all.
    """
    tokens = log.tokens
    mask = len(tokens) - 1
    p = log.heads1[unigram_bucket(token, len(log.heads1))]
    looked = 0
    while p >= oldest and looked < cap and used < len(pool.positions):
        looked += 1
        new = tokens[(p + 1) & mask] != -1 and tokens[(p - 1) & mask] != parent_token
        if new and tokens[p & mask] == token and log.owners[(p & mask) // BLOCK] != owner:
            pool.positions[used], pool.sources[used], pool.lengths[used], pool.starts[used] = p, source, 1, depth
            pool.links[used] = first
            first = used
            used += 1
        step = log.back[0, p & mask]
        if step == 0:
            break
        p -= step
    return first, used


@compiled
def branch(
    own: Int32Array, tenant: Int32Array, public: Int32Array, weights: Float64Array, history_weight: float, first: int, depth: int,
    row: int, count: int, pool: Pool,
) -> tuple[int, float, int]:  # fmt: skip
    """Makes the children that a node's occurrences give; ``own``, ``tenant`` and ``public`` are the tokens of the three logs.

    Returns:
        Candidates in use, the weight of all occurrences, and the longest agreement at the node.
    """
    total, longest, begin = 0.0, 0, count
    at = first
    while at >= 0:
        after = pool.links[at]
        source, below = pool.sources[at], depth - pool.starts[at]
        length = pool.lengths[at] + below
        weight = weights[min(length, len(weights) - 1)] * (history_weight if source else 1.0)
        total += weight
        longest = max(longest, length)
        log_tokens = own if source == 0 else (tenant if source == 1 else public)
        token = follower(log_tokens, pool.positions[at] + 1 + below)
        if token >= 0:
            slot = slot_of(token, pool.slots, pool.tokens)
            child = pool.slots[slot]
            if child < 0 and count < len(pool.tokens) and count - begin < MAX_CHILDREN:
                child, count = count, count + 1
                pool.slots[slot] = child
                pool.tokens[child], pool.parents[child], pool.depths[child] = token, row, depth + 1
                pool.weights[child], pool.firsts[child], pool.matches[child] = 0.0, -1, 0
            if child >= 0:
                pool.weights[child] += weight
                pool.links[at] = pool.firsts[child]
                pool.firsts[child] = at
                if length > pool.matches[child]:
                    pool.matches[child] = length
                    pool.kinds[child] = min(source, 1) + (2 if pool.starts[at] > 0 else 0)
        at = after
    return count, total, longest


@compiled
def add_ranked(
    ranked: Int32Array, kind: int, context: int, row: int, depth: int, chance: float, table: Float64Array, begin: int, count: int,
    pool: Pool,
) -> int:  # fmt: skip
    """Makes children of ranked tokens that are none yet; the node's begin at ``begin``. Returns the candidates in use."""
    for rank in range(len(ranked)):
        token = ranked[rank]
        if token < 0 or count >= len(pool.tokens) or count - begin >= MAX_CHILDREN:
            continue
        slot = slot_of(token, pool.slots, pool.tokens)
        if pool.slots[slot] >= 0:
            continue
        pool.slots[slot] = count
        pool.tokens[count], pool.parents[count], pool.depths[count], pool.firsts[count] = token, row, depth + 1, -1
        pool.kinds[count] = kind
        pool.features[count] = feature(kind, min(rank // 2 if kind == UNIGRAM else rank, MATCH_BUCKETS - 1), context)
        pool.chances[count] = chance * table[pool.features[count]]
        count += 1
    return count


@compiled
def open_root(
    own: LogArrays, own_oldest: int, tenant: LogArrays, tenant_oldest: int, owner: int, public: LogArrays, public_oldest: int,
    context: Int32Array, caps: Int64Array, pool: Pool,
) -> tuple[int, int]:  # fmt: skip
    """Lists the occurrences of the end of ``context`` in the three logs; arguments as in ``grow``.

    Returns:
        The head of the list, -1 for none, and how many entries are used.
    """
    own_used = gather(own, own_oldest, -1, context, caps, 0, pool.positions, pool.lengths)
    tenant_used = gather(tenant, tenant_oldest, owner, context, caps, own_used, pool.positions, pool.lengths)
    used = tenant_used
    if public_oldest >= 0:
        used = gather(public, public_oldest, -1, context, caps, used, pool.positions, pool.lengths)
    first = -1
    for at in range(used - 1, -1, -1):
        pool.sources[at] = 0 if at < own_used else (1 if at < tenant_used else 2)
        pool.starts[at], pool.links[at] = 0, first
        first = at
    return first, used


@compiled
def open_node(
    own: Int32Array, tenant: Int32Array, public: Int32Array, ranked: Ranked, table: Float64Array, weights: Float64Array,
    history_weight: float, first: int, token: int, depth: int, row: int, chance: float, count: int, pool: Pool,
) -> int:  # fmt: skip
    """Makes the children of a node with their chances: what its occurrences give, then what is ranked after its token.

    Returns:
        Candidates in use.
    """
    begin = count
    count, total, longest = branch(own, tenant, public, weights, history_weight, first, depth, row, count, pool)
    for child in range(begin, count):
        match = match_bucket(pool.matches[child])
        pool.features[child] = feature(pool.kinds[child], match, share_bucket(pool.weights[child] / total))
        pool.chances[child] = chance * table[pool.features[child]]
    ends = context_bucket(longest)
    if token < len(ranked.recycled):
        count = add_ranked(ranked.recycled[token], RECYCLING, ends, row, depth, chance, table, begin, count, pool)
    if token < len(ranked.bigrams):
        count = add_ranked(ranked.bigrams[token], BIGRAM, ends, row, depth, chance, table, begin, count, pool)
    if depth == 0:
        count = add_ranked(ranked.frequent, UNIGRAM, ends, row, depth, chance, table, begin, count, pool)
    clear_slots(begin, count, pool.slots, pool.tokens)
    return count


@compiled
def grow(
    own_log: PlainArrays, own_oldest: int, tenant_log: PlainArrays, tenant_oldest: int, owner: int, public_log: PlainArrays,
    public_oldest: int, context: Int32Array, plain_ranked: PlainRanked, table: Float64Array, weights: Float64Array,
    history_weight: float, caps: Int64Array, budget: int, max_depth: int, least_chance: float, plain_pool: PlainPool,
    plain_rows: PlainRows,
) -> int:  # fmt: skip
    """Grows a tree below the end of ``context``, the best chances first.

    Args:
        own_log: log of the request's texts; its positions before ``own_oldest`` are gone.
        tenant_log: log of the outputs of the request's tenant, an empty one without a tenant; blocks of ``owner`` are passed
            over.
        public_log: log of what every tenant drafts from; not looked into with a ``public_oldest`` of -1.
        context: [c] the last committed tokens, the root is the last one.
        table: [NUM_FEATURES] chance of a child given its parent.
        weights: [w] weight of an occurrence by length of agreement; longer ones weigh like the last entry.
        history_weight: factor on occurrences in the tenant's and the public log.
        caps: [4] the most occurrences to gather from each log by 1-, 2-, 4-grams, and for each node below the root.
        max_depth: of rows.
        least_chance: nodes of less are left out.
        plain_ranked: see ``Ranked``.
        plain_pool: see ``Pool``.
        plain_rows: see ``Rows``; out.

    Returns:
        How many rows were grown below the root.
    """
    own, tenant, public = LogArrays(*own_log), LogArrays(*tenant_log), LogArrays(*public_log)
    ranked, pool, rows = Ranked(*plain_ranked), Pool(*plain_pool), Rows(*plain_rows)
    first, used = open_root(
        own, own_oldest, tenant, tenant_oldest, owner, public, public_oldest, context, caps, pool
    )  # fmt: skip
    count = size = grown = depth = row = 0
    chance, token = 1.0, context[-1]
    rows.tokens[0], rows.parents[0], rows.kinds[0], rows.features[0], rows.depths[0] = token, -1, NUM_KINDS, 0, 0
    while True:
        if depth < max_depth:
            begin = count
            count = open_node(
                own.tokens, tenant.tokens, public.tokens, ranked, table, weights, history_weight, first, token, depth, row,
                chance, count, pool,
            )  # fmt: skip
            for child in range(begin, count):
                if pool.chances[child] >= least_chance:
                    size = push(pool.heap, size, pool.chances, child)
        if size == 0 or grown >= budget:
            return grown
        size = pop(pool.heap, size, pool.chances)
        best = pool.heap[size]
        rows.chances[grown] = pool.chances[best]
        grown += 1
        rows.tokens[grown], rows.parents[grown], rows.kinds[grown] = pool.tokens[best], pool.parents[best], pool.kinds[best]
        rows.features[grown], rows.depths[grown] = pool.features[best], pool.depths[best]
        parent = rows.tokens[pool.parents[best]]
        row, depth, chance, first, token = grown, pool.depths[best], pool.chances[best], pool.firsts[best], pool.tokens[best]
        if depth < max_depth:
            cap = caps[3]
            first, used = fresh_occurrences(own, own_oldest, token, parent, cap, 0, -1, depth, first, used, pool)
            first, used = fresh_occurrences(tenant, tenant_oldest, token, parent, cap, 1, owner, depth, first, used, pool)
            if public_oldest >= 0:
                first, used = fresh_occurrences(public, public_oldest, token, parent, cap, 2, -1, depth, first, used, pool)
