"""Frequencies that depend on the length of a text: what comes out is what plain decoding and ``generate`` give.

Texts end below the border, cross it, begin at it and begin beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import STRATEGIES, build_drafter
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.forward import exactness
from outrider.engine.forward.rope import LengthRope
from outrider.engine.kv.kv_cache import SlotCache
from outrider.engine.kv.prefix_cache import PrefixCache
from outrider.engine.scheduling.planner import SlotPlacement
from outrider.engine.scheduling.scheduler import Scheduler
from tests.helpers.hostile import HostileDrafter
from tests.helpers.models import BORDER, ROPES, VOCAB, engine_over, nearly, prepared, run, save_model, tiny_model
from tests.helpers.ranks import BranchingDrafter, TinyGroup, rank_runner
from tests.lossless.models.asked import DTYPES, LONG, MAX_TOKENS, REPEATED, TWICE, Asked, name_of

_QUICK = "phi3_long"
FAMILIES = pytest.mark.parametrize("family", ROPES)
# Every family with every type is a long proof.
EVERY_CASE = pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, *dtype.values, marks=[*dtype.marks, *(() if family == _QUICK else marks)])
        for family in ROPES
        for dtype, marks in zip(DTYPES, ([], [pytest.mark.proof]), strict=True)
    ],
)
RECOMPUTING = pytest.mark.parametrize("family", [_QUICK, "phimoe_long"])
ASKED = Asked([7], REPEATED, TWICE, LONG[:BORDER], LONG[: BORDER + 1], LONG, ignore_eos=True)
PROMPTS, requests, plain = ASKED.prompts, ASKED.requests, ASKED.plain


@FAMILIES
def test_plain_decoding_is_generate(family: str) -> None:
    outputs = plain(family, "float32")
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        stock = deepcopy(tiny_model(family, "float32").stock)  # dynamic rope goes on with the frequencies of the text before
        stock.generation_config.eos_token_id = None
        mask = torch.ones(1, len(prompt))
        with torch.inference_mode():
            given = stock.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False)
        assert output == given[0, len(prompt) :].tolist(), len(prompt)
    assert len({tuple(output) for output in outputs}) == len(outputs)  # prompts and parameters matter


@EVERY_CASE
def test_the_checks_of_the_start_find_nothing(family: str, dtype: torch.dtype) -> None:
    runner = tiny_model(family, name_of(dtype)).runner
    assert exactness.check_attention(runner) is None
    assert exactness.check(runner) is None


@EVERY_CASE
def test_every_strategy_gives_the_plain_output(family: str, dtype: torch.dtype) -> None:
    model, expected = tiny_model(family, name_of(dtype)), plain(family, name_of(dtype))
    found = {}
    for at, strategy in enumerate(sorted(STRATEGIES)):
        wanted = requests(expected)
        # Fewer slots than requests, and prompts in chunks.
        engine = engine_over(model.runner, prepared(build_drafter(strategy, {}), model), 1 + at % 3, step_tokens=24 + at)
        assert run(engine, *wanted) == expected, strategy
        found[strategy] = sum(request.stats.accepted for request in wanted)
    assert min(found[strategy] for strategy in ("auto", "llma")) > 0, found  # else nothing was shown


@EVERY_CASE
def test_hostile_drafts_change_nothing(family: str, dtype: torch.dtype) -> None:
    expected = plain(family, name_of(dtype))
    answers = {str(at): output for at, output in enumerate(expected)}
    for batch in (1, 4):
        engine = engine_over(tiny_model(family, name_of(dtype)).runner, HostileDrafter(answers, batch), batch)
        assert run(engine, *requests()) == expected, batch


@EVERY_CASE
def test_prompts_may_be_cut_anywhere(family: str, dtype: torch.dtype) -> None:
    expected = plain(family, name_of(dtype))
    for step_tokens in (4, 13, 31):
        engine = engine_over(tiny_model(family, name_of(dtype)).runner, build_drafter("llma", {}), 2, step_tokens)
        assert run(engine, *requests(expected)) == expected, step_tokens
    cut = rank_runner(family, name_of(dtype), 0, fixed_rows=5)  # each forward of a step has so many rows
    assert run(engine_over(cut, build_drafter("llma", {}), 3), *requests(expected)) == expected


@EVERY_CASE
def test_preemption_changes_nothing(family: str, dtype: torch.dtype) -> None:
    expected = plain(family, name_of(dtype))
    for tenant in (None, "t"):
        for reached in (1, 4, 20):  # the third prompt has 37 tokens: before it crosses, just then, and after
            wanted = requests(expected, tenant)
            engine = engine_over(tiny_model(family, name_of(dtype)).runner, build_drafter("llma", {}), 2, step_tokens=16)
            for request in wanted[1:4]:
                engine.add(request)
            while wanted[2].num_output < reached:
                engine.step()
            engine._scheduler.preempt(wanted[2])
            others = [*wanted[:1], *wanted[4:]]
            assert run(engine, *others) == [*expected[:1], *expected[4:]]
            assert [request.output_ids.tolist() for request in wanted] == expected
            assert wanted[2].stats.preemptions == 1


@RECOMPUTING
def test_a_text_that_crosses_is_computed_once_more_in_its_slot_while_others_go_on(family: str) -> None:
    expected = plain(family, "float32")
    wanted = requests()
    engine = engine_over(tiny_model(family, "float32").runner, build_drafter("autoregressive", {}), 2, step_tokens=8)
    one, other = wanted[2], wanted[0]
    engine.add(one)
    while one.num_tokens < BORDER:
        engine.step()
    engine.add(other)
    while one.num_tokens == BORDER:
        engine.step()
    slot, before, steps = one.slot, other.num_output, 0
    assert (one.num_tokens, one.num_computed) == (BORDER + 1, 0)
    while one.num_tokens == BORDER + 1:
        engine.step()
        engine.check_integrity()
        steps += 1
    assert one.slot == slot and not one.stats.preemptions
    assert steps >= BORDER // 8 and other.num_output == before + steps  # a token in each step, beside the chunks
    assert run(engine) == [] and [one.output_ids.tolist(), other.output_ids.tolist()] == [expected[2], expected[0]]


# Lengths of prompts of one tenant, one after another, tokens wanted, and how many of the prompt are there by then. Of dynamic
# rope the fifth finds none: there each length of a prompt has frequencies of its own.
_SHARING = ((30, 4, 0), (38, 1, 30), (60, 24, 0), (60, 24, 59), (64, 24, 60), (35, 4, 34), (35, 24, 34))
_OF_DYNAMIC = {4: 0}


def sharing(family: str, dtype: str) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """What each of ``_SHARING`` says alone, and with what the ones before it have left, and the tokens that it reused."""
    model = tiny_model(family, dtype)

    def ask(at: int, tenant: str | None = "t", answers: Sequence[Sequence[int]] = ()) -> Request:
        size, count, _ = _SHARING[at]
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        return Request(str(at), LONG[:size], params, [nearly(answer) for answer in answers], tenant=tenant)

    alone = engine_over(model.runner, build_drafter("autoregressive", {}), 1)
    expected = [run(alone, ask(at, None))[0] for at in range(len(_SHARING))]
    model.runner.cache.prefixes.clear()
    engine = engine_over(model.runner, build_drafter("llma", {}), 4, step_tokens=27)
    asked = [ask(at, answers=[output]) for at, output in enumerate(expected)]
    try:
        given = [run(engine, request)[0] for request in asked]
    finally:
        model.runner.cache.prefixes.clear()
    return expected, given, [request.stats.cached_tokens for request in asked]


@EVERY_CASE
def test_prefixes_are_reused_by_texts_of_the_same_frequencies_alone(family: str, dtype: torch.dtype) -> None:
    expected, given, cached = sharing(family, name_of(dtype))
    assert given == expected
    others = _OF_DYNAMIC if family == "llama_dynamic" else {}
    assert cached == [others.get(at, count) for at, (_, _, count) in enumerate(_SHARING)]


@FAMILIES
def test_what_is_reused_across_the_border_would_be_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the one before."""
    place = SlotCache.place
    monkeypatch.setattr(SlotCache, "place", lambda cache, tokens, scope, free: place(cache, tokens, scope and "all", free))
    keep = PrefixCache.keep
    monkeypatch.setattr(PrefixCache, "keep", lambda held, slot, scope, tokens: keep(held, slot, scope and "all", tokens))
    expected, given, cached = sharing(family, "float32")
    assert given != expected and cached[2] > 0


