"""Exactness of lookahead-parallel groups: whatever number of ranks shares the steps, whoever joins or leaves meanwhile, each
token and each log-probability is that of plain decoding on one replica, which ``test_models.py`` compares with ``generate``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from outrider.decoding.drafters.registry import STRATEGIES, build_drafter, build_drafters
from outrider.decoding.jit import NATIVE
from outrider.decoding.request import PLAIN, FinishReason, Request, SamplingParams, TokenLogprob
from tests.helpers.hostile import HostileDrafter
from tests.helpers.models import CONTEXT, VOCAB, engine_over, nearly, prepared, tiny_model
from tests.helpers.ranks import PATIENT, BranchingDrafter, TinyGroup

DTYPE = "float32"
TOLERANCE = 1e-5
MAX_TOKENS = 24
WORLDS = (1, 2, 3, 4)
_RNG = np.random.default_rng(5)
_MOTIF = _RNG.integers(1, 40, 15).tolist()
_LONG = _RNG.integers(1, VOCAB, 90).tolist()
PROMPTS = ([7], [1, 2, 3], [1, 2, 3, 4] * 6 + [1, 2], _MOTIF * 2 + _MOTIF[:7], _LONG, [5] * 64)
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
_ALL = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": ((3, 2.0), (0, -5.0))}
CASES = (
    *((prompt, GREEDY) for prompt in PROMPTS),
    (PROMPTS[0], SamplingParams(MAX_TOKENS, temperature=0.3, seed=3, logprobs=3)),
    (PROMPTS[3], SamplingParams(MAX_TOKENS, temperature=1.2, seed=5, top_k=20, min_p=0.02)),
    (PROMPTS[2], SamplingParams(MAX_TOKENS, temperature=0.8, seed=7, top_p=0.9, min_tokens=12, logprobs=2, **_ALL)),  # type: ignore[arg-type]
    (PROMPTS[3], SamplingParams(MAX_TOKENS, min_tokens=9, logprobs=0, **_ALL)),  # type: ignore[arg-type]
    (PROMPTS[4], SamplingParams(1, logprobs=1)),
    (PROMPTS[1], SamplingParams(MAX_TOKENS, stop_token_ids=tuple(range(1, VOCAB, 12)))),
)
BRANCHING = ("adapld", "auto", "jacobi", "ngrammys", "racer", "recycling", "sam", "trie")  # what drafts more than one chain


def requests(
    answers: Sequence[Sequence[int]] = (), cases: Sequence[tuple[Sequence[int], SamplingParams]] = CASES, prefix: str = ""
) -> list[Request]:
    """New requests of several tenants; ``answers`` make references of which parts can be copied."""
    tenants = ("a", "a", "b", None)
    return [
        Request(
            f"{prefix}{at}", prompt, params, [prompt[::-1], *map(nearly, answers[at : at + 1])], tenant=tenants[at % len(tenants)]
        )
        for at, (prompt, params) in enumerate(cases)
    ]


@cache
def plain(family: str = "llama") -> tuple[list[list[int]], list[list[TokenLogprob]]]:
    """Outputs and log-probabilities of plain decoding on one replica, one request at a time."""
    engine = engine_over(tiny_model(family, DTYPE).runner, build_drafter("autoregressive", {}), 1)
    wanted, logprobs = requests(), {str(at): list[TokenLogprob]() for at in range(len(CASES))}
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            logprobs[output.request_id] += output.logprobs or ()
    return [request.output_ids.tolist() for request in wanted], list(logprobs.values())


def group(strategy: str, world: int, family: str = "llama", **settings: int) -> TinyGroup:
    drafter = prepared(build_drafter(strategy, {}), tiny_model(family, DTYPE))
    return TinyGroup(family, drafter, world, dtype=DTYPE, strategy=strategy, **settings)


def hostile(world: int, family: str = "llama", seed: int = 0, **settings: int) -> TinyGroup:
    answers = {str(at): output for at, output in enumerate(plain(family)[0])}
    return TinyGroup(family, HostileDrafter(answers, seed), world, dtype=DTYPE, **settings)


def check(ranks: TinyGroup, family: str = "llama") -> list[Request]:
    """Runs all cases; outputs and log-probabilities are plain decoding's."""
    expected, expected_logprobs = plain(family)
    wanted = requests(expected)
    outputs, logprobs = ranks.answers(wanted)
    assert outputs == expected
    same_logprobs(logprobs, expected_logprobs)
    assert ranks.state.losses == ranks.state.disagreements == ranks.state.divergences == 0
    return wanted


