"""The merged drafter through whole requests: what it offers, what it learns, how many rows it thinks pay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.budget.latency import LatencyCurve
from outrider.decoding.drafters.auto import AutoDrafter
from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.replay import known_rows
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree
from outrider.decoding.verify.exact import verify_exact
from tests.helpers.targets import Target, is_chain, paths, says

VOCAB = 60


def small(vocab_size: int = VOCAB, per_row: float = 0.0) -> Target:
    """Whose steps cost the same for each further row."""
    return Target(vocab_size, curve=LatencyCurve((1, 2), (1.0, 1.0 + per_row), 0, 0.0, 0.0))


def prepared(target: Target | None = None, frequent_tokens: int = AutoDrafter.num_frequent, **options: object) -> AutoDrafter:
    drafter = AutoDrafter(**options)  # type: ignore[arg-type]
    drafter.num_frequent = frequent_tokens
    drafter.prepare(target or small())
    return drafter


def request(
    name: str, prompt: Sequence[int], references: Sequence[Sequence[int]] = (), max_tokens: int = 1000, output: Sequence[int] = ()
) -> Request:  # fmt: skip
    made = Request(name, list(prompt), SamplingParams(max_tokens=max_tokens), references, tenant="local")
    made.commit(list(output))
    return made


def propose(drafter: AutoDrafter, asking: Request, budget: int = 64) -> DraftTree:
    (tree,) = drafter.propose([asking], [budget])
    checked(tree, asking, budget)
    return tree


def checked(tree: DraftTree, asking: Request, budget: int) -> None:
    tree.check()
    assert tree.tokens[0] == asking.root and len(tree) <= budget + 1 and tree.num_candidates == len(tree)
    assert len(set(paths(tree))) == len(tree) - 1
    assert tree.depths().max() <= max(asking.remaining - 1, 0)


def by_source(tree: DraftTree) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for path, source in zip(paths(tree), tree.sources[1:], strict=True):
        found.setdefault(SOURCES[source], set()).add(path)
    return found


def step(drafter: AutoDrafter, running: Request, answer: Sequence[int], tree: DraftTree) -> int:
    """Verifies against what the target says, commits and tells the drafter, as the engine does; returns the accepted rows."""
    upcoming = iter(answer[running.num_output :])
    acceptance = verify_exact(tree, lambda row: next(upcoming), running.remaining, frozenset())
    running.commit([*tree.tokens[list(acceptance.rows)].tolist(), acceptance.next_token])
    if running.remaining:
        drafter.observe(running, tree, known_rows(tree, acceptance), acceptance)
    return len(acceptance.rows)


def run(drafter: AutoDrafter, running: Request, answer: Sequence[int], budget: int = 64) -> int:
    """From the prefill to the end; returns the number of steps."""
    step(drafter, running, answer, DraftTree.chain(running.root, ()))
    steps = 1
    while running.remaining:
        step(drafter, running, answer, propose(drafter, running, budget))
        steps += 1
    drafter.finish(running)
    assert running.output_ids.tolist() == list(answer)
    return steps


def answered(name: str, prompt: Sequence[int], answer: Sequence[int], references: Sequence[Sequence[int]] = ()) -> Request:
    return request(name, prompt, references, max_tokens=len(answer))


def test_a_copied_answer_takes_few_steps() -> None:
    passage = (1 + np.random.default_rng(0).permutation(VOCAB - 1)).tolist()
    assert run(prepared(), answered("prompt", [*passage, 0], passage[5:45]), passage[5:45]) <= 4
    assert run(prepared(), answered("reference", [0], passage[5:45], [passage]), passage[5:45]) <= 4
    assert run(prepared(), answered("nothing", [0], passage[5:45]), passage[5:45]) == 40
    assert run(prepared(), answered("itself", [0], passage[:10] * 8), passage[:10] * 8) <= 18


def test_outputs_are_offered_to_other_requests_at_once() -> None:
    drafter = prepared(frequent_tokens=0)
    first, second = request("a", [9, 8, 7], output=[1, 3, 4, 5]), request("b", [1, 3])
    assert len(propose(drafter, second)) == 1
    propose(drafter, first)
    assert by_source(propose(drafter, second)) == {"history": {(4,), (4, 5)}}
    drafter.finish(first)
    assert by_source(propose(drafter, second)) == {"history": {(4,), (4, 5)}}
    assert len(propose(drafter, request("c", [2, 9, 8]))) == 1  # a prompt is nobody else's


def test_the_own_output_is_copied_and_not_history_until_the_end() -> None:
    drafter = prepared(frequent_tokens=0)
    growing, beside = request("a", [9], output=[1, 3, 4, 1, 3]), request("b", [7])
    for token in range(200):  # over several blocks, with another that grows beside it
        assert set(by_source(propose(drafter, growing))) <= {"copy"}
        growing.commit([token % 40])
        beside.commit([40 + token % 20])
        propose(drafter, beside)
    growing.commit([1, 3])
    assert (4,) in by_source(propose(drafter, growing))["copy"]
    drafter.finish(growing)
    assert (4,) in by_source(propose(drafter, request("c", [1, 3])))["history"]


def test_without_history_nothing_outlives_a_request() -> None:
    drafter = prepared(history_tokens=0)
    passage = list(range(10, 40))
    before = run(drafter, answered("a", [0], passage), passage)
    assert run(drafter, answered("b", [0], passage), passage) == before == 30
    assert by_source(propose(drafter, request("c", [12]))) == {"unigram": {(12,)}}
    kept = prepared()
    assert run(kept, answered("a", [0], passage), passage) == 30 > run(kept, answered("b", [0], passage), passage)


def test_frequent_tokens_are_those_of_past_outputs_and_the_prompt() -> None:
    drafter = prepared(frequent_tokens=3)
    past = request("past", [1], output=[30, 30, 30, 31, 31, 32])
    propose(drafter, past)
    drafter.finish(past)
    asking = request("r", [40] * 11 + [41])  # a fifth each: 2.2 for 40
    assert by_source(propose(drafter, asking))["unigram"] == {(30,), (40,), (31,)}
    assert by_source(propose(prepared(frequent_tokens=0), asking)) == {}


def test_requests_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(10, 20, 40).tolist() for _ in range(3)]
    alone = []
    for number, text in enumerate(texts):
        drafter = prepared(history_tokens=0, recycling=False, all_rows=True)
        alone.append(paths(propose(drafter, request(str(number), text[:30], [text[5:]]))))
    together = prepared(history_tokens=0, recycling=False, all_rows=True)
    requests = [request(str(number), text[:30], [text[5:]]) for number, text in enumerate(texts)]
    trees = together.propose(requests, [64, 64, 64])
    assert [paths(tree) for tree in trees] == alone
    assert [len(tree) for tree in together.propose(requests, [0, 5, 1])] == [1, 6, 2]
    assert together.propose([], []) == []


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), min_size=1, max_size=30)), min_size=1, max_size=12),
    st.integers(0, 20),
    st.integers(0, 300),
)
def test_any_answers_of_concurrent_requests(pieces: list[tuple[int, list[int]]], budget: int, history: int) -> None:
    answers: dict[int, list[int]] = {}
    for name, piece in pieces:
        answers.setdefault(name, []).extend(piece)
    drafter = prepared(small(per_row=0.1), history_tokens=history)
    running = {name: answered(str(name), [name, 0, 1], answer, [[3, 0, 4]]) for name, answer in answers.items()}
    for name, started in running.items():
        step(drafter, started, answers[name], DraftTree.chain(started.root, ()))
    while running:
        for name in [name for name, each in running.items() if not each.remaining]:
            drafter.finish(running.pop(name))
        names = list(running)
        trees = drafter.propose([running[name] for name in names], [budget] * len(names))
        for name, tree in zip(names, trees, strict=True):
            checked(tree, running[name], budget)
            step(drafter, running[name], answers[name], tree)
    later = answered("later", [0], answers[pieces[0][0]])
    run(drafter, later, answers[pieces[0][0]], budget)


def test_drafting_comes_back_after_a_text_that_nothing_foretells() -> None:
    drafter = prepared(small(vocab_size=4000, per_row=0.2), frequent_tokens=0, recycling=False)
    circle, noise = [*range(10, 30)] * 15, np.random.default_rng(0).integers(100, 4000, 900).tolist()
    first = run(drafter, answered("copies", [1, *circle], circle), circle)
    running = answered("noise", [3], noise)
    step(drafter, running, noise, DraftTree.chain(running.root, ()))
    while running.remaining:
        tree = propose(drafter, running)
        step(drafter, running, noise, tree)
    assert len(tree) == 1 and first < len(circle) / 3
    drafter.finish(running)
    assert run(drafter, answered("again", [1, *circle], circle), circle) <= first + 5


def test_what_the_target_ranked_is_offered_again() -> None:
    drafter = prepared(frequent_tokens=0, history_tokens=0)
    first = request("a", [7])
    drafter.observe(first, DraftTree.chain(7, ()), says([20, 21]), Acceptance((), 20))
    tree = DraftTree.chain(20, [30, 31])
    drafter.observe(first, tree, says([30, 33], [34, 35], [36]), Acceptance((1,), 34))
    ranked = propose(drafter, request("b", [7]))
    assert set(by_source(ranked)) == {"recycling"}
    assert {(20,), (21,), (20, 30), (20, 33), (20, 30, 34)} <= set(paths(ranked))
    assert paths(ranked).index((20,)) < paths(ranked).index((21,))
    assert (36,) in paths(propose(drafter, request("c", [31])))  # 31 was rejected: its row taught all the same
    drafter.observe(first, DraftTree.chain(7, ()), says([25]), Acceptance((), 25))
    assert paths(propose(drafter, request("d", [7])))[0] == (25,)  # the latest stays
    off = prepared(frequent_tokens=0, recycling=False)
    off.observe(first, DraftTree.chain(7, ()), says([20, 21]), Acceptance((), 20))
    assert len(propose(off, request("e", [7]))) == 1


def test_ranks_of_a_replay_and_of_a_small_vocabulary() -> None:
    without_logits, small_vocabulary = prepared(frequent_tokens=0), prepared(small(vocab_size=5))
    target = TargetRows(np.array([20], np.int32), None)
    without_logits.observe(request("a", [7]), DraftTree.chain(7, ()), target, Acceptance((), 20))
    assert len(propose(without_logits, request("b", [7]))) == 1
    asking = request("a", [1])
    small_vocabulary.observe(asking, DraftTree.chain(1, ()), says([4, 2], vocab_size=5), Acceptance((), 4))
    assert (4,) in by_source(propose(small_vocabulary, asking))["recycling"]


def test_rows_are_drafted_where_they_pay() -> None:
    text = np.random.default_rng(2).integers(10, 25, 300).tolist()
    sizes = []
    for per_row in (0.0, 0.02, 0.05, 1.0):
        drafter = prepared(small(per_row=per_row))
        sizes.append(len(propose(drafter, request("r", text))) - 1)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 64 and 1 <= sizes[2] < sizes[1] < 40 and sizes[3] == 0
    assert len(propose(prepared(small(per_row=1.0), all_rows=True), request("r", text))) == 65


def test_the_rows_of_a_step_go_to_the_request_that_will_use_them() -> None:
    passage = list(range(10, 50))
    sure, unsure = request("sure", [*passage, *passage[:20]]), request("unsure", [10, 11, 10, 12, 10, 13, 10])
    trees = prepared(small(per_row=0.12)).propose([sure, unsure], [64, 64])
    assert len(trees[0]) > len(trees[1]) + 3


def test_what_is_right_comes_first() -> None:
    drafter = prepared(history_tokens=0, all_rows=True, frequent_tokens=0)
    drafter.observe(request("teacher", [1]), DraftTree.chain(1, ()), says([20]), Acceptance((), 20))

    def order() -> list[tuple[int, ...]]:
        tree = propose(drafter, request("asking", [1, 10, 3, 1]))
        return sorted([(10,), (20,)], key=paths(tree).index)

    def always(right: int, count: int) -> None:
        for number in range(count):
            asking = request(f"{right} {number}", [1, 10, 3, 1])
            tree = propose(drafter, asking)
            (row,) = tree.children([0], right)
            asking.commit([right, 50])
            drafter.observe(asking, tree, TargetRows(np.full(len(tree), 50, np.int32), None), Acceptance((row,), 50))
            drafter.finish(asking)

    assert order() == [(20,), (10,)]  # at first what was recycled
    always(10, 15)
    assert order() == [(10,), (20,)]  # then the copy
    always(20, 40)
    assert order() == [(20,), (10,)]


def test_a_poisoned_history_is_set_aside_for_its_tenant_and_tried_again() -> None:
    """Another output says what never comes. It is drafted until it has failed often enough, and again after 256 steps."""
    drafter = prepared(frequent_tokens=0, recycling=False)
    poison = request("poison", [40], output=[10, 11, 12, 13, 14] * 8)
    propose(drafter, poison)
    drafter.finish(poison)

    def drafts() -> bool:
        asking = request("asking", [10, 11, 12])
        tree = propose(drafter, asking)
        asking.commit([50])
        drafter.observe(asking, tree, TargetRows(np.full(len(tree), 50, np.int32), None), Acceptance((), 50))
        drafter.finish(asking)
        return len(tree) > 1

    drafted = [drafts() for _ in range(600)]
    failed = drafted.index(False)
    assert 16 <= failed <= 40 and not any(drafted[failed : failed + 256]) and drafted[failed + 256]
    other = Request("other", [10, 11, 12], SamplingParams(max_tokens=10), [[10, 11, 12, 13]], tenant="other")
    assert len(propose(drafter, other)) > 1


def test_a_clipped_tree_teaches_no_rates() -> None:
    drafter = prepared(history_tokens=0)
    asking = request("a", [1, 10, 3, 1])
    before = paths(propose(drafter, asking))
    for _ in range(50):
        tree = propose(drafter, asking).clipped(2, 64, VOCAB)
        assert len(tree) == 2
        drafter.observe(asking, tree, TargetRows(np.full(2, 50, np.int32), None), Acceptance((), 50))
    assert paths(propose(drafter, asking)) == before


def test_a_long_prompt() -> None:
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 50_000, 50_000).tolist()
    drafter = prepared(small(vocab_size=50_000))
    answer = prompt[20_000:20_100]
    assert run(drafter, answered("r", prompt, answer), answer) <= 5


@pytest.mark.parametrize("prompt", [[0], [7], [0] * 300, [2] * 300, [0, 1] * 100])
def test_prompts_of_little_content(prompt: list[int]) -> None:
    drafter = prepared()
    answer = [*prompt, *prompt][:200]
    steps = run(drafter, answered("r", prompt, answer), answer)
    assert steps <= max(3, len(answer) // 8)
    assert run(drafter, answered("again", prompt, answer), answer) <= steps


def test_depth_ends_at_the_limit_and_where_the_output_ends() -> None:
    tree = propose(prepared(max_depth=16, frequent_tokens=0), request("r", [5] * 100))
    assert is_chain(tree) and len(tree) == 17
    drafter = prepared()
    asking = request("r", [5] * 100, max_tokens=3)
    assert propose(drafter, asking).depths().max() == 2
    asking.commit([5, 5])
    assert len(propose(drafter, asking)) == 1
    assert len(propose(drafter, request("one", [5] * 100, max_tokens=1))) == 1


def test_requests_that_were_never_proposed_for() -> None:
    drafter = prepared()
    drafter.finish(request("unseen", [1, 2, 3], output=[4]))
    assert paths(propose(drafter, request("other", [1, 2, 3, 1]))) == paths(propose(prepared(), request("r", [1, 2, 3, 1])))
    seen = request("prefilled", [1, 2, 3], output=[4])
    drafter.observe(seen, DraftTree.chain(3, ()), TargetRows(np.array([4], np.int32), None), Acceptance((), 4))
    drafter.finish(seen)
    assert not {seen.request_id, "unseen"} & set(drafter.tracked_requests())
    assert (4,) in paths(propose(drafter, request("next", [1, 2, 3, 1])))  # what it said is remembered


def test_more_ranks_than_rows() -> None:
    drafter = prepared(small(vocab_size=6000), 5000, all_rows=True)
    assert len(propose(drafter, request("r", [*range(6000), 17]))) == 65


def test_a_source_that_always_fails_is_drafted_no_more() -> None:
    drafter = prepared(small(per_row=0.1), history_tokens=0, frequent_tokens=0)
    assert len(propose(drafter, request("before", [1, 10, 1]))) > 1
    for number in range(60):
        asking = request(str(number), [1, 10, 1])
        tree = propose(drafter, asking)
        asking.commit([50])
        drafter.observe(asking, tree, TargetRows(np.full(len(tree), 50, np.int32), None), Acceptance((), 50))
        drafter.finish(asking)
    assert len(propose(drafter, request("after", [1, 10, 1]))) == 1


def test_all_equal_tokens_fill_a_chain() -> None:
    tree = propose(prepared(max_depth=16, frequent_tokens=0), request("r", [5] * 100))
    assert is_chain(tree) and len(tree) == 17
