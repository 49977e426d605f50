"""Every model family, strategy and data type: what comes out is what plain decoding gives, token for token.

Models and their plain outputs are computed once and shared; engines over them are new for every run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from outrider.decoding.drafters.registry import STRATEGIES, build_drafter
from outrider.decoding.request import FinishReason, Request, SamplingParams
from outrider.engine.engine import Engine
from tests.helpers.hostile import HostileDrafter
from tests.helpers.models import CONTEXT, FAMILIES, VOCAB, engine_over, nearly, prepared, tiny_model

DTYPES = ("float32", "float64")
MAX_TOKENS = 24
_MOTIF = np.random.default_rng(5).integers(1, 40, 15).tolist()
PROMPTS = ([7], [1, 2, 3, 4] * 6 + [1, 2], _MOTIF * 2 + _MOTIF[:7])
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
CASES = (  # requests of one batch differ in what they ask for
    *((prompt, GREEDY) for prompt in PROMPTS),
    (PROMPTS[1], SamplingParams(max_tokens=MAX_TOKENS, temperature=0.2, seed=3, top_k=8, presence_penalty=-0.2)),
    (PROMPTS[0], SamplingParams(max_tokens=MAX_TOKENS, temperature=1.3, seed=5, top_p=0.9, repetition_penalty=1.2)),
    (PROMPTS[2], SamplingParams(max_tokens=MAX_TOKENS, frequency_penalty=0.1, logit_bias=((9, 0.5), (0, -5.0)), min_tokens=3)),
)
LEARNED_POSITIONS = ("gpt2", "opt")


def requests(
    cases: Sequence[tuple[Sequence[int], SamplingParams]] = CASES, answers: Sequence[Sequence[int]] = ()
) -> list[Request]:
    """New requests; ``answers`` make references of which parts can be copied."""
    return [
        Request(str(at), prompt, params, references=[nearly(answer) for answer in answers[at : at + 1]])
        for at, (prompt, params) in enumerate(cases)
    ]


def run(engine: Engine, wanted: Sequence[Request]) -> list[list[int]]:
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert all(request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for request in wanted)
    return [request.output_ids.tolist() for request in wanted]


def by_generate(family: str, dtype: str, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
    """transformers' greedy output, and the least distance between the two best logits on its way."""
    with torch.inference_mode():
        given = tiny_model(family, dtype).stock.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=max_tokens, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    gap = min(float(-row[0].topk(2).values.diff()) for row in given.logits)
    return given.sequences[0, len(prompt) :].tolist(), gap


@cache
def plain(family: str, dtype: str) -> list[list[int]]:
    """The outputs of plain decoding, one request at a time."""
    return run(engine_over(tiny_model(family, dtype).runner, build_drafter("autoregressive", {}), 1), requests())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_generate(family: str, dtype: str) -> None:
    outputs = plain(family, dtype)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        expected, gap = by_generate(family, dtype, prompt, MAX_TOKENS)
        assert output == expected
        assert gap > 1e-3  # far from rounding: equality is no accident
    assert len({tuple(output) for output in outputs}) > len(outputs) // 2  # prompts and parameters matter
    assert outputs == plain(family, "float64")


_PAIRS = [(family, strategy) for family in FAMILIES for strategy in sorted(STRATEGIES)]
_EACH_TIME = {*zip(FAMILIES, itertools.cycle(sorted(STRATEGIES)))}  # each family once and each strategy once


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(*pair, marks=() if pair in _EACH_TIME or pair[0] == "llama" or pair[1] == "auto" else pytest.mark.proof)
        for pair in _PAIRS
    ],
)
def test_every_strategy_gives_the_plain_output(family: str, strategy: str, dtype: str) -> None:
    model, expected = tiny_model(family, dtype), plain(family, dtype)
    for batch in (1, 4):
        wanted = requests(answers=expected)
        assert run(engine_over(model.runner, prepared(build_drafter(strategy, {}), model), batch), wanted) == expected, batch
        accepted = sum(request.stats.accepted for request in wanted)
        assert (accepted > 0) == (strategy != "autoregressive"), (batch, accepted)  # else nothing was shown


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_drafts_change_nothing(family: str, dtype: str) -> None:
    expected = plain(family, dtype)
    answers = {str(i): output for i, output in enumerate(expected)}
    for batch in (1, 4):
        drafter = HostileDrafter(answers, batch)
        assert run(engine_over(tiny_model(family, dtype).runner, drafter, batch), requests()) == expected, batch


_LAST = 12
_FILLING = CONTEXT - _LAST  # prompts of this length fill the context with their output
HOSTILE_PROMPTS = (
    [0],
    [VOCAB - 1],
    [5] * _FILLING,
    np.random.default_rng(6).integers(0, VOCAB, _FILLING).tolist(),
)
ENDLESS = SamplingParams(max_tokens=_LAST, ignore_eos=True)
_FULL = np.random.default_rng(7).integers(1, VOCAB, CONTEXT - 1).tolist()
HOSTILE_CASES = (
    *((prompt, ENDLESS) for prompt in HOSTILE_PROMPTS),
    ([0] * _FILLING, SamplingParams(max_tokens=_LAST, ignore_eos=True, temperature=0.3, seed=8)),
    (_FULL, SamplingParams(max_tokens=1)),  # no room for a draft
    (_FULL[1:], SamplingParams(max_tokens=2, temperature=0.5)),
)


@cache
def plain_hostile(family: str, dtype: str) -> list[list[int]]:
    return run(engine_over(tiny_model(family, dtype).runner, build_drafter("autoregressive", {}), 1), requests(HOSTILE_CASES))


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_prompts_change_nothing_to_the_last_position(family: str) -> None:
    expected = plain_hostile(family, "float64")
    for prompt, output in zip(HOSTILE_PROMPTS, expected, strict=False):
        stock = tiny_model(family, "float64").stock
        stock.generation_config.eos_token_id = None
        assert output == by_generate(family, "float64", prompt, _LAST)[0]
        stock.generation_config.eos_token_id = 0
    model, answers = tiny_model(family, "float64"), {str(at): output for at, output in enumerate(expected)}
    names = sorted(STRATEGIES) if family in LEARNED_POSITIONS else ["llma"]
    for drafter in (HostileDrafter(answers, 1), *(prepared(build_drafter(name, {}), model) for name in names)):
        for batch in (1, 4):
            wanted = requests(HOSTILE_CASES)
            assert run(engine_over(model.runner, drafter, batch), wanted) == expected
            assert max(request.num_tokens for request in wanted) == CONTEXT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_preemption_change_nothing(family: str, dtype: str) -> None:
    model, expected = tiny_model(family, dtype), plain(family, dtype)
    wanted = requests()
    engine = engine_over(model.runner, build_drafter("prompt_lookup", {}), 2, step_tokens=16)  # prefill in chunks
    for request in wanted[:3]:
        engine.add(request)
    while not wanted[1].num_output:
        engine.step()
    assert wanted[1].num_output < MAX_TOKENS
    for request in wanted[3:]:
        request.priority = -1
    assert run(engine, wanted[3:]) == expected[3:]
    assert [request.output_ids.tolist() for request in wanted] == expected
    assert sum(request.stats.preemptions for request in wanted) > 0
