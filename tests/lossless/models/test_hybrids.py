"""Families some of whose layers keep a state: what comes out is what plain decoding gives, token for token, and ``generate``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider.decoding.drafters.registry import STRATEGIES, build_drafter
from outrider.decoding.request import Request
from outrider.engine.engine import Engine
from outrider.engine.forward import exactness
from outrider.engine.kv.state_cache import StateCache
from tests.helpers.hostile import HostileDrafter
from tests.helpers.models import HYBRIDS, engine_over, prepared, run, tiny_model
from tests.helpers.ranks import BranchingDrafter, TinyGroup
from tests.lossless.models.asked import DTYPES, GREEDY, LONG, MAX_TOKENS, REPEATED, TWICE, Asked, name_of

_QUICK = ("lfm2", "qwen3_5", "falcon_h1")  # one of each rule
_ONE_CALL = ("lfm2", "qwen3_5", "granite4")  # their forwards are one call, those of the others modules'
every_family = pytest.mark.parametrize("family", HYBRIDS)
quick_families = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in _QUICK else pytest.mark.proof) for family in HYBRIDS]
)
ASKED = Asked([7], REPEATED, TWICE, LONG)
PROMPTS, requests, plain = ASKED.prompts, ASKED.requests, ASKED.plain


@every_family
def test_plain_decoding_is_generate_and_auto_gives_its_output(family: str) -> None:
    model, outputs = tiny_model(family, "float32"), plain(family, "float32")
    assert (
        run(engine_over(model.runner, prepared(build_drafter("auto", {}), model), 2, step_tokens=24), *requests(outputs))
        == outputs
    )
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        with torch.inference_mode():
            stock = model.stock
            stock.generation_config.eos_token_id = None
            mask = torch.ones(1, len(prompt))
            given = stock.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False)
        assert output == given[0, len(prompt) :].tolist()
    assert len({tuple(output) for output in outputs}) == len(outputs)  # prompts and parameters matter


@quick_families
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_of_exactness_finds_nothing(family: str, dtype: torch.dtype) -> None:
    runner = tiny_model(family, name_of(dtype)).runner
    assert (runner._whole is not None) == (family in _ONE_CALL)
    assert exactness.check(runner) is None


@quick_families
@pytest.mark.parametrize("dtype", DTYPES)
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


@quick_families
@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_drafts_change_nothing(family: str, dtype: torch.dtype) -> None:
    expected = plain(family, name_of(dtype))
    answers = {str(at): output for at, output in enumerate(expected)}
    for batch in (1, 4):
        engine = engine_over(tiny_model(family, name_of(dtype)).runner, HostileDrafter(answers, batch), batch)
        assert run(engine, *requests()) == expected, batch


@quick_families
def test_prompts_may_be_cut_anywhere(family: str) -> None:
    expected = plain(family, "float32")
    for step_tokens in (4, 5, 7, 13, 31, 64):
        engine = engine_over(tiny_model(family, "float32").runner, build_drafter("llma", {}), 2, step_tokens)
        assert run(engine, *requests(expected)) == expected, step_tokens


@quick_families
@pytest.mark.parametrize("dtype", DTYPES)
def test_preemption_changes_nothing(family: str, dtype: torch.dtype) -> None:
    expected = plain(family, name_of(dtype))
    for tenant in (None, "t"):
        wanted = requests(expected, tenant)
        engine = engine_over(tiny_model(family, name_of(dtype)).runner, build_drafter("llma", {}), 2, step_tokens=16)
        for request in wanted[:4]:
            engine.add(request)
        while wanted[1].num_output < 4:
            engine.step()
        engine._scheduler.preempt(wanted[1])
        assert run(engine, *wanted[4:]) == expected[4:]
        assert [request.output_ids.tolist() for request in wanted] == expected
        assert wanted[1].stats.preemptions == 1


@quick_families
@pytest.mark.parametrize("commit", ["none", "the root again"])
def test_what_was_accepted_and_not_committed_would_be_seen(family: str, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all others here."""
    expected = plain(family, "float32")

    def accept(states: StateCache, slot: int, rows: Sequence[int]) -> None:
        states._paths[slot] = (0,) if commit == "none" else (0,) * len(rows)

    monkeypatch.setattr(StateCache, "accept", accept)
    engine = engine_over(tiny_model(family, "float32").runner, build_drafter("llma", {}), 1)
    if commit == "none":
        engine.add(requests(expected)[1])
        with pytest.raises(RuntimeError, match="the state of slot 0 is at token"):
            _all_steps(engine)
    else:
        assert run(engine, *requests(expected)) != expected