def same_logprobs(ours: Sequence[Sequence[TokenLogprob]], theirs: Sequence[Sequence[TokenLogprob]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
        assert [[token for token, _ in entry.top] for entry in one] == [[token for token, _ in entry.top] for entry in other]
        np.testing.assert_allclose(values(one), values(other), atol=TOLERANCE, rtol=0)


def values(entries: Sequence[TokenLogprob]) -> list[float]:
    return [value for entry in entries for value in (entry.logprob, *(value for _, value in entry.top))]


def test_the_cases_differ() -> None:
    outputs, logprobs = plain()
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert any(len(output) < MAX_TOKENS and output[-1] % 12 == 1 for output in outputs)  # a stop token was met
    assert sum(map(len, logprobs)) > 2 * MAX_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_on_every_number_of_ranks(strategy: str, world: int) -> None:
    with group(strategy, world) as ranks:
        wanted = check(ranks)
        accepted = sum(request.stats.accepted for request in wanted)
        assert (accepted > 0) == (strategy != "autoregressive")  # else the comparison would show nothing
        assert ranks.state.world_size == world and ranks.state.ready == tuple(range(world))
        together = sum(len(step.rank_s) == world for step in ranks.times)
        assert together > len(ranks.times) // 4 or strategy not in BRANCHING  # ranks that have no branch answer nothing


@pytest.mark.parametrize("strategy", BRANCHING)
def test_ranks_share_the_work(strategy: str) -> None:
    with group(strategy, 3) as ranks:
        check(ranks)
        decoding = [step for step in ranks.times if step.emitted]
        assert all(len(step.rows) == len(step.recomputed) == len(step.rank_s) for step in decoding)
        wide = [step for step in decoding if len(step.rows) == 3 and min(step.rows) > 1]
        assert len(wide) > len(decoding) // 4  # not only the tree of a lucky moment had branches for everyone
        # What another rank's part had and rank 0 lacks, rank 0 computes as the spine of its next step, and the other way round.
        recomputed = np.sum([step.recomputed for step in wide], axis=0)
        assert (recomputed > 0).all(), recomputed


@pytest.mark.parametrize("world", [2, 4])
def test_trees_grow_with_the_ranks(world: int) -> None:
    def largest(ranks: TinyGroup) -> int:
        with ranks:
            check(ranks)
            return max(sum(step.rows) for step in ranks.times)

    assert largest(group("trie", world)) > largest(group("trie", 1)) * world * 0.6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "hostile"])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma2", "qwen3", "mixtral"])
def test_model_families_on_three_ranks(family: str, strategy: str) -> None:
    with hostile(3, family) if strategy == "hostile" else group(strategy, 3, family) as ranks:
        wanted = check(ranks, family)
        assert sum(request.stats.accepted for request in wanted) > 0


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_hostile_drafts_change_nothing(world: int, batch: int) -> None:
    with hostile(world, seed=world, batch=batch) as ranks:
        wanted = check(ranks)
        assert sum(request.stats.accepted for request in wanted) > MAX_TOKENS


@pytest.mark.parametrize("strategy", ["auto", "jacobi", "trie"])
def test_prompts_in_chunks_change_nothing(strategy: str) -> None:
    with group(strategy, 3, step_tokens=16) as ranks:
        check(ranks)
        # A chunk of 16, and of four requests what the last step accepted elsewhere and what a part repeats of the tree.
        assert max(max(step.rows) for step in ranks.times) < 64


def test_a_more_urgent_request_takes_the_slot_of_another() -> None:
    expected = plain()[0]
    with hostile(3, batch=2) as ranks:
        wanted = requests(expected)
        slow, urgent = wanted[:3], wanted[3:]
        for request in urgent:
            request.priority = -1

        def between(step: int) -> None:
            if step == 4:
                for request in urgent:
                    ranks.engine.add(request)

        ranks.run(slow, between)
        assert [request.output_ids.tolist() for request in wanted] == expected
        assert sum(request.stats.preemptions for request in slow) > 0
        assert ranks.state.disagreements == 0


