"""N-Grammys: the context's n-grams, the model's n-grams, how they share the rows, and how rows become a tree."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.arrays import Int32Array
from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.ngrammys import NgrammysDrafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.ngrams import ContextNgrams
from outrider.decoding.tree import SOURCES, DraftTree
from outrider.decoding.verify.exact import verify_exact

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
MANY = 1000
# After 5 the model says 4, 7; after 4 it says 2, 6; and so on: two tokens after each.
TABLE = [[6, 7], [4, 7], [4, 3], [3, 4], [2, 6], [4, 7], [2, 7], [5, 3]]


class Tables:
    """A target of eight tokens with written-down tables."""

    vocab_size = 8
    end_token_ids = (0,)
    max_model_len = 64

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def bigram_table(self, width: int) -> Int32Array:
        self.asked.append(("bigram", width))
        return np.array(TABLE, np.int32)[:, :width]

    def unigram_ranking(self, width: int) -> Int32Array:
        self.asked.append(("unigram", width))
        return np.array([7, 1, 0, 2, 3, 4, 5, 6], np.int32)[:width]

    def latency(self) -> LatencyCurve:
        return LatencyCurve((1, 64), (1.0, 1.0), context=0, sequence_s=0.0, entry_s=0.0)


def prepared(**options: object) -> NgrammysDrafter:
    drafter = NgrammysDrafter(**{"k": 3, "w": 3, "table_width": 2, "layout": "batched", **options})  # type: ignore[arg-type]
    drafter.prepare(Tables())
    return drafter


def propose(drafter: NgrammysDrafter, tokens: list[int], budget: int = MANY) -> DraftTree:
    (tree,) = drafter.propose([Request("r", tokens, SamplingParams())], [budget])
    tree.check()
    assert tree.tokens[0] == tokens[-1] and len(tree) - 1 <= budget and tree.num_candidates == len(tree)
    drafter.finish(Request("r", tokens, SamplingParams()))
    return tree


def rows(tree: DraftTree) -> list[tuple[str, list[int]]]:
    """The branches: source of the last token, and all tokens."""
    leaves = sorted(set(range(1, len(tree))) - set(tree.parents.tolist()))
    return [(SOURCES[tree.sources[leaf]], tree.tokens[tree.path(leaf)].tolist()) for leaf in leaves]


def naive(tokens: list[int], q: int, w: int, k: int) -> list[list[int]]:
    query = tokens[-q:]
    counts: Counter[tuple[int, ...]] = Counter()
    latest: dict[tuple[int, ...], int] = {}
    for start in range(len(tokens) - q - w + 1):
        if len(query) == q and tokens[start : start + q] == query:
            row = tuple(tokens[start + q : start + q + w])
            counts[row] += 1
            latest[row] = start
    return [list(row) for row in sorted(counts, key=lambda row: (-counts[row], -latest[row]))[:k]]


def continuations(tokens: list[int], q: int, w: int, k: int, short: bool = False, cap: int = MANY) -> list[list[int]]:
    return ContextNgrams(q, w, cap).continuations(np.array(tokens, np.int32), k, short)


@given(TOKENS, st.lists(TOKENS, max_size=3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6))
def test_continuations_are_the_naive_rule_at_every_step(
    prompt: list[int], bursts: list[list[int]], q: int, w: int, k: int
) -> None:
    context, tokens = ContextNgrams(q, w, MANY), list(prompt)
    for burst in [*bursts, []]:
        assert context.continuations(np.array(tokens, np.int32), k, short=False) == naive(tokens, q, w, k)
        tokens += burst


def test_only_complete_rows_unless_short_ones_are_asked_for() -> None:
    tokens = [5, 1, 2, 3, 5, 4, 5, 1, 5]
    assert continuations(tokens, 1, 3, 5) == [[4, 5, 1], [1, 2, 3]]
    assert continuations(tokens, 1, 3, 5, short=True) == [[4, 5, 1], [1, 2, 3], [1, 5]]
    assert continuations(tokens, 1, 3, 2, short=True) == [[4, 5, 1], [1, 2, 3]]
    # What begins a row that is there already adds nothing.
    assert continuations([5, 1, 5, 1, 5, 1], 1, 4, 5, short=True) == [[5, 1, 5, 1]]


def test_only_the_latest_occurrences_are_counted() -> None:
    tokens = [5, 1, 5, 1, 5, 1, 5, 2, 5, 3, 5]
    assert continuations(tokens, 1, 1, 1) == [[1]]
    assert continuations(tokens, 1, 1, 3, cap=2) == [[3], [2]]


CONTEXT, BIGRAM, UNIGRAM = "context_ngram", "bigram", "unigram"


@pytest.mark.parametrize(
    ("options", "tokens", "expected"),
    [
        ({}, [0, 5, 1, 3, 3, 0, 5], [(CONTEXT, [1, 3, 3]), (BIGRAM, [4, 2, 4]), (BIGRAM, [7, 5, 4])]),
        # The unigram ranking fills what a narrow table leaves.
        ({"k": 4, "w": 2}, [0, 5], [(BIGRAM, [4, 2]), (BIGRAM, [7, 5]), (UNIGRAM, [7, 5]), (UNIGRAM, [1, 4])]),
        ({"k": 4, "w": 2}, [5, 3, 3, 5], [(CONTEXT, [3, 3]), (BIGRAM, [4, 2]), (BIGRAM, [7, 5]), (UNIGRAM, [7, 5])]),
        ({"w": 1, "allocation": "context"}, [5, 1, 3, 5], [(CONTEXT, [1])]),
        ({"w": 1, "allocation": "bigram"}, [5, 1, 3, 5], [(BIGRAM, [4]), (BIGRAM, [7])]),
        ({"w": 2, "allocation": "unigram"}, [5, 1, 3, 5], [(UNIGRAM, [7, 5]), (UNIGRAM, [1, 4]), (UNIGRAM, [0, 6])]),
    ],
)
def test_mixed_rows(options: dict[str, object], tokens: list[int], expected: list[tuple[str, list[int]]]) -> None:
    assert rows(propose(prepared(**options), tokens)) == expected
    assert rows(propose(NgrammysDrafter(k=3, w=1), [5, 1, 5])) == [(CONTEXT, [1])]  # without a model the context is left


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"allocation": "context"}, []),
        ({}, [("bigram", 8), ("unigram", 8)]),
        ({"k": 2}, [("bigram", 8)]),
        ({"allocation": "bigram", "table_width": 99}, [("bigram", 8)]),
        ({"allocation": "unigram", "k": 99}, [("bigram", 8), ("unigram", 8)]),
    ],
)
def test_only_the_tables_in_use_are_asked_for(options: dict[str, object], asked: list[tuple[str, int]]) -> None:
    target = Tables()
    drafter = NgrammysDrafter(**{"k": 3, "table_width": 2, **options})  # type: ignore[arg-type]
    drafter.prepare(target)
    assert target.asked == asked
    assert drafter.needs_logits == bool(asked)


def test_a_small_budget_takes_the_first_rows() -> None:
    tokens = [0, 5, 1, 3, 3, 0, 5]
    for layout in ("tree", "batched"):
        drafter = prepared(layout=layout)
        assert rows(propose(drafter, tokens, 3)) == [("context_ngram", [1, 3, 3])]
        assert rows(propose(drafter, tokens, 4)) == [("context_ngram", [1, 3, 3]), ("bigram", [4])]
        assert len(propose(drafter, tokens, 0)) == 1


def test_layouts() -> None:
    tokens = [5, 4, 2, 6, 5, 4, 3, 0, 5]
    batched, tree = propose(prepared(), tokens), propose(prepared(layout="tree"), tokens)
    assert rows(batched) == [("context_ngram", [4, 3, 0]), ("context_ngram", [4, 2, 6]), ("bigram", [4, 2, 4])]
    assert (batched.parents == 0).sum() == 4 - 1 and len(batched) == 10
    assert rows(tree) == [("context_ngram", [4, 3, 0]), ("context_ngram", [4, 2, 6]), ("bigram", [4, 2, 4])]
    assert tree.tokens.tolist() == [5, 4, 3, 0, 2, 6, 4] and tree.parents.tolist() == [-1, 0, 1, 2, 1, 4, 4]
    assert [SOURCES[source] for source in tree.sources[1:]] == ["context_ngram"] * 5 + ["bigram"]


@given(TOKENS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 2), st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_the_tree_keeps_every_row_and_loses_no_accepted_token(tokens: list[int], k: int, w: int, q: int, says: list[int]) -> None:
    options = {"k": k, "w": w, "q": q, "short_rows": True}
    batched, tree = propose(prepared(**options), tokens), propose(prepared(layout="tree", **options), tokens)
    paths = [{tuple(made.tokens[made.path(row)].tolist()) for row in range(len(made))} for made in (batched, tree)]
    assert paths[0] == paths[1] and len(paths[1]) == len(tree)  # the tree holds each path once
    longest = max(depth for depth in range(len(says) + 1) if tuple(says[:depth]) in paths[0])
    for made in (batched, tree):  # the same text in the same steps
        depths = made.depths()
        acceptance = verify_exact(made, lambda row, depths=depths: says[min(depths[row], 4)], 5, frozenset())
        assert len(acceptance.rows) == min(longest, 4)


def test_contexts_of_requests_are_apart() -> None:
    drafter = NgrammysDrafter(k=1, w=1, allocation="context")
    asking = [Request(name, [5, follower, 5], SamplingParams()) for name, follower in (("a", 1), ("b", 2))]
    assert [tree.tokens[1:].tolist() for tree in drafter.propose(asking, [4, 4])] == [[1], [2]]


def test_continuations_by_count_then_by_the_latest() -> None:
    tokens = [5, 1, 2, 5, 1, 2, 5, 1, 3, 5]
    assert continuations(tokens, 1, 2, 5) == [[1, 2], [1, 3]]
    assert continuations(tokens, 1, 2, 1) == [[1, 2]]
    assert continuations([5, 1, 2, 5, 3, 5, 1], 2, 1, 5) == [[2]] and continuations([9], 2, 1, 5) == []
    assert continuations([5, 1, 5, 2, 5, 3, 5], 1, 1, 3) == [[3], [2], [1]]


def test_the_unigram_ranking_fills_what_a_narrow_table_leaves() -> None:
    drafter = prepared(k=4, w=2)
    assert rows(propose(drafter, [0, 5])) == [("bigram", [4, 2]), ("bigram", [7, 5]), ("unigram", [7, 5]), ("unigram", [1, 4])]
    assert rows(propose(drafter, [5, 3, 3, 5])) == [
        ("context_ngram", [3, 3]),
        ("bigram", [4, 2]),
        ("bigram", [7, 5]),
        ("unigram", [7, 5]),
    ]


def test_allocations_of_one_kind() -> None:
    tokens = [5, 1, 3, 5]
    assert rows(propose(prepared(w=1, allocation="context"), tokens)) == [("context_ngram", [1])]
    assert rows(propose(prepared(w=1, allocation="bigram"), tokens)) == [("bigram", [4]), ("bigram", [7])]
    assert rows(propose(prepared(w=2, allocation="unigram"), tokens)) == [
        ("unigram", [7, 5]),
        ("unigram", [1, 4]),
        ("unigram", [0, 6]),
    ]


def test_without_a_model_the_context_is_left() -> None:
    assert rows(propose(NgrammysDrafter(k=3, w=1), [5, 1, 5])) == [("context_ngram", [1])]
