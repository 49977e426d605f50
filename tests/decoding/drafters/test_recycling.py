"""Token recycling: what is learned from a step, and the tree that grows from it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from outrider.decoding.arrays import Int64Array
from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.drafters.recycling import RacerDrafter, RecyclingDrafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.ranked.contexts import NO_SIGNS, Contexts, most_alike, signs_of
from outrider.decoding.sources.ranked.successors import SuccessorTable
from outrider.decoding.sources.window_trie import WindowTrie
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree
from tests.helpers.targets import Target, says

VOCAB = 40


def prepared(vocab_size: int = VOCAB, **options: object) -> RecyclingDrafter:
    drafter = RecyclingDrafter(**options)  # type: ignore[arg-type]
    drafter.prepare(Target(vocab_size, first=11))
    return drafter


def request(token: int, name: str = "r") -> Request:
    return Request(name, [token], SamplingParams(), tenant="local")


def propose(drafter: RecyclingDrafter, root: int, budget: int = 80, name: str = "r") -> DraftTree:
    (tree,) = drafter.propose([request(root, name)], [budget])
    tree.check()
    assert len(tree) - 1 <= budget and tree.tokens[0] == root
    assert all(SOURCES[source] == "recycling" for source in tree.sources[1:])
    return tree


def teach(drafter: RecyclingDrafter, entries: dict[int, list[int]], name: str = "r") -> None:
    for token, best in entries.items():
        drafter.observe(request(token, name), DraftTree.chain(token, ()), says(best), Acceptance((), best[0]))


def top8(*best: int) -> list[int]:
    return [*best, *(token for token in range(VOCAB) if token not in best)][:8]


def children(tree: DraftTree, row: int) -> list[int]:
    return tree.tokens[tree.parents == row].tolist()


@pytest.mark.parametrize("shape", ["ranked", "published"])
def test_entries_of_drafted_tokens_continue_the_draft(shape: str) -> None:
    drafter = prepared(shape=shape)
    teach(drafter, {7: top8(31, 32), 31: top8(33, 34)})
    tree = propose(drafter, 7)
    assert children(tree, 0) == top8(31, 32)
    (row,) = tree.children([0], 31)
    assert children(tree, row) == top8(33, 34)
    assert len(tree) == 1 + 8 + 8 and len(propose(drafter, 9)) == 1  # nothing is known of the others
    assert len(propose(drafter, 7, budget=5)) == 6
    assert len(propose(prepared(shape=shape), 7)) == len(propose(RecyclingDrafter(shape=shape), 7)) == 1  # nothing was learned


def test_the_published_tree() -> None:
    drafter = prepared(shape="published", start="bigram")
    tree = propose(drafter, 7)
    assert len(tree) == 81 and Counter(tree.depths().tolist()) == {0: 1, 1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    ranks = [(tree.tokens[row] - tree.tokens[tree.parents[row]] - 11) % VOCAB for row in range(81)]
    paths = {tuple(int(ranks[at]) for at in tree.path(row)) for row in range(81)}
    assert paths >= {(7, 0), (1, 3), (0, 7, 0), (1, 1, 0), (5, 0, 0), (0, 0, 4, 0), (3, 0, 0, 0), (0, 0, 0, 2, 0)}
    assert (0, 0, 0, 1, 0, 0) in paths
    assert not paths & {(7, 1), (1, 4), (1, 2, 0), (6, 0, 0), (4, 0, 0, 0), (0, 0, 0, 3, 0), (0, 0, 0, 0, 1, 0)}
    assert propose(drafter, 7, budget=20).parents.tolist() == tree.parents[:21].tolist()


def test_the_ranked_tree_holds_the_best_estimates_and_grows_in_their_order() -> None:
    drafter = prepared(start="bigram")
    table = SuccessorTable(VOCAB, None)
    rates = table.rates()
    tree = propose(drafter, 7, budget=30)
    estimates = [1.0]
    for row in range(1, len(tree)):
        parent = int(tree.parents[row])
        estimates.append(estimates[parent] * rates[int(tree.tokens[row] - tree.tokens[parent] - 11) % VOCAB])
    assert estimates == sorted(estimates, reverse=True)
    reachable = {1.0}
    for _ in range(4):
        reachable |= {estimate * rate for estimate in reachable for rate in rates}
    assert min(estimates) >= sorted((estimate for estimate in reachable), reverse=True)[30] - 1e-12
    assert propose(drafter, 7, budget=12).tokens.tolist() == tree.tokens[:13].tolist()


def test_ranks_that_prove_right_come_first() -> None:
    drafter = prepared(start="bigram")
    before = propose(drafter, 7, budget=2).tokens.tolist()
    assert before[1] == 18
    for _ in range(60):  # the target says the second token each time
        drafter.observe(request(7), DraftTree.chain(7, ()), says([18, 19, *range(20, 26)]), Acceptance((), 19))
    assert propose(drafter, 7, budget=1).tokens.tolist() == [7, 19]


def test_a_tree_is_learned_with_the_context_of_each_row() -> None:
    table, before = SuccessorTable(VOCAB, None), np.array([6, 5], np.int32)
    # Root 7 with 1 and 2, below 1 again 7: of what ends in 7 alone the root wins, which is accepted; 2 1 is in the tree twice.
    tree = DraftTree.of([7, 1, 2, 7, 1, 1], [-1, 0, 0, 1, 2, 2], 9)
    ranked = np.array([[row * 8 + rank for rank in range(8)] for row in range(6)], np.int32)
    signs = np.array([[1 << row, 0, 0, 0] for row in range(6)], np.int64)
    above = np.array([1 << 40, 0, 0, 0], np.int64)
    table.learn_tree(tree, before, above, (2, 5), signs, ranked)

    def kept(*tokens: int, near: Int64Array) -> tuple[int, int, int]:
        two, one, token = (-1, -1, *tokens)[-3:]
        place, distance, agreed = most_alike(table.contexts, token, one, two, near)
        return int(table.contexts.ranked[place, 0]) // 8, distance, agreed

    assert [table.entries[token, 0] // 8 for token in (7, 1, 2)] == [0, 5, 2]
    assert kept(5, 6, 7, near=above) == (0, 0, 3) and kept(6, 7, near=above) == (0, 0, 2) and kept(9, 7, near=above) == (0, 0, 1)
    assert kept(7, 1, 7, near=signs[1]) == (3, 0, 3) and kept(5, 6, 7, near=signs[1]) == (3, 0, 1)
    assert kept(7, 2, 1, near=signs[2]) == (5, 0, 3)  # of two alike the accepted one
    assert kept(6, 7, 1, near=signs[0]) == (1, 0, 3) and kept(6, 7, 1, near=signs[3]) == (1, 2, 3)
    assert kept(6, 7, 1, near=NO_SIGNS) == (1, -1, 3) and kept(7, 1, near=NO_SIGNS) == (1, -1, 2)
    assert most_alike(table.contexts, 3, 1, 1, above) == (-1, -1, 0)
    fresh = SuccessorTable(VOCAB, None)
    fresh.learn_tree(DraftTree.chain(3, ()), np.full(2, -1, np.int32), NO_SIGNS, (), signs[:1], ranked[:1])  # a text of one token
    assert fresh.entries[3, 0] == 0 and most_alike(fresh.contexts, 3, -1, -1, NO_SIGNS)[1:] == (-1, 1)


def test_the_latest_rows_are_kept() -> None:
    table, before, ranked = SuccessorTable(VOCAB, None), np.full(2, -1, np.int32), np.zeros((2, 8), np.int32)
    places = len(Contexts.empty(1, 1).previous)
    learned = [[number & 0xFF, 1 << 62, 0, 0] for number in range(places // 2 + 10)]
    table.learn_tree(DraftTree.chain(30, ()), before, np.ones(4, np.int64), (), np.ones((1, 4), np.int64), ranked[:1])
    assert most_alike(table.contexts, 30, -1, -1, np.ones(4, np.int64))[1] == 0
    for signs in learned:
        table.learn_tree(DraftTree.chain(1, [2]), before, np.array(signs), (1,), np.array([signs, signs]), ranked)
    assert most_alike(table.contexts, 30, -1, -1, np.ones(4, np.int64))[0] == -1  # its place is another's
    assert most_alike(table.contexts, 2, 1, -1, np.array(learned[-1]))[1:] == (0, 2)


@pytest.mark.parametrize("size", [5, 256, 300])
def test_signs_of_hidden_states(size: int) -> None:
    hidden = np.random.default_rng(0).integers(-9, 9, (7, size)).astype(np.int16)
    bits = np.zeros((7, 256), bool)
    bits[:, :size] = hidden[:, :256] < 0
    expected = np.packbits(bits, axis=1, bitorder="little").view(np.int64)
    assert (signs_of(hidden, 2, 3) == expected[2:5]).all() and signs_of(hidden.astype(np.int32), 6, 1).tolist() == [
        expected[6].tolist()
    ]


def test_rates_follow_the_traffic() -> None:
    table = SuccessorTable(VOCAB, None)
    table.learn(np.array([3], np.int32), np.array([top8(5, 6)], np.int32))
    for _ in range(9000):
        table.count(3, 5)
    for _ in range(9000):
        table.count(3, 6)
    table.count(4, 5)  # nothing is known of 4
    assert table.rates()[1] > 0.8 > 0.2 > table.rates()[0]


def test_of_a_token_that_stands_twice_the_accepted_row_is_learned_else_the_shallowest() -> None:
    # 5 stands below the root (accepted), below 6 and at depth 2 below 5; 6 at depth 1 and 2. Rows are not in order of depth.
    tree = DraftTree(np.array([5, 5, 6, 6, 5], np.int32), np.array([-1, 0, 1, 0, 3], np.int32), np.zeros(5, np.int8), 5)
    target = says([5, 20], [7, 21], [8, 22], [9, 23], [10, 24])
    drafter = prepared()
    drafter.observe(request(5), tree, target, Acceptance((1,), 7))
    assert children(propose(drafter, 5, budget=8), 0)[:2] == [7, 21]  # the last of the accepted path, not the root, not row 4
    assert children(propose(drafter, 6, budget=8), 0)[:2] == [9, 23]  # row 3 is shallower than row 2


def test_learn_rows_bounds_what_is_learned() -> None:
    tree = DraftTree(np.array([7, 1, 2, 3], np.int32), np.array([-1, 0, 1, 0], np.int32), np.zeros(4, np.int8), 4)
    target = says([1], [2], [9], [8])
    known = {}
    for count in (1, 2, 3, 4):
        drafter = prepared(learn_rows=count)
        drafter.observe(request(1), tree, target, Acceptance((1,), 2))
        known[count] = [token for token in (7, 1, 2, 3) if len(propose(drafter, token)) > 1]
    assert known == {1: [1], 2: [7, 1], 3: [7, 1, 3], 4: [7, 1, 2, 3]}


def test_rows_behind_the_candidates_and_replays_teach_nothing() -> None:
    drafter = prepared()
    tree = DraftTree(np.array([7, 1, 2], np.int32), np.array([-1, 0, 1], np.int32), np.zeros(3, np.int8), 2)
    drafter.observe(request(7), tree, says([9], [2], [3]), Acceptance((), 9))
    assert len(propose(drafter, 2)) == 1 and len(propose(drafter, 1)) > 1
    drafter.observe(request(2), DraftTree.chain(2, ()), TargetRows(np.array([3], np.int32), None), Acceptance((), 3))
    assert len(propose(drafter, 2)) == 1


def test_a_bigram_table_stands_in_until_something_was_learned() -> None:
    drafter = prepared(start="bigram")
    assert children(propose(drafter, 7), 0) == list(range(18, 26))
    teach(drafter, {7: top8(1)})
    assert children(propose(drafter, 7), 0) == top8(1) and children(propose(drafter, 8), 0) == list(range(19, 27))


@pytest.mark.parametrize("scope", ["all", "request"])
def test_scope(scope: str) -> None:
    drafter = prepared(**({} if scope == "all" else {"scope": scope}))
    teach(drafter, {7: top8(31)}, name="a")
    assert len(propose(drafter, 7, name="a")) > 1
    assert (len(propose(drafter, 7, name="b")) > 1) == (scope == "all")
    drafter.finish(request(7, "a"))
    assert (len(propose(drafter, 7, name="a")) > 1) == (scope == "all")


def test_a_vocabulary_below_eight_tokens() -> None:
    for shape in ("ranked", "published"):
        drafter = prepared(vocab_size=3, shape=shape)
        drafter.observe(request(1), DraftTree.chain(1, ()), says([2, 0, 1], vocab_size=3), Acceptance((), 2))
        assert children(propose(drafter, 1), 0) == [2, 0, 1]
        assert len(propose(prepared(vocab_size=3, shape=shape, start="bigram"), 1)) > 4


def racer(**options: object) -> RacerDrafter:
    drafter = RacerDrafter(**options)  # type: ignore[arg-type]
    drafter.prepare(Target(VOCAB, first=11))
    return drafter


def racer_tree(
    drafter: RacerDrafter, text: list[int], budget: int = 80, name: str = "r", tenant: str | None = "local"
) -> DraftTree:
    (tree,) = drafter.propose([Request(name, text, SamplingParams(), tenant=tenant)], [budget])
    tree.check()
    return tree


def spelled(tree: DraftTree) -> dict[tuple[int, ...], str]:
    return {tuple(tree.tokens[tree.path(row)].tolist()): SOURCES[tree.sources[row]] for row in range(1, len(tree))}


REPEATING = [1, 2, 3, 4, 1, 2, 5, 4, 1, 2]


def test_racer_fills_what_is_retrieved_from_the_table() -> None:
    drafter = racer(draft_nodes=8, window=4)
    retrieved = dict.fromkeys([(5,), (5, 4), (3,), (3, 4)], "trie")
    assert spelled(racer_tree(drafter, REPEATING)) == retrieved
    drafter.finish(Request("r", REPEATING, SamplingParams(), tenant="local"))
    teach(drafter, {2: top8(3, 6, 5, 7, 9)}, name="other")
    tree = racer_tree(drafter, REPEATING, name="next")
    assert spelled(tree).keys() > {(3,), (5,), (6,), (7,), (9,)} and len(tree) == 8
    assert spelled(tree)[6,] == "recycling" and len(spelled(tree)) == 7  # what both say is there once, and not charged twice


def test_racer_tree_of_the_table_alone_has_the_published_layers() -> None:
    drafter = racer(window=10)
    for token in range(1, VOCAB):  # distinct paths: no token is its own successor's sibling
        teach(drafter, {token: [(token + 3 * step + 1) % VOCAB for step in range(8)]})
    tree = racer_tree(drafter, [7])
    assert Counter(tree.depths().tolist()) == {0: 1, 1: 8, 2: 19, 3: 24, 4: 12}
    assert len(racer_tree(drafter, [7], budget=20)) == 21
    drafter.ranks = 2
    assert len(racer_tree(drafter, [7], budget=200)) > 64  # each rank has its share


def test_racer_drafts_what_was_seen_most_often_first() -> None:
    drafter = racer(draft_nodes=5, window=3)
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    tree = racer_tree(drafter, text)
    assert children(tree, 0)[0] == 4  # twice, 3 once


def test_racer_copies_at_the_same_speed_however_often() -> None:
    passage = list(range(10, 38))
    drafter = RacerDrafter()  # as in a replay: nothing is ranked
    text, lengths = [*passage, 1], []
    for turn in range(3):
        text = [*text, *passage[:10]]
        tree = racer_tree(drafter, text, name=f"r{turn}")
        lengths.append(int(tree.depths().max()))
        text = [*text, *passage[10:], 2 + turn]
    assert lengths == [8, 8, 8]  # of windows of ten the two shortest tokens are looked up


def test_racer_trie_keeps_its_size_and_what_was_seen_last() -> None:
    trie = WindowTrie(4, 64)
    trie.learn(np.random.default_rng(0).integers(0, 30, 2000).astype(np.int32), 0)
    assert len(trie) == 64
    trie.learn(np.array([31, 32, 33, 34], np.int32), 0)
    assert trie.grow([31, 32, 33], 3, 8) == ([33, 34], [-1, 0]) and trie.grow([31, 33], 2, 8) == ([33], [-1]) and len(trie) == 64


def test_racer_counts_a_removed_window_anew() -> None:
    trie = WindowTrie(2, 12)
    for often, start in ((3, 10), (9, 20), (6, 30), (1, 40)):  # twelve nodes each, so that each removes the ones before
        for first in range(start, start + 6):
            for _ in range(often):
                trie.learn(np.array([first, first + 100], np.int32), 0)
    for second in (1, 2, 3, 4, 5):
        trie.learn(np.array([7, second], np.int32), 0)
    assert trie.grow([7], 1, 6)[0] == [7, 1, 2, 3, 4, 5]  # once each, so in the order of their coming


def test_racer_draws_nothing_from_another_tenant_or_from_a_private_request() -> None:
    for tenant, name in (("a", "one"), (None, "two")):
        drafter = racer()
        racer_tree(drafter, [*range(10, 30)], name=name, tenant=tenant)
        assert len(racer_tree(drafter, [*range(10, 15)], name="next", tenant="b")) == 1
        assert len(racer_tree(drafter, [*range(10, 15)], name="last", tenant=tenant)) == (9 if tenant else 1)
    assert len(racer_tree(drafter, [*range(10, 15)], name="end", tenant=None)) == 1


def test_racer_with_a_trie_for_each_request() -> None:
    drafter = racer(scope="request")
    asking = Request("r", list(range(10, 30)), SamplingParams(), tenant="a")
    drafter.propose([asking], [60])
    assert set(drafter.tracked_requests()) == {"r"}
    drafter.finish(asking)
    assert not drafter.tracked_requests() and len(racer_tree(drafter, [*range(10, 15)], name="next", tenant="a")) == 1


def test_nothing_is_drafted_before_anything_was_learned() -> None:
    assert len(propose(prepared(), 7)) == 1
    assert len(propose(RecyclingDrafter(), 7)) == 1


def test_every_computed_row_teaches_accepted_or_not() -> None:
    drafter = prepared()
    tree = DraftTree(np.array([7, 1, 2, 3], np.int32), np.array([-1, 0, 1, 0], np.int32), np.zeros(4, np.int8), 4)
    drafter.observe(request(2), tree, says([1, 20], [2, 21], [9, 22], [8, 23]), Acceptance((1, 2), 9))
    for token, best in {7: (1, 20), 1: (2, 21), 2: (9, 22), 3: (8, 23)}.items():
        assert children(propose(drafter, token, budget=8), 0)[:2] == list(best)