def test_requests_that_are_aborted_leave_the_others_alone() -> None:
    expected = plain()[0]
    with hostile(3) as ranks:
        wanted = requests(expected)

        def between(step: int) -> None:
            if step in (2, 5, 7):
                ranks.engine.abort(str(step))

        ranks.run(wanted, between)
        for request, output in zip(wanted, expected, strict=True):
            if request.finish_reason is FinishReason.ABORT:
                assert request.output_ids.tolist() == output[: request.num_output]
            else:
                assert request.output_ids.tolist() == output
        assert 0 < sum(request.finish_reason is FinishReason.ABORT for request in wanted) <= 3


def test_ids_that_come_again_are_other_requests() -> None:
    """The same id with another prompt, then with another seed: nothing is left on the ranks of what it stood for before."""
    expected = plain()[0]
    with hostile(3) as ranks:
        for at in (2, 8, 3, 6, 7):
            request = Request("one", *CASES[at])
            assert ranks.run([request]) == [expected[at]]
        assert ranks.state.losses == 0


@pytest.mark.parametrize("strategy", ["auto", "jacobi", "recycling"])
def test_ranks_that_join_late_take_part(strategy: str) -> None:
    """The first joins beside running requests and has all of their texts to compute, the second when there is nothing to do."""
    expected, expected_logprobs = plain()
    with group(strategy, 1) as ranks:
        ranks.join(1)

        def between(step: int) -> None:
            ranks.catch_up()
            if step == 3:
                ranks.join(2)

        outputs, logprobs = ranks.answers(requests(expected), between)
        assert outputs == expected
        same_logprobs(logprobs, expected_logprobs)
        widths = [len(step.rank_s) for step in ranks.times]
        assert max(widths[:3]) <= 2 and widths.count(3) > len(widths) // 4
        assert ranks.state.ready == (0, 1, 2) and ranks.state.refilling == ()


@pytest.mark.parametrize("strategy", ["auto", "jacobi", "recycling"])
def test_ranks_may_leave_and_come_back(strategy: str) -> None:
    expected, expected_logprobs = plain()
    seen: list[tuple[int, ...]] = []
    with group(strategy, 4) as ranks:

        def between(step: int) -> None:
            ranks.catch_up()
            seen.append(ranks.state.ready)
            if step == 3:
                ranks.leave(2)
            if step == 6:
                ranks.leave(1)
                ranks.leave(3)
            if step == 10:
                ranks.join(2)

        outputs, logprobs = ranks.answers(requests(expected), between)
        assert outputs == expected
        same_logprobs(logprobs, expected_logprobs)
        assert {(0, 1, 2, 3), (0, 1, 3), (0,), (0, 2)} <= set(seen)
        assert ranks.state.losses == 0


def test_more_ranks_than_branches() -> None:
    """One chain cannot be dealt: one rank has it, the others have the root at most, and all agree."""
    with group("llma", 4) as ranks:
        wanted = check(ranks)
        assert sum(request.stats.accepted for request in wanted) > 0
        assert max(sorted(step.rows)[-1] for step in ranks.times) > 1


