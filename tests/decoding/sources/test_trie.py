"""The frequency trie against a dict of prefixes, and against values worked out by hand from the published rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.experiments.papers.ablation.frequency_trie import Draft, FrequencyTrie, Mode
from tests.helpers.drafts import chains

END = 2
TEXT = st.lists(st.integers(0, 5), max_size=24)  # END among them
CHUNKS = st.lists(TEXT, max_size=4)


def trie(*outputs: list[int], branch_length: int = 4, **options: int) -> FrequencyTrie:
    made = FrequencyTrie([END], **options)  # type: ignore[arg-type]
    for output in outputs:
        made.put(output, branch_length)
    return made


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The path of every row below the root; asserts that the draft is a tree."""
    assert len(draft.tokens) == len(draft.parents) and draft.parents[0] == -1
    found: list[tuple[int, ...]] = [()]
    for row in range(1, len(draft.tokens)):
        assert 0 <= draft.parents[row] < row
        found.append((*found[draft.parents[row]], draft.tokens[row]))
    return found[1:]


def contents(of: FrequencyTrie, request: Hashable = None) -> dict[tuple[int, ...], tuple[float, float]]:
    """First token and path -> (prompt frequency, output frequency), live nodes only."""
    return {
        (first, *branch.path): (branch.prompt, branch.output)
        for first in of.firsts()
        for branch in of.branches(first, request)
        if branch.prompt or branch.output
    }


def naive_counts(text: list[int], branch_length: int) -> Counter[tuple[int, ...]]:
    """How often each prefix of each inserted branch occurs."""
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(len(text)):
        for end in range(start + 2, min(len(text), start + branch_length + 1) + 1):
            if END not in text[start:end]:
                counts[tuple(text[start:end])] += 1
    return counts


@given(CHUNKS, CHUNKS, st.integers(1, 6))
def test_frequencies_are_counts_of_prefixes(outputs: list[list[int]], prompts: list[list[int]], branch_length: int) -> None:
    made = trie(*outputs, branch_length=branch_length)
    for owner, prompt in enumerate(prompts):
        made.put(prompt, branch_length, owner)
    by_output = sum((naive_counts(text, branch_length) for text in outputs), Counter[tuple[int, ...]]())
    for owner, prompt in enumerate(prompts):
        by_prompt = naive_counts(prompt, branch_length)
        expected = {key: (float(by_prompt[key]), float(by_output[key])) for key in {*by_output, *by_prompt}}
        assert contents(made, owner) == expected
    assert contents(made) == {key: (0.0, float(count)) for key, count in by_output.items()}
    created = {key for text in [*outputs, *prompts] for key in naive_counts(text, branch_length)}
    for first in range(6):
        of_outputs = {key for key in by_output if key[0] == first}
        assert made.size(first) == (sum(key[0] == first for key in created), len(of_outputs))


@given(CHUNKS, st.integers(1, 6))
def test_streaming_equals_one_put(chunks: list[list[int]], branch_length: int) -> None:
    streamed = trie()
    for chunk in chunks:
        streamed.stream("r", chunk, branch_length)
    streamed.stream("r", [], branch_length, final=True)
    assert contents(streamed) == contents(trie([token for chunk in chunks for token in chunk], branch_length=branch_length))


def test_paper_figure() -> None:
    made = trie([100, 1, 30, 31], [100, 1, 40, 41], [100, 1, 40, 42], branch_length=3)
    assert made.hierarchical([100], 7, 4) == ([100, 1, 40, 41, 42, 30, 31], [-1, 0, 1, 2, 2, 1, 5])
    assert made.hierarchical([100], 6, 4) == ([100, 1, 40, 41, 42, 30], [-1, 0, 1, 2, 2, 1])
    assert made.hierarchical([100], 7, 2) == ([100, 1, 40, 30], [-1, 0, 1, 1])
    assert chains(made.hierarchical([100], 7, 4)) == ([100, 1, 40, 41, 1, 40, 42], [-1, 0, 1, 2, 0, 4, 5])
    assert made.single([100], 7, 4) == ([100, 1, 40, 41], [-1, 0, 1, 2])
    assert made.single([100], 3, 4) == ([100, 1, 40], [-1, 0, 1])


