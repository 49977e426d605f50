"""Best-first growth against a naive growth that knows texts as lists and searches them all at every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.arrays import Float64Array, Int32Array, Int64Array
from outrider.decoding.budget.candidates import HASH_SLOTS, clear_slots, pop, push, slot_of
from outrider.decoding.budget.features import (
    ALONE,
    COPY,
    COPY_FRESH,
    EVEN,
    HISTORY,
    HISTORY_FRESH,
    KIND_FEATURES,
    LEVELS,
    LIKELY,
    MATCH_BUCKETS,
    NUM_FEATURES,
    NUM_KINDS,
    RANKED,
    RECYCLING,
    SHARE_BUCKETS,
    SIMILAR,
    SIMILAR_FRESH,
    TOKEN_BITS,
    TOKEN_MASK,
    UNIGRAM,
    UNKNOWN,
    UNRANKED,
    context_bucket,
    distance_bucket,
    feature,
    likelihood_bucket,
    match_bucket,
    share_bucket,
)
from outrider.decoding.budget.tree_builder import RankedTokens, TreeRows, Workspace, build_tree
from outrider.decoding.sources.log.chains import MAX_MATCH
from outrider.decoding.sources.log.token_log import TokenLog
from outrider.decoding.sources.ranked.contexts import NO_CONTEXTS, WORDS, Contexts, keep_tree

Path = tuple[int, ...]
VOCAB = 6
NO_CAPS = np.full(4, 1000, np.int64)
WEIGHTS = 2.0 ** np.minimum(np.arange(6), 4)  # agreement beyond five tokens weighs no more
NOTHING = np.zeros((0, 0), np.int32)
SIMILARITY = 0.5  # exact, as all weights are: sums are the same in any order


@cache
def table() -> Float64Array:
    """Chances by feature, all different."""
    return np.random.default_rng(0).uniform(0.05, 1.0, NUM_FEATURES)


@dataclass(frozen=True)
class Computed:
    """A row that the target computed before."""

    two: int  # the tokens before it, -1 for none
    one: int
    token: int
    above: int  # signs of the row before, as the bits of a number; 0 where they are not known
    signs: int  # its own
    ranked: tuple[int, ...]


@dataclass
class Known:
    """What a tree can be grown from."""

    own: list[list[int]]
    similar: list[list[int]]  # of requests that resemble it
    shared: list[list[int]]  # of others
    owned: list[list[int]]  # in the shared log, but by the request itself
    public: list[list[int]]
    context: list[int]
    recycled: list[list[int]]  # by token
    frequent: list[int]
    computed: list[Computed] = field(default_factory=list)
    above: int = 0  # signs of the row before the root

    @property
    def public_texts(self) -> list[list[int]]:
        """One text, as its pieces are extended."""
        return [[token for text in self.public for token in text]] if self.public else []


@dataclass
class Grown:
    """Rows as paths, in their order."""

    paths: list[Path]
    chances: list[float]
    kinds: list[int]
    features: list[int]


TOKENS = st.integers(0, VOCAB - 1)
TEXTS = st.lists(st.lists(TOKENS, min_size=1, max_size=40), max_size=3)
LIKELIHOODS = st.integers(0, MATCH_BUCKETS - 1).map(lambda bucket: bucket << TOKEN_BITS)
RANKED_TOKENS = st.just(-1) | st.builds(int.__or__, TOKENS, LIKELIHOODS)
RECYCLED = st.lists(st.lists(RANKED_TOKENS, min_size=3, max_size=3), min_size=VOCAB, max_size=VOCAB)
SIGN_SETS = st.builds(lambda first, count: ((1 << count) - 1) << first, st.integers(0, 90), st.integers(0, 90))
COMPUTED = st.builds(
    Computed,
    TOKENS | st.just(-1),
    TOKENS,
    TOKENS,
    SIGN_SETS,
    SIGN_SETS,
    st.lists(RANKED_TOKENS, min_size=3, max_size=3).map(tuple),
)
KNOWN = st.builds(
    Known,
    own=TEXTS,
    similar=TEXTS,
    shared=TEXTS,
    owned=TEXTS,
    public=TEXTS,
    context=st.lists(TOKENS, min_size=1, max_size=8),
    recycled=st.just([]) | RECYCLED,
    frequent=st.lists(TOKENS, max_size=4, unique=True),
    computed=st.lists(COMPUTED, max_size=40),
    above=SIGN_SETS,
)


def logs(known: Known) -> tuple[TokenLog, TokenLog, TokenLog, int, TokenLog]:
    own, similar, shared, public = TokenLog(2048), TokenLog(2048), TokenLog(2048), TokenLog(2048)
    for text in known.own:
        own.add(text)
    for text in known.similar:
        similar.add(text)
    for text in known.shared:
        shared.add(text)
    for text in known.owned:  # one growing text
        shared.extend("mine", text)
    for text in known.public:
        public.extend("mine", text)  # of the same number as the owner's in the shared log: owners are of one log
    return own, similar, shared, shared.number("mine"), public


def ranks(lists: Sequence[Sequence[int]]) -> Int32Array:
    return np.array(lists, np.int32) if len(lists) else NOTHING


def words(signs: int) -> Int64Array:
    return np.frombuffer(signs.to_bytes(8 * WORDS, "little"), np.int64).copy()


def contexts(computed: Sequence[Computed]) -> Contexts:
    """Them as ``SuccessorTable`` keeps them, the last one to be found first."""
    if not computed:
        return NO_CONTEXTS
    kept, root = Contexts.empty(VOCAB, 3), np.full(1, -1, np.int32)
    for row in computed:
        tokens, before, ranked = (np.array(each, np.int32) for each in ([row.token], [row.one, row.two], [row.ranked]))
        keep_tree(kept[:], tokens, root, before, words(row.above), np.zeros(1, np.int32), words(row.signs)[None].copy(), ranked)
    return kept


def grown(
    known: Known, budget: int, max_depth: int = 8, least: float = 1e-4, history: float = 0.5, caps: np.ndarray = NO_CAPS,
    pool: Workspace | None = None, chances: Float64Array | None = None,
) -> Grown:  # fmt: skip
    """Grows a tree, and checks what holds for all of them."""
    own, similar, shared, owner, public = logs(known)
    rows = TreeRows.empty(budget)
    frequent, recycled = np.array(known.frequent, np.int32), ranks(known.recycled)
    ranked = RankedTokens(frequent, recycled, contexts(known.computed)[:], words(known.above))
    count = build_tree(
        (own.without(-1), similar.without(-1), shared.without(owner), public.without(-1)), np.array(known.context, np.int32),
        ranked[:], (table() if chances is None else chances, WEIGHTS, history, np.full(len(known.similar), SIMILARITY), caps),
        (budget, max_depth, np.array([least])), (pool or Workspace.empty())[:], rows.numbers, rows.chances,
    )  # fmt: skip
    assert 0 <= count <= budget
    rows = rows.first(count)
    paths: list[Path] = [()]
    assert rows.numbers[:, 0].tolist() == [known.context[-1], -1, NUM_KINDS, 0, 0]
    tokens, parents, kinds, features, _ = rows.numbers[:, 1:].tolist()
    for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        assert 0 <= parent < row
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths)
    assert all(len(path) <= max_depth for path in paths)
    assert (np.diff(rows.chances) <= 0).all() and (rows.chances >= least).all()
    return Grown(paths[1:], rows.chances.tolist(), kinds, features)


def agreement(text: Sequence[int], at: int, path: Sequence[int]) -> int:
    length = 0
    while length < min(at + 1, len(path)) and text[at - length] == path[-1 - length]:
        length += 1
    return length


class Naive:
    """Children of a node by a search of all texts, and the best nodes by a search of all open ones."""

    def __init__(self, known: Known, history: float, chances: Float64Array) -> None:
        self._known, self._history, self._table = known, history, chances
        self.seen: dict[Path, tuple[float, int]] = {}  # of all open nodes: chance and kind

    def children(self, path: Path, chance: float) -> dict[Path, tuple[float, int]]:
        known, depth = self._known, len(path)
        context = (*known.context[-MAX_MATCH:], *path)
        total, longest = 0.0, 0
        weights: dict[int, float] = {}
        matches: dict[int, int] = {}
        kinds: dict[int, set[int]] = {}
        factors = {COPY: 1.0, SIMILAR: SIMILARITY, HISTORY: self._history}
        texts = [(COPY, text) for text in known.own] + [(SIMILAR, text) for text in known.similar]
        for source, text in texts + [(HISTORY, text) for text in known.shared + known.public_texts]:
            for at in range(len(text)):
                length = agreement(text, at, context)
                ends = at + 1 == len(text)
                # Where a text ends nothing follows. It counts among a node's occurrences when it came with the parent's.
                if length == 0 or (ends and (depth == 0 or length == 1)):
                    continue
                weight = WEIGHTS[min(length, len(WEIGHTS) - 1)] * factors[source]
                total, longest = total + weight, max(longest, length)
                if ends:
                    continue
                token = text[at + 1]
                weights[token] = weights.get(token, 0.0) + weight
                kind = source + (COPY_FRESH if length <= depth else 0)
                if length > matches.get(token, 0):
                    matches[token], kinds[token] = length, {kind}
                elif length == matches[token]:
                    kinds[token].add(kind)
        found: dict[int, tuple[int, int]] = {}
        alike, distance, agreed = self.most_alike(context, depth) if known.recycled else (None, -1, 0)
        for token in weights:
            kind = min(kinds[token])
            share = weights[token] / total * (SIMILARITY if kind in (SIMILAR, SIMILAR_FRESH) else 1.0)
            level = UNKNOWN
            if alike is not None and (agreed > 1 or distance_bucket(distance) <= 5):
                buckets = [value >> TOKEN_BITS for value in alike.ranked if value >= 0 and value & TOKEN_MASK == token]
                level = (LIKELY if buckets[-1] <= EVEN else RANKED) if buckets else UNRANKED
            found[token] = feature(kind, match_bucket(matches[token]), share_bucket(share), level), kind
        ends_in = context_bucket(longest)
        lists: list[tuple[int, int, int, Sequence[int]]] = []  # kind, bucket, level, ranked tokens
        if alike is not None:
            lists.append((RECYCLING, distance_bucket(distance), agreed, alike.ranked))
        if known.recycled:
            lists.append((RECYCLING, ends_in, ALONE, known.recycled[context[-1]]))
        if depth == 0:
            lists.append((UNIGRAM, ends_in, 0, known.frequent))
        for kind, share_of, level, values in lists:
            for rank, value in enumerate(values):
                token, bucket = value & TOKEN_MASK, rank // 2 if kind == UNIGRAM else rank
                entry = feature(kind, value >> TOKEN_BITS if kind == RECYCLING else bucket, share_of, level)
                if value >= 0 and (token not in found or self._table[entry] > self._table[found[token][0]]):
                    found[token] = (entry, kind)
        return {(*path, token): (chance * self._table[entry], kind) for token, (entry, kind) in found.items()}

    def most_alike(self, context: Path, depth: int) -> tuple[Computed | None, int, int]:
        """Of the last rows of a node's token the one whose context is the most like its own, with the signs in which the contexts
        on the way to it differ (-1: not known) and the number of last tokens that agree."""
        above, apart = self._known.above, 0
        if depth:
            parent, apart, _ = self.most_alike(context[:-1], depth - 1)
            above = 0 if parent is None else parent.signs
        best: tuple[int, int, Computed] | None = None
        for row in [row for row in self._known.computed[::-1] if row.token == context[-1]][:16]:
            one, two = (*(-1, -1), *context)[-2], (*(-1, -1), *context)[-3]
            agreed = 1 if one < 0 or row.one != one else (3 if two >= 0 and row.two == two else 2)
            distance = (row.above ^ above).bit_count() if above else -1
            if best is None or (distance, -agreed) < (best[0], -best[1]):
                best = distance, agreed, row
        if best is None:
            return None, -1, 0
        distance, agreed, row = best
        return row, distance + apart if distance >= 0 and apart >= 0 else -1, agreed

    def best(self, budget: int, max_depth: int, least: float) -> dict[Path, float]:
        open_nodes = self.children((), 1.0) if max_depth else {}
        taken: dict[Path, float] = {}
        self.seen = dict(open_nodes)
        while len(taken) < budget:
            path = max(open_nodes, key=lambda path: open_nodes[path][0], default=None)
            if path is None or open_nodes[path][0] < least:
                break
            chance, _ = open_nodes.pop(path)
            taken[path] = chance
            if len(path) < max_depth:
                below = self.children(path, chance)
                open_nodes.update(below)
                self.seen.update(below)
        return taken


@settings(max_examples=250)
@given(KNOWN, st.integers(0, 30), st.integers(0, 6), st.sampled_from([0.0, 1e-4, 0.05, 0.3, 1.1]))
def test_the_best_rows_are_grown(known: Known, budget: int, max_depth: int, least: float) -> None:
    assert_best(grown(known, budget, max_depth, least), Naive(known, 0.5, table()), budget, max_depth, least)


@settings(max_examples=100)
@given(KNOWN, st.booleans(), st.integers(1, 30))
def test_each_kind_has_its_own_chances(known: Known, from_own: bool, budget: int) -> None:
    known.own, known.shared = (known.own, []) if from_own else ([], known.own)
    known.public, known.similar = ([], []) if from_own else (known.public, known.similar)
    assert_best(grown(known, budget), Naive(known, 0.5, table()), budget, 8, 1e-4)


def assert_best(got: Grown, naive: Naive, budget: int, max_depth: int, least: float) -> None:
    """The rows are the naive ones; of those with the last row's chance any may be taken."""
    expected = naive.best(budget, max_depth, least)
    assert got.chances == pytest.approx(sorted(expected.values(), reverse=True))
    worst = min(expected.values(), default=0.0)
    assert {path for path, chance in expected.items() if chance > worst * (1 + 1e-9)} <= set(got.paths)
    for path, chance, kind, entry in zip(got.paths, got.chances, got.kinds, got.features, strict=True):
        assert entry // KIND_FEATURES == kind
        if path not in naive.seen:  # below a node that ties with the last row
            assert chance == pytest.approx(worst)
            continue
        assert (chance, kind) == (pytest.approx(naive.seen[path][0]), naive.seen[path][1])


