"""Log-probabilities of a prompt: what one forward of the stock model says, however the prompt is cut and whoever runs beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.decoding.drafters.llma import LlmaDrafter
from outrider.decoding.request import Request, SamplingParams, TokenLogprob
from tests.helpers.models import VOCAB, engine_over, prepared, tiny_model

RNG = np.random.default_rng(4)
PROMPT = RNG.integers(1, VOCAB, 110).tolist()  # more than one part of _TOGETHER, and several chunks


def reference(prompt: list[int]) -> torch.Tensor:
    """[n - 1, vocab] log-probabilities of the tokens behind each of the first n - 1."""
    with torch.inference_mode():
        logits = tiny_model("llama", "float32").stock(torch.tensor([prompt])).logits[0, :-1]
    return torch.log_softmax(logits, -1)


def check(scores: tuple[TokenLogprob, ...] | None, prompt: list[int], count: int) -> None:
    """The scores are those of the stock model."""
    expected = reference(prompt)
    assert scores is not None and [entry.token_id for entry in scores] == prompt[1:]
    for entry, row in zip(scores, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert len(entry.top) == count
        assert [value for _, value in entry.top] == pytest.approx(torch.topk(row, count).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("step_tokens", [16, 512])
def test_scores_are_the_stock_models(step_tokens: int) -> None:
    model = tiny_model("llama", "float32")
    engine = engine_over(model.runner, prepared(LlmaDrafter(), model), step_tokens=step_tokens)
    requests = [
        Request("before", PROMPT, SamplingParams(4), tenant="t"),  # whose KV is there, and is not used
        Request("scored", PROMPT, SamplingParams(9), [PROMPT], tenant="t", prompt_logprobs=3),
        Request("beside", PROMPT[::-1], SamplingParams(9), tenant="t"),
        Request("short", PROMPT[:1], SamplingParams(9), prompt_logprobs=0),
        Request("resumed", PROMPT[:20], SamplingParams(9), emitted=[5, 6], prompt_logprobs=0),
    ]
    told: dict[str, list[tuple[TokenLogprob, ...] | None]] = {request.request_id: [] for request in requests}
    for request in requests[:1]:
        engine.add(request)
    while engine.has_work:
        engine.step()
    for request in requests[1:]:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            told[output.request_id].append(output.prompt_logprobs)
        engine.check_integrity()
    check(told["scored"][0], PROMPT, 3)
    assert told["short"][0] == ()
    later = [scores for name, found in told.items() for scores in found[name in ("scored", "short") :]]
    assert later and not any(scores is not None for scores in later)
    assert requests[1].stats.cached_tokens == 0
    assert requests[1].output_ids.tolist()[:4] == requests[0].output_ids.tolist()


def test_a_preempted_request_is_scored_once() -> None:
    model = tiny_model("llama", "float32")
    engine = engine_over(model.runner, prepared(LlmaDrafter(), model), batch=1, step_tokens=16)
    scored = Request("scored", PROMPT, SamplingParams(3), priority=1, prompt_logprobs=1)
    engine.add(scored)
    for _ in range(3):
        assert engine.step() == []
    urgent = Request("urgent", PROMPT[:5], SamplingParams(2), priority=0)
    engine.add(urgent)
    told = []
    while engine.has_work:
        told += [output.prompt_logprobs for output in engine.step() if output.request_id == "scored"]
    assert scored.stats.preemptions == 1
    check(told[0], PROMPT, 1)
