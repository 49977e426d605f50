"""Exactness with bias, penalties, min-p, minimum length and log-probabilities: whatever is drafted, in whatever batch, each token
and each log-probability is that of plain decoding, and plain decoding is that of transformers or of a loop that follows the rules
by the letter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.drafters.registry import STRATEGIES
from outrider.decoding.request import Request, SamplingParams, TokenLogprob
from outrider.decoding.sampling.sampler import choose
from outrider.engine.engine import Engine
from tests.helpers.hostile import HostileDrafter
from tests.helpers.models import VOCAB, draft_with, llama_config, save_model

MAX_TOKENS = 24
PROMPTS = [[7], [1, 2, 3] * 12, [9, 30, 9, 31, 12, 9, 30]]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
BIAS = ((3, 4.0), (17, -100.0), (250, 2.5))
ALL = {**PENALTIES, "logit_bias": BIAS, "min_p": 0.02, "top_k": 60, "top_p": 0.95, "min_tokens": 9}
CASES: dict[str, dict[str, object]] = {
    "repetition": {"repetition_penalty": 1.2},
    "reward": {"repetition_penalty": 0.8, "frequency_penalty": -0.2},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": BIAS},
    "min_tokens": {"min_tokens": 20, "logit_bias": ((0, 3.0),)},
    "all_greedy": ALL,
    "min_p": {"temperature": 1.1, "min_p": 0.1},
    "penalties_sampled": {"temperature": 0.8, **PENALTIES},
    "all_sampled": {"temperature": 0.9, **ALL},
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Tied embeddings make the model repeat itself, so that drafts are accepted and penalties have something to do.
    config = llama_config(tie_word_embeddings=True, initializer_range=0.15)
    return str(save_model(Path(tmp_path_factory.mktemp("model")), config, seed=4))


@pytest.fixture(scope="module", params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(folder: str, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@pytest.fixture(scope="module")
def engines(folder: str, dtype: str) -> dict[str, Engine]:
    def load(strategy: str, batch: int) -> Engine:
        return Engine.load(ModelOptions(folder, dtype=dtype), EngineOptions(max_running=batch), SpeculationOptions(strategy))  # type: ignore[arg-type]

    made = {"autoregressive": load("autoregressive", 1), "prompt_lookup": load("prompt_lookup", 4), "llma": load("llma", 4)}
    return made | {"hostile": load("llma", 4)}


def params_of(case: str, **more: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": 11, **CASES[case], **more})  # type: ignore[arg-type]


def generate(engine: Engine, params: SamplingParams) -> tuple[list[list[int]], list[list[TokenLogprob]], int]:
    """The outputs of all prompts, their log-probabilities, and how many drafted tokens were accepted."""
    requests = [Request(str(i), prompt, params, references=[[3, 9, 250, 3, 9], prompt]) for i, prompt in enumerate(PROMPTS)]
    logprobs: dict[str, list[TokenLogprob]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if params.logprobs is None:
                assert output.logprobs is None
            else:
                assert output.logprobs is not None and [entry.token_id for entry in output.logprobs] == list(output.token_ids)
                logprobs[output.request_id] += output.logprobs
    accepted = sum(request.stats.accepted for request in requests)
    return [request.output_ids.tolist() for request in requests], list(logprobs.values()), accepted


def naive_scores(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The rules token by token, from the sequence as it is."""
    scores, counts = logits.clone(), Counter(output)
    for token, bias in params.logit_bias:
        scores[token] += bias
    if len(output) < params.min_tokens:
        scores[0] = -torch.inf  # the model's end token
    for token in {*prompt, *output}:
        scores[token] = (
            scores[token] / params.repetition_penalty if scores[token] > 0 else scores[token] * params.repetition_penalty
        )
    for token, count in counts.items():
        scores[token] -= params.frequency_penalty * count
        scores[token] -= params.presence_penalty
    return scores


