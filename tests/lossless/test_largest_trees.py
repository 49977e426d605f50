"""Outputs equal plain decoding with options at their extremes, drafted for as published in trees of up to 512 rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.options import OPTIONS
from outrider.decoding.drafters.registry import STRATEGIES
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from tests.helpers.models import llama_config, save_model

CONTEXT = 96
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("jacobi", {"window": 64, "ngram": 5, "guesses": 64}),
    ("jacobi", {"window": 512, "ngram": 2}),
    ("jacobi", {"window": 1, "ngram": 64, "guesses": 512}),
    ("ngrammys", {"k": 32, "w": 16, "layout": "batched"}),
    ("ngrammys", {"k": 512, "w": 1}),
    ("ngrammys", {"k": 1, "w": 512, "q": 32}),
    ("suffix", {"max_spec_tokens": 4096, "max_spec_offset": 4096.0}),
    ("prompt_lookup", {"max_ngram": 64, "num_tokens": 4096}),
    ("trie", {"decoding_length": 4096, "branch_length": 4096, "max_occurrences": 1024}),
    ("trie", {"decoding_length": 1, "min_output": 4096}),
    ("llma", {"copy_length": 4096, "include_output": True}),
    ("recycling", {"shape": "published"}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = llama_config(tie_word_embeddings=True, max_position_embeddings=CONTEXT)
    return str(save_model(Path(tmp_path_factory.mktemp("model")), config, seed=4))


def outputs(folder: str, speculation: SpeculationOptions) -> tuple[list[list[int]], int]:
    """Return the outputs of some requests, and the most rows drafted for one of them in a step on average."""
    options = EngineOptions(max_running=2, max_step_tokens=1100)
    engine = Engine.load(ModelOptions(folder, dtype="float32"), options, speculation)
    generator = torch.Generator().manual_seed(12)
    prompts = [torch.randint(1, 40, (9,), generator=generator).tolist(), [1, 2, 3] * 12]
    requests = [
        Request(f"{at}/{temperature}", prompt, SamplingParams(CONTEXT - len(prompt), temperature, seed=at))
        for at, prompt in enumerate(prompts)
        for temperature in (0.0, 0.7)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.output_ids.tolist() for request in requests], max(one.stats.drafted // one.stats.steps for one in requests)


@pytest.fixture(scope="module")
def plain(folder: str) -> list[list[int]]:
    return outputs(folder, SpeculationOptions("autoregressive"))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options"), SETTINGS)
def test_outputs_are_those_of_plain_decoding(folder: str, plain: list[list[int]], strategy: str, options: dict[str, Any]) -> None:
    found, _ = outputs(folder, SpeculationOptions(strategy, options=options, as_published=True))
    assert found == plain


def _extremes() -> list[tuple[str, str, Any]]:
    """List strategy, option and value of each end of each option's range; memory options at most at 1 M tokens."""
    found: list[tuple[str, str, Any]] = []
    for strategy, options in OPTIONS.items():
        for name, option in options.items() if strategy in STRATEGIES else ():
            most = min(option.high or 0, 1 << 20) if option.costly else option.high
            values = option.choices or ((False, True) if option.low is None else (option.low, option.kind(most)))
            found += [(strategy, name, value) for value in values]
    return found


@pytest.mark.proof
@pytest.mark.parametrize(("strategy", "option", "value"), _extremes())
def test_each_option_at_each_end_of_its_range(
    folder: str, plain: list[list[int]], strategy: str, option: str, value: Any
) -> None:
    options = {option: value} | ({"max_context": value} if option == "match_length" else {})
    found, _ = outputs(folder, SpeculationOptions(strategy, options=options, as_published=True))
    assert found == plain


def test_trees_of_hundreds_of_rows_are_exact(folder: str, plain: list[list[int]]) -> None:
    options = {"k": 32, "w": 16, "layout": "batched"}
    found, rows = outputs(folder, SpeculationOptions("ngrammys", options=options, as_published=True))
    assert found == plain and rows > 200
