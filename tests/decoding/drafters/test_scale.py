"""Ranks that share a step: every strategy drafts more for them, and what it did before when there is one rank again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.llma import agreements
from outrider.decoding.drafters.registry import STRATEGIES, build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import Acceptance, DraftTree, tree_of
from outrider.decoding.verify.exact import verify_exact
from tests.helpers.targets import Target, is_chain, leaves, paths

VOCAB = 30
TARGET = Target(VOCAB, (0,), LatencyCurve((1, 64), (1.02, 2.28), 0, 0.0, 0.0))
BRANCHED = ["llma", "prompt_lookup", "suffix", "trie", "ngrammys", "recycling", "auto", "jacobi"]
BRANCHED += ["recycling:published", "ngrammys:batched", "trie:parallel", "llma:random", "suffix:latest"]
OPTIONS: dict[str, dict[str, object]] = {
    "recycling:published": {"shape": "published", "start": "bigram"},
    "ngrammys:batched": {"layout": "batched", "k": 2, "w": 3},
    "trie:parallel": {"layout": "parallel"},
    "llma:random": {"ties": "random"},
    "suffix:latest": {"occurrence": "latest"},
    "llma": {"include_output": True},
    "recycling": {"start": "bigram"},
    "ngrammys": {"k": 2, "w": 4, "table_width": 2},
}


def built(name: str) -> Drafter:
    drafter = build_drafter(name.partition(":")[0], OPTIONS.get(name, {}))
    drafter.prepare(TARGET)
    return drafter


def texts(seed: int = 3, count: int = 800) -> list[int]:
    """Few tokens, so that each end of the text stands elsewhere with other followers."""
    return np.random.default_rng(seed).integers(1, 8, count).tolist()


def request(name: str = "r", max_tokens: int = 1000, output: Sequence[int] = (6, 5)) -> Request:
    prompt, *references = texts()[:400], texts()[400:600], texts()[600:]
    made = Request(name, prompt, SamplingParams(max_tokens=max_tokens), references, tenant="local")
    made.commit(list(output))
    return made


def propose(drafter: Drafter, asking: Request, budget: int) -> DraftTree:
    (tree,) = drafter.propose([asking], [budget])
    tree.check()
    assert tree.tokens[0] == asking.root and len(tree) <= budget + 1
    return tree


def same(one: DraftTree, other: DraftTree) -> bool:
    columns = zip((one.tokens, one.parents, one.sources), (other.tokens, other.parents, other.sources), strict=True)
    return len(one) == len(other) and all((a == b).all() for a, b in columns)


@pytest.mark.parametrize("name", [name for name in BRANCHED if name != "jacobi"])
def test_more_ranks_draft_more_branches_and_one_rank_what_it_did(name: str) -> None:
    drafter, other = built(name), built(name)
    trees = {}
    for ranks in (1, 2, 4):
        drafter.ranks = ranks
        trees[ranks] = propose(drafter, request(), 64 * ranks)
        assert same(propose(drafter, request(), 64 * ranks), trees[ranks])
    assert len(trees[1]) < len(trees[2]) < len(trees[4])
    assert len(leaves(trees[1])) < len(leaves(trees[2])) < len(leaves(trees[4]))
    drafter.ranks = 1
    assert same(propose(drafter, request(), 64), trees[1])
    other.ranks = 4
    assert same(propose(other, request(), 256), trees[4])


@pytest.mark.parametrize("name", ["llma", "prompt_lookup", "suffix", "llma:random", "suffix:latest"])
def test_the_first_branch_is_that_of_one_rank(name: str) -> None:
    drafter = built(name)
    alone = propose(drafter, request(), 64)
    assert is_chain(alone) and len(alone) > 1
    for ranks in (2, 5):
        drafter.ranks = ranks
        tree = propose(drafter, request(), 64 * ranks)
        assert tree.tokens[: len(alone)].tolist() == alone.tokens.tolist()
        assert tree.parents[: len(alone)].tolist() == alone.parents.tolist()
        assert 2 <= len(leaves(tree)) <= ranks


def test_copies_by_agreement_for_each_rank() -> None:
    drafter = build_drafter("llma", {"copy_length": 2, "include_prompt": False})
    references = [[4, 5, 6, 7], [1, 4, 5, 6, 8], [3, 4, 5, 9, 9], [2, 5, 9, 9]]
    asking = Request("r", [0], SamplingParams(), references)
    asking.commit([3, 4, 5])

    def branches(ranks: int) -> list[list[int]]:
        drafter.ranks = ranks
        tree = propose(drafter, asking, 15 * ranks)
        return [tree.tokens[tree.path(leaf)].tolist() for leaf in leaves(tree)]

    assert branches(1) == [[9, 9]]  # three tokens agree
    assert branches(2) == [[9, 9], [6, 7]]  # then two
    assert branches(3) == branches(9) == [[9, 9], [6, 7], [6, 8]]  # what follows 2 5 says nothing new


def test_agreements_and_branches_of_the_docstrings() -> None:
    levels = agreements(np.array([4, 5, 6, 5], np.int32), np.array([1, 3]), np.array([9, 4, 5], np.int32), 8)
    assert [level.tolist() for level in levels] == [[1, 3], [1]]
    assert agreements(np.array([4], np.int32), np.zeros(0, np.int64), np.array([9], np.int32), 8) == []
    rows = [([1, 2, 3], 3), ([1, 2], 4), ([1, 4], 5), ([6], 6)]
    tree = tree_of(9, iter(rows), 4, 2)
    assert tree.tokens.tolist() == [9, 1, 2, 3, 4] and tree.parents.tolist() == [-1, 0, 1, 2, 1]
    assert tree.sources.tolist() == [0, 3, 3, 3, 5] and tree_of(9, rows, 9).tokens.tolist() == [9, 1, 2, 3, 4, 6]
    assert tree_of(9, rows, 9, merged=False).parents.tolist() == [-1, 0, 1, 2, 0, 4, 0, 6, 0]
    assert tree_of(9, rows, 2).tokens.tolist() == [9, 1, 2] and len(tree_of(9, [], 9)) == len(tree_of(9, rows, 0)) == 1


def test_windows_have_more_columns_for_more_ranks_and_those_of_ranks_that_have_left_wait() -> None:
    drafter = build_drafter("jacobi", {"window": 3, "ngram": 3, "guesses": 2, "prompt_as_reference": False})
    drafter.prepare(TARGET)
    narrow, wide = request("narrow"), request("wide")
    assert len(propose(drafter, narrow, 100)) == 1 + 3  # the first level: width + ngram - 3
    drafter.ranks = 4
    assert len(propose(drafter, narrow, 400)) == 1 + 3  # it began with fewer
    tree = propose(drafter, wide, 400)
    assert len(tree) == 1 + 12
    wide.commit([9])
    drafter.observe(wide, tree, TargetRows(np.full(len(tree), 9, np.int32), None), Acceptance((), 9))
    for ranks, columns in ((4, 12), (1, 3), (2, 6), (4, 12)):  # of a full window: two levels
        drafter.ranks = ranks
        assert len(propose(drafter, wide, 400)) == 2 * columns
    drafter.ranks = 1
    assert len(propose(drafter, request("later"), 100)) == 1 + 3


def test_guesses_follow_the_ranks_at_once() -> None:
    drafter = build_drafter("jacobi", {"window": 1, "ngram": 3, "guesses": 2})
    drafter.prepare(TARGET)
    drafter.ranks = 3
    asking = Request("r", [5, 1, 2, 5, 2, 3, 5, 3, 4, 5, 4, 6, 5, 6, 7, 5], SamplingParams())

    def candidates(ranks: int) -> list[int]:
        drafter.ranks = ranks
        tree = propose(drafter, asking, 40)
        return tree.tokens[1 : tree.num_candidates : 2].tolist()

    assert candidates(3) == [6, 4, 3, 2, 1]
    assert candidates(2) == [6, 4, 3, 2]
    assert candidates(1) == [6, 4]  # as many as ever, the latest
    assert candidates(3) == [6, 4, 3, 2, 1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_fixed_tree_has_eighty_rows_for_each_rank(ranks: int) -> None:
    drafter = built("recycling:published")
    published = propose(drafter, request(), 1000)
    drafter.ranks = ranks
    tree = propose(drafter, request(), 1000)
    assert len(published) - 1 == 80 and len(tree) - 1 == 80 * ranks

    assert set(paths(published)) <= set(paths(tree)) and len(set(paths(tree))) == 80 * ranks
    assert (np.diff(tree.depths()) >= 0).all()  # level by level: a smaller budget cuts the deepest
    drafter.ranks = 1
    assert same(propose(drafter, request(), 1000), published)


def test_more_rows_are_learned_from() -> None:
    drafter = build_drafter("recycling", {"learn_rows": 1})
    drafter.prepare(TARGET)
    tree = DraftTree(np.array([7, 1, 2], np.int32), np.array([-1, 0, 0], np.int32), np.zeros(3, np.int8), 3)
    target = TargetRows(np.array([9, 9, 9], np.int32), None, np.tile(np.arange(10, 18, dtype=np.int32), (3, 1)))

    def learned(ranks: int) -> set[int]:
        drafter.ranks = ranks
        asking = request(f"{ranks}")
        asking.tenant = None
        drafter.observe(asking, tree, target, Acceptance((), 9))
        found = set()
        for token in (7, 1, 2):
            asking.commit([token])
            found |= {token} if len(propose(drafter, asking, 8)) > 1 else set()
        return found

    assert learned(1) == {7} and learned(2) == {7, 1} and learned(3) == {7, 1, 2}


def test_ranked_tokens_stand_for_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    ids = logits.argmax(-1).numpy().astype(np.int32)
    ranked = logits.topk(3, dim=-1).indices.numpy().astype(np.int32)
    near, far, nothing = TargetRows(ids, logits), TargetRows(ids, None, ranked), TargetRows(ids, None)
    assert near.has_logits and far.has_logits and not nothing.has_logits
    for rows in ([0], [2, 0], [1, 1, 2], []):
        for k in (1, 2, 3):
            assert far.top_k(rows, k).tolist() == near.top_k(rows, k).tolist()
            assert far.top_k(rows, k).shape == (len(rows), k) and far.top_k(rows, k).dtype == np.int32
    with pytest.raises(AssertionError, match=r"the drafter.s top_k is 3"):
        far.top_k([0], 4)
    with pytest.raises(AssertionError, match="has_logits"):
        nothing.top_k([0], 1)
    with pytest.raises(AssertionError):
        TargetRows(ids, None, ranked[:2])
    assert TargetRows(ids, logits, ranked[:, :1]).top_k([0], 3).tolist() == [[1, 3, 2]]  # logits go first


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_who_ranks_nothing_asks_for_nothing(name: str) -> None:
    drafter, ranks = build_drafter(name, {}), name in ("adapld", "auto", "racer", "recycling", "sam")
    for _ in range(2):
        assert drafter.top_k == 0  # not prepared
        drafter.ranks = 3
    assert built(name).top_k == (8 if ranks else 0)
    if ranks:
        drafter = build_drafter(name, {})
        drafter.prepare(Target(5))  # a small vocabulary
        assert drafter.top_k == 5
    if name == "auto":
        drafter = build_drafter(name, {"recycling": False})
        drafter.prepare(Target(5))
        assert drafter.top_k == 0


@pytest.mark.parametrize("together", [1, 3])
def test_ranks_are_announced_for_the_steps_that_are_learned_from(together: int) -> None:
    """Auto learns nearly nothing where recycled rows are never right; what it learns of was announced."""
    drafter = built("auto")
    asking = [request(str(number), output=[7]) for number in range(together)]
    announced, learned = [], []

    class Watched(TargetRows):
        def ranked(self, rows: Sequence[int], k: int) -> Int32Array:
            learned[-1] += 1
            return super().ranked(rows, k)

    for _ in range(700):
        drafter.propose(asking, [0] * together)
        announced.append(drafter.top_k)
        learned.append(0)
        for each in asking:
            ranked = np.arange(8, dtype=np.int32)[None] if announced[-1] else None
            target = Watched(np.array([9], np.int32), None, ranked)
            drafter.observe(each, DraftTree.chain(each.root, ()), target, Acceptance((), 9))
    assert announced[0] == 8 and learned[0] == together
    late = np.array(announced[-240:]) > 0
    assert set(announced) == {0, 8}
    assert [bool(count) for count in learned[-240:]] == late.tolist()  # none is announced for nothing, none is missed
    assert sum(learned[-240:]) == 240 * together / 8


@pytest.mark.parametrize("name", BRANCHED)
@pytest.mark.parametrize("ranks", [1, 7, 200])
def test_any_budget(name: str, ranks: int) -> None:
    drafter = built(name)
    drafter.ranks = ranks
    for budget in (0, 1, 2, 3, 17):
        propose(drafter, request(str(budget)), budget)
    last = request("last", max_tokens=3)
    assert propose(drafter, last, 50).clipped(51, 0, VOCAB).num_candidates == 1
    nothing = Request("nothing", [VOCAB - 1], SamplingParams(max_tokens=9))
    propose(drafter, nothing, 64 * min(ranks, 8))
    assert drafter.propose([], []) == []
    for name_of in ("0", "last", "nothing", "unseen"):
        drafter.finish(request(name_of))


@pytest.mark.parametrize("name", BRANCHED)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_ranks_that_come_and_go_change_no_output(name: str, data: st.DataObject) -> None:
    """A model of its last two tokens: whatever was drafted for whichever ranks, the output is the model's."""
    a, b, c = (data.draw(st.integers(1, 5)) for _ in range(3))
    drafter, asking = built(name), request("r", max_tokens=40, output=[3])

    def says(prefix: Sequence[int]) -> int:
        return (a * prefix[-1] + b * prefix[-2] + c) % 9 + 1

    expected = asking.tokens.tolist()
    while len(expected) < asking.num_prompt + 40:
        expected.append(says(expected))
    while asking.remaining:
        ranks = data.draw(st.integers(1, 5))
        drafter.ranks = ranks
        tree = propose(drafter, asking, 12 * ranks).clipped(12 * ranks + 1, asking.remaining - 1, VOCAB, 99)
        tokens = asking.tokens.tolist()
        ids = np.array([says([*tokens, *tree.tokens[tree.path(row)].tolist()]) for row in range(len(tree))], np.int32)
        acceptance = verify_exact(tree, lambda row, ids=ids: int(ids[row]), asking.remaining, frozenset())  # type: ignore[misc]
        asking.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
        if asking.remaining:
            ranked = (ids[:, None] + np.arange(8, dtype=np.int32)) % VOCAB if drafter.top_k else None
            drafter.observe(asking, tree, TargetRows(ids, None, ranked), acceptance)
    drafter.finish(asking)
    assert asking.tokens.tolist() == expected
