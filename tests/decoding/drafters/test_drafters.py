"""What the drafters propose."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.drafters.registry import LOSSLESS, STRATEGIES, WITH_DRAFT_MODEL, build_drafter
from outrider.decoding.replay import KnownText, replay_workload
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree
from outrider.decoding.verify.exact import verify_exact
from tests.helpers.targets import is_chain, prepared

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


def request(prompt: list[int], output: list[int] | None = None, references: list[list[int]] | None = None) -> Request:
    made = Request("r", prompt, SamplingParams(max_tokens=1000), references or [])
    made.commit(output or [])
    return made


def drafted(strategy: str, of: Request, budget: int = 1000, **options: object) -> list[int]:
    (tree,) = build_drafter(strategy, options).propose([of], [budget])
    tree.check()
    assert tree.tokens[0] == of.root and is_chain(tree)
    assert len(tree) - 1 <= budget
    assert all(SOURCES[source] == strategy for source in tree.sources[1:])
    return list(tree.tokens[1:].tolist())


def naive_prompt_lookup(tokens: list[int], max_ngram: int, count: int) -> list[int]:
    for n in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + count]
    return []


def naive_llma(
    output: list[int], references: list[list[int]], n: int, k: int, max_context: int, own: bool = False
) -> list[list[int]]:
    """The copies of all occurrences that agree the longest, the first one first."""
    copies: list[list[int]] = []
    best = n
    for reference in [*references, *([output] if own else [])]:
        for end in range(1, len(reference)):
            length = 0
            while length < min(end, len(output), max_context) and reference[end - 1 - length] == output[-1 - length]:
                length += 1
            if length > best:
                best, copies = length, []
            if length == best:
                copies.append(reference[end : end + k])
    return copies


@given(TOKENS, st.lists(TOKENS, max_size=4), st.integers(1, 4), st.integers(1, 6))
def test_prompt_lookup_is_the_naive_rule_at_every_step(prompt: list[int], bursts: list[list[int]], n: int, count: int) -> None:
    drafter = build_drafter("prompt_lookup", {"max_ngram": n, "num_tokens": count})
    growing, tokens = request(prompt), list(prompt)
    for burst in [*bursts, []]:
        (tree,) = drafter.propose([growing], [1000])
        assert tree.tokens[1:].tolist() == naive_prompt_lookup(tokens, n, count)
        growing.commit(burst)
        tokens += burst


def adapld(ranked: dict[int, list[int]], tokens: list[int], budget: int = 64, **options: object) -> dict[tuple[int, ...], str]:
    """What AdaPLD drafts after ``tokens``, when the target ranked ``ranked`` next at some positions, and from which source."""
    drafter = prepared("adapld", **options)
    first = min(ranked, default=len(tokens) - 1)
    asking = request(tokens[: first + 1])
    for at in range(first, len(tokens) - 1):  # plain steps, each of which shows the rows of one position
        asking.commit([tokens[at + 1]])
        rows = np.array([(ranked.get(at, []) + [0] * drafter.top_k)[: drafter.top_k]], np.int32)
        target = TargetRows(rows[:, 0].copy(), None, rows)
        drafter.observe(asking, DraftTree.chain(tokens[at], ()), target, Acceptance((), tokens[at + 1]))
    (tree,) = drafter.propose([asking], [budget])
    tree.check()
    assert len(tree) <= budget + 1
    return {tuple(tree.tokens[tree.path(row)].tolist()): SOURCES[tree.sources[row]] for row in range(1, len(tree))}


def test_adapld_copies_where_the_context_is_nearest_and_ranked_tokens_beside_it() -> None:
    text = [1, 5, 6, 2, 5, 7, 1, 5]
    main = dict.fromkeys([(6, 2, 5, 7, 1, 5)[:n] for n in range(1, 7)], "prompt_lookup")
    assert adapld({}, text) == main  # the later 5 followed 2
    assert adapld({4: [8, 9]}, text) == main  # other positions' rows say nothing here
    drafted = adapld({1: [6, 7, 9]}, text, branches=3)
    assert drafted == main | {(7,): "recycling", (7, 1): "recycling", (9,): "recycling"}
    assert adapld({1: [7, 9, 4]}, text, num_tokens=2, branches=3).keys() == {(6,), (6, 2), (7,), (7, 1), (9,), (4,)}


def test_adapld_takes_the_latest_of_equal_contexts_and_branches_keep_their_place_in_a_small_budget() -> None:
    assert list(adapld({}, [3, 1, 3, 2, 3], num_tokens=1)) == [(2,)]
    assert adapld({}, [3, 1, 3, 2, 4]) == {}  # a new token
    text = [1, 5, 6, 2, 5, 7, 1, 5]
    assert adapld({1: [6, 7, 9]}, text, budget=5, branches=3).keys() == {(6,), (6, 2), (7,), (7, 1), (9,)}
    assert adapld({1: [6, 7, 9]}, text, budget=1, branches=3).keys() == {(6,)}


def test_llma_looks_in_references_then_in_the_prompt() -> None:
    assert drafted("llma", request([5, 1], [5], [[5, 2]])) == [2]
    assert drafted("llma", request([5, 1], [5])) == [1]
    assert drafted("llma", request([5, 1], [5]), include_prompt=False) == []
    assert drafted("llma", request([4, 5, 6, 4])) == []  # before the first output token
    own = request([9], [4, 5, 6, 4])
    assert drafted("llma", own, include_prompt=False) == []
    assert drafted("llma", own, include_prompt=False, include_output=True) == [5, 6, 4]


def test_llma_random_ties_are_a_function_of_seed_and_position() -> None:
    references = [[4, token] for token in range(10, 15)]

    def draft(seed: int, output: list[int]) -> list[int]:
        made = Request("r", [1], SamplingParams(max_tokens=1000, seed=seed), references)
        made.commit(output)
        return drafted("llma", made, ties="random")

    assert {draft(seed, [4])[0] for seed in range(60)} == set(range(10, 15))
    assert {draft(3, [9] * position + [4])[0] for position in range(60)} == set(range(10, 15))
    assert [draft(seed, [4]) for seed in range(9)] == [draft(seed, [4]) for seed in range(9)]


@given(TOKENS, st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 3), st.integers(1, 6), st.integers(0, 6), st.booleans())
def test_llma_is_the_naive_rule(
    output: list[int], references: list[list[int]], prompt: list[int], n: int, k: int, more_context: int, own: bool
) -> None:
    copies = naive_llma(output, [*references, prompt], n, k, n + more_context, own)
    options = {"match_length": n, "copy_length": k, "max_context": n + more_context, "include_output": own}
    text = request(prompt, output, references)
    assert drafted("llma", text, **options) == (copies[0] if copies else [])
    assert drafted("llma", text, **options, ties="recent") == (copies[-1] if copies else [])
    assert drafted("llma", text, **options, ties="random") in (copies or [[]])


@given(TOKENS, st.lists(TOKENS, max_size=3), st.integers(1, 2), st.integers(1, 5))
def test_llma_replay_takes_the_steps_of_the_published_simulation(
    output: list[int], references: list[list[int]], n: int, k: int
) -> None:
    steps, position = 1, 1  # the prefill emits one token
    while position < len(output):
        copies = naive_llma(output[:position], references, n, k, 32) or [[]]
        rest = output[position:]
        agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(copies[0], rest, strict=False)))
        steps, position = steps + 1, position + agreeing + 1
    text = KnownText("t", np.array([9]), tuple(np.array(r, np.int32) for r in references), np.array(output, np.int32))
    options = {"match_length": n, "copy_length": k, "include_prompt": False}
    counts = replay_workload([text], lambda: build_drafter("llma", options), 64, 10, lambda: 0.0)
    assert (counts.steps, counts.tokens) == (steps, len(output))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("autoregressive", "recycling")])
def test_a_finished_request_leaves_nothing_to_the_next_of_its_name(strategy: str) -> None:
    choices: dict[str, dict[str, object]] = {"ngrammys": {"allocation": "context", "w": 1}, "racer": {"window": 4}}
    choices["sam"] = {"min_match_length": 1}
    options = choices.get(strategy, {})
    used, fresh = (prepared(strategy, **options) for _ in range(2))
    first = request([1, 4, 3, 1], [4, 3, 1])
    (tree,) = used.propose([first], [40])
    assert len(tree) > 1 and set(used.tracked_requests()) == {"r"}
    used.finish(first)
    assert not used.tracked_requests()
    trees = [drafter.propose([request([7, 8, 9, 7], [7])], [40])[0] for drafter in (used, fresh)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist() and trees[0].parents.tolist() == trees[1].parents.tolist()


def test_budgets_are_kept() -> None:
    for strategy in STRATEGIES:
        assert drafted(strategy, request([1, 1, 1], [1, 1]), budget=0) == []
    assert drafted("llma", request([9], [5], [[5, 1, 2, 3]]), budget=2) == [1, 2]
    assert drafted("prompt_lookup", request([1, 2, 3, 9, 1, 2]), budget=1) == [3]
    assert drafted("autoregressive", request([1, 2, 1, 2])) == []


def test_registry_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="did you mean 'llma'"):
        build_drafter("lma", {})
    with pytest.raises(ValueError, match="did you mean 'copy_length'"):
        build_drafter("llma", {"copy_len": 3})
    with pytest.raises(ValueError, match=r"copy_length.*int"):
        build_drafter("llma", {"copy_length": "3"})
    assert {*STRATEGIES, *WITH_DRAFT_MODEL} >= LOSSLESS >= set(STRATEGIES) and not {"bild", "mjsd"} & LOSSLESS


OUT_OF_RANGE: dict[str, tuple[tuple[str, object], ...]] = {
    "prompt_lookup": (("max_ngram", 0), ("num_tokens", 0)),
    "llma": (("match_length", 0), ("copy_length", 0), ("max_context", 0), ("ties", "last")),
    "suffix": (
        ("max_spec_tokens", 0), ("max_spec_factor", -1.0), ("max_spec_factor", float("inf")),
        ("max_spec_offset", float("nan")), ("min_match_length", 0), ("occurrence", "last"),
    ),
    "suffix_decoding": (
        ("max_spec_tokens", 0), ("max_spec_factor", -1.0), ("max_spec_offset", float("inf")), ("min_token_prob", 1.5),
        ("max_tree_depth", 1), ("capacity", 1),
    ),
    "sam": (("max_spec_tokens", 0), ("min_match_length", 0), ("shape", "x"), ("scope", "x")),
    "trie": (
        ("decoding_length", 0), ("branch_length", 0), ("max_query_length", 33), ("layout", "tree"), ("frequencies", "all"),
        ("min_input", -1), ("min_output", -2), ("max_occurrences", 1025), ("capacity", -1),
    ),
    "ngrammys": (
        ("k", 0), ("w", 0), ("q", 0), ("table_width", 0), ("max_occurrences", 0), ("allocation", "other"), ("layout", "other"),
    ),
    "recycling": (("shape", "x"), ("start", "x"), ("scope", "x"), ("learn_rows", 0)),
    "racer": (("draft_nodes", 1), ("window", 1), ("capacity", 63), ("scope", "x")),
    "adapld": (("num_tokens", 0), ("branches", 0), ("branches", 33)),
    "jacobi": (("window", 0), ("ngram", 1), ("guesses", 0)),
    "auto": (("max_depth", 0), ("history_tokens", -1), ("similar_requests", -1), ("recycling", 1)),
    "speculative": (("num_draft_tokens", 0), ("sampling", "other")),
    "spectr": (("num_draft_tokens", 0), ("sequences", 0)),
    "bild": (("num_draft_tokens", 0), ("fallback", 1.5), ("rollback", -1.0), ("variant", "other")),
    "mjsd": (("num_draft_tokens", 0), ("beams", 0), ("joint_law", "other")),
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "name", "value"), [(key, *pair) for key, pairs in OUT_OF_RANGE.items() for pair in pairs])
def test_options_out_of_range_are_named(strategy: str, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}\b.*must"):
        build_drafter(strategy, {name: value})


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


def test_whole_numbers_are_fine_where_any_number_is() -> None:
    assert build_drafter("bild", {"rollback": 5, "fallback": 1}).draft_rows == 10
    with pytest.raises(ValueError, match="'fallback' of bild must be of type float, got True"):
        build_drafter("bild", {"fallback": True})


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


def test_llma_worked_example() -> None:
    assert drafted("llma", request([1], [9, 5], [[4, 5, 6, 7]])) == [6, 7]


def test_llma_copies_nothing_before_the_first_output_token() -> None:
    assert drafted("llma", request([4, 5, 6, 4])) == []


def test_llma_prefers_the_longest_agreement() -> None:
    assert drafted("llma", request([0], [3, 4], [[9, 4, 1], [3, 4, 2]])) == [2]


def test_llma_passes_over_a_reference_that_ends_there() -> None:
    assert drafted("llma", request([0], [3, 4], [[3, 4], [4, 8]])) == [8]


def test_llma_never_copies_across_references() -> None:
    assert drafted("llma", request([0], [4], [[4, 8], [5, 6]])) == [8]


def test_llma_ties() -> None:
    text = request([4, 8], [4, 9, 4], [[4, 5], [4, 6], [3, 4]])
    assert drafted("llma", text) == drafted("llma", text, ties="first", include_output=True) == [5]
    assert drafted("llma", text, ties="recent") == [8]
    assert drafted("llma", text, ties="recent", include_output=True) == [9, 4]
    longer = request([9], [1, 4], [[4, 5], [1, 4, 6], [4, 7], [1, 4, 8], [4, 9]])
    assert {tuple(drafted("llma", longer, ties=ties)) for ties in ("first", "recent", "random")} <= {(6,), (8,)}


def test_llma_copies_from_its_own_output_but_not_from_its_end() -> None:
    text = request([9], [4, 5, 6, 4])
    assert drafted("llma", text, include_prompt=False) == []
    assert drafted("llma", text, include_prompt=False, include_output=True) == [5, 6, 4]
    assert drafted("llma", request([9], [4]), include_output=True) == []
    assert drafted("llma", request([9], [4, 4]), include_output=True) == [4]
    assert drafted("llma", request([9], [3, 4, 7, 3, 4], [[4, 8]]), include_output=True) == [7, 3, 4]  # agrees longer


def test_llma_with_little_to_match() -> None:
    assert drafted("llma", request([9], [4, 5], [[5], [4]])) == []
    assert drafted("llma", request([9], [4, 5], []), include_prompt=False) == []
    assert drafted("llma", request([9], [4, 5], [[5, 1], [5, 2]]), match_length=2) == []
    assert drafted("llma", request([9], [5], [[4, 5, 1]]), match_length=2) == []
    assert drafted("llma", request([9], [5], [[5, 1, 2, 3]]), budget=2) == [1, 2]


def test_llma_copies_past_an_end_token_and_verification_stops_there() -> None:
    text = request([9], [4], [[4, 5, 2, 6, 7]])
    (tree,) = build_drafter("llma", {}).propose([text], [9])
    assert tree.tokens.tolist() == [4, 5, 2, 6, 7]
    says = {0: 5, 1: 2, 2: 6, 3: 7}
    assert verify_exact(tree, lambda row: says[row], 9, frozenset({2})) == Acceptance((1,), 2)
