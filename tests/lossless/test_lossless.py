"""Exactness of an engine as it is loaded from a folder, on prompts of many lengths: every strategy gives, token for token, what
plain decoding gives. ``test_models.py`` has the matrix of model families."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.options import OPTIONS, Option
from outrider.decoding.drafters.registry import STRATEGIES
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from tests.helpers.hostile import HostileDrafter
from tests.helpers.models import draft_with, llama_config, nearly, save_model

STRATEGY_NAMES = sorted(STRATEGIES)
EACH = ("float32", pytest.param("float64", marks=pytest.mark.slow))
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Tied embeddings make the model repeat tokens it has just seen, so that looking them up succeeds in places.
    return str(
        save_model(Path(tmp_path_factory.mktemp("model")), llama_config(tie_word_embeddings=True, initializer_range=0.15), seed=4)
    )


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = (1, 2, 3, 17, 40, 64, 90, 120)
    made = [torch.randint(1, 40, (length,), generator=generator).tolist() for length in lengths]
    return [*made, [5] * 30, [1, 2, 3] * 20]


PROMPTS = prompts()
SAMPLINGS = (
    {"temperature": 0.3},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
)


@pytest.fixture(scope="module", params=EACH)
def reference(request: pytest.FixtureRequest, folder: str) -> tuple[str, list[list[int]]]:
    """transformers' greedy outputs, with the stock model and its own cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, request.param)).eval()
    outputs = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False)
        outputs.append(ids[0, len(prompt) :].tolist())
    return request.param, outputs


def generate(engine: Engine, all_params: Sequence[SamplingParams], expected: Sequence[list[int]] = ()) -> list[list[int]]:
    """The outputs of all prompts; ``expected`` makes references of which parts can be copied."""
    tenants = ("a", "a", "b", None)
    requests = [
        Request(
            str(i), prompt, params, [prompt[::-1], *(nearly(output) for output in expected[i : i + 1])], tenant=tenants[i % 4]
        )
        for i, (prompt, params) in enumerate(zip(PROMPTS, all_params, strict=True))
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    if expected and engine.info.strategy != "autoregressive":
        assert sum(request.stats.accepted for request in requests) > 0  # else the comparison would show nothing
    return [request.output_ids.tolist() for request in requests]


def load(folder: str, dtype: str, strategy: str, batch: int, step_tokens: int = 512) -> Engine:
    options = EngineOptions(max_running=batch, max_step_tokens=step_tokens)
    return Engine.load(ModelOptions(folder, dtype=dtype), options, SpeculationOptions(strategy))  # type: ignore[arg-type]


GREEDY = [SamplingParams(max_tokens=MAX_TOKENS)] * len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_greedy_is_transformers_generate(folder: str, reference: tuple[str, list[list[int]]], strategy: str) -> None:
    dtype, expected = reference
    assert generate(load(folder, dtype, strategy, 8), GREEDY, expected) == expected


SAMPLED = [
    SamplingParams(max_tokens=MAX_TOKENS, seed=100 + i, **SAMPLINGS[i % len(SAMPLINGS)])  # type: ignore[arg-type]
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module", params=EACH)
def sampled(request: pytest.FixtureRequest, folder: str) -> tuple[str, list[list[int]]]:
    """Plain decoding, one request at a time."""
    return request.param, generate(load(folder, request.param, "autoregressive", 1), SAMPLED)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_same_seed_gives_the_same_text_under_every_strategy(
    folder: str, sampled: tuple[str, list[list[int]]], strategy: str
) -> None:
    dtype, expected = sampled
    assert generate(load(folder, dtype, strategy, 3), SAMPLED, expected) == expected


def test_another_seed_gives_another_text(folder: str, sampled: tuple[str, list[list[int]]]) -> None:
    dtype, outputs = sampled
    assert len({tuple(output) for output in outputs}) == len(outputs)
    other_seeds = [replace(params, seed=params.seed + 1) for params in SAMPLED]
    assert generate(load(folder, dtype, "llma", 8), other_seeds) != outputs


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_chunked_prefill_changes_nothing(folder: str, reference: tuple[str, list[list[int]]], strategy: str) -> None:
    dtype, expected = reference
    assert generate(load(folder, dtype, strategy, batch=4, step_tokens=16), GREEDY, expected) == expected


@pytest.mark.slow
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_hostile_trees_change_nothing(folder: str, hot: bool, batch: int) -> None:
    params = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8 if hot else 0.0, seed=i) for i in range(len(PROMPTS))]
    plain = generate(load(folder, "float64", "autoregressive", 1), params)
    engine = load(folder, "float64", "llma", batch)
    draft_with(engine, HostileDrafter({str(i): output for i, output in enumerate(plain)}, batch))
    assert generate(engine, params) == plain


def test_the_drafter_of_the_documentation(
    folder: str, reference: tuple[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``docs/adding-a-drafter.md``: its class and its lines, as they stand there."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
    source, line, options = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, drafter in eval(f"{{{line}}}").items():
        module = ModuleType(drafter.partition(":")[0])
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(STRATEGIES, name, drafter)
        monkeypatch.setitem(OPTIONS, name, eval(f"{{{options}}}", {"Option": Option})[name])
        dtype, expected = reference
        # Not exact=True: what is lossless is read off the table when it is imported.
        speculation = SpeculationOptions(name, options={"period": 3}, exact=False)
        engine = Engine.load(ModelOptions(folder, dtype=dtype), EngineOptions(max_running=8), speculation)  # type: ignore[arg-type]
        assert generate(engine, GREEDY, expected) == expected
