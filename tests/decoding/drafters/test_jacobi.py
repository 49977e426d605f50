"""Jacobi lookahead against the published rule written down naively, with a scripted model instead of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import Drafter, TargetRows
from outrider.decoding.drafters.jacobi import JacobiDrafter
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.jacobi_window import JacobiBlock, JacobiWindow, NgramPool, PromptTokens, WindowRows
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree
from outrider.decoding.verify.exact import verify_exact
from tests.helpers.targets import is_chain

Model = Callable[[Sequence[int]], int]
Seen = tuple[int, int, tuple[int, ...]]  # token, position, visible tokens of the step by position


def scripted(a: int, b: int, c: int, d: int, m: int) -> Model:
    """A model of the last two tokens and the position: deterministic, and periodic enough for n-grams to come back."""
    return lambda prefix: (a * prefix[-1] + b * (prefix[-2] if len(prefix) > 1 else 0) + c * len(prefix) + d) % m + 3


MODELS = st.builds(scripted, st.integers(1, 3), st.integers(0, 3), st.integers(0, 1), st.integers(0, 3), st.integers(2, 9))
PROMPTS = st.lists(st.integers(3, 11), min_size=1, max_size=12)


@dataclass(frozen=True)
class EndTokens:
    """The part of a target that the drafter asks for."""

    end_token_ids: tuple[int, ...]


def request(prompt: Sequence[int], output: Sequence[int] = (), max_tokens: int = 1000, **params: object) -> Request:
    made = Request("r", prompt, SamplingParams(max_tokens=max_tokens, **params))  # type: ignore[arg-type]
    made.commit(output)
    return made


def answers(tree: DraftTree, tokens: Sequence[int], model: Model) -> Int32Array:
    """What the model says below each row."""
    below = [model([*tokens, *(int(tree.tokens[at]) for at in tree.path(row))]) for row in range(len(tree))]
    return np.array(below, np.int32)


def compute(drafter: Drafter, of: Request, tree: DraftTree, model: Model) -> Acceptance:
    """Verifies a tree, commits what it gives and lets the drafter see it."""
    ids = answers(tree, of.tokens.tolist(), model)
    acceptance = verify_exact(tree, lambda row: int(ids[row]), of.remaining, frozenset())
    of.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
    drafter.observe(of, tree, TargetRows(ids, torch.zeros(len(ids), 1)), acceptance)
    return acceptance


def step(drafter: Drafter, of: Request, model: Model, budget: int = 1000) -> tuple[DraftTree, Acceptance]:
    (tree,) = drafter.propose([of], [budget])
    tree.check()
    assert len(tree) - 1 <= budget and tree.tokens[0] == of.root
    return tree, compute(drafter, of, tree, model)


def plain(prompt: Sequence[int], count: int, model: Model) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(tokens))
    return tokens[len(prompt) :]


def window_of(tree: DraftTree, position: int) -> list[Seen]:
    """The window rows as (token, position, what they see of the step), sorted."""
    depths = tree.depths()
    rows = []
    for row in range(tree.num_candidates, len(tree)):
        seen = tree.tokens[[0, *tree.path(row)]].tolist()
        rows.append((int(tree.tokens[row]), position + int(depths[row]), tuple(seen)))
    return sorted(rows)


def branches_of(tree: DraftTree) -> set[tuple[int, ...]]:
    inner = set(tree.parents[: tree.num_candidates].tolist())
    leaves = [row for row in range(1, tree.num_candidates) if row not in inner]
    return {tuple(tree.tokens[tree.path(row)].tolist()) for row in leaves}


class Published:
    """The rules of the published window and pool, in lists: rows R_0 .. R_f, fed with the root in front of R_0."""

    def __init__(self, window: int, ngram: int, guesses: int, first_row: list[int]) -> None:
        self.ngram, self.guesses = ngram, guesses
        self.rows = [first_row]
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def expected_window(self, root: int, position: int) -> list[Seen]:
        block = [root, *self.rows[0]]
        seen = [(token, position + 1 + j, (*block[: j + 2],)) for j, token in enumerate(self.rows[0])]
        for level in range(1, len(self.rows)):
            for j in range(len(block)):
                column = [self.rows[below][j] for below in range(1, level + 1)]
                seen.append((column[-1], position + level + j, (*block[: j + 1], *column)))
        return sorted(seen)

    def add(self, key: int, value: tuple[int, ...]) -> None:
        values = self.pool.setdefault(key, [])
        if value in values:
            values.remove(value)
        elif len(values) == self.guesses:
            values.pop(0)
        values.append(value)

    def update(self, prefix: list[int], model: Model) -> None:
        """One forward after ``prefix``, the root its last token."""
        block = [prefix[-1], *self.rows[0]]
        above = [[row[j] for row in self.rows[1:]] for j in range(len(block))]
        said = [model([*prefix, *block[1 : j + 1], *above[j]]) for j in range(len(block))]
        if len(self.rows) < self.ngram - 1:
            self.rows = [row[1:] for row in self.rows] + [said[1:]]
            return
        for j, key in enumerate(block):
            self.add(key, (*above[j], said[j]))
        self.rows = [self.rows[1][1:], *self.rows[2:], said]


@settings(deadline=None, max_examples=60)
@given(MODELS, PROMPTS, st.integers(1, 6), st.integers(3, 6), st.integers(1, 4), st.booleans())
def test_every_step_is_the_published_rule(
    model: Model, prompt: list[int], width: int, ngram: int, guesses: int, from_prompt: bool
) -> None:
    drafter = JacobiDrafter(width, ngram, guesses, from_prompt)
    of = request(prompt, [model(prompt)])
    published: Published | None = None
    learned = 0  # tokens whose n-grams the published pool has
    for _ in range(16):
        (tree,) = drafter.propose([of], [1000])
        if published is None:
            first = tree.tokens[tree.num_candidates :].tolist()
            assert len(first) == width + ngram - 3 and set(first) <= set(prompt)
            published = Published(width, ngram, guesses, first)
        if from_prompt:
            for end in range(max(learned + 1, ngram), of.num_tokens + 1):
                tokens = of.tokens[end - ngram : end].tolist()
                published.add(tokens[0], tuple(tokens[1:]))
            learned = of.num_tokens
        assert branches_of(tree) == set(published.pool.get(of.root, []))
        assert window_of(tree, of.num_tokens - 1) == published.expected_window(of.root, of.num_tokens - 1)
        before = of.tokens.tolist()
        compute(drafter, of, tree, model)
        published.update(before, model)
    assert of.output_ids.tolist() == plain(prompt, of.num_output, model)


@settings(deadline=None, max_examples=60)
@given(MODELS, PROMPTS, st.integers(1, 9), st.integers(2, 6), st.integers(1, 4), st.lists(st.integers(0, 40), min_size=1))
def test_any_budget_is_kept_and_the_output_is_that_of_the_model(
    model: Model, prompt: list[int], width: int, ngram: int, guesses: int, budgets: list[int]
) -> None:
    drafter, of = JacobiDrafter(width, ngram, guesses), request(prompt, [model(prompt)], max_tokens=40)
    for at in range(40):
        if of.remaining == 0:
            break
        left = of.remaining
        tree, _ = step(drafter, of, model, budgets[at % len(budgets)])
        assert tree.depths()[: tree.num_candidates].max() < left
    assert of.output_ids.tolist() == plain(prompt, of.num_output, model)


@settings(deadline=None, max_examples=60)
@given(MODELS, PROMPTS, st.integers(1, 6), st.integers(3, 6), st.data())
def test_rows_that_were_not_computed_move_no_column(
    model: Model, prompt: list[int], width: int, ngram: int, data: st.DataObject
) -> None:
    drafter, of = JacobiDrafter(width, ngram, 2), request(prompt, [model(prompt)])
    held = None
    for _ in range(12):
        (tree,) = drafter.propose([of], [1000])
        rows = tree.tokens[tree.num_candidates :].tolist()
        if held is not None:
            assert rows[1:] == held[1:]  # but for the root's place nothing moved
        most, deepest = data.draw(st.integers(1, len(tree))), data.draw(st.integers(0, width + ngram))
        clipped = tree.clipped(most, 1000, 1000, deepest)
        compute(drafter, of, clipped, model)
        held = rows if len(clipped) == 1 else None
    assert of.output_ids.tolist() == plain(prompt, of.num_output, model)


def test_the_window_worked_example() -> None:
    window = JacobiWindow(3, 3, np.array([4, 5, 6], np.int32))
    assert (window.levels, window.columns, window.full, window.peak_rows) == (1, 4, False, 5)
    window.advance(np.array([1, 7, 8, 9], np.int32))
    said = np.array([2, 3, 1], np.int32)
    assert window.full and window.ngrams(1, said) == [(1, (7, 2)), (5, (8, 3)), (6, (9, 1))]
    window.advance(said)
    for _ in range(2):
        assert window.entries[0, 1:].tolist() == [8, 9] and window.entries[1].tolist() == [2, 3, 1]
        window.advance(said[:1])  # one column was computed: the others wait
    assert window.ngrams(1, said[:0]) == []
    with pytest.raises(AssertionError):
        JacobiWindow(3, 4, np.array([4, 5, 6], np.int32))
    filling = JacobiWindow(2, 4, np.array([4, 5, 6], np.int32))
    with pytest.raises(AssertionError):
        filling.advance(np.array([1, 2], np.int32))  # it needs every answer
    assert JacobiWindow(1, 5, np.zeros(3, np.int32)).peak_rows == 5  # 2 levels of 3 columns; full it has 3 rows


def test_the_comb_worked_example() -> None:
    window = JacobiWindow(3, 3, np.array([4, 5, 6], np.int32))
    assert WindowRows.of(window, 4).tokens.tolist() == [4, 5, 6]
    window.advance(np.array([1, 7, 8, 9], np.int32))
    rows = WindowRows.of(window, 3)
    assert (rows.tokens.tolist(), rows.parents.tolist(), rows.ends.tolist()) == ([5, 6, 7, 8, 9], [-1, 0, -1, 0, 1], [2, 3, 4])
    assert WindowRows.of(window, 1).tokens.tolist() == [7]
    tree = DraftTree(
        np.array([1, 2, 5, 6, 7, 8, 9], np.int32), np.array([-1, 0, 0, 2, 0, 2, 3], np.int32), np.zeros(7, np.int8), 2
    )
    assert rows.locate(tree).tolist() == [4, 5, 6]
    assert rows.locate(tree.clipped(6, 9, 99)).tolist() == [4, 5]
    assert rows.locate(tree.clipped(7, 9, 99, 2)).tolist() == [4, 5]  # the third column is three deep
    assert rows.locate(DraftTree.chain(1, [2])).tolist() == []


def test_candidates_come_most_recent_first_share_beginnings_and_fill_a_small_budget() -> None:
    drafter = JacobiDrafter(2, 4, 3)
    of = request([5, 6, 9, 7, 5, 1, 1, 1, 5, 6, 8, 8, 4], [5])
    (tree,) = drafter.propose([of], [64])
    assert tree.tokens[: tree.num_candidates].tolist() == [5, 6, 8, 8, 1, 1, 1, 9, 7]
    assert tree.parents[: tree.num_candidates].tolist() == [-1, 0, 1, 2, 0, 4, 5, 1, 7]
    assert len(tree) - tree.num_candidates == 3 and {SOURCES[source] for source in tree.sources} == {"jacobi"}
    (tree,) = drafter.propose([of], [7])
    assert tree.tokens.tolist() == [5, 6, 8, 8, 1, 1, 1, 9] and tree.num_candidates == 8
    (tree,) = JacobiDrafter(2, 4, 3).propose([request([5, 6, 9, 7, 5, 1], [5], max_tokens=3)], [64])
    assert tree.tokens.tolist() == [5, 6] and tree.num_candidates == 2  # two tokens are left: one draft and the bonus


def test_references_are_in_the_pool_before_the_prompt() -> None:
    drafter = JacobiDrafter(1, 3, 2)
    of = Request("r", [7, 3, 3, 7], SamplingParams(max_tokens=9), references=[[7, 1, 1, 7, 2, 2]])
    of.commit([7])
    (tree,) = drafter.propose([of], [4])
    assert tree.tokens.tolist() == [7, 3, 3, 2, 2]


def test_a_budget_below_the_window_narrows_it_and_one_below_a_column_drops_it() -> None:
    model = scripted(2, 3, 1, 1, 9)
    for budget, columns in ((31, 8), (30, 7), (15, 4), (14, 3), (8, 2), (7, 1), (5, 1), (4, 0)):
        drafter, of = JacobiDrafter(8, 5, 8, prompt_as_reference=False), request([3, 4, 5], [6])
        trees = [step(drafter, of, model, budget)[0] for _ in range(4)]
        full = trees[3]
        assert len(full) - full.num_candidates == max(0, 4 * columns - 1), budget
        assert len(trees[0]) - 1 == (columns + 2 if columns else 0)


def test_no_window_is_computed_that_no_step_can_use() -> None:
    model = scripted(1, 0, 1, 1, 9)
    for left, rows in ((5, 0), (6, 4)):  # ngram 5 fills in three steps, the fourth gives n-grams, the fifth drafts and emits two
        of = request([3, 4], [5], max_tokens=1 + left)
        assert len(step(JacobiDrafter(2, 5, 1, prompt_as_reference=False), of, model)[0]) - 1 == rows, left


def test_end_tokens_are_neither_drafted_nor_kept_in_the_window() -> None:
    drafter = JacobiDrafter(3, 3, 2)
    drafter.prepare(EndTokens((2,)))  # type: ignore[arg-type]
    of = request([4, 2, 5, 4, 7, 2, 5], [4], stop_token_ids=(9,))
    tree, _ = step(drafter, of, lambda prefix: 2 if len(prefix) % 2 else 9)
    assert branches_of(tree) == {(7,)} and not {2, 9} & set(tree.tokens.tolist())
    (tree,) = drafter.propose([of], [64])
    assert not {2, 9} & set(tree.tokens[1:].tolist()) and len(tree) - tree.num_candidates == 5
    keeping = JacobiDrafter(3, 3, 2)
    keeping.prepare(EndTokens((2,)))  # type: ignore[arg-type]
    (tree,) = keeping.propose([request([4, 2, 5, 4, 7, 2, 5], [4], ignore_eos=True)], [64])
    assert branches_of(tree) == {(2, 5), (7, 2)}


def test_the_first_guesses_depend_on_prompt_and_seed_alone() -> None:
    def first(prompt: list[int], seed: int) -> list[int]:
        (tree,) = JacobiDrafter(prompt_as_reference=False).propose([request(prompt, [3], seed=seed)], [64])
        return tree.tokens[1:].tolist()

    prompt = list(range(10, 90))
    assert first(prompt, 1) == first(prompt, 1) and len(first(prompt, 1)) == 10
    assert first(prompt, 1) != first(prompt, 2) and first(prompt, 1) != first([*prompt, 5], 1)
    assert PromptTokens(np.array([2, 2, 7], np.int32), 0, {2}).draw(5).tolist() == [7] * 5
    assert PromptTokens(np.array([2, 2], np.int32), 0, {2}).draw(2).tolist() == [2, 2]
    drawn = PromptTokens(np.arange(4, dtype=np.int32), 0).draw(4000)
    assert (np.abs(np.bincount(drawn, minlength=4) - 1000) < 150).all()


@settings(deadline=None, max_examples=60)
@given(MODELS, PROMPTS, st.integers(1, 9), st.integers(0, 12))
def test_plain_jacobi_replaces_each_guess_by_the_answer_in_its_place(
    model: Model, prompt: list[int], size: int, budget: int
) -> None:
    drafter, of = JacobiDrafter(window=size, ngram=2), request(prompt, [model(prompt)], max_tokens=30)
    known: dict[int, int] = {}  # absolute position -> what was last said there
    while of.remaining:
        start = of.num_tokens
        (tree,) = drafter.propose([of], [budget])
        draft = tree.tokens[1:].tolist()
        assert is_chain(tree) and tree.num_candidates == len(tree) and len(draft) == min(size, budget, of.remaining - 1)
        assert all(known.get(start + i, token) == token for i, token in enumerate(draft))
        assert all(token in prompt for i, token in enumerate(draft) if start + i not in known)
        said = answers(tree, of.tokens.tolist(), model).tolist()
        known.update({start + i: token for i, token in enumerate(said)})
        compute(drafter, of, tree, model)
    assert of.output_ids.tolist() == plain(prompt, 30, model)


def test_the_block_worked_example_and_a_step_without_a_draft() -> None:
    block = JacobiBlock(3, PromptTokens(np.array([1], np.int32), 0))
    block.guesses = np.array([4, 5, 6], np.int32)
    block.advance(np.array([4, 7, 8, 9], np.int32), emitted=2)
    assert block.guesses.tolist() == [8, 9, 1]
    block.advance(np.array([3], np.int32), emitted=1)  # the root alone: the guesses for the places behind it stay
    assert block.guesses.tolist() == [9, 1, 1]
    block.advance(np.array([3, 5], np.int32), emitted=5)  # others' drafts were accepted beyond the block
    assert block.guesses.tolist() == [1, 1, 1]


def test_a_window_that_fills_needs_every_answer() -> None:
    window = JacobiWindow(2, 4, np.array([4, 5, 6], np.int32))
    with pytest.raises(AssertionError):
        window.advance(np.array([1, 2], np.int32))
    assert JacobiWindow(1, 5, np.zeros(3, np.int32)).peak_rows == 5  # 2 levels of 3 columns; full it has 3 rows


def test_the_pool_keeps_the_last_inserted() -> None:
    pool = NgramPool(3, 2)
    for key, value in ((1, (2, 3)), (1, (4, 5)), (1, (2, 3)), (1, (6, 7)), (8, (1, 1))):
        pool.insert(key, value)
    assert pool.lookup(1) == [(2, 3), (6, 7)] and pool.lookup(8) == [(1, 1)] and pool.lookup(9) == []
    pool.insert_sequence([5, 5, 5, 6])
    assert pool.lookup(5) == [(5, 5), (5, 6)]


def test_a_wholly_accepted_ngram_keeps_its_bonus_token() -> None:
    prompt = [4, 5, 6, 7, 8, 9]
    of = request([*prompt, 3], [4])
    _, acceptance = step(JacobiDrafter(2, 4, 2), of, lambda prefix: prefix[-1] + 1)
    assert len(acceptance.rows) == 3 and of.output_ids.tolist() == [4, 5, 6, 7, 8]


def test_without_the_prompt_the_first_candidates_come_from_the_window() -> None:
    model = scripted(1, 0, 0, 1, 4)
    drafter, of = JacobiDrafter(4, 3, 2, prompt_as_reference=False), request([3, 4, 5, 6, 3, 4], [5])
    counts = [step(drafter, of, model)[0].num_candidates for _ in range(4)]
    assert counts[:2] == [1, 1] and counts[2] > 1


def test_plain_jacobi_converges_at_once_where_tokens_do_not_depend_on_one_another() -> None:
    drafter, of = build_drafter("jacobi", {"ngram": 2, "window": 6}), request([50, 51, 52], [3])
    model: Model = lambda prefix: len(prefix)  # noqa: E731
    counts = [step(drafter, of, model)[1].count for _ in range(5)]
    assert counts == [1, 7, 1, 7, 1]  # a block of guesses, all right after one iteration, then a block of new ones