@EVERY_CASE
def test_ranks_share_steps(family: str, dtype: torch.dtype) -> None:
    expected = plain(family, name_of(dtype))
    answers = {str(at): output for at, output in enumerate(expected)}
    for world in (2, 3):
        with TinyGroup(family, BranchingDrafter(answers), world, dtype=name_of(dtype), batch=3, step_tokens=96) as group:
            for tenant in (None, "t"):
                assert group.run(requests(expected, tenant)) == expected
            assert len(group.state.ready) == world and not group.state.disagreements and not group.state.divergences
            assert any(min(times.rows) > 1 for times in group.times)


@FAMILIES
def test_a_draft_model_drafts_up_to_the_border(family: str, tmp_path: Path) -> None:
    """The target drafts for itself, both loaded from a folder."""
    folder = str(save_model(tmp_path, ROPES[family], seed=1))
    options, running = ModelOptions(folder, dtype="float32"), EngineOptions(max_running=3)
    alone = Engine.load(options, running, SpeculationOptions("autoregressive"))
    assert alone.info.exact and alone.info.max_model_len > BORDER + MAX_TOKENS
    expected = run(alone, *requests())
    wanted = requests()
    assert run(Engine.load(options, running, SpeculationOptions("speculative", 16, {}, draft_model=folder)), *wanted) == expected
    drafted = [request.stats.drafted for request in wanted]
    assert min(drafted[:3]) > 0 and not any(drafted[3:6]), drafted  # prompts below the border, and from there on
    assert sum(request.stats.accepted for request in wanted) > sum(drafted) // 2


@pytest.mark.parametrize("missing", ["recomputation", "the limit of drafts"])
@RECOMPUTING
def test_what_is_missing_would_be_seen(family: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all others here."""
    expected, model = plain(family, "float32"), tiny_model(family, "float32")
    if missing == "recomputation":
        monkeypatch.setattr(Scheduler, "recompute", lambda self, request: None)
        monkeypatch.setattr(SlotPlacement, "crosses", lambda self, request: False)
    else:
        monkeypatch.setattr(LengthRope, "depth", lambda self, request: VOCAB)
    engine = engine_over(model.runner, build_drafter("llma", {}), 4)
    assert run(engine, *requests(expected)) != expected
