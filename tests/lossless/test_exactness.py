"""Outputs are plain decoding's to the last bit, in the types and through the cuts where rounding else decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import LOSSLESS, WITH_DRAFT_MODEL
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.sources.embeddings import signs_of
from outrider.engine.cpu import linear as row_linear
from outrider.engine.cpu.fused_forward import FusedForward
from outrider.engine.engine import Engine
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward import cached_checks, exactness
from outrider.engine.forward.attention import TREE_ATTENTION, StepContext
from outrider.engine.forward.batch import AttentionCall, Batch, SequenceRows
from outrider.engine.forward.patches import RowActivation
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.forward.runners import make_runner
from tests.helpers.models import CONTEXT, FAMILIES, VOCAB, llama_config, save_model

MAX_TOKENS = 32
# What a request may ask for, and how requests meet: a row's company, place and cuts all change.
SAMPLINGS = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.1, "top_k": 20, "seed": 2},
    {"temperature": 0.7, "top_p": 0.8, "min_tokens": 4, "repetition_penalty": 1.2, "seed": 3},
)
_RNG = np.random.default_rng(6)
_MOTIF = _RNG.integers(1, 40, 14).tolist()
PROMPTS = ([5], _MOTIF * 4, _RNG.integers(1, VOCAB, 61).tolist(), [*_MOTIF, 2, 3] * 2, _MOTIF * 4 + [9, 8, 7])
WAYS = ((1, 512), (5, 512), (3, 24))  # requests of a step, and its rows
DRAFTING = sorted(LOSSLESS - set(WITH_DRAFT_MODEL) - {"autoregressive"})
_HALF = ("bfloat16", "float16")


def _compiled(dtype: str) -> pytest.MarkDecorator:
    missing = not row_linear.has_kernels(torch.device("cpu"), getattr(torch, dtype))
    return pytest.mark.skipif(missing, reason="no compiled code for it here")


_OFTEN = ("bfloat16", "float32")  # of the types on a CPU, those that are tried each time
ON_CPU = [
    pytest.param("cpu", dtype, marks=[_compiled(dtype), *(() if dtype in _OFTEN else (pytest.mark.proof,))])
    for dtype in (*_HALF, "float32")
]
EVERYWHERE = [*ON_CPU, *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (*_HALF, "float32"))]
compiled_only = _compiled("bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = llama_config(tie_word_embeddings=True, head_dim=16)
    return str(save_model(Path(tmp_path_factory.mktemp("model")), config, seed=4))


def load(
    folder: str, strategy: str, way: tuple[int, int] = (1, 512), device: str = "cpu", dtype: str = "bfloat16", **options: Any
) -> Engine:
    engine = EngineOptions(max_running=way[0], max_step_tokens=way[1], **options)
    return Engine.load(ModelOptions(folder, dtype=dtype, device=device), engine, SpeculationOptions(strategy))  # type: ignore[arg-type]


def requests(answers: Sequence[Sequence[int]] = (), prompts: Iterable[Sequence[int]] = PROMPTS) -> list[Request]:
    """All prompts with all samplings; the ``answers`` can be copied."""
    pairs = [(prompt, sampling) for prompt in prompts for sampling in SAMPLINGS]
    return [
        Request(str(at), prompt, SamplingParams(max_tokens=MAX_TOKENS, **sampling), answers[at : at + 1], tenant="a")  # type: ignore[arg-type]
        for at, (prompt, sampling) in enumerate(pairs)
    ]


def outputs(engine: Engine, wanted: Sequence[Request], between: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    """Of requests that are added at once; ``between`` is called before each step."""
    for request in wanted:
        engine.add(request)
    steps = count()
    while engine.has_work:
        between(next(steps))
        engine.step()
        engine.check_integrity()
    return [request.output_ids.tolist() for request in wanted]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), EVERYWHERE)
def test_every_strategy_and_company_gives_the_tokens_of_plain_decoding(folder: str, device: str, dtype: str) -> None:
    plain = load(folder, "autoregressive", (1, 512), device, dtype)
    assert plain.info.exact and plain.info.dtype == dtype
    expected = outputs(plain, requests())
    assert len({tuple(output) for output in expected}) > len(PROMPTS)
    for number, strategy in enumerate(DRAFTING):
        wanted = requests(expected)
        assert outputs(load(folder, strategy, WAYS[number % len(WAYS)], device, dtype), wanted) == expected, strategy
        assert sum(request.stats.accepted for request in wanted) > 0, strategy
    for way in WAYS[1:]:
        assert outputs(load(folder, "autoregressive", way, device, dtype), requests()) == expected, way


@pytest.mark.parametrize(("device", "dtype"), EVERYWHERE)
def test_what_requests_in_other_words_brought_changes_no_token(folder: str, device: str, dtype: str) -> None:
    def words(length: int) -> list[int]:
        return rng.integers(1, VOCAB, length).tolist()

    def in_other_words(time: int) -> list[Request]:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        prompts = [[*words(30), *passage, *words(20)] for passage in passages]
        return [
            Request(f"{at}, {time}", prompt, params, tenant="a", embedding=meaning)
            for at, (prompt, meaning) in enumerate(zip(prompts, meanings, strict=True))
        ]

    rng, some = np.random.default_rng(8), slice(0, None, 5)  # of each prompt another sampling
    expected = outputs(load(folder, "autoregressive", (1, 512), device, dtype), requests()[some])
    passages = [[*words(40), *said, *words(40)] for said in expected]
    meanings = [signs_of(rng.standard_normal(64).tolist()) for _ in expected]
    for strategy in ("auto", "llma", "trie"):
        engine, wanted = load(folder, strategy, (3, 512), device, dtype), requests()[some]
        for time in range(2):
            outputs(engine, in_other_words(time))  # the second time the passages recur
        assert engine.histories is not None
        history = engine.histories.of("a")
        assert history is not None
        for one, meaning in zip(wanted, meanings, strict=True):
            one.embedding = meaning
            assert [text for text in history.recall(one, 1) if not text.is_output], strategy
        assert outputs(engine, wanted) == expected, strategy
        if strategy == "auto":
            assert sum(one.stats.accepted_by_source.get("similar", 0) for one in wanted) > 0


@pytest.mark.slow
@compiled_only
@pytest.mark.parametrize("strategy", ["autoregressive", "auto"])
def test_a_second_turn_finds_the_first(folder: str, strategy: str) -> None:
    """What decoding left in the slots, drafts and all, is what a prefill of the same text computes."""
    engine = load(folder, strategy, (4, 512))
    answers = outputs(engine, requests())
    turns = [[*prompt, *answer, 7, 8] for prompt, answer in zip((r.prompt_ids for r in requests()), answers, strict=True)][::3]
    before = engine.counts().prefix_hits
    warm = [outputs(engine, requests(prompts=[turn])) for turn in turns]
    assert engine.counts().prefix_hits > before
    cold = load(folder, "autoregressive", (1, 512), prefix_caching=False)
    assert [outputs(cold, requests(prompts=[turn])) for turn in turns] == warm


@compiled_only
def test_prompts_beside_decoding_and_requests_that_are_put_off(folder: str) -> None:
    expected = outputs(load(folder, "autoregressive"), requests())
    engine = load(folder, "auto", (3, 17), scheduling_policy="priority")
    wanted = requests(expected)
    for request in wanted[8:]:
        request.priority = -1

    def between(step: int) -> None:
        if 2 <= step < 2 + len(wanted[8:]):
            engine.add(wanted[6 + step])

    outputs(engine, wanted[:8], between)
    assert [request.output_ids.tolist() for request in wanted] == expected
    assert sum(request.stats.preemptions for request in wanted) > 0


def tiny(family: str, dtype: str, device: str = "cpu", positions: int = CONTEXT) -> PreTrainedModel:
    torch.manual_seed(1)
    config = deepcopy(FAMILIES[family])
    config.max_position_embeddings = positions
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation=TREE_ATTENTION
    )
    return model.eval().to(device)  # type: ignore[arg-type]


def made(model: PreTrainedModel, **options: Any) -> ModelRunner:
    """A runner as an engine gets it."""
    return make_runner(model, CONTEXT + 64, EngineOptions(max_running=2, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), EVERYWHERE)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_families_are_exact(family: str, device: str, dtype: str) -> None:
    runner = made(tiny(family, dtype, device))
    assert runner.exact and runner.fixed_rows == (None if device == "cpu" else 64)


def test_float64_goes_row_by_row(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner = made(tiny("qwen2", "float64"))
    assert runner.exact and runner.fixed_rows == 16
    (line,) = caplog.messages
    assert "not exact with any number of rows" in line and "limited to 16 rows" in line and "\n" not in line


Change = Callable[..., Any]


def by_segments(original: Change, runner: ModelRunner, batch: Batch) -> StepContext:
    """Attention whose order of sums follows the shape."""
    return StepContext(batch, runner.cache, torch.from_numpy(batch.positions), runner.model.dtype, by_row=False)


def another_kernel_for_one(original: Change, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    product = torch.nn.functional.linear if input.shape[-2] == 1 else original
    return product(input, weight, bias)


def of_many_rows(original: Change, module: Any, input: torch.Tensor) -> Any:
    return original(module, input) * (1 + 2**-6 * (input.shape[-2] == 33))


def keys(when: Callable[[Any], bool]) -> Change:
    """Keys that are a little larger in segments of some kind."""

    def change(original: Change, context: StepContext, call: AttentionCall) -> Any:
        larger = torch.ones(1, 1, call.key.shape[2], 1, dtype=call.key.dtype)
        for segment in filter(when, context.segments):
            larger[:, :, segment.offset : segment.offset + segment.rows] += 2**-6
        return original(context, replace(call, key=call.key * larger))

    return change


Segments = Callable[[SequenceRows], Any]
WHOLE_FAULTS: dict[str, Segments] = {
    "another kernel for one row": lambda segment: segment.rows == 1,
    "pieces that begin somewhere": lambda segment: segment.start % 16 and segment.rows > 16,
    "long pieces": lambda segment: segment.rows > 256,
    "trees": lambda segment: segment.mask is not None,
    "the other slot": lambda segment: segment.slot == 1,
    "a place behind others": lambda segment: segment.offset > 0,
}
FAULTS: dict[str, tuple[tuple[Any, str], Change]] = {
    **{fault: ((StepContext, "attend"), keys(when)) for fault, when in WHOLE_FAULTS.items()},
    "attention by segments": ((ModelRunner, "_context"), by_segments),
    "another kernel for one row": ((row_linear, "linear"), another_kernel_for_one),
    "an activation of 33 rows": ((RowActivation, "forward"), of_many_rows),
}


def put_in(monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str], change: Change) -> None:
    original = getattr(*where)
    monkeypatch.setattr(*where, lambda *args: change(original, *args))


@pytest.mark.slow
@compiled_only
@pytest.mark.parametrize("fault", FAULTS)
def test_what_depends_on_company_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(tiny("qwen2", "float32", positions=320), 2, 320)
    assert exactness.check(runner) is None
    put_in(monkeypatch, *FAULTS[fault])
    found = exactness.check(runner)
    assert found is not None and found.endswith("rows changed with the other rows of the batch"), found


@compiled_only
@pytest.mark.parametrize("fault", WHOLE_FAULTS)
def test_what_depends_on_company_is_noticed_of_a_whole_forward(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(tiny("llama", "float32", positions=320), 2, 320)
    assert exactness.check(runner) is None

    def change(original: Change, whole: FusedForward, batch: Batch) -> Any:
        """With a norm that is a little larger in batches with segments of some kind."""
        weight, larger = runner.model.model.layers[0].input_layernorm.weight, any(map(WHOLE_FAULTS[fault], batch.segments))
        with torch.no_grad():
            weight.mul_(1 + 2**-6 * larger)
            found = original(whole, batch)
            weight.div_(1 + 2**-6 * larger)
        return found

    put_in(monkeypatch, (FusedForward, "forward"), change)
    assert str(exactness.check(runner)).endswith("rows changed with the other rows of the batch")


@pytest.mark.slow
@compiled_only
@pytest.mark.parametrize("form", [16, 1])
def test_an_engine_goes_on_in_a_form_that_is_exact(
    form: int, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cached_checks, "cache_folder", lambda: tmp_path)  # no earlier result of the check is used
    expected = outputs(load(folder, "autoregressive", dtype="float32"), requests())

    def change(original: Change, runner: ModelRunner, batch: Batch) -> Any:
        spoiled = runner.fixed_rows != form and len(batch.token_ids) > 1
        return original(runner, batch) * (1 + 2**-6 * spoiled)

    put_in(monkeypatch, (ModelRunner, "_compute"), change)
    with caplog.at_level(logging.WARNING, "outrider.engine.forward.runners"):
        engine = load(folder, "llma", (3, 64), dtype="float32")
    assert engine.info.exact and outputs(engine, requests(expected)) == expected
    lines = [record.message for record in caplog.records if record.name == "outrider.engine.forward.runners"]
    assert len(lines) == (1 if form == 16 else 2) and f"limited to {form} rows" in lines[-1], lines


@compiled_only
def test_a_model_that_is_exact_in_no_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()
    put_in(monkeypatch, (ModelRunner, "_compute"), lambda original, *args: original(*args) * (1 + 2**-6 * (next(calls) % 2)))
    with pytest.raises(ModelLoadError, match=r"^LlamaForCausalLM cannot be served exactly on cpu: \d+ of \d+ rows .*\.$"):
        made(tiny("llama", "float32"))


def test_rounding_is_for_gpus() -> None:
    with pytest.raises(ModelLoadError, match=r"^engine.exact=rounding is supported on GPUs only: .* Leave it out$"):
        made(tiny("llama", "float32"), exact="rounding")