def test_prompts_come_before_outputs_and_only_the_requests_own() -> None:
    made = trie([5, 6, 30, 31], [5, 6, 30, 32])
    made.put([5, 6, 7], 4, "a")
    made.put([5, 6, 20], 4, "b")
    assert made.hierarchical([5], 16, 4, request="a") == ([5, 6, 7, 30, 31, 32], [-1, 0, 1, 1, 3, 3])
    assert made.hierarchical([5], 16, 4, request="b").tokens == [5, 6, 20, 30, 31, 32]
    assert made.hierarchical([5], 16, 4, mode="input", request="a").tokens == [5, 6, 7]
    assert made.hierarchical([5], 16, 4, mode="output", request="a").tokens == [5, 6, 30, 31, 32]
    assert made.hierarchical([5], 16, 4).tokens == [5, 6, 30, 31, 32]
    assert made.single([5], 16, 4, request="a").tokens == [5, 6, 7]
    assert made.single([5], 16, 4, mode="output", request="a").tokens == [5, 6, 30, 31]


def test_elimination_is_per_request_and_leaves_nothing_to_draft() -> None:
    made = trie([5, 6, 30])
    made.put([5, 6, 7], 4, "a")
    made.put([5, 6, 20], 4, "b")
    made.eliminate("a")
    assert made.hierarchical([5], 16, 4, request="a").tokens == [5, 6, 30]
    assert made.hierarchical([5], 16, 4, request="b").tokens == [5, 6, 20, 30]
    made.stream("b", [], 4, final=True)
    assert made.hierarchical([5], 16, 4, request="b").tokens == [5, 6, 30]
    made.eliminate("never seen")
    assert contents(made, "a") == contents(made, "b") == contents(made)


def test_of_more_nodes_than_fit_the_best_are_taken() -> None:
    made = trie([1, 4, 5], [1, 4, 5], [1, 6, 7], [1, 6, 8], [1, 6, 7], [1, 9])
    assert paths(made.hierarchical([1], 5, 4)) == [(6,), (6, 7), (4,), (4, 5)]
    assert paths(made.hierarchical([1], 6, 4)) == [(6,), (6, 7), (6, 8), (4,), (4, 5)]
    made.put([1, 9, 3], 4, "a")
    assert paths(made.hierarchical([1], 4, 4, min_output=0, request="a")) == [(9,), (9, 3), (6,)]
    assert paths(made.hierarchical([1], 4, 4, min_output=4, request="a")) == [(6,), (6, 7), (4,)]
    assert paths(made.hierarchical([1], 4, 4, min_input=1, min_output=3, request="a")) == [(9,), (6,), (6, 7)]
    assert paths(made.hierarchical([1], 3, 4, mode="output", request="a")) == [(6,), (6, 7)]


def test_pruning_halves_what_stays_and_drops_the_rest() -> None:
    made = trie([1, 4, 5], [1, 4, 5], [1, 4, 6], [1, 7], max_output_nodes=3)
    made.put([1, 4, 8], 4, "a")
    assert made.size(1) == (5, 4)
    made.prune()
    assert contents(made, "a") == {
        (1, 4): (1.0, 1.5),
        (1, 4, 5): (0.0, 1.0),
        (4, 5): (0.0, 2.0),
        (4, 6): (0.0, 1.0),
        (4, 8): (1.0, 0.0),
    }
    assert made.size(1) == (2, 2) and made.size(4) == (3, 2)
    made.prune()  # nothing changed since
    assert made.size(1) == (2, 2)
    for _ in range(3):
        made.put([1, 3, 4, 5], 4)
    trie_of_once = trie([1, 4, 5], max_nodes=1)
    trie_of_once.prune()
    assert trie_of_once.firsts() == [4]  # the tree of 1 had two nodes, both seen once


def test_the_end_of_an_output_prunes_once_enough_trees_changed() -> None:
    made = trie(max_output_nodes=1, prune_after=3)
    made.put([1, 4, 5], 4)
    made.stream("a", [], 4, final=True)
    assert made.firsts() == [1, 4]  # two trees changed
    made.put([3, 4], 4)
    made.stream("a", [], 4, final=True)
    assert made.firsts() == [4, 3]


def test_limits_are_checked() -> None:
    for name in ("max_nodes", "max_output_nodes", "prune_after"):
        with pytest.raises(ValueError, match=name):
            trie(**{name: 0})


def test_a_streamed_position_opens_once_enough_tokens_follow() -> None:
    made = trie()
    made.stream("r", [1, 3, 4], 3)
    assert made.firsts() == []
    made.stream("r", [5, 6], 3)
    assert made.firsts() == [1, 3]
    made.stream("other", [7, 8], 3, final=True)
    assert made.firsts() == [1, 3, 7]
    made.stream("r", [END], 3)  # an end token is an end: what is pending opens with what there is
    assert made.firsts() == [1, 3, 7, 4, 5]