def test_contexts_filled_to_the_last_position() -> None:
    """Prompts that leave the output just its room, on ranks whose trees are several times as large."""
    full = _RNG.integers(1, VOCAB, CONTEXT - 1).tolist()
    cases = (
        (full[13:], SamplingParams(12 + 2, ignore_eos=True)),
        (full, SamplingParams(1)),
        ([0] * (CONTEXT - 12), SamplingParams(12, ignore_eos=True, temperature=0.3, seed=8)),
    )
    engine = engine_over(tiny_model("gpt2", DTYPE).runner, build_drafter("autoregressive", {}), 1)
    alone = requests(cases=cases)
    for request in alone:
        engine.add(request)
        while engine.has_work:
            engine.step()
    expected = [request.output_ids.tolist() for request in alone]
    for drafter in (HostileDrafter({str(at): output for at, output in enumerate(expected)}, 1), "jacobi", "auto"):
        made = prepared(build_drafter(drafter, {}), tiny_model("gpt2", DTYPE)) if isinstance(drafter, str) else drafter
        with TinyGroup("gpt2", made, 4) as ranks:
            assert ranks.run(requests(expected, cases)) == expected


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="numba is not installed")
@pytest.mark.parametrize(("strategy", "fixed_rows"), [("auto", None), ("jacobi", None), ("trie", None), ("auto", 16)])
def test_ranks_give_every_bit_of_plain_decoding_in_half_precision(strategy: str, fixed_rows: int | None) -> None:
    """Outputs, and log-probabilities to the last digit: rows on a rank with others than on one replica have the same bits."""
    found = []
    for world, drafter in ((1, "autoregressive"), (3, strategy)):
        ready = prepared(build_drafter(drafter, {}), tiny_model("qwen3", "bfloat16"))
        rows = None if world == 1 else fixed_rows  # forwards of any number of rows and of sixteen say the same, too
        with TinyGroup("qwen3", ready, world, dtype="bfloat16", check_steps=1, strategy=drafter, fixed_rows=rows) as ranks:
            wanted = requests([output for outputs, _ in found for output in outputs])
            found.append(ranks.answers(wanted))
            assert ranks.state.ready == tuple(range(world))
            assert ranks.state.losses == ranks.state.disagreements == ranks.state.divergences == 0
            assert world == 1 or any(len(step.rank_s) == world for step in ranks.times)
    assert found[0] == found[1]


def test_requests_ask_for_strategies_and_bounds_of_their_own() -> None:
    """Every strategy with each bound, among others in one step; answers are references that can be copied."""
    world, expected = 3, plain()[0]
    drafter = prepared(build_drafters("auto", {"all_rows": True}, sorted(STRATEGIES)), tiny_model("llama", DTYPE))
    asked, answers = list[Request](), list[list[int]]()
    kinds = ((None, "a"), (3, "b"), (100, None))
    for at, (strategy, (bound, tenant)) in enumerate(itertools.product((None, *sorted(STRATEGIES)), kinds)):
        case = at % len(CASES)
        answers.append(expected[case])
        references = [expected[case]]
        asked.append(Request(str(at), *CASES[case], references, tenant=tenant, strategy=strategy, max_draft_tokens=bound))
    with TinyGroup("llama", drafter, world, dtype=DTYPE, strategy="auto") as ranks:
        assert ranks.run(asked) == answers
        assert ranks.state.losses == ranks.state.disagreements == ranks.state.divergences == 0
        ranks.engine.check_integrity()
    for name in (None, "auto", "llma", "suffix", "trie"):
        assert sum(one.stats.accepted for one in asked if one.strategy == name) > 0, name
    assert sum(one.stats.drafted for one in asked if one.strategy == PLAIN) == 0
    assert all(one.max_draft_tokens != 3 or one.stats.drafted <= 3 * world * one.stats.steps for one in asked)


def test_parts_take_turns_in_being_right() -> None:
    """Any rank may be the one that knows what comes: the others lack what it accepted, and compute it as their next spine."""
    answers = {str(at): output for at, output in enumerate(plain()[0])}
    for world in (2, 3, 4):
        with TinyGroup("llama", BranchingDrafter(answers), world, dtype=DTYPE) as ranks:
            wanted = check(ranks)
            assert max(request.stats.tokens_per_step(request.num_output) for request in wanted) > 2.5
            recomputed = np.array([step.recomputed for step in ranks.times if len(step.recomputed) == world])
            assert len(recomputed) > len(ranks.times) // 2
            assert (recomputed.sum(0) > MAX_TOKENS).all(), recomputed.sum(0)  # every rank, the leader among them


def test_steps_that_are_not_shared_change_nothing() -> None:
    """An adaptive group takes both ways in turns; ranks that have no part of a step keep up and take part in the next."""
    expected = plain()[0]
    drafter = prepared(build_drafter("auto", {}), tiny_model("llama", DTYPE))
    with TinyGroup("llama", drafter, 3, dtype=DTYPE, options=replace(PATIENT, adaptive=True), batch=1) as ranks:
        for at in range(3):
            assert ranks.run(requests(expected, prefix=f"{at}/")) == expected
        wide = [len(step.rank_s) > 1 for step in ranks.times]
        assert any(wide) and not all(wide) and any(wide[wide.index(True) + 24 :])
        assert ranks.state.ready == (0, 1, 2) and ranks.state.losses == ranks.state.disagreements == 0