def known(own: list[list[int]], context: list[int], **rest: object) -> Known:
    parts = {"similar": [], "shared": [], "owned": [], "public": [], "recycled": [], "frequent": []} | rest
    return Known(own=own, context=context, **parts)  # type: ignore[arg-type]


def test_longer_agreement_and_more_occurrences_weigh_more() -> None:
    chances = np.ones(NUM_FEATURES).reshape(NUM_KINDS, MATCH_BUCKETS, SHARE_BUCKETS, LEVELS)
    chances[:] = np.linspace(0.1, 0.8, SHARE_BUCKETS)[:, None]  # by share alone
    # After 1 2: 3 agrees in two tokens and weighs 4; 4 agrees in one, three times, and weighs 6; 5 weighs 2.
    texts = [[1, 2, 3], [9, 2, 4], [8, 2, 4], [7, 2, 4], [6, 2, 5]]
    got = grown(known(texts, [1, 2]), 3, chances=chances.ravel())
    assert sorted(got.paths[:2]) == [(3,), (4,)] and got.paths[2] == (5,)
    assert got.features[got.paths.index((4,))] == feature(COPY, 0, share_bucket(6 / 12), 0)
    assert got.features[got.paths.index((3,))] == feature(COPY, 1, share_bucket(4 / 12), 0)
    # An occurrence elsewhere weighs half: 3 weighs 2 of 10.
    got = grown(known(texts[1:], [1, 2], shared=[texts[0]]), 3, chances=chances.ravel())
    assert got.features[got.paths.index((3,))] == feature(HISTORY, 1, share_bucket(2 / 10), 0)


