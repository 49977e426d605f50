"""Best-first growth of a draft tree from all draft sources: the nodes with the highest chance along their path become rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider.decoding.arrays import Float64Array, Int32Array, Int64Array
from outrider.decoding.budget.candidates import HASH_SLOTS, MAX_CHILDREN, clear_slots, pop, push, slot_of
from outrider.decoding.budget.features import (
    ALONE,
    COPY_FRESH,
    EVEN,
    HISTORY,
    LEVELS,
    LIKELY,
    MATCH_BUCKETS,
    NUM_KINDS,
    RANKED,
    RECYCLING,
    SIMILAR,
    TOKEN_BITS,
    TOKEN_MASK,
    UNIGRAM,
    UNKNOWN,
    UNRANKED,
    context_bucket,
    distance_bucket,
    feature,
    match_bucket,
    share_bucket,
)
from outrider.decoding.jit import compiled
from outrider.decoding.sources.log.chains import BLOCK, Log, LogArrays, follower, gather, unigram_bucket
from outrider.decoding.sources.ranked.contexts import WORDS, Contexts, PlainContexts, most_alike

MAX_CANDIDATES = 8192  # candidate nodes of one tree
MAX_OCCURRENCES = 8192
_NEAR = 5  # last distance bucket in which a context's ranking adjusts the chances of occurrences


class Workspace(NamedTuple):
    """Working memory of one expansion, reused between calls: candidates, and linked lists of the occurrences below them."""

    tokens: Int32Array  # [candidates]
    parents: Int32Array  # [candidates] row of the parent
    depths: Int32Array  # [candidates]
    kinds: Int32Array  # [candidates] features
    features: Int32Array  # [candidates]
    matches: Int32Array  # [candidates] longest agreement of an occurrence, at depth 0
    weights: Float64Array  # [candidates] sum over occurrences
    similarities: Float64Array  # [candidates] similarity of the request with the longest agreement; 1 for other sources
    chances: Float64Array  # [candidates] product of chances along the path
    firsts: Int32Array  # [candidates] first occurrence, -1 for none
    heap: Int32Array  # [candidates + 1]
    slots: Int32Array  # [HASH_SLOTS] children of the current node by token, -1 for none
    positions: Int64Array  # [occurrences] position of the node's token in the log
    lengths: Int32Array  # [occurrences] length of agreement
    sources: Int32Array  # [occurrences] index of the log in ``Logs``
    factors: Float64Array  # [occurrences] weight relative to an occurrence in the request's own texts
    starts: Int32Array  # [occurrences] depth of the node at which the occurrence was found
    links: Int32Array  # [occurrences] next in the list of its node
    above: Int64Array  # [WORDS] sign hash of the hidden state before the current row
    alike: Int32Array  # [rows] index of the computed row with the most similar context, -1 for none
    distances: Int32Array  # [rows] number of differing signs of the contexts along the path, -1 if unknown

    @classmethod
    def empty(cls) -> Workspace:
        """Allocate memory for one thread."""
        nodes, found = MAX_CANDIDATES, MAX_OCCURRENCES
        return cls(
            tokens=np.empty(nodes, np.int32),
            parents=np.empty(nodes, np.int32),
            depths=np.empty(nodes, np.int32),
            kinds=np.empty(nodes, np.int32),
            features=np.empty(nodes, np.int32),
            matches=np.empty(nodes, np.int32),
            weights=np.empty(nodes),
            similarities=np.empty(nodes),
            chances=np.empty(nodes),
            firsts=np.empty(nodes, np.int32),
            heap=np.empty(nodes + 1, np.int32),
            slots=np.full(HASH_SLOTS, -1, np.int32),
            positions=np.empty(found, np.int64),
            lengths=np.empty(found, np.int32),
            sources=np.empty(found, np.int32),
            factors=np.empty(found),
            starts=np.empty(found, np.int32),
            links=np.empty(found, np.int32),
            above=np.empty(WORDS, np.int64),
            alike=np.empty(nodes + 1, np.int32),
            distances=np.empty(nodes + 1, np.int32),
        )


class RankedTokens(NamedTuple):
    """Next-token candidates by rank instead of by occurrence."""

    frequent: Int32Array  # [n] most frequent tokens in general, the most frequent first
    # [vocab, k] tokens that the target last ranked after each token, with likelihood buckets above ``TOKEN_BITS``; -1 for none.
    # [0, 0] if not used.
    recycled: Int32Array
    contexts: PlainContexts  # contexts of rows that the target computed
    above: Int64Array  # [WORDS] sign hash of the hidden state before the root


class TreeRows:
    """Grown tree.

    Args:
        numbers: [5, n + 1] token, row of the parent, kind of feature, feature, depth; the root, first, has ``NUM_KINDS`` and 0.
        chances: [n] chances of the rows below the root, non-increasing.
    """

    __slots__ = ("chances", "numbers")

    def __init__(self, numbers: Int32Array, chances: Float64Array) -> None:
        self.numbers, self.chances = numbers, chances

    @classmethod
    def empty(cls, budget: int) -> TreeRows:
        """Allocate memory for trees of up to ``budget`` rows below the root."""
        return cls(np.empty((5, budget + 1), np.int32), np.empty(budget))

    @property
    def depths(self) -> Int32Array:
        """Return [n + 1] depths."""
        depths: Int32Array = self.numbers[4]
        return depths

    def first(self, count: int) -> TreeRows:
        """Return the root and the first ``count`` rows below it."""
        return TreeRows(self.numbers[:, : count + 1], self.chances[:count])


# Plain tuples of the same arrays: passing them to compiled code takes a tenth of the time.
PlainPool = tuple[
    Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Float64Array, Float64Array, Float64Array, Int32Array,
    Int32Array, Int32Array, Int64Array, Int32Array, Int32Array, Float64Array, Int32Array, Int32Array, Int64Array,
    Int32Array, Int32Array,
]  # fmt: skip
PlainRanked = tuple[Int32Array, Int32Array, PlainContexts, Int64Array]
# Logs of: the request's own texts, texts of similar requests, outputs of its tenant, public texts.
Logs = tuple[Log, Log, Log, Log]
LogTokens = tuple[Int32Array, Int32Array, Int32Array, Int32Array]  # tokens of ``Logs``
# [NUM_FEATURES] chance of a child given its parent; [w] weight of an occurrence by length of agreement (longer ones weigh like
# the last); factor on occurrences in tenant and public texts; [texts] similarity of the requests in the second log; [4] maximum
# occurrences to gather per log by 1-, 2- and 4-grams, and per node below the root.
Measures = tuple[Float64Array, Float64Array, float, Float64Array, Int64Array]
# Maximum rows below the root; maximum depth; [n] non-decreasing minimum chance of a row by the number of rows before it (the
# last value applies beyond n).
Limits = tuple[int, int, Float64Array]


@compiled
def factor_of(measures: Measures, source: int, log: LogArrays, position: int) -> float:
    """Return the weight of an occurrence relative to one in the request's own texts."""
    if source == 0:
        return 1.0
    if source == SIMILAR:
        return float(measures[3][log.owners[(position & (len(log.tokens) - 1)) // BLOCK]])
    return measures[2]


@compiled
def fresh_occurrences(
    plain_log: Log,
    source: int,
    measures: Measures,
    token: int,
    parent_token: int,
    depth: int,
    first: int,
    used: int,
    pool: Workspace,
) -> tuple[int, int]:
    """Add a token's latest occurrences that do not follow its parent's token; return the list's new head and the used entries."""
    log, oldest, owner, cap = LogArrays(*plain_log[0]), plain_log[1], plain_log[2], measures[4][3]
    if oldest < 0:
        return first, used
    tokens = log.tokens
    mask = len(tokens) - 1
    p = log.heads1[unigram_bucket(token, len(log.heads1))]
    looked = 0
    # The cap counts occurrences that are passed over too, so that a frequent token costs a bounded number of reads.
    while p >= oldest and looked < cap and used < len(pool.positions):
        looked += 1
        # Occurrences after the parent's token were added with the parent.
        new = tokens[(p + 1) & mask] != -1 and tokens[(p - 1) & mask] != parent_token
        if new and tokens[p & mask] == token and log.owners[(p & mask) // BLOCK] != owner:
            pool.positions[used], pool.sources[used], pool.lengths[used], pool.starts[used] = p, source, 1, depth
            pool.factors[used], pool.links[used] = factor_of(measures, source, log, p), first
            first = used
            used += 1
        step = log.back[p & mask, 0]
        if step == 0:
            break
        p -= step
    return first, used


@compiled
def branch(
    logs: LogTokens, measures: Measures, first: int, depth: int, row: int, count: int, pool: Workspace
) -> tuple[int, float, int]:
    """Create the children after a node's occurrences; return the used candidates, total weight and longest agreement."""
    weights = measures[1]
    total, longest, begin = 0.0, 0, count
    at = first
    while at >= 0:
        after = pool.links[at]
        source, below = pool.sources[at], depth - pool.starts[at]
        length = pool.lengths[at] + below
        weight = weights[min(length, len(weights) - 1)] * pool.factors[at]
        total += weight
        longest = max(longest, length)
        log_tokens = logs[0] if source == 0 else (logs[1] if source == 1 else (logs[2] if source == 2 else logs[3]))
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
                kind = min(source, HISTORY) + (COPY_FRESH if pool.starts[at] > 0 else 0)
                if length > pool.matches[child] or (length == pool.matches[child] and kind < pool.kinds[child]):
                    pool.matches[child], pool.kinds[child] = length, kind
                    pool.similarities[child] = pool.factors[at] if source == SIMILAR else 1.0
        at = after
    return count, total, longest


@compiled
def add_ranked(
    ranked: Int32Array, kind: int, context: int, level: int, row: int, depth: int, chance: float, table: Float64Array, begin: int,
    count: int, pool: Workspace,
) -> int:  # fmt: skip
    """Create children for ranked tokens, or raise the chance of existing ones from ``begin`` on; return the used candidates."""
    for rank in range(len(ranked)):
        token, bucket = ranked[rank] & TOKEN_MASK, ranked[rank] >> TOKEN_BITS
        if kind != RECYCLING:
            bucket = min(rank // 2 if kind == UNIGRAM else rank, MATCH_BUCKETS - 1)
        if ranked[rank] < 0:
            continue
        entry = feature(kind, bucket, context, level)
        slot = slot_of(token, pool.slots, pool.tokens)
        child = pool.slots[slot]
        if child < 0:
            if count >= len(pool.tokens) or count - begin >= MAX_CHILDREN:
                continue
            pool.slots[slot] = child = count
            pool.tokens[child], pool.parents[child], pool.depths[child], pool.firsts[child] = token, row, depth + 1, -1
            count += 1
        elif pool.chances[child] >= chance * table[entry]:
            continue
        pool.kinds[child], pool.features[child], pool.chances[child] = kind, entry, chance * table[entry]
    return count


@compiled
def list_occurrences(log: Log, source: int, measures: Measures, context: Int32Array, used: int, pool: Workspace) -> int:
    """List the occurrences in one log after the first ``used`` entries, and return the number of used entries."""
    plain, oldest, owner = log
    if oldest < 0:
        return used
    arrays = LogArrays(*plain)
    end = gather(arrays, oldest, owner, context, measures[4], used, pool.positions, pool.lengths)
    for at in range(used, end):
        pool.sources[at], pool.factors[at] = source, factor_of(measures, source, arrays, pool.positions[at])
    return end


@compiled
def open_root(logs: Logs, measures: Measures, context: Int32Array, pool: Workspace) -> tuple[int, int]:
    """List the occurrences of the end of ``context``; return the head of the list, -1 for none, and the used entries."""
    used = list_occurrences(logs[0], 0, measures, context, 0, pool)
    used = list_occurrences(logs[1], 1, measures, context, used, pool)
    used = list_occurrences(logs[2], 2, measures, context, used, pool)
    used = list_occurrences(logs[3], 3, measures, context, used, pool)
    for at in range(used):
        pool.starts[at], pool.links[at] = 0, at + 1 if at + 1 < used else -1
    return 0 if used else -1, used


@compiled
def add_recycled(
    ranked: RankedTokens, three: tuple[int, int, int], ends: int, row: int, parent: int, depth: int, chance: float,
    table: Float64Array, begin: int, count: int, pool: Workspace,
) -> int:  # fmt: skip
    """Set the levels of the children from occurrences and create the children that the target ranked; see ``open_node``."""
    two, one, token = three
    contexts = Contexts(*ranked.contexts)
    for word in range(len(ranked.above)):
        # A drafted parent has no hidden state yet: that of the stored row most like it is used, all 0 if there is none.
        known = pool.alike[parent] if parent >= 0 else -1
        signs = contexts.signs[known, word] if known >= 0 else 0
        pool.above[word] = ranked.above[word] if parent < 0 else signs
    place, distance, agreed = most_alike(contexts, token, one, two, pool.above)
    if parent >= 0 and distance >= 0:
        distance = distance + pool.distances[parent] if pool.distances[parent] >= 0 else -1
    pool.alike[row], pool.distances[row] = place, distance
    if place < 0:
        return add_ranked(ranked.recycled[token], RECYCLING, ends, ALONE, row, depth, chance, table, begin, count, pool)
    near = distance_bucket(distance)
    entry = contexts.ranked[place]
    if agreed > 1 or near <= _NEAR:
        # From ``UNKNOWN``, 0, to ``UNRANKED``; the ranked ones are then raised further.
        for child in range(begin, count):
            pool.features[child] += UNRANKED
        for rank in range(len(entry)):
            if entry[rank] >= 0:
                child = pool.slots[slot_of(entry[rank] & TOKEN_MASK, pool.slots, pool.tokens)]
                if child >= 0:
                    level = LIKELY if entry[rank] >> TOKEN_BITS <= EVEN else RANKED
                    pool.features[child] = pool.features[child] // LEVELS * LEVELS + level
        for child in range(begin, count):
            pool.chances[child] = chance * table[pool.features[child]]
    count = add_ranked(entry, RECYCLING, near, agreed, row, depth, chance, table, begin, count, pool)
    return add_ranked(ranked.recycled[token], RECYCLING, ends, ALONE, row, depth, chance, table, begin, count, pool)


@compiled
def open_node(
    logs: LogTokens, ranked: RankedTokens, measures: Measures, first: int, three: tuple[int, int, int], depth: int, row: int,
    parent: int, chance: float, count: int, pool: Workspace,
) -> int:  # fmt: skip
    """Create the children of a node with their chances, and return the number of used candidates.

    Args:
        three: the two tokens before the node's, -1 for none, and its own.
        parent: row of the node's parent, -1 for the root.
    """
    begin, table, token = count, measures[0], three[2]
    pool.alike[row] = -1
    count, total, longest = branch(logs, measures, first, depth, row, count, pool)
    for child in range(begin, count):
        match = match_bucket(pool.matches[child])
        share = pool.weights[child] / total * pool.similarities[child]
        pool.features[child] = feature(pool.kinds[child], match, share_bucket(share), UNKNOWN)
        pool.chances[child] = chance * table[pool.features[child]]
    ends = context_bucket(longest)
    if token < len(ranked.recycled):
        count = add_recycled(ranked, three, ends, row, parent, depth, chance, table, begin, count, pool)
    if depth == 0:
        count = add_ranked(ranked.frequent, UNIGRAM, ends, 0, row, depth, chance, table, begin, count, pool)
    clear_slots(begin, count, pool.slots, pool.tokens)
    return count


@compiled
def build_tree(
    logs: Logs, context: Int32Array, plain_ranked: PlainRanked, measures: Measures, limits: Limits,
    plain_pool: PlainPool, numbers: Int32Array, row_chances: Float64Array,
) -> int:  # fmt: skip
    """Grow a tree below the last token of ``context``, best chances first; fill the arrays of ``TreeRows``, return its size."""
    ranked, pool = RankedTokens(*plain_ranked), Workspace(*plain_pool)
    tokens, parents, kinds, features, depths = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    log_tokens = logs[0][0][0], logs[1][0][0], logs[2][0][0], logs[3][0][0]
    budget, max_depth, least_chances = limits
    first, used = open_root(logs, measures, context, pool)
    count = size = grown = depth = row = 0
    above = -1
    chance, token, least_chance = 1.0, context[-1], least_chances[0]
    before = context[-2] if len(context) > 1 else -1, context[-3] if len(context) > 2 else -1
    two, one = before[1], before[0]
    tokens[0], parents[0], kinds[0], features[0], depths[0] = token, -1, NUM_KINDS, 0, 0
    while True:
        if depth < max_depth:
            begin = count
            count = open_node(log_tokens, ranked, measures, first, (two, one, token), depth, row, above, chance, count, pool)
            for child in range(begin, count):
                if pool.chances[child] >= least_chance:
                    size = push(pool.heap, size, pool.chances, child)
        if size == 0 or grown >= budget:
            return grown
        size = pop(pool.heap, size, pool.chances)
        best = pool.heap[size]
        # The minimum has risen since this candidate was pushed, and all others are worse.
        if pool.chances[best] < least_chance:
            return grown
        row_chances[grown] = pool.chances[best]
        grown += 1
        least_chance = least_chances[min(grown, len(least_chances) - 1)]
        tokens[grown], parents[grown], kinds[grown] = pool.tokens[best], pool.parents[best], pool.kinds[best]
        features[grown], depths[grown] = pool.features[best], pool.depths[best]
        above = pool.parents[best]
        parent = one = tokens[above]
        two = before[0] if above == 0 else tokens[parents[above]]
        row, depth, chance, first, token = grown, pool.depths[best], pool.chances[best], pool.firsts[best], pool.tokens[best]
        if depth < max_depth:
            first, used = fresh_occurrences(logs[0], 0, measures, token, parent, depth, first, used, pool)
            first, used = fresh_occurrences(logs[1], 1, measures, token, parent, depth, first, used, pool)
            first, used = fresh_occurrences(logs[2], 2, measures, token, parent, depth, first, used, pool)
            first, used = fresh_occurrences(logs[3], 3, measures, token, parent, depth, first, used, pool)
