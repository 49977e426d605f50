"""Jacobi lookahead is exact whatever its window, n-grams, guesses and budget, and close to the end of the context."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.engine import Engine
from tests.helpers.models import llama_config, save_model

CONTEXT = 96
SETTINGS: tuple[tuple[dict[str, int | bool], int], ...] = (
    ({}, 64),
    ({}, 16),
    ({"window": 5, "ngram": 3, "guesses": 2}, 64),
    ({"window": 3, "ngram": 6, "guesses": 5, "prompt_as_reference": False}, 40),  # W != G, both ways
    ({"window": 1, "ngram": 4, "guesses": 4}, 64),
    ({"window": 12, "ngram": 2}, 9),  # plain Jacobi decoding
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = llama_config(tie_word_embeddings=True, max_position_embeddings=CONTEXT)
    return str(save_model(Path(tmp_path_factory.mktemp("model")), config, seed=4))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(12)
    made = [torch.randint(1, 40, (length,), generator=generator).tolist() for length in (1, 9, 50)]
    return [*made, [5] * 20, [1, 2, 3] * 12]


PROMPTS = prompts()


def params(temperature: float, reaches_context: bool) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=CONTEXT - len(prompt) if reaches_context else 32, temperature=temperature, seed=at, ignore_eos=at == 3
        )
        for at, prompt in enumerate(PROMPTS)
    ]


def load(folder: str, strategy: str, batch: int, budget: int, options: dict[str, int | bool]) -> Engine:
    engine_options = EngineOptions(max_running=batch, max_step_tokens=256, scheduling_policy="priority")
    return Engine.load(ModelOptions(folder, dtype="float64"), engine_options, SpeculationOptions(strategy, budget, options))


def run(engine: Engine, all_params: list[SamplingParams], priorities: tuple[int, ...] = (0,) * len(PROMPTS)) -> list[Request]:
    requests = [Request(str(at), PROMPTS[at], all_params[at], priority=priority) for at, priority in enumerate(priorities)]
    for request in requests:
        engine.add(request)
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    return requests


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[tuple[float, bool], list[list[int]]]:
    """Plain outputs by (temperature, whether they reach the end of the context)."""
    engine = load(folder, "autoregressive", 8, 0, {})
    kinds = [(temperature, reaches) for temperature in (0.0, 0.7) for reaches in (False, True)]
    return {kind: [request.output_ids.tolist() for request in run(engine, params(*kind))] for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("options", "budget"), SETTINGS)
def test_output_is_that_of_plain_decoding(
    folder: str,
    expected: dict[tuple[float, bool], list[list[int]]],
    options: dict[str, int | bool],
    budget: int,
    temperature: float,
) -> None:
    reaches_context = budget == 64  # where the engine cuts the window
    batch = 1 if options else 4
    requests = run(load(folder, "jacobi", batch, budget, options), params(temperature, reaches_context))
    assert [request.output_ids.tolist() for request in requests] == expected[temperature, reaches_context]
    if temperature == 0.0:
        assert sum(request.stats.accepted for request in requests) > 0
        assert all(set(request.stats.accepted_by_source) <= {"jacobi"} for request in requests)
    if reaches_context:
        assert any(request.num_tokens == CONTEXT for request in requests)


def test_a_preempted_request_keeps_its_output(folder: str, expected: dict[tuple[float, bool], list[list[int]]]) -> None:
    requests = run(load(folder, "jacobi", 2, 64, {}), params(0.0, False), priorities=(4, 3, 2, 1, 0))
    assert sum(request.stats.preemptions for request in requests) > 0
    assert [request.output_ids.tolist() for request in requests] == expected[0.0, False]


def test_the_window_saves_steps_without_the_prompt(folder: str) -> None:
    """The n-grams of the model's own guesses are accepted: not every token costs a forward."""
    requests = run(load(folder, "jacobi", 1, 64, {"prompt_as_reference": False}), params(0.0, False))
    assert sum(request.stats.steps for request in requests) < 0.9 * sum(request.num_output for request in requests)