def test_what_there_is_nothing_to_draft_from_is_the_root_alone() -> None:
    made = trie([1, 3, 4])
    for query, length, depth in [([9], 8, 4), ([4], 8, 4), ([3, 1, 9], 8, 4), ([1], 1, 4), ([1], 8, 0)]:
        for draft in (
            made.hierarchical(query, length, depth),
            chains(made.hierarchical(query, length, depth)),
            made.single(query, length, depth),
        ):
            assert draft == ([query[-1]], [-1])


def test_token_zero_is_a_token() -> None:
    assert trie([5, 0, 7, 8]).hierarchical([5, 0], 8, 3) == ([0, 7, 8], [-1, 0, 1])
    assert trie([5, 0, 0, 8]).single([5], 8, 4).tokens == [5, 0, 0, 8]


def test_what_follows_an_end_token_is_not_lost() -> None:
    made = trie([1, 3, END, 4, 5, END, 6])
    assert contents(made) == {(1, 3): (0.0, 1.0), (4, 5): (0.0, 1.0)}
    assert made.hierarchical([3], 8, 4).tokens == [3]


def test_a_shorter_suffix_adds_to_a_longer_one() -> None:
    made = trie([1, 3, 50, 51], [3, 60, 61], [3, 50, 70], branch_length=5)
    # Below 1 3: 50 51. Below 3: also 50 70 and 60 61. Rows of the longer suffix come first; nothing comes twice.
    assert made.hierarchical([1, 3], 16, 5) == ([3, 50, 51, 70, 60, 61], [-1, 0, 1, 1, 0, 4])
    assert made.hierarchical([1, 3], 5, 5) == ([3, 50, 51, 70, 60], [-1, 0, 1, 1, 0])
    assert made.hierarchical([1, 3], 16, 3).tokens == [3, 50, 51]  # three rows are enough for branches of three
    assert trie([1, 3, 50], [3, 50, 70], branch_length=5).single([1, 3], 16, 8).tokens == [3, 50, 70]


@given(CHUNKS, CHUNKS, st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 12), st.integers(0, 5))
def test_drafts_are_trees_of_live_nodes_within_the_budget(
    outputs: list[list[int]], prompts: list[list[int]], query: list[int], decoding_length: int, branch_length: int
) -> None:
    made = trie(*outputs, branch_length=5)
    for owner, prompt in enumerate(prompts):
        made.put(prompt, 5, owner)
    modes: tuple[Mode, ...] = ("mix", "input", "output")
    for mode in modes:
        live = {
            key[1:]
            for key, (prompt, output) in contents(made, 0).items()
            if key[0] == query[-1] and (prompt if mode == "input" else output if mode == "output" else prompt + output)
        }
        tree = made.hierarchical(query, decoding_length, branch_length, mode=mode, request=0)
        side_by_side = chains(tree)
        chain = made.single(query, decoding_length, branch_length, mode=mode, request=0)
        for draft in (tree, side_by_side, chain):
            assert draft.tokens[0] == query[-1] and len(draft.tokens) <= max(decoding_length, 1)
            assert all(len(path) <= branch_length and path in live for path in paths(draft))
        assert len(set(paths(tree))) == len(tree.tokens) - 1
        assert set(paths(side_by_side)) <= set(paths(tree)) and len(side_by_side.tokens) <= len(tree.tokens)
        assert chain.parents == list(range(-1, len(chain.tokens) - 1))
        if decoding_length > len(live) + 1 and branch_length == 5 and len(query) == 1:
            assert set(paths(tree)) == live


@given(CHUNKS, st.integers(1, 4))
def test_a_pruned_trie_keeps_its_counts(outputs: list[list[int]], limit: int) -> None:
    made = trie(*outputs, max_output_nodes=limit)
    before = contents(made)
    made.prune()
    after = contents(made)
    for key, (_, output) in after.items():
        pruned = made.size(key[0])[0] == made.size(key[0])[1] and output != before[key][1]
        assert output == (before[key][1] / 2 if pruned else before[key][1])
        assert len(key) == 2 or output <= after[key[:-1]][1]
    for first in made.firsts():
        assert made.size(first)[0] == sum(key[0] == first for key in after)