def test_below_the_root_shorter_ends_of_the_path_add_children() -> None:
    # 3 follows 1 2; 4 follows 1 2 3 in the same text, and 5 follows 3 in a text that does not hold 2 3.
    got = grown(known([[1, 2, 3, 4], [0, 3, 5]], [1, 2]), 8)
    assert set(got.paths) == {(3,), (3, 4), (3, 5)}
    assert [got.kinds[got.paths.index(path)] for path in [(3,), (3, 4), (3, 5)]] == [COPY, COPY, COPY_FRESH]
    got = grown(known([], [1, 2], shared=[[1, 2, 3, 4], [0, 3, 5]]), 8)
    assert [got.kinds[got.paths.index(path)] for path in [(3,), (3, 4), (3, 5)]] == [HISTORY, HISTORY, HISTORY_FRESH]


def test_a_similar_requests_text_counts_as_far_as_the_request_is_similar() -> None:
    got = grown(known([], [1, 2], similar=[[1, 2, 3, 4]]), 8)  # nothing says otherwise
    assert got.kinds == [SIMILAR, SIMILAR] and got.features[0] == feature(SIMILAR, 1, share_bucket(SIMILARITY), 0)
    got = grown(known([[1, 2, 3]], [1, 2], similar=[[1, 2, 3]]), 8)  # what the request's own texts say is no less likely for it
    assert got.features == [feature(COPY, 1, share_bucket(1.0), 0)]