def naive_output(model: PreTrainedModel, params: SamplingParams, prompt: list[int]) -> list[int]:
    """Plain decoding with a fresh forward for every token."""
    output: list[int] = []
    plain = SamplingParams(params.max_tokens, params.temperature, params.top_k, params.top_p, params.seed, min_p=params.min_p)
    while len(output) < params.max_tokens and 0 not in output:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1]
        output.append(choose(naive_scores(logits, params, prompt, output), plain, len(prompt) + len(output)))
    return output


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_strategy_gives_what_the_rules_give(
    engines: dict[str, Engine], model: PreTrainedModel, dtype: str, case: str
) -> None:
    params = params_of(case, logprobs=3)
    expected = [naive_output(model, params, prompt) for prompt in PROMPTS]
    _, plain_logprobs, _ = generate(engines["autoregressive"], params)
    for name, engine in engines.items():
        if name == "hostile":
            draft_with(engine, HostileDrafter({str(i): output for i, output in enumerate(expected)}, seed=len(case)))
        outputs, logprobs, accepted = generate(engine, params)
        assert outputs == expected, name
        assert accepted > 0 or name != "hostile"  # else the comparison would show nothing of penalties inside a tree
        for ours, theirs in zip(logprobs, plain_logprobs, strict=True):
            assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
            np.testing.assert_allclose(
                [[entry.logprob, *(value for _, value in entry.top)] for entry in ours],
                [[entry.logprob, *(value for _, value in entry.top)] for entry in theirs],
                atol=TOLERANCE[dtype],
                rtol=0,
            )


@pytest.fixture(scope="module")
def plain(engines: dict[str, Engine]) -> dict[str, list[list[int]]]:
    """What plain decoding gives for two of the cases; the test above compares it with the rules."""
    return {case: generate(engines["autoregressive"], params_of(case))[0] for case in ("all_greedy", "all_sampled")}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_registered_strategies_give_what_plain_decoding_gives(
    folder: str, dtype: str, plain: dict[str, list[list[int]]], strategy: str
) -> None:
    options = ModelOptions(folder, dtype=dtype)  # type: ignore[arg-type]
    engine = Engine.load(options, EngineOptions(max_running=2), SpeculationOptions(strategy))
    for case, expected in plain.items():
        assert generate(engine, params_of(case))[0] == expected, case


def test_rules_change_the_output(engines: dict[str, Engine]) -> None:
    """The cases above would show little if no rule had an effect."""
    plain, _, _ = generate(engines["llma"], SamplingParams(max_tokens=MAX_TOKENS))
    for case in ("repetition", "reward", "presence", "frequency", "bias", "min_tokens"):
        assert generate(engines["llma"], params_of(case))[0] != plain, case
    lengths = [len(output) for output in generate(engines["llma"], params_of("min_tokens"))[0]]
    assert min(lengths) > 20 and min(len(o) for o in generate(engines["llma"], params_of("min_tokens", min_tokens=0))[0]) < 20
    ending = SamplingParams(max_tokens=MAX_TOKENS, min_tokens=5, logit_bias=((0, 100.0),))  # the end token as soon as it may come
    assert {len(output) for output in generate(engines["llma"], ending)[0]} == {6}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"repetition_penalty": 1.25}, {"sequence_bias": BIAS}, {"min_new_tokens": 20}], ids=str)
@pytest.mark.parametrize("strategy", ["autoregressive", "llma", "prompt_lookup"])
def test_greedy_is_transformers_generate(
    engines: dict[str, Engine], model: PreTrainedModel, strategy: str, arguments: dict[str, object]
) -> None:
    names = {"sequence_bias": "logit_bias", "min_new_tokens": "min_tokens"}
    params = SamplingParams(MAX_TOKENS, **{names.get(name, name): value for name, value in arguments.items()})  # type: ignore[arg-type]
    if "sequence_bias" in arguments:
        arguments = {"sequence_bias": {(token,): bias for token, bias in BIAS}}
    expected = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, **arguments)  # type: ignore[operator]
        expected.append(ids[0, len(prompt) :].tolist())
    assert generate(engines[strategy], params)[0] == expected


