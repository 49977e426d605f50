"""Exactness with a draft model: coupled and greedy drafts give, token for token, what plain decoding gives, whatever the draft
model is, and so do lossy strategies that accept nothing. What the others preserve, a law, is tested in ``tests/decoding``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import build_drafter, build_drafters, parse_strategy
from outrider.decoding.request import PLAIN, FinishReason, Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.draft_model import LocalDraftModel
from tests.helpers.models import CONTEXT, END, SLOTS, VOCAB, engine_over, llama_config, prepared, run, save_model, tiny_model
from tests.helpers.ranks import TinyGroup
from tests.helpers.traffic import Case, Rush, Watch, make_cases

MAX_TOKENS = 20
PROMPTS = [[7], [1, 2, 3] * 12, [9, 30, 9, 31, 12, 9, 30], [5] * 30]
KINDS: dict[str, dict[str, object]] = {
    "hot": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "all": {
        "temperature": 0.9, "repetition_penalty": 1.2, "logit_bias": ((3, 4.0), (17, -100.0)), "top_p": 0.95, "min_tokens": 9,
    },
}  # fmt: skip
EXACT = ("speculative", "speculative:sampling=greedy", "speculative:num_draft_tokens=1")
Folders = dict[str, str]


def config(**changes: object) -> PreTrainedConfig:
    # Tied embeddings make the models repeat what they have just seen, so that they agree in places.
    return llama_config(**{"tie_word_embeddings": True, **changes})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target; a draft model that is nearly the target; and one that has nothing to do with it, of half the context."""
    root = Path(tmp_path_factory.mktemp("models"))
    target = save_model(root / "target", config(), seed=4)
    near = save_model(root / "near", config(), seed=4)
    model, noise = AutoModelForCausalLM.from_pretrained(near, dtype=torch.float32), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.15 * weights.std() * torch.randn(weights.shape, generator=noise)
    model.save_pretrained(near)
    far = save_model(root / "far", config(hidden_size=32, num_hidden_layers=1, max_position_embeddings=48), seed=5)
    return {"target": str(target), "near": str(near), "far": str(far)}


def load(folders: Folders, strategy: str, draft: str = "near", batch: int = 3, dtype: str = "float64", **more: object) -> Engine:
    choice = parse_strategy(strategy)
    speculation = SpeculationOptions(choice.name, 16, dict(choice.options), draft_model=folders[draft], exact=False)
    options_of = EngineOptions(max_running=batch, **more)  # type: ignore[arg-type]
    return Engine.load(ModelOptions(folders["target"], dtype=dtype), options_of, speculation)  # type: ignore[arg-type]


def requests(params: Callable[[int], SamplingParams], prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [Request(str(at), prompt, params(at), tenant=("a", None)[at % 2]) for at, prompt in enumerate(prompts)]


def greedy(at: int) -> SamplingParams:
    return SamplingParams(MAX_TOKENS)


@pytest.fixture(scope="module")
def generated(folders: Folders) -> list[list[int]]:
    """transformers' greedy outputs."""
    model = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float64).eval()
    with torch.inference_mode():
        ids = [model.generate(torch.tensor([p]), max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist() for p in PROMPTS]
    return [all_ids[len(prompt) :] for all_ids, prompt in zip(ids, PROMPTS, strict=True)]


@pytest.fixture(scope="module")
def plain(folders: Folders) -> dict[str, list[list[int]]]:
    engine = load(folders, PLAIN, batch=1)
    return {kind: run(engine, *requests(sampled(kind))) for kind in KINDS}


def sampled(kind: str) -> Callable[[int], SamplingParams]:
    return lambda at: SamplingParams(MAX_TOKENS, seed=50 + at, **KINDS[kind])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["target", "near", "far"])