def test_the_blocks_of_the_owner_are_passed_over() -> None:
    assert grown(known([], [1], owned=[[1, 2, 3]]), 8).paths == []
    assert set(grown(known([], [1], owned=[[1, 2, 3]], shared=[[1, 4, 1, 2]]), 8).paths) >= {(4,), (2,)}
    assert (2, 3) not in grown(known([], [1], owned=[[1, 2, 3]], shared=[[1, 4, 1, 2]]), 8).paths


def test_public_texts_are_history_of_their_own_log() -> None:
    got = grown(known([], [1, 2], public=[[1, 2, 3, 4, 0, 3, 5]]), 8)
    assert [got.kinds[got.paths.index(path)] for path in [(3,), (3, 4), (3, 5)]] == [HISTORY, HISTORY, HISTORY_FRESH]
    # Number 0 is the owner's in the shared log, and this text's in the public one.
    assert grown(known([], [1], owned=[[1, 2, 3]], public=[[1, 4]]), 8).paths == [(4,)]


def test_ranked_tokens_fill_in_where_no_occurrence_gave_them() -> None:
    recycled = [[-1, -1]] * 6
    recycled[1] = [2, 3]
    chances = np.repeat(np.array([0.9, 0.2, 0.2, 0.2, 0.2, 0.2, 0.3, 0.5]), KIND_FEATURES)  # by kind
    ranked = {"recycled": recycled, "frequent": [3, 4, 2, 5]}
    got = grown(known([[1, 2]], [1], **ranked), 4, max_depth=1, chances=chances)
    by_path = dict(zip(got.paths, got.kinds, strict=True))
    assert by_path == {(2,): COPY, (3,): RECYCLING, (4,): UNIGRAM, (5,): UNIGRAM}
    entries = dict(zip(got.paths, got.features, strict=True))
    assert entries[(3,)] == feature(RECYCLING, 0, context_bucket(1), ALONE)
    assert entries[(4,)] == feature(UNIGRAM, 0, context_bucket(1), 0)
    assert entries[(5,)] == feature(UNIGRAM, 1, context_bucket(1), 0)  # two ranks share a bucket
    got = grown(known([], [1], frequent=[4, 2, 5]), 9)  # with other chances
    assert set(got.paths) == {(4,), (2,), (5,)}  # frequent tokens stand below the root only
    assert entries[(5,)] != got.features[got.paths.index((5,))] == feature(UNIGRAM, 1, 0, 0)