def _all_steps(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@quick_families
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefixes_are_reused_up_to_a_snapshot(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.kv.state_cache._FIRST", 16)
    model, drafter = tiny_model(family, name_of(dtype)), build_drafter("llma", {})
    alone = engine_over(model.runner, build_drafter("autoregressive", {}), 1, prefix_caching=False)
    prompt, others = PROMPTS[3], ([5] * 9, [6] * 12, [8] * 20)
    further = [prompt[:60] + list(other) for other in others]

    def ask(name: str, text: Sequence[int], tenant: str | None = "t") -> Request:
        return Request(name, text, GREEDY, tenant=tenant)

    expected = [run(alone, ask("a", text, None))[0] for text in (prompt, *further)]
    text = prompt + expected[0] + [9] * 5
    on_alone = run(alone, ask("a", text, None))[0]
    model.runner.cache.prefixes.clear()
    engine = engine_over(model.runner, drafter, 3, step_tokens=27)
    first, on = ask("first", prompt), ask("on", text)
    assert run(engine, first)[0] == expected[0]
    assert run(engine, on)[0] == on_alone  # a conversation that goes on, from where the last step of its first turn began
    assert 80 < on.stats.cached_tokens < first.num_tokens
    again = [ask(f"again {at}", prompt) for at in range(2)]
    assert run(engine, *again) == [expected[0]] * 2
    assert [request.stats.cached_tokens for request in again] == [69, 69]  # all but the last
    for at, text in enumerate(further):  # 60 tokens are the same, and snapshots are behind 16, 32 and 64
        request = ask(f"further {at}", text)
        assert run(engine, request)[0] == expected[1 + at]
        assert request.stats.cached_tokens == 32
    private = ask("private", prompt, None)
    stranger = ask("stranger", prompt, "u")
    assert run(engine, private, stranger) == [expected[0]] * 2
    assert (private.stats.cached_tokens, stranger.stats.cached_tokens) == (0, 0)
    single = engine_over(model.runner, build_drafter("llma", {}), 1, step_tokens=27)  # keeps more slots than it runs requests
    for turn in range(2):
        kept = [ask(f"kept {turn} {at}", text) for at, text in enumerate(further)]
        assert run(single, *kept) == expected[1:]
    assert min(request.stats.cached_tokens for request in kept) > 64


@quick_families
def test_a_wrong_snapshot_would_be_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the one before."""
    model = tiny_model(family, "float32")
    engine = engine_over(model.runner, build_drafter("autoregressive", {}), 1)
    first, again = (Request(name, PROMPTS[3], GREEDY, tenant="t") for name in ("first", "again"))
    (expected,) = run(engine, first)
    states = model.runner.cache.states
    assert states is not None
    states._places[states.slots :] = states._places[states.slots :].flip(1)
    monkeypatch.setattr(StateCache, "restore", _restore_from_a_snapshot)
    try:
        assert run(engine, again) != [expected]
    finally:
        model.runner.cache.prefixes.clear()


def _restore_from_a_snapshot(states: StateCache, slot: int, place: int, length: int) -> None:
    assert place >= states.slots and length == 69
    states._places[slot] = states._places[place].view(torch.float32).nan_to_num(0.5, 0.5, -0.5).clamp(-1, 1).view(torch.uint8)
    states._anchors[slot], states._paths[slot] = length, ()


@quick_families
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_share_steps(family: str, dtype: torch.dtype) -> None:
    expected = plain(family, name_of(dtype))
    answers = {str(at): output for at, output in enumerate(expected)}
    with TinyGroup(family, BranchingDrafter(answers), 3, dtype=name_of(dtype), batch=3, step_tokens=96) as group:
        assert group.run(requests(expected)) == expected
        assert group.state.ready == (0, 1, 2) and not group.state.disagreements and not group.state.divergences
        assert any(min(times.rows) > 1 for times in group.times)