@pytest.mark.parametrize("strategy", [*EXACT, "speculative:sampling=rejection", "spectr", "mjsd:threshold=1.0"])
def test_greedy_is_transformers_generate(folders: Folders, generated: list[list[int]], strategy: str, draft: str) -> None:
    wanted = requests(greedy)
    engine = load(folders, strategy, draft)
    assert run(engine, *wanted) == generated
    accepted, drafted = (sum(getattr(one.stats, name) for one in wanted) for name in ("accepted", "drafted"))
    assert drafted > 0
    if strategy.startswith("mjsd"):
        assert accepted == 0
    elif draft == "target":  # what was drafted, all is; an end token that was drafted is the target's own then
        assert drafted - accepted <= sum(output[-1:] == [0] for output in generated)
    elif draft == "near":
        assert 0 < accepted < drafted
        assert {name for one in wanted for name in one.stats.accepted_by_source} == {"draft_model"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "draft"), [*((strategy, "near") for strategy in EXACT), ("speculative", "far"), ("mjsd:threshold=1.0", "near")]
)
def test_the_text_is_the_seeds(folders: Folders, plain: dict[str, list[list[int]]], strategy: str, draft: str) -> None:
    engine, accepted, lossy = load(folders, strategy, draft), 0, strategy.startswith("mjsd")
    for kind in ("all",) if lossy else KINDS:
        wanted = requests(sampled(kind))
        assert run(engine, *wanted) == plain[kind], kind
        assert sum(one.stats.drafted for one in wanted) > 0
        accepted += sum(one.stats.accepted for one in wanted)
    assert accepted == 0 if lossy else accepted > 0 or draft == "far"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "speculative",
        "speculative:sampling=rejection",
        "spectr:sequences=1",
        "mjsd:joint_law=warped",
        "mjsd:joint_law=warped,do_sample=true",
    ],
)
def test_a_draft_model_that_is_the_target_is_always_right(folders: Folders, strategy: str) -> None:
    engine = load(folders, strategy, "target")
    wanted = requests(lambda at: SamplingParams(21, 0.9, seed=at, ignore_eos=True))
    run(engine, *wanted)
    for one in wanted:
        assert one.stats.accepted == one.stats.drafted > 0
        assert one.stats.steps == 1 + 20 // 5  # the prefill's token, then five a step


@pytest.mark.slow
def test_drafts_follow_the_requests_own_rules(folders: Folders, plain: dict[str, list[list[int]]]) -> None:
    """With its penalties and its noise the draft model chooses what the target chooses, else it would not."""
    for kind in ("penalties", "all"):
        coupled, own = (requests(sampled(kind)) for _ in range(2))
        assert run(load(folders, "speculative", "target"), *coupled) == plain[kind]
        assert run(load(folders, "speculative:sampling=greedy", "target"), *own) == plain[kind]
        right = [sum(one.stats.accepted for one in many) / sum(one.stats.drafted for one in many) for many in (coupled, own)]
        assert right[0] > 0.95 > right[1], (kind, right)


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_other_families(family: str) -> None:
    """Sliding windows and learned positions, to the last position of the context."""
    model = tiny_model(family, "float64")
    drafter = build_drafter("speculative", {})
    drafter.draft_model = LocalDraftModel(ModelRunner(model.runner.model, SLOTS, CONTEXT + 4), VOCAB, CONTEXT, 64)
    prompts = [[3] * (CONTEXT - 20), list(range(1, 60)), [9]]
    wanted, alone = (requests(lambda at: SamplingParams(20, 0.7, seed=at, ignore_eos=True), prompts) for _ in range(2))
    expected = run(engine_over(model.runner, build_drafter(PLAIN, {}), 1), *alone)
    assert run(engine_over(model.runner, prepared(drafter, model)), *wanted) == expected
    assert all(one.stats.accepted > 10 for one in wanted)


def test_no_budget_is_plain_decoding(folders: Folders, generated: list[list[int]]) -> None:
    options = SpeculationOptions("speculative", 0, draft_model=folders["near"])
    engine = Engine.load(ModelOptions(folders["target"], dtype="float64"), EngineOptions(max_running=3), options)
    wanted = requests(greedy)
    assert run(engine, *wanted) == generated and sum(one.stats.drafted for one in wanted) == 0
    narrow = load(folders, "spectr")
    bounded = [Request(str(at), PROMPTS[at], SamplingParams(MAX_TOKENS, 0.9), max_draft_tokens=at) for at in range(len(PROMPTS))]
    run(narrow, *bounded)
    for one in bounded:
        assert one.stats.drafted <= (one.max_draft_tokens or 0) * one.stats.steps
        assert (one.stats.drafted > 0) == (one.max_draft_tokens != 0)