def test_what_was_ranked_in_the_context_most_alike_tells_of_copies() -> None:
    recycled = [[-1] * 3] * 6
    recycled[2] = [3 | 5 << TOKEN_BITS, -1, -1]  # neither likely nor unlikely
    near, far = (1 << 10) - 1, (1 << 60) - 1
    computed = [
        Computed(0, 1, 2, near, near, (4 | 1 << TOKEN_BITS, 5 | 9 << TOKEN_BITS, -1)),
        Computed(0, 1, 2, far, far, (1, -1, -1)),
        Computed(-1, 4, 4, near, near, (2, -1, -1)),
    ]
    chances = np.full(NUM_FEATURES, 0.2)

    def features(own: list[list[int]], context: list[int], above: int, max_depth: int = 1) -> dict[Path, int]:
        everything = known(own, context, recycled=recycled, computed=computed, above=above)
        got = grown(everything, 9, max_depth=max_depth, chances=chances)
        return dict(zip(got.paths, got.features, strict=True))

    alone = {(3,): feature(RECYCLING, 5, 0, ALONE)}
    ranked = {(4,): feature(RECYCLING, 1, distance_bucket(3), 2), (5,): feature(RECYCLING, 9, distance_bucket(3), 2)}
    assert features([], [1, 2], near >> 3) == ranked | alone
    other = {(1,): feature(RECYCLING, 0, distance_bucket(1), 1)}
    assert features([], [5, 2], far >> 1) == other | alone  # what agrees in fewer tokens may be nearer
    unknown = {(1,): feature(RECYCLING, 0, distance_bucket(-1), 2)}
    assert features([], [1, 2], 0) == unknown | alone  # the latest
    for token, level in ((4, LIKELY), (5, RANKED), (0, UNRANKED)):
        assert features([[1, 2, token]], [1, 2], near)[(token,)] == feature(COPY, 1, share_bucket(1.0), level)
    # Below 4 the context is what the row that it was ranked by read, and as far off as that was.
    assert features([], [1, 2], near >> 9, 2)[(4, 2)] == feature(RECYCLING, 0, distance_bucket(9), 1)
    chances[feature(RECYCLING, 1, distance_bucket(0), 2)] = 0.9
    assert features([[1, 2, 4]], [1, 2], near)[(4,)] == feature(RECYCLING, 1, distance_bucket(0), 2)  # what is likelier counts


