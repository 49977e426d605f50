"""Choices of one prompt compute it once, though they are private, and nobody else finds what they computed."""

from __future__ import annotations

import numpy as np

from decoding.drafters import build_drafter
from decoding.request import Request, SamplingParams
from engine.engine import Engine
from engine.kv.prefix_cache import WORTH_COPYING
from tests.models import VOCAB, engine_over, prepared, run, tiny_model

PROMPT = np.random.default_rng(3).integers(1, VOCAB, 60).tolist()


def engine(strategy: str = "prompt_lookup", **settings: int) -> Engine:
    model = tiny_model("llama", "float32")
    return engine_over(model.runner, prepared(build_drafter(strategy, {}), model), **settings)


def choice(name: str, index: int, siblings: bool = True) -> Request:
    return Request(f"{name}/{index}", PROMPT, SamplingParams(12, temperature=0.9, seed=index, ignore_eos=True), siblings=siblings)


def alone(index: int) -> list[int]:
    return run(engine("autoregressive"), choice("alone", index, siblings=False))[0]


def test_the_prompt_of_several_choices_is_computed_once() -> None:
    for batch, step_tokens in ((4, 256), (4, 24), (2, 256)):  # in one step, in chunks, more choices than slots
        of = engine(batch=batch, step_tokens=step_tokens)
        choices = [choice("a", index) for index in range(4)]
        assert run(of, *choices) == [alone(index) for index in range(4)]
        counts = sorted(one.stats.cached_tokens for one in choices)
        assert counts[0] == 0 and counts[1] > len(PROMPT) - WORTH_COPYING, (batch, step_tokens, counts)


def test_nobody_else_finds_it() -> None:
    of = engine(batch=4)
    siblings = [choice("a", index) for index in range(2)]
    others = [choice("b", 0), choice("a2", 0, siblings=False), Request("c", PROMPT, SamplingParams(4), tenant="-")]
    outputs = run(of, *siblings, *others)
    assert outputs[:2] == [alone(0), alone(1)] and outputs[2] == outputs[3] == alone(0)
    later = [choice("d", 0), choice("a", 3, siblings=False), Request("e", PROMPT, SamplingParams(4))]
    run(of, *later)
    assert [one.stats.cached_tokens for one in (*others, *later)] == [0] * 6