def test_a_request_beyond_the_draft_models_context_goes_on_without_it(folders: Folders) -> None:
    one = Request("long", [1, 2, 3] * 10, SamplingParams(100, ignore_eos=True))
    two = Request("longer", [4, 5] * 30, SamplingParams(20, ignore_eos=True))
    outputs = run(load(folders, "speculative", "far"), one, two)
    assert [len(output) for output in outputs] == [100, 20] and 0 < one.stats.drafted <= 4 * 18 and two.stats.drafted == 0
    again = [Request(other.request_id, other.prompt_ids, other.params) for other in (one, two)]
    assert run(load(folders, PLAIN), *again) == outputs


@pytest.fixture(scope="module")
def cases(folders: Folders) -> list[Case]:
    alone = load(folders, PLAIN, batch=1, dtype="float32", prefix_caching=False)
    return make_cases(alone, 27, seed=21, longest_prompt=70, max_tokens=20)


@pytest.mark.parametrize("draft", ["near", "far"])
def test_arrivals_aborts_and_preemptions_change_no_answer(folders: Folders, cases: list[Case], draft: str) -> None:
    """Few rows a step: prompts are computed in chunks by both models. Requests have strategies of their own, and share the slots
    of one draft model."""
    others = (PLAIN, "mjsd:threshold=1.0,beams=3", "llma")
    options = SpeculationOptions("speculative", 16, strategies=others, draft_model=folders[draft], exact=False)
    engine = Engine.load(
        ModelOptions(folders["target"], dtype="float32"),
        EngineOptions(max_running=4, max_step_tokens=24, scheduling_policy="priority"),
        options,
    )
    watch, asked = Watch(engine), (None, "mjsd", "llma", None, PLAIN, "speculative")

    def of(number: int) -> dict[str, object]:
        strategy, tenant = asked[number % len(asked)], ("a", "a", "b", None)[number % 4]
        return {"tenant": tenant, "priority": (0, 2, 1, -1)[number % 4], "strategy": strategy}

    Rush(count=40, most_live=9, check_share=0.2).play(watch, cases, seed=3, options=of)
    assert watch.preemptions > 0 and watch.ended[FinishReason.ABORT] > 0 and watch.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["speculative:sampling=rejection", "spectr", "bild:variant=mjsd", "bild", "mjsd"])
def test_what_keeps_no_text_keeps_the_rules_of_requests(folders: Folders, strategy: str) -> None:
    """Lengths, end tokens, banned and barred tokens, in any batch; the text depends on nothing but the seed and the request."""
    engine = load(folders, strategy, batch=4)
    tokenizer = engine.tokenizer
    assert tokenizer is not None and tokenizer.convert_tokens_to_ids(END) == 0
    made = {
        "length": SamplingParams(17, 0.9, seed=1, ignore_eos=True),
        "early": SamplingParams(40, 1.3, seed=2, logit_bias=((0, 7.0),)),
        "late": SamplingParams(40, 1.3, seed=2, logit_bias=((0, 7.0),), min_tokens=12),
        "banned": SamplingParams(30, 1.0, seed=3, ignore_eos=True, logit_bias=tuple((token, -100.0) for token in range(1, 200))),
    }

    def texts(names: Sequence[str]) -> dict[str, list[int]]:
        return dict(zip(names, run(engine, *(Request(name, [1, 2, 3, 4], made[name]) for name in names)), strict=True))

    found = texts(list(made))
    assert len(found["length"]) == 17 and len(found["banned"]) == 30
    assert found["early"][-1] == 0 not in found["early"][:-1] and len(found["early"]) < 12
    assert 0 not in found["late"][:12] and found["late"].count(0) <= 1
    assert not {token for token in found["banned"] if 0 < token < 200}
    for name in made:
        assert texts([name]) == {name: found[name]}, name


def test_a_group_of_ranks_drafts_with_the_leaders_model() -> None:
    model = tiny_model("llama", "float32")
    drafter = build_drafters("speculative", {}, ("llma",))
    drafter.draft_model = LocalDraftModel(ModelRunner(model.runner.model, SLOTS, CONTEXT + 4), VOCAB, CONTEXT, 64)
    wanted, alone = (requests(lambda at: SamplingParams(16, 0.9 * (at % 2), seed=at)) for _ in range(2))
    expected = run(engine_over(model.runner, build_drafter(PLAIN, {}), 1), *alone)
    with TinyGroup("llama", prepared(drafter, model), 2, strategy="speculative") as ranks:
        assert ranks.run(wanted) == expected
        assert ranks.state.losses == ranks.state.disagreements == ranks.state.divergences == 0
    assert all(one.stats.accepted > 0 for one in wanted)