def test_ranked_tables_may_be_narrower_than_the_vocabulary() -> None:
    narrow = {"recycled": [[-1, -1, -1]] * 3}
    assert grown(known([], [50_000], **narrow), 4).paths == []
    computed = [Computed(-1, 4, 1, 5, 5, (2, -1, -1))]
    got = grown(known([], [50_000], **narrow, frequent=[1], computed=computed, above=5), 4, max_depth=2)
    assert got.features[got.paths.index((1, 2))] == feature(RECYCLING, 0, distance_bucket(-1), 1)  # nothing is known of its root


def test_a_cap_takes_the_latest_occurrences() -> None:
    texts = [[1, follower] for follower in range(10, 20)]
    caps = np.array([3, 0, 0, 0], np.int64)
    assert {path[0] for path in grown(known(texts, [1]), 30, caps=caps).paths} == {17, 18, 19}


@settings(max_examples=40)
@given(KNOWN, st.integers(1, 12), st.integers(1, 12), st.integers(0, 40))
def test_a_pool_that_is_full_grows_what_it_can(known: Known, nodes: int, found: int, budget: int) -> None:
    sizes = dict.fromkeys(Workspace._fields, nodes) | dict.fromkeys(
        ("positions", "lengths", "sources", "factors", "starts", "links"), found
    )
    sizes |= {"heap": nodes + 1, "alike": nodes + 1, "distances": nodes + 1, "slots": HASH_SLOTS, "above": WORDS}
    # Compiled code checks no bounds: what stands behind each array must not change.
    backing = {name: np.full(sizes[name] + 16, -1, array.dtype) for name, array in Workspace.empty()._asdict().items()}
    views = {name: array[:-16] for name, array in backing.items()}
    got = grown(known, budget, pool=Workspace(**views))
    assert all((array[-16:] == -1).all() for array in backing.values())
    assert (views["slots"] == -1).all()
    assert len(got.paths) <= nodes


