"""What the drafters propose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.drafters import LOSSLESS, SOURCES, STRATEGIES, build_drafter
from decoding.request import Request, SamplingParams

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def request(prompt: list[int], output: list[int] | None = None, references: list[list[int]] | None = None) -> Request:
    made = Request("r", prompt, SamplingParams(max_tokens=1000), references or [])
    made.commit(output or [])
    return made


def drafted(strategy: str, of: Request, budget: int = 1000, **options: object) -> list[int]:
    (tree,) = build_drafter(strategy, options).propose([of], [budget])
    tree.check()
    assert tree.tokens[0] == of.root and tree.is_chain
    assert len(tree) - 1 <= budget
    assert all(SOURCES[source] == strategy for source in tree.sources[1:])
    return list(tree.tokens[1:].tolist())


def naive_prompt_lookup(tokens: list[int], max_ngram: int, count: int) -> list[int]:
    for n in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + count]
    return []


def naive_llma(output: list[int], references: list[list[int]], n: int, k: int, max_context: int) -> list[int]:
    best, draft = 0, []
    for reference in references:
        for end in range(1, len(reference)):
            length = 0
            while length < min(end, len(output), max_context) and reference[end - 1 - length] == output[-1 - length]:
                length += 1
            if length >= n and length > best:
                best, draft = length, reference[end : end + k]
    return draft


def test_autoregressive_drafts_nothing() -> None:
    assert drafted("autoregressive", request([1, 2, 1, 2])) == []


def test_prompt_lookup_worked_example() -> None:
    assert drafted("prompt_lookup", request([1, 2, 3, 9, 1, 2])) == [3, 9, 1, 2]
    assert drafted("prompt_lookup", request([1, 2, 3, 9, 1, 2]), num_tokens=2) == [3, 9]
    assert drafted("prompt_lookup", request([1, 2, 3, 9, 1, 2]), budget=1) == [3]
    assert drafted("prompt_lookup", request([1])) == []


def test_prompt_lookup_prefers_the_longer_ngram_and_then_the_first_occurrence() -> None:
    assert drafted("prompt_lookup", request([2, 7, 1, 2, 8, 1, 2]), num_tokens=1) == [8]
    assert drafted("prompt_lookup", request([2, 7, 1, 2, 8, 1, 2]), num_tokens=1, max_ngram=1) == [7]


@given(TOKENS, st.lists(TOKENS, max_size=4), st.integers(1, 4), st.integers(1, 6))
def test_prompt_lookup_is_the_naive_rule_at_every_step(prompt: list[int], bursts: list[list[int]], n: int, count: int) -> None:
    drafter = build_drafter("prompt_lookup", {"max_ngram": n, "num_tokens": count})
    growing, tokens = request(prompt), list(prompt)
    for burst in [*bursts, []]:
        (tree,) = drafter.propose([growing], [1000])
        assert tree.tokens[1:].tolist() == naive_prompt_lookup(tokens, n, count)
        growing.commit(burst)
        tokens += burst


def test_llma_worked_example() -> None:
    assert drafted("llma", request([1], [9, 5], [[4, 5, 6, 7]])) == [6, 7]


def test_llma_copies_nothing_before_the_first_output_token() -> None:
    assert drafted("llma", request([4, 5, 6, 4])) == []


def test_llma_looks_in_references_then_in_the_prompt() -> None:
    assert drafted("llma", request([5, 1], [5], [[5, 2]])) == [2]
    assert drafted("llma", request([5, 1], [5])) == [1]
    assert drafted("llma", request([5, 1], [5]), include_prompt=False) == []


def test_llma_prefers_the_longest_agreement() -> None:
    assert drafted("llma", request([0], [3, 4], [[9, 4, 1], [3, 4, 2]])) == [2]


def test_llma_passes_over_a_reference_that_ends_there() -> None:
    assert drafted("llma", request([0], [3, 4], [[3, 4], [4, 8]])) == [8]


def test_llma_never_copies_across_references() -> None:
    assert drafted("llma", request([0], [4], [[4, 8], [5, 6]])) == [8]


@given(TOKENS, st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 3), st.integers(1, 6), st.integers(0, 6))
def test_llma_is_the_naive_rule(
    output: list[int], references: list[list[int]], prompt: list[int], n: int, k: int, more_context: int
) -> None:
    expected = naive_llma(output, [*references, prompt], n, k, n + more_context)
    options = {"match_length": n, "copy_length": k, "max_context": n + more_context}
    assert drafted("llma", request(prompt, output, references), **options) == expected


def test_a_finished_request_is_forgotten() -> None:
    for strategy in ("prompt_lookup", "llma"):
        drafter = build_drafter(strategy, {})
        drafter.propose([request([1, 2, 1], [1])], [5])
        drafter.finish(request([1, 2, 1], [1]))
        (tree,) = drafter.propose([request([7, 8, 7], [7])], [1])
        assert tree.tokens[1:].tolist() == [8]


def test_budget_zero_is_the_root_alone() -> None:
    for strategy in STRATEGIES:
        assert drafted(strategy, request([1, 1, 1], [1, 1]), budget=0) == []


def test_registry_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="did you mean 'llma'"):
        build_drafter("lma", {})
    with pytest.raises(ValueError, match="did you mean 'copy_length'"):
        build_drafter("llma", {"copy_len": 3})
    with pytest.raises(ValueError, match=r"copy_length.*int"):
        build_drafter("llma", {"copy_length": "3"})
    for name, value in [("match_length", 0), ("copy_length", 0), ("max_context", 0)]:
        with pytest.raises(ValueError, match=name):
            build_drafter("llma", {name: value})
    for name in ("max_ngram", "num_tokens"):
        with pytest.raises(ValueError, match=name):
            build_drafter("prompt_lookup", {name: 0})
    assert set(STRATEGIES) >= LOSSLESS


def test_request_views_and_limits() -> None:
    made = request([1, 2], [3])
    assert made.tokens.tolist() == [1, 2, 3] and made.output_ids.tolist() == [3] and made.root == 3
    assert (made.num_tokens, made.num_output, made.remaining) == (3, 1, 999)
    with pytest.raises(ValueError, match="prompt"):
        request([])
    short = Request("s", [1], SamplingParams(max_tokens=1))
    with pytest.raises(AssertionError):
        short.commit([1, 2])
    assert Request("t", np.array([1]), SamplingParams(), [[], [4]]).references[0].tolist() == [4]