@pytest.mark.parametrize("case", ["repetition", "all_sampled"])
def test_logprobs_are_those_of_a_fresh_forward(engines: dict[str, Engine], model: PreTrainedModel, dtype: str, case: str) -> None:
    params = params_of(case, logprobs=5)
    plain, _, _ = generate(engines["autoregressive"], params)
    draft_with(engines["hostile"], HostileDrafter({str(i): output for i, output in enumerate(plain)}, seed=1))
    outputs, logprobs, accepted = generate(engines["hostile"], params)
    assert accepted > 0
    for prompt, output, entries in zip(PROMPTS, outputs, logprobs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits, -1)
        best = torch.topk(table, 5)
        assert len(entries) == len(output)
        for at, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(table[at, output[at]].item(), abs=TOLERANCE[dtype])
            assert [token for token, _ in entry.top] == best.indices[at].tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values[at].tolist(), abs=TOLERANCE[dtype])


def test_logprobs_end_with_the_output(engines: dict[str, Engine]) -> None:
    """A stop string in the middle of an accepted burst ends tokens and log-probabilities together."""
    engine = engines["hostile"]
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    whole, _, _ = generate(engines["autoregressive"], SamplingParams(MAX_TOKENS))
    draft_with(engine, HostileDrafter({str(i): output for i, output in enumerate(whole)}, seed=0))
    shorter = 0
    for i, output in enumerate(whole):
        text = tokenizer.decode(output)
        stop = next(text[at] for at in range(5, len(text)) if text[at].isascii() and text[at] not in text[:5])
        request = Request(str(i), PROMPTS[i], SamplingParams(MAX_TOKENS, stop=(stop,), logprobs=0))
        engine.add(request)
        entries: list[TokenLogprob] = []
        while engine.has_work:
            for step in engine.step():
                entries += step.logprobs or ()
        assert [entry.token_id for entry in entries] == request.output_ids.tolist() == output[: len(entries)]
        assert all(entry.top == () for entry in entries)
        shorter += len(entries) < len(output)
    assert shorter > 0


def test_preempted_requests_give_the_same(folder: str) -> None:
    params = SamplingParams(30, 0.9, seed=5, ignore_eos=True, logit_bias=BIAS, logprobs=2, **PENALTIES)  # type: ignore[arg-type]

    def run(priorities: bool) -> tuple[Request, list[TokenLogprob]]:
        options = EngineOptions(max_running=1, scheduling_policy="priority")
        engine = Engine.load(ModelOptions(folder, dtype="float64"), options, SpeculationOptions("llma"))
        slow = Request("slow", PROMPTS[2], params, priority=1)
        engine.add(slow)
        entries: list[TokenLogprob] = []
        for number in range(1000):
            if priorities and number in (4, 9, 14):
                engine.add(Request(f"urgent{number}", [number, 2], replace(params, max_tokens=3), priority=0))
            for output in engine.step():
                entries += (output.logprobs or ()) if output.request_id == "slow" else ()
            if not engine.has_work:
                break
        return slow, entries

    undisturbed, expected = run(False)
    slow, entries = run(True)
    assert slow.stats.preemptions >= 2
    assert slow.output_ids.tolist() == undisturbed.output_ids.tolist()
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in expected], abs=1e-10)


def test_a_request_id_that_comes_again_starts_with_no_counts(folder: str) -> None:
    engine = Engine.load(ModelOptions(folder, dtype="float64"), EngineOptions(), SpeculationOptions("llma"))
    first = generate(engine, params_of("all_sampled"))[0]
    assert generate(engine, params_of("all_sampled"))[0] == first


def test_bias_outside_the_vocabulary_is_refused(engines: dict[str, Engine]) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        engines["llma"].add(Request("a", [1], SamplingParams(8, logit_bias=((VOCAB, 1.0),))))
    assert not engines["llma"].has_work
