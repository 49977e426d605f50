"""With adapters, too, every output is that of plain decoding to the last bit, whatever adapters the others of a step have; and
nothing of one adapter is another's: neither KV nor texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import LOSSLESS, WITH_DRAFT_MODEL
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.errors import RequestError
from outrider.engine.forward.batch import Batch, DummySequence, ScheduledDummy, pack
from outrider.engine.loading.weights.adapters import find_adapters
from tests.helpers.models import COMPILED, FAMILIES, LINEARS, VOCAB, llama_config, merge, random_tree, save_adapter, save_model
from tests.helpers.ranks import loaded_group

_RNG = np.random.default_rng(8)
_MOTIF = _RNG.integers(1, 40, 12).tolist()
PROMPTS = (_MOTIF * 3, _RNG.integers(1, VOCAB, 41).tolist(), [*_MOTIF, 2, 3] * 2)
SAMPLINGS = ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 5})
WHO = (None, "all", "some")  # the model alone, an adapter of all its layers, and one of some of them, of another rank
WAYS = ((3, 512), (4, 20))  # requests of a step, and its rows
DRAFTING = sorted(LOSSLESS - set(WITH_DRAFT_MODEL) - {"autoregressive"})
# A forward in one call; one by modules; one by modules whose layers are stored the other way around, in one product for three.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": llama_config(intermediate_size=104, tie_word_embeddings=True),
    "gemma2": FAMILIES["gemma2"],
    "gpt2": FAMILIES["gpt2"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelOptions]:
    made = {}
    for family, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(family)
        path = save_model(folder / "model", config, seed=4)
        stock = AutoModelForCausalLM.from_pretrained(path)
        gpt2 = isinstance(config, GPT2Config)
        targets = (("c_attn", "c_proj", "c_fc"), ("c_attn",)) if gpt2 else (LINEARS, ("k_proj", "down_proj", "up_proj"))
        paths = {
            "all": save_adapter(folder / "all", stock, targets[0], 4, seed=1, ranks={targets[0][1]: 19}),
            "some": save_adapter(folder / "some", stock, targets[1], 20, seed=2, size=0.15, use_rslora=True),
        }
        made[family] = ModelOptions(str(path), adapters={name: str(each) for name, each in paths.items()})
    return made


def load(
    model: ModelOptions, strategy: str, dtype: str = "float32", way: tuple[int, int] = (3, 512), drafts: int | None = None
) -> Engine:
    options, speculation = EngineOptions(max_running=way[0], max_step_tokens=way[1]), SpeculationOptions(strategy, drafts)
    return Engine.load(dataclasses.replace(model, dtype=dtype), options, speculation)  # type: ignore[arg-type]


def ask(who: str | None, prompt: Sequence[int] = PROMPTS[0], name: str = "r", tokens: int = 24, **sampling: float) -> Request:
    return Request(f"{name}-{who}", prompt, SamplingParams(tokens, **sampling), tenant="t", adapter=who)  # type: ignore[arg-type]


def requests(name: str = "r") -> list[Request]:
    """Every prompt, sampling and adapter, so that those of a step have different ones."""
    return [
        ask(who, prompt, f"{name}{number}{place}", **sampling)
        for number, prompt in enumerate(PROMPTS)
        for place, sampling in enumerate(SAMPLINGS)
        for who in WHO
    ]


def run(engine: Engine, wanted: Sequence[Request]) -> list[list[int]]:
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    return [request.output_ids.tolist() for request in wanted]


def plainly(model: ModelOptions, dtype: str) -> list[list[int]]:
    """One request after another, token by token."""
    engine = load(model, "autoregressive", dtype, (1, 512))
    assert engine.info.exact
    return [run(engine, [request])[0] for request in requests()]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.proof)])
@pytest.mark.parametrize("family", CONFIGS)
def test_in_every_company_it_is_plain_decoding(models: dict[str, ModelOptions], family: str, dtype: str) -> None:
    expected = plainly(models[family], dtype)
    assert len({tuple(one) for one in expected}) > len(expected) * 0.7  # the adapters say something
    for way in WAYS:
        engine = load(models[family], "auto", dtype, way)
        assert [run(engine, requests(name)) for name in ("first", "again")] == [expected, expected]
        assert engine.by_strategy()[0].accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.proof)])
@pytest.mark.parametrize("strategy", DRAFTING)
def test_with_every_strategy_it_is_plain_decoding(models: dict[str, ModelOptions], strategy: str, dtype: str) -> None:
    engine = load(models["llama"], strategy, dtype, (4, 64))
    assert [run(engine, requests(name)) for name in ("first", "again")] == [plainly(models["llama"], dtype)] * 2


def test_ranks_that_share_the_steps_have_the_adapters(models: dict[str, ModelOptions]) -> None:
    model = dataclasses.replace(models["llama"], dtype="bfloat16")
    speculation = SpeculationOptions("auto", max_draft_tokens=16, options={"all_rows": True})
    with loaded_group(model, EngineOptions(max_running=3), speculation, 2) as (leader, group):
        assert run(leader, requests()) == plainly(models["llama"], "bfloat16")
        state = group.state(2)
        assert state.ready == (0, 1) and (state.losses, state.divergences, state.disagreements) == (0, 0, 0)
        assert any(len(step.rank_s) == 2 and min(step.rows) > 1 for step in group.times)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_it_says_what_the_merged_weights_say(models: dict[str, ModelOptions], family: str) -> None:
    model, engine = models[family], load(models[family], "auto")
    for who in WHO:
        merged = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager")
        if who is not None:
            (file,) = [each for each in find_adapters(model, merged.config) if each.name == who]
            merge(merged, file.read().factors)
        for prompt in PROMPTS:
            given = run(engine, [ask(who, prompt, ignore_eos=True)])[0]
            ids = torch.tensor([prompt])
            expected = merged.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert given == expected[0, len(prompt) :].tolist()


def _texts() -> Iterator[tuple[DummySequence, str | None]]:
    tokens = np.random.default_rng(0).integers(1, VOCAB, 60).astype(np.int32)
    for slot, who in enumerate((None, "all", "some", "all")):
        yield DummySequence(slot, tokens[slot : slot + 30 + slot], who), who


@pytest.mark.slow
@pytest.mark.parametrize("by_modules", [False, True])
@pytest.mark.parametrize("dtype", COMPILED)
def test_a_row_has_the_same_bits_beside_any_others(models: dict[str, ModelOptions], dtype: torch.dtype, by_modules: bool) -> None:
    """Rows without an adapter those that they have in a forward in which nobody has one."""
    engine = load(models["llama"], "autoregressive", str(dtype).removeprefix("torch."), (4, 512))
    runner = engine._executor.runner  # type: ignore[attr-defined]
    assert runner._whole is not None
    if by_modules:
        runner._whole = None
    rng = np.random.default_rng(1)
    trees = [random_tree(rng, int(line.tokens[-1]), 9) for line, _ in _texts()]

    def logits(*slots: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        chosen = [each for each, _ in _texts() if each.slot in slots]
        runner.forward(pack([ScheduledDummy(line, 0, 11, None) for line in chosen]))
        batch: Batch = pack([ScheduledDummy(line, 11, len(line.tokens), trees[line.slot]) for line in chosen])
        entries = [torch.stack(list(runner.cache.entries(line.slot, 11))).clone() for line in chosen]
        return runner.forward(batch).clone(), entries

    alone = [logits(slot) for slot in range(4)]
    for slots in ((0, 1, 2, 3), (1, 2), (0, 3), (1, 3)):
        together, entries = logits(*slots)
        assert torch.equal(together, torch.cat([alone[slot][0] for slot in slots]))
        assert all(torch.equal(one, alone[slot][1][0]) for one, slot in zip(entries, slots, strict=True))


def test_kv_is_reused_within_an_adapter_alone(models: dict[str, ModelOptions]) -> None:
    engine, again = load(models["llama"], "prompt_lookup", way=(6, 512)), "again"
    first, second = ([ask(who, name=name) for who in WHO] for name in ("first", again))
    outputs = [run(engine, [request])[0] for request in first]
    assert [request.stats.cached_tokens for request in first] == [0, 0, 0]
    assert [run(engine, [request])[0] for request in second] == outputs
    assert [request.stats.cached_tokens for request in second] == [len(PROMPTS[0]) - 1] * 3


def test_texts_are_kept_by_adapter(models: dict[str, ModelOptions]) -> None:
    engine = load(models["llama"], "auto")
    said = [run(engine, [ask(who, PROMPTS[1], ignore_eos=True, tokens=20 + place)])[0] for place, who in enumerate(WHO)]
    assert engine.histories is not None and [len(one) for one in said] == [20, 21, 22]
    histories = [engine.histories.of(name) for name in ("t", "t:all", "t:some")]
    assert [history.num_tokens for history in histories if history is not None] == [20, 21, 22]


@pytest.mark.parametrize("strategy", ["trie", "llma", "recycling", "racer"])
def test_what_an_adapter_said_is_drafted_for_it_alone(models: dict[str, ModelOptions], strategy: str) -> None:
    """The first request of an adapter goes as if nobody else had asked, the second one faster."""

    def steps(engine: Engine, name: str) -> int:
        request = ask("all", PROMPTS[1], name, 60)
        run(engine, [request])
        return request.stats.steps

    fresh, used = (load(models["llama"], strategy, drafts=8) for _ in range(2))
    for number in range(3):
        run(used, [ask(who, PROMPTS[1], str(number), 60) for who in (None, "some")])
    assert steps(used, "one") == steps(fresh, "one") > steps(used, "two")


def test_an_adapter_that_is_not_there_is_refused(models: dict[str, ModelOptions]) -> None:
    engine = load(models["llama"], "autoregressive")
    with pytest.raises(RequestError, match="'none' does not exist; available: all, some"):
        engine.add(ask("none"))
    assert not engine.has_work
