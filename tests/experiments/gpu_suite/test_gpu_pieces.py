"""Pieces of the GPU suite against something simpler: models, trees, texts, ratios, and engines that follow known outputs."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.configs.slices import SpeculationOptions
from outrider.decoding.drafters.registry import build_drafter
from outrider.decoding.replay import replay_workload
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.engines.guided import stock_twin
from outrider.experiments.gpu_suite import device
from outrider.experiments.gpu_suite.models import (
    SIZES,
    STRATEGIES,
    contestants,
    device_model,
    engines,
    random_tree,
    step_bytes,
    tree_batch,
)
from outrider.experiments.gpu_suite.parts import any_rows, prefill
from outrider.experiments.gpu_suite.parts.end_to_end import Trace, summary
from outrider.experiments.gpu_suite.report import Job, Report
from outrider.experiments.gpu_suite.texts import made_up, renumbered

CONTEXT = 384


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(device_model("tiny", "cpu", torch.float32, 3), None, "tiny", CONTEXT, ())


@pytest.fixture(scope="module")
def runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded.model, 1, CONTEXT + 64)


def report() -> Report:
    return Report(Job("piece", "tiny", "", 1.0), 60.0, lambda kind, value: None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_engines_emit_the_known_output_in_the_steps_of_a_replay(
    loaded: LoadedModel, runner: ModelRunner, tmp_path: Path, strategy: str
) -> None:
    prompts = made_up(3, loaded.vocab_size, 80, 40, 5)
    run = contestants(engines(loaded, runner, tmp_path), 40)[strategy].run(prompts)
    assert run.outputs == [prompt.known for prompt in prompts]
    if strategy == "auto":  # drafts from what the model ranks and what steps cost, which a replay cannot know
        assert run.steps < 120
        return
    texts = [prompt.text() for prompt in prompts]
    budget = SpeculationOptions().most_draft_tokens
    replay = replay_workload(texts, lambda: build_drafter(strategy, {}), budget, loaded.vocab_size, lambda: 0.0)
    assert (run.steps, run.drafted) == (replay.steps, replay.drafted)
    assert (run.steps == 120) == (strategy == "autoregressive")


def test_a_step_reads_every_weight_but_those_of_other_embeddings(runner: ModelRunner) -> None:
    hidden, inner, layers, vocab = 64, 96, 2, SIZES["tiny"].shape["vocab_size"]
    attention = hidden * hidden * 2 + hidden * hidden // 2 * 2  # queries and output, and two KV heads of the four
    weights = layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden + vocab * hidden
    assert step_bytes(runner, 10) == {"weights": 4 * weights, "kv": 4 * layers * 2 * 2 * 16 * 10}


@pytest.mark.parametrize("size", SIZES)
def test_models_have_the_parameters_that_their_names_say(size: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES[size].shape))
    billions = {"1b": 1.236, "7b": 6.738, "8b": 8.030, "13b": 13.016}  # as published
    if size in billions:
        assert model.num_parameters() / 1e9 == pytest.approx(billions[size], abs=0.001)


def test_the_twin_has_the_same_weights_in_the_same_memory_and_says_the_same(loaded: LoadedModel, runner: ModelRunner) -> None:
    twin = stock_twin(loaded.model)
    assert twin.lm_head.weight.data_ptr() == loaded.model.lm_head.weight.data_ptr()
    tree = random_tree(1, loaded.vocab_size, 0)
    ours = runner.forward(tree_batch(tree, 0))
    with torch.no_grad():
        theirs = twin(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert 0.015 < float(twin.model.layers[0].mlp.up_proj.weight.detach().std()) < 0.025


def test_renumbered_texts_are_equal_where_they_were_and_fit_the_vocabulary() -> None:
    prompts = [Prompt("a", [900, 5, 900], [[5, 7]], [7, 900]), Prompt("b", [5, 1, 2, 3, 4], [], [6])]
    (small,) = renumbered(prompts, 4)  # the second text needs more
    before, after = [5, 7, 900, 5, 900, 7, 900], [*small.references[0], *small.ids, *(small.known or ())]
    for (one, other), (new, another) in zip(itertools.combinations(before, 2), itertools.combinations(after, 2), strict=True):
        assert (one == other) == (new == another)
    assert set(after) <= set(range(4)) and len(renumbered(prompts, 50)) == 2


def test_ratios_are_of_the_same_record_and_round() -> None:
    plain = [Trace("a/1", 4.0, 1.0, 10, 10, 0, True), Trace("b/1", 9.0, 1.0, 10, 10, 0, True)]
    drafted = [Trace("a/1", 2.0, 1.0, 10, 4, 30, True), Trace("b/1", 3.0, 1.0, 10, 6, 30, False)]
    figures = summary({"autoregressive": plain, "llma": drafted})["llma"]
    assert figures["ratio"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert figures["decode_ratio"]["median"] == 3.5 and figures["ratio_of_sums"] == 2.6
    assert (figures["tokens_per_s"], figures["decode_tokens_per_s"], figures["tokens_per_step"]) == (4.0, 6.0, 2.0)
    assert figures["wrong"] == 1 and figures["by_workload"]["b"] == {"runs": 1, "ratio": 3.0, "tokens_per_step": 1.667}


def test_cases_take_turns_and_one_round_at_least_is_made() -> None:
    called: list[str] = []
    cases = {name: device.Case(lambda name=name: called.append(name)) for name in "ab"}  # type: ignore[misc]
    times = device.in_turns("cpu", cases, 5, 2, over=lambda: True, warm=1)
    assert called == ["a", "b", "a", "a", "b", "b"]
    assert all(len(taken.wall_s) == 1 and not taken.gpu_s for taken in times.values())
    assert device.shown({}) == ("n/a", "") and device.shown({"median": 2.0, "min": 1.0, "max": 3.0}, " ms") == (
        "2.00 ms",
        "1.00-3.00",
    )


def test_a_prefill_computes_all_tokens_and_the_logits_of_the_last(loaded: LoadedModel, runner: ModelRunner) -> None:
    length = 300
    logits = prefill.prefill_case(runner, length, loaded.vocab_size, 4).launch()
    text = torch.from_numpy(np.random.default_rng(4).integers(0, loaded.vocab_size, length))
    with torch.no_grad():
        expected = stock_twin(loaded.model)(input_ids=text[None], use_cache=False).logits[0, -1:]
    assert torch.allclose(logits, expected, atol=1e-5)


def test_a_module_that_follows_the_number_of_rows_is_named(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_rows, "_ROWS", (1, 2, 3, 8))
    product = loaded.model.lm_head
    monkeypatch.setattr(product, "forward", lambda rows: rows * len(rows))
    found = any_rows.differing(loaded.model, 0)
    assert found[f"Linear {'x'.join(map(str, product.weight.shape))}"] == 3


def test_trees_are_valid_deep_and_wide() -> None:
    for rows in (1, 4, 64, 256):
        tree = random_tree(rows, 100, rows)
        tree.check()
        assert len(tree) == tree.num_candidates == rows
    assert tree.depths().max() > 20 and len(set(tree.parents.tolist())) < 200
    (segment,) = tree_batch(random_tree(64, 100, 1), 32).segments
    assert (segment.start, segment.rows) == (32, 64) and segment.mask is not None
