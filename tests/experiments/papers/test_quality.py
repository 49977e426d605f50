"""Perplexity by hand, and joint greedy decoding against every continuation there is."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from outrider.configs.slices import EngineOptions
from outrider.decoding.request import Request, SamplingParams
from outrider.engine.forward.runner import ModelRunner
from outrider.engine.loading.model import LoadedModel
from outrider.experiments.bench.engines.contestants import Prompt
from outrider.experiments.bench.engines.stock_generate import StockGenerate
from outrider.experiments.papers.quality import joint_greedy, output_nats, over_target, until_end
from outrider.experiments.papers.stage import perplexity
from tests.helpers.models import CONTEXT, VOCAB, tiny_model

PROMPT = [5, 60, 7, 131, 9, 10, 250, 12, 13]
OUTPUT = [14, 99, 7, 131, 9, 201, 3, 44, 44, 8, 17]


def loaded(family: str = "llama") -> LoadedModel:
    return LoadedModel(tiny_model(family, "float64").runner.model, None, family, CONTEXT, (0,))  # type: ignore[arg-type]


def nats_by_hand(prompt: list[int], output: list[int]) -> np.ndarray:
    """Of the stock model, one forward over everything."""
    with torch.inference_mode():
        logits = tiny_model("llama", "float64").stock(torch.tensor([prompt + output])).logits[0]
    distributions = logits.log_softmax(-1)
    return np.array([-float(distributions[len(prompt) - 1 + at, token]) for at, token in enumerate(output)])


@pytest.mark.parametrize("chunk", [1, 3, 9, 256])
def test_tokens_are_scored_as_by_one_forward_of_the_stock_model(chunk: int) -> None:
    runner = tiny_model("llama", "float64").runner
    for prompt, output in ((PROMPT, OUTPUT), (PROMPT[:1], OUTPUT), (PROMPT, OUTPUT[:1])):
        given = output_nats(runner, prompt, output, chunk)
        np.testing.assert_allclose(given, nats_by_hand(prompt, output), atol=1e-9)
    assert output_nats(runner, PROMPT, []).shape == (0,)


def test_a_prefix_that_others_may_reuse_is_given_up() -> None:
    runner = ModelRunner(tiny_model("llama", "float64").runner.model, 1, 40)
    runner.cache.prefixes.keep(0, "tenant", np.array([1, 2, 3], np.int32))
    output_nats(runner, PROMPT, OUTPUT)
    assert len(runner.cache.prefixes.tokens(0)) == 0


def test_sequences_that_cannot_be_scored_are_refused() -> None:
    runner = ModelRunner(tiny_model("llama", "float64").runner.model, 1, 12)
    with pytest.raises(ValueError, match="have 20 tokens, a slot of the model holds 12"):
        output_nats(runner, PROMPT, OUTPUT)
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        output_nats(runner, [], OUTPUT)


def test_perplexity_weighs_tokens_and_not_outputs() -> None:
    found = perplexity([(math.log(2), 1), (3 * math.log(4), 3)])
    assert found.mean == pytest.approx(2.0**1.75) and len(found.samples) == 2
    over, under = (sum(values) for values in zip(*found.samples, strict=True))
    assert over / under == pytest.approx(found.mean)  # the samples' ratio is the perplexity
    assert perplexity([(0.0, 4)]).mean == 1.0


def test_a_text_counts_up_to_its_end() -> None:
    assert until_end([4, 0, 5, 0], (0, 7)) == [4, 0]
    assert until_end([4, 5], (0,)) == [4, 5]


def test_blocks_of_one_are_greedy_decoding() -> None:
    model = over_target(loaded(), 1, 4, EngineOptions().max_step_tokens)
    stock = StockGenerate(tiny_model("llama", "float64").stock, 12, (0,))
    for prompt in (PROMPT, [33, 34]):
        expected = stock.run([Prompt("x", prompt, [])]).outputs
        run = joint_greedy(model, Request("x", prompt, SamplingParams(12)), 1, 4, (0,))
        assert run.outputs == expected and run.steps == len(expected[0])


def test_a_block_is_the_likeliest_of_all_continuations() -> None:
    """With as many beams as tokens the search misses none of the pairs."""
    model = over_target(loaded(), 2, VOCAB, 512)
    output = joint_greedy(model, Request("x", PROMPT, SamplingParams(4)), 2, VOCAB, ()).outputs[0]
    for start in (0, 2):
        prefix = PROMPT + output[:start]
        with torch.inference_mode():
            batch = torch.tensor([[*prefix, token] for token in range(VOCAB)])
            distributions = tiny_model("llama", "float64").stock(batch).logits.log_softmax(-1)
        joint = distributions[0, len(prefix) - 1][:, None] + distributions[:, -1]
        assert divmod(int(joint.argmax()), VOCAB) == tuple(output[start : start + 2])


def test_an_end_within_a_block_ends_the_output() -> None:
    model = over_target(loaded(), 4, 3, 512)
    whole = joint_greedy(model, Request("x", PROMPT, SamplingParams(10)), 4, 3, ()).outputs[0]
    assert len(whole) == 10  # the last block is shorter
    end = whole[5]
    ended = joint_greedy(model, Request("x", PROMPT, SamplingParams(10)), 4, 3, (end,))
    assert ended.outputs == [whole[: whole.index(end) + 1]]


def test_a_long_prompt_is_prefilled_in_parts() -> None:
    prompt = [1 + at % (VOCAB - 1) for at in range(0, 400, 5)]
    outputs = [
        joint_greedy(over_target(loaded(), 3, 2, rows), Request("x", prompt, SamplingParams(6)), 3, 2, (0,)).outputs
        for rows in (16, 512)
    ]
    assert outputs[0] == outputs[1] and len(outputs[0][0]) > 0


def test_beams_find_what_the_brute_force_finds_on_a_small_tree() -> None:
    """Three tokens at a time with enough beams, scored by hand among a few candidates, are never beaten by them."""
    model = over_target(loaded(), 3, 64, 512)
    output = joint_greedy(model, Request("x", PROMPT, SamplingParams(3)), 3, 64, ()).outputs[0]
    best = nats_by_hand(PROMPT, output).sum()
    others = [nats_by_hand(PROMPT, list(tokens)).sum() for tokens in product((output[0], 5, 60), (output[1], 9), (output[2], 8))]
    assert best <= min(others) + 1e-9
