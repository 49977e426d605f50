"""Prefix reuse changes no output: each is that of an engine that computes the whole prompt, and the reused tokens are counted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.request import FinishReason, Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.kv.prefix_cache import WORTH_COPYING
from tests.helpers.models import FAMILIES, SLOTS, VOCAB, engine_over, prepared, run, tiny_model
from tests.helpers.ranks import BranchingDrafter, TinyGroup

_RNG = np.random.default_rng(12)
SYSTEM = _RNG.integers(1, VOCAB, 40).tolist()
QUESTIONS = [_RNG.integers(1, VOCAB, length).tolist() for length in (9, 1, 17, 5, 12, 3)]
GREEDY = SamplingParams(12, ignore_eos=True)
SAMPLED = SamplingParams(12, temperature=0.9, seed=4, ignore_eos=True)


def engine(family: str = "llama", dtype: str = "float32", strategy: str = "prompt_lookup", **settings: int) -> Engine:
    model = tiny_model(family, dtype)
    return engine_over(model.runner, prepared(build_drafter(strategy, {}), model), **settings)


def ask(
    prompt: Sequence[int], name: str = "r", tenant: str | None = "t", params: SamplingParams = GREEDY, **more: int
) -> Request:
    return Request(name, prompt, params, tenant=tenant, **more)


def alone(prompt: Sequence[int], family: str = "llama", dtype: str = "float32", params: SamplingParams = GREEDY) -> list[int]:
    """What plain decoding says to a private request."""
    return run(engine(family, dtype, "autoregressive"), ask(prompt, tenant=None, params=params))[0]


def cached(*requests: Request) -> list[int]:
    return [request.stats.cached_tokens for request in requests]


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "float32") for family in FAMILIES), *((family, "float64") for family in ("llama", "gemma2"))]
)
def test_every_family_reuses_chats_and_system_prompts(family: str, dtype: str) -> None:
    of = engine(family, dtype, batch=3)
    chat, said = ask(SYSTEM + QUESTIONS[0]), list[int]()
    said += run(of, chat)[0]
    first, system = ask(SYSTEM + QUESTIONS[0] + said + QUESTIONS[1], "chat"), ask(SYSTEM + QUESTIONS[2], "other", params=SAMPLED)
    private = ask(SYSTEM + QUESTIONS[0], "private", None)
    outputs = run(of, first, system, private)
    assert outputs[0] == alone(SYSTEM + QUESTIONS[0] + said + QUESTIONS[1], family, dtype)
    assert outputs[1] == alone(SYSTEM + QUESTIONS[2], family, dtype, SAMPLED)
    assert outputs[2] == said == alone(SYSTEM + QUESTIONS[0], family, dtype)
    # What the last step accepted does not count.
    assert first.stats.cached_tokens >= len(SYSTEM + QUESTIONS[0]) and cached(chat, system, private) == [0, len(SYSTEM), 0]


def test_the_same_prompt_twice_leaves_one_token_to_compute() -> None:
    of = engine()
    first, again = ask(SYSTEM), ask(SYSTEM, params=SAMPLED)
    assert [*run(of, first), *run(of, again)] == [alone(SYSTEM), alone(SYSTEM, params=SAMPLED)]
    assert cached(first, again) == [0, len(SYSTEM) - 1]
    counts = of.counts()
    assert (counts.prefix_queries, counts.prefix_hits) == (2 * len(SYSTEM), len(SYSTEM) - 1)


@pytest.mark.parametrize("strategy", ["autoregressive", "llma", "trie", "jacobi"])
def test_live_requests_share_a_system_prompt_and_are_copied_while_they_decode(strategy: str) -> None:
    of = engine(strategy=strategy, step_tokens=24)
    prompts = [SYSTEM + question for question in QUESTIONS]
    requests = [ask(prompt, str(at), params=(GREEDY, SAMPLED)[at % 2]) for at, prompt in enumerate(prompts)]
    of.add(requests[0])
    while requests[0].num_output < 3:
        of.step()
    for request in requests[1:]:
        of.add(request)
    of.step()
    of.check_integrity()
    assert requests[0].num_output < 12  # it goes on beside those that copied from it
    run(of)
    wanted = [alone(prompt, params=(GREEDY, SAMPLED)[at % 2]) for at, prompt in enumerate(prompts)]
    assert [request.output_ids.tolist() for request in requests] == wanted
    assert cached(*requests) == [0, *[len(SYSTEM)] * 5]


def test_what_comes_at_once_is_computed_once() -> None:
    for step_tokens in (24, 256):  # in chunks, and in one step
        of = engine(batch=4, step_tokens=step_tokens)
        requests = [ask(SYSTEM * 2 + question, str(at)) for at, question in enumerate(QUESTIONS)]
        private = ask(SYSTEM * 2, "private", None)
        outputs = run(of, *requests[:2], private, *requests[2:])
        assert cached(requests[0], private) == [0, 0]
        # Fewer tokens than are worth copying are not worth waiting for.
        assert all(len(SYSTEM) * 2 - WORTH_COPYING < count <= len(SYSTEM) * 2 for count in cached(*requests[1:]))
        assert of.counts().prefix_hits == sum(cached(*requests))
        assert outputs == [alone(request.prompt_ids.tolist()) for request in (*requests[:2], private, *requests[2:])]


def test_a_conversation_of_several_turns_among_others_computes_only_what_is_new() -> None:
    of, text, turns = engine(batch=2), list(SYSTEM), list[Request]()
    for turn, question in enumerate(QUESTIONS[:4]):
        text += question
        turns.append(ask(text, f"chat{turn}"))
        text += run(of, turns[-1], ask([9 + turn] * 20, f"other{turn}", "u"))[0]
    for before, after in itertools.pairwise(turns):
        assert before.num_prompt <= after.stats.cached_tokens < before.num_tokens  # what the last step accepted does not count
    assert [request.output_ids.tolist() for request in turns] == [alone(request.prompt_ids.tolist()) for request in turns]


def test_tenants_and_private_requests_share_nothing() -> None:
    of = engine(batch=4)
    requests = [ask(SYSTEM, str(at), tenant) for at, tenant in enumerate(("a", "b", None, None))]
    outputs = [run(of, request)[0] for request in requests]
    assert cached(*requests) == [0, 0, 0, 0]
    assert of.counts().prefix_queries == 2 * len(SYSTEM)  # private requests do not ask
    again = ask(SYSTEM, "again", "b")
    outputs += run(of, again)
    assert cached(again) == [len(SYSTEM) - 1]
    assert outputs == [alone(SYSTEM)] * 5


def choice(name: str, index: int, siblings: bool = True) -> Request:
    params = SamplingParams(12, temperature=0.9, seed=index, ignore_eos=True)
    return Request(f"{name}/{index}", SYSTEM + QUESTIONS[2], params, siblings=siblings)


def test_the_prompt_of_several_choices_is_computed_once_though_they_are_private() -> None:
    wanted = run(engine(strategy="autoregressive", prefix_caching=False), *(choice("alone", index) for index in range(4)))
    for batch, step_tokens in ((4, 256), (4, 24), (2, 256)):  # in one step, in chunks, more choices than slots
        choices = [choice("a", index) for index in range(4)]
        assert run(engine(batch=batch, step_tokens=step_tokens), *choices) == wanted
        counts = sorted(cached(*choices))
        assert counts[0] == 0 and counts[1] > choices[0].num_prompt - WORTH_COPYING, (batch, step_tokens, counts)


def test_nobody_else_finds_what_the_choices_of_a_prompt_computed() -> None:
    of, prompt = engine(batch=4), SYSTEM + QUESTIONS[2]
    others = [choice("b", 0), choice("a2", 0, siblings=False), ask(prompt, "c", "-")]
    outputs = run(of, choice("a", 0), choice("a", 1), *others)
    assert outputs[0] == outputs[2] == outputs[3] != outputs[1]
    later = [choice("d", 0), choice("a", 3, siblings=False), ask(prompt, "e", None)]
    run(of, *later)
    assert cached(*others, *later) == [0] * 6


def test_nothing_from_before_a_deletion_is_reused() -> None:
    long = SamplingParams(40, ignore_eos=True)
    expected, expected_live = alone(SYSTEM), alone([*SYSTEM, 1, 2, 3], params=long)  # by the same slots, and so before
    of = engine(strategy="trie")
    assert of.histories is not None
    live = ask([*SYSTEM, 1, 2, 3], "live", params=long)
    run(of, ask(SYSTEM, "dead"), ask(SYSTEM, "else", "u"))
    of.add(live)
    of.step()
    history = of.histories.of("t")
    assert history is not None and live.stats.cached_tokens >= len(SYSTEM)
    history.remove(Request("dead", [1], GREEDY).text)
    after, other = ask(SYSTEM, "after"), ask(SYSTEM, "other", "u")
    assert run(of, after, other) == [expected] * 2
    assert cached(after, other) == [0, len(SYSTEM) - 1]  # not from the ended one, nor from the one that lives
    assert live.output_ids.tolist() == expected_live
    again = ask(SYSTEM, "again")
    run(of, again)
    assert cached(again) == [len(SYSTEM) - 1]


def test_more_prompts_are_kept_than_may_run() -> None:
    """Slots beyond those of running requests keep prompts; the one that was used longest ago gives way."""
    prompts = [[at + 1, *SYSTEM[at:]] for at in range(SLOTS + 1)]
    expected = [alone(prompt) for prompt in prompts]
    of = engine(batch=1)
    assert [run(of, ask(prompt, f"a{at}"))[0] for at, prompt in enumerate(prompts)] == expected
    assert of.counts().free_slots == 1
    again = [ask(prompt, f"b{at}", params=(GREEDY, SAMPLED)[at % 2]) for at, prompt in reversed([*enumerate(prompts)])]
    outputs = run(of, *again)  # one at a time; the others wait
    assert outputs == [alone(request.prompt_ids.tolist(), params=request.params) for request in again]
    assert cached(*again) == [*(len(prompt) - 1 for prompt in reversed(prompts[1:])), 0]
    private, stranger = ask(prompts[1], "p", None), ask(prompts[2], "q", "u")
    assert run(of, private, stranger) == [expected[1], expected[2]] and cached(private, stranger) == [0, 0]


def test_ranks_keep_more_prompts_than_may_run_alike() -> None:
    prompts = {f"{turn}{at}": [at + 1, *SYSTEM[at:]] for turn in "ab" for at in range(3)}
    answers = {name: alone(prompt) for name, prompt in prompts.items()}
    with TinyGroup("llama", BranchingDrafter(answers), 2, batch=1) as ranks:
        for turn in "ab":
            requests = [ask(prompts[name], name) for name in prompts if name.startswith(turn)]
            assert ranks.run(requests) == [answers[request.request_id] for request in requests]
        assert cached(*requests) == [request.num_prompt - 1 for request in requests]
        assert ranks.state.losses == ranks.state.disagreements == ranks.state.divergences == 0


def test_the_switch_turns_it_off() -> None:
    model = tiny_model("llama", "float32")
    of = engine_over(model.runner, build_drafter("autoregressive", {}), prefix_caching=False)
    first, again = ask(SYSTEM, "a"), ask(SYSTEM, "b")
    assert [*run(of, first), *run(of, again)] == [alone(SYSTEM)] * 2
    assert cached(first, again) == [0, 0] and of.counts().prefix_queries == 0


def test_preempted_requests_reuse_what_is_left_and_do_not_count_it_as_a_hit() -> None:
    of = engine(batch=2)
    slow = [ask(SYSTEM + question, f"slow{at}", priority=1) for at, question in enumerate(QUESTIONS[:2])]
    for request in slow:
        of.add(request)
    while min(request.num_output for request in slow) < 4:
        of.step()
    before = cached(*slow)
    urgent = [ask(QUESTIONS[2][:4], f"urgent{at}", params=SamplingParams(2, ignore_eos=True)) for at in range(3)]
    outputs = run(of, *urgent)
    assert sum(request.stats.preemptions for request in slow) >= 1
    assert outputs == [alone(QUESTIONS[2][:4])[:2]] * 3
    assert [request.output_ids.tolist() for request in slow] == [alone(SYSTEM + question) for question in QUESTIONS[:2]]
    assert cached(*slow) == before


def test_a_failed_step_leaves_nothing_wrong_behind() -> None:
    of = engine(batch=2, step_tokens=16)
    run(of, ask(SYSTEM, "first"))
    halfway = ask(SYSTEM + QUESTIONS[2] * 2, "halfway")
    of.add(halfway)
    of.step()
    of.abort("halfway", FinishReason.ERROR)
    of.check_integrity()
    again = ask(SYSTEM + QUESTIONS[2] * 2, "again")
    assert run(of, again) == [alone(SYSTEM + QUESTIONS[2] * 2)]
    assert again.stats.cached_tokens > len(SYSTEM)  # the chunk that was computed


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_share_the_steps_reuse_alike(world: int) -> None:
    prompts = {f"{turn}{at}": SYSTEM + question for turn in "ab" for at, question in enumerate(QUESTIONS)}
    answers = {name: alone(prompt) for name, prompt in prompts.items()}
    with TinyGroup("llama", BranchingDrafter(answers), world, batch=3, step_tokens=24) as ranks:
        for turn in "ab":
            requests = [ask(prompts[name], name) for name in prompts if name.startswith(turn)]
            assert ranks.run(requests) == [answers[request.request_id] for request in requests]
            ranks.engine.check_integrity()
            assert min(cached(*requests[turn == "a" :])) >= len(SYSTEM)
        assert ranks.state.losses == ranks.state.disagreements == ranks.state.divergences == 0


def test_a_rank_that_joins_late_has_nothing_to_reuse_and_still_agrees() -> None:
    prompts = {f"{at}": SYSTEM * 2 + question for at, question in enumerate(QUESTIONS[:4])}
    answers = {name: alone(prompt) for name, prompt in prompts.items()}
    with TinyGroup("llama", BranchingDrafter(answers), 2, batch=2) as ranks:
        assert ranks.run([ask(prompts["0"], "0")]) == [answers["0"]]
        ranks.join(2)
        requests = [ask(prompts[name], name) for name in ("1", "2", "3")]
        slow = ask(prompts["0"], "0", priority=1)
        assert ranks.run([slow, *requests], lambda step: ranks.catch_up()) == [
            answers["0"],
            answers["1"],
            answers["2"],
            answers["3"],
        ]
        assert min(cached(*requests)) >= len(SYSTEM) * 2 and ranks.state.ready == (0, 1, 2)
        assert ranks.state.losses == ranks.state.disagreements == 0


def test_check_integrity_finds_wrong_entries_and_forgotten_requests() -> None:
    model = tiny_model("llama", "float32")
    drafter = prepared(build_drafter("llma", {}), model)
    of = engine_over(model.runner, drafter)
    requests = [ask(SYSTEM, "a"), ask(QUESTIONS[0], "b")]
    for request in requests:
        of.add(request)
    while min(request.num_output for request in requests) < 2:
        of.step()
    of.check_integrity()
    slot, prefixes = requests[0].slot, model.runner.cache.prefixes
    assert slot is not None
    kept = prefixes.tokens(slot)
    for wrong in (kept[::-1].copy(), requests[0].tokens):  # other tokens, and one more than are computed
        prefixes.keep(slot, requests[0].scope, wrong)
        with pytest.raises(AssertionError):
            of.check_integrity()
    prefixes.keep(slot, requests[0].scope, kept)
    of.check_integrity()
    assert set(drafter.tracked_requests()) == {"a", "b"}
    drafter.propose([Request("ended", SYSTEM, GREEDY, emitted=[3, 4])], [4])
    with pytest.raises(AssertionError, match="ended"):
        of.check_integrity()
