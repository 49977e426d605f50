"""Verification against brute force: what comes out is what the target would have said alone."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.tree import DraftTree
from outrider.decoding.verify.exact import verify_exact


def scripted(prefix: tuple[int, ...], vocab: int) -> int:
    """A deterministic target: the next token as a function of the whole prefix."""
    return (7 * sum((i + 3) * token for i, token in enumerate(prefix)) + len(prefix)) % vocab


def alone(prefix: tuple[int, ...], vocab: int, max_tokens: int, end: frozenset[int]) -> list[int]:
    """Plain decoding."""
    output: list[int] = []
    while len(output) < max_tokens and not (output and output[-1] in end):
        output.append(scripted(prefix + tuple(output), vocab))
    return output


def path_tokens(tree: DraftTree, row: int) -> tuple[int, ...]:
    return tuple(int(token) for token in tree.tokens[tree.path(row)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[DraftTree, int, int, frozenset[int]]:
    n, vocab = draw(st.integers(1, 14)), draw(st.integers(1, 4))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n))
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(n, np.int8), draw(st.integers(1, n)))
    return tree, vocab, draw(st.integers(1, 6)), frozenset(draw(st.sets(st.integers(0, vocab - 1), max_size=2)))


@given(cases())
def test_emits_a_prefix_of_plain_decoding(case: tuple[DraftTree, int, int, frozenset[int]]) -> None:
    tree, vocab, max_tokens, end = case
    prefix = (1, int(tree.tokens[0]))
    visited: list[int] = []

    def choose(row: int) -> int:
        visited.append(row)
        return scripted(prefix + path_tokens(tree, row), vocab)

    acceptance = verify_exact(tree, choose, max_tokens, end)
    emitted = [*(int(tree.tokens[row]) for row in acceptance.rows), acceptance.next_token]
    expected = alone(prefix, vocab, max_tokens, end)
    assert emitted == expected[: len(emitted)] and acceptance.count == len(emitted)
    assert len(visited) == len(set(visited)) == len(emitted)
    if len(emitted) < len(expected):  # the walk may end early only where no candidate child goes on
        assert not tree.children([visited[-1]], emitted[-1])


@given(cases())
def test_accepts_the_longest_branch_there_is(case: tuple[DraftTree, int, int, frozenset[int]]) -> None:
    tree, vocab, max_tokens, end = case
    prefix = (int(tree.tokens[0]),)
    acceptance = verify_exact(tree, lambda row: scripted(prefix + path_tokens(tree, row), vocab), max_tokens, end)
    expected = alone(prefix, vocab, max_tokens, end)
    paths = {path_tokens(tree, row) for row in range(tree.num_candidates)}
    longest = max(len(path) for path in paths if list(path) == expected[: len(path)] and len(path) < len(expected))
    assert acceptance.count == min(longest + 1, len(expected))


def test_branches_that_begin_alike_are_followed_side_by_side() -> None:
    tree = DraftTree(np.array([7, 1, 2, 1, 3], np.int32), np.array([-1, 0, 1, 0, 3], np.int32), np.zeros(5, np.int8), 5)
    acceptance = verify_exact(tree, lambda row: {0: 1, 1: 3, 3: 3, 4: 9}[row], 10, frozenset())
    assert acceptance.rows == (3, 4) and acceptance.next_token == 9


def test_end_token_held_by_a_child_is_emitted_once() -> None:
    acceptance = verify_exact(DraftTree.chain(7, [1, 0, 5]), lambda row: [1, 0, 5, 6][row], 10, frozenset({0}))
    assert acceptance.rows == (1,) and acceptance.next_token == 0


def test_length_limit_counts_the_bonus_token() -> None:
    for limit, draft in itertools.product(range(1, 5), ([], [1], [1, 2, 3])):
        acceptance = verify_exact(DraftTree.chain(7, draft), lambda row: row + 1, limit, frozenset())
        assert acceptance.count == min(limit, len(draft) + 1)


def test_bonus_token_after_a_full_match_is_kept() -> None:
    acceptance = verify_exact(DraftTree.chain(7, [1, 2]), lambda row: [1, 2, 9][row], 10, frozenset())
    assert acceptance.rows == (1, 2) and acceptance.next_token == 9