def test_thousands_of_occurrences_and_ranked_tokens() -> None:
    rng = np.random.default_rng(0)
    text = [token for follower in rng.integers(0, 50_000, 20_000).tolist() for token in (7, follower)]
    own, shared = TokenLog(65536), TokenLog(65536)
    own.add(text)
    shared.add(text[::-1])
    recycled = np.arange(800, dtype=np.int32).reshape(8, 100)
    ranked = RankedTokens(np.arange(60_000, dtype=np.int32), recycled, NO_CONTEXTS[:], words(0))
    rows = TreeRows.empty(2000)
    context = np.array(text[-33:-2], np.int32)
    measures = np.ones(NUM_FEATURES), WEIGHTS, 0.5, np.ones(1), np.full(4, 5000, np.int64)
    logs = own.without(-1), shared.without(-1), shared.without(-1), own.without(-1)
    count = build_tree(
        logs, context, ranked[:], measures, (2000, 8, np.array([1e-4])), Workspace.empty()[:], rows.numbers, rows.chances
    )
    assert count == 2000
    tokens, parents, *_ = rows.numbers[:, 1:].tolist()
    assert len(set(zip(parents, tokens, strict=True))) == 2000


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_the_heap_sorts(keys: list[int]) -> None:
    values, heap, size = np.array(keys, np.float64), np.empty(len(keys) + 1, np.int32), 0
    for candidate in range(len(keys)):
        size = push(heap, size, values, candidate)
    order = []
    while size:
        size = pop(heap, size, values)
        order.append(int(heap[size]))
    assert sorted(order) == list(range(len(keys)))
    assert [keys[candidate] for candidate in order] == sorted(keys, reverse=True)


@given(st.lists(st.integers(0, 300), unique=True, max_size=12), st.sampled_from([16, 128]))
def test_children_that_collide_leave_no_slot_behind(children: list[int], size: int) -> None:
    tokens, slots = (
        np.array([9, 9, *children], np.int32),
        np.full(size, -1, np.int32),
    )  # behind two of another node
    for child in range(2, len(tokens)):
        slot = slot_of(int(tokens[child]), slots, tokens)
        assert slots[slot] == -1
        slots[slot] = child
    assert all(slots[slot_of(int(tokens[child]), slots, tokens)] == child for child in range(2, len(tokens)))
    clear_slots(2, len(tokens), slots, tokens)
    assert (slots == -1).all()


def test_buckets_are_steps() -> None:
    assert [match_bucket(length) for length in (1, 2, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 48, 49, 1000)] == [
        0, 1, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11,
    ]  # fmt: skip
    assert [share_bucket(share) for share in (0.0, 0.03, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)] == list(range(8))
    assert [context_bucket(length) for length in (0, 1, 5, 6, 8, 9, 100)] == [0, 1, 5, 6, 6, 7, 7]
    shares = (1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02, 0.007, 0.0)
    assert [likelihood_bucket(share) for share in shares] == list(range(MATCH_BUCKETS))
    last = feature(NUM_KINDS - 1, MATCH_BUCKETS - 1, SHARE_BUCKETS - 1, LEVELS - 1)
    assert feature(0, 0, 0, 0) == 0 and last == NUM_FEATURES - 1


@pytest.mark.parametrize("budget", [0, 1])
def test_the_smallest_budgets(budget: int) -> None:
    assert grown(known([[1, 2, 3], [1, 2, 4], [1, 5]], [1]), budget).paths == [(2,)][:budget]


def test_nothing_is_known() -> None:
    assert grown(known([], [1]), 8).paths == []
    assert grown(known([[1]], [1]), 8).paths == []
    assert grown(known([[1, 2]], [1]), 8, max_depth=0).paths == []
    assert grown(known([[1, 2]], [1]), 8, least=1.1).paths == []
