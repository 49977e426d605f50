"""Exactness under a grammar: whatever is drafted, by one replica or several ranks, each token is that of plain decoding, plain
decoding is that of a loop that tries every token, and every text is of the grammar."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from outrider.configs.slices import EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, Request, SamplingParams, StepOutput
from outrider.decoding.sampling.sampler import choose
from outrider.decoding.tree import SOURCES
from outrider.engine.engine import Engine
from outrider.engine.errors import RequestError
from outrider.engine.executor import VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.scheduling.planner import LONG_S
from outrider.engine.text.grammar import (
    MASK_S,
    MAX_DEBT_S,
    Grammars,
    choice_grammar,
    json_grammar,
    object_grammar,
    regex_grammar,
)
from outrider.engine.text.tokenizer import load_tokenizer
from tests.helpers.hostile import HostileDrafter
from tests.helpers.models import draft_with, llama_config, save_model
from tests.helpers.ranks import loaded_group

SCHEMA = {
    "type": "object",
    "properties": {
        "identifier": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "description": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["identifier", "count", "colours", "description"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"
COLOURS = ["crimson", "crimson red", "cyan", "größer"]
PROMPTS = ([7], [1, 2, 3] * 8, [9, 30, 9, 31, 12, 9, 30])
EXAMPLES = ('{"identifier": "abc", "count": 12, "colours": ["red"], "description": null}', "crimson red", "2024-10-31")
MAX_TOKENS = 120
Biases = tuple[tuple[int, float], ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = llama_config(tie_word_embeddings=True, initializer_range=0.15)
    return str(save_model(Path(tmp_path_factory.mktemp("model")), config, seed=4))


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> PreTrainedTokenizerFast:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def blanks(tokenizer: PreTrainedTokenizerFast) -> Biases:
    """A bias against whitespace, of which a random model would write as much as it may."""
    texts = [str(tokenizer.decode([token])) for token in range(len(tokenizer))]
    return tuple((token, -100.0) for token, text in enumerate(texts) if text and not text.strip())


def load(folder: str, strategy: str, batch: int = 4, **options: object) -> Engine:
    speculation = SpeculationOptions(strategy, options={"all_rows": True} if strategy == "auto" else {})
    return Engine.load(ModelOptions(folder, dtype="float32"), EngineOptions(max_running=batch, **options), speculation)  # type: ignore[arg-type]


STRATEGIES = ("autoregressive", "auto", "llma", "jacobi", "recycling", "racer", "adapld", "trie", "hostile")


@pytest.fixture(scope="module")
def engines(folder: str) -> dict[str, Engine]:
    made = {name: load(folder, name) for name in STRATEGIES[:-1]}
    return made | {"hostile": load(folder, "llma")}


def cases(blanks: Biases) -> list[SamplingParams]:
    """Grammars with everything else that a request may ask for."""
    bound = json_grammar(SCHEMA)
    base = SamplingParams(MAX_TOKENS, logit_bias=blanks)
    hot = replace(base, temperature=1.0)
    return [
        replace(base, grammar=bound),
        *(replace(hot, grammar=bound, seed=seed) for seed in range(3)),
        replace(hot, grammar=bound, seed=3, top_p=0.8),
        replace(hot, grammar=bound, seed=4, top_k=5, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3),
        replace(hot, grammar=bound, seed=5, min_tokens=100, logprobs=2),
        replace(hot, grammar=regex_grammar(DATE), seed=6),
        replace(base, grammar=regex_grammar(DATE), presence_penalty=1.0),
        replace(hot, grammar=choice_grammar(COLOURS), seed=7, min_tokens=50),
        replace(hot, grammar=object_grammar(), seed=8, max_tokens=30),
    ]


def requests(params: Sequence[SamplingParams], tokenizer: PreTrainedTokenizerFast) -> list[Request]:
    references = [tokenizer.encode(text) for text in EXAMPLES]
    return [Request(str(at), PROMPTS[at % len(PROMPTS)], one, references, tenant="a") for at, one in enumerate(params)]


def run(engine: Engine, wanted: Sequence[Request]) -> list[list[StepOutput]]:
    """All outputs of each request."""
    found: dict[str, list[StepOutput]] = {request.request_id: [] for request in wanted}
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append(output)
        engine.check_integrity()
    return list(found.values())


@pytest.fixture(scope="module")
def plain(engines: dict[str, Engine], tokenizer: PreTrainedTokenizerFast, blanks: Biases) -> list[list[int]]:
    """The outputs without speculation, which the tests below compare with."""
    wanted = requests(cases(blanks), tokenizer)
    run(engines["autoregressive"], wanted)
    assert all(request.stats.drafted == 0 for request in wanted)
    return [request.output_ids.tolist() for request in wanted]


def text_of(outputs: Sequence[StepOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_texts_are_of_the_grammar_and_the_same_whatever_is_drafted(
    engines: dict[str, Engine],
    tokenizer: PreTrainedTokenizerFast,
    blanks: Biases,
    plain: list[list[int]],
    strategy: str,
) -> None:
    engine = engines[strategy]
    if strategy == "hostile":
        draft_with(engine, HostileDrafter({str(at): output for at, output in enumerate(plain)}, 5))
    wanted = requests(cases(blanks), tokenizer)
    outputs = run(engine, wanted)
    assert [request.output_ids.tolist() for request in wanted] == plain
    whole = 0
    for request, steps in zip(wanted, outputs, strict=True):
        text, grammar = text_of(steps), request.params.grammar
        assert steps[-1].finish_reason is (FinishReason.LENGTH if request.remaining == 0 else FinishReason.STOP)
        assert request.output_ids[-1] == 0 or request.remaining == 0
        if request.remaining == 0:
            continue
        whole += 1
        if grammar == json_grammar(SCHEMA):
            jsonschema.validate(json.loads(text), SCHEMA)
        elif grammar == choice_grammar(COLOURS):
            assert text in COLOURS
        elif grammar == regex_grammar(DATE):
            assert len(text) == 10
        else:
            assert isinstance(json.loads(text), dict)
    assert whole >= len(wanted) - 3
    accepted = sum(request.stats.accepted for request in wanted)
    assert (accepted > 0) == (strategy != "autoregressive")
    if strategy == "auto":
        assert sum(request.stats.accepted_by_source.get("grammar", 0) for request in wanted) > 0
        assert SOURCES.index("grammar") > 0


def test_plain_decoding_is_the_best_of_what_may_come(
    folder: str, engines: dict[str, Engine], blanks: Biases, plain: list[list[int]]
) -> None:
    """A fresh forward for every token, and every token of the vocabulary tried."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    grammars = engines["auto"]._grammars
    assert grammars is not None
    for at in (0, 1, 4):
        params, prompt, output = cases(blanks)[at], PROMPTS[at % len(PROMPTS)], list[int]()
        assert params.grammar is not None
        while len(output) < 40 and output[-1:] != [0]:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
            logits = logits.clone()
            for token, bias in blanks:
                logits[token] += bias
            for token in range(len(logits)):
                state = grammars.start(params.grammar)
                assert all(state.push(earlier) for earlier in output)
                if not state.push(token):
                    logits[token] = -torch.inf
            free = SamplingParams(1, params.temperature, params.top_k, params.top_p, params.seed)
            output.append(choose(logits, free, len(prompt) + len(output)))
        assert output == plain[at][: len(output)]


def test_preempted_and_resumed_requests_give_the_same(
    folder: str, tokenizer: PreTrainedTokenizerFast, blanks: Biases, plain: list[list[int]]
) -> None:
    engine = load(folder, "llma", 1, scheduling_policy="priority")
    params = cases(blanks)
    slow = Request("slow", PROMPTS[1], params[1], priority=1)  # the others are more urgent
    engine.add(slow)
    for step in range(400):
        if step in (4, 9, 14):
            engine.add(Request(f"urgent{step}", [step, 2], replace(params[9], seed=step, max_tokens=3, min_tokens=0)))
        engine.step()
        if not engine.has_work:
            break
    assert slow.stats.preemptions >= 2
    assert slow.output_ids.tolist() == plain[1]
    for given in (1, len(plain[2]) // 2, len(plain[2]) - 1):
        resumed = Request("2", PROMPTS[2], params[2], emitted=plain[2][:given])
        run(engine, [resumed])
        assert resumed.output_ids.tolist() == plain[2]


def test_an_output_that_is_none_of_the_grammar_ends_its_request_alone(
    engines: dict[str, Engine], blanks: Biases, plain: list[list[int]]
) -> None:
    params = cases(blanks)[1]
    wrong = Request("wrong", PROMPTS[0], params, emitted=[5, 6])
    right = Request("1", PROMPTS[1], params)
    outputs = run(engines["llma"], [wrong, right])
    assert [(output.token_ids, output.finish_reason) for output in outputs[0]] == [((), FinishReason.ERROR)]
    assert "grammar" in (outputs[0][0].error or "") and outputs[0][0].fault_field == "response_format"
    assert right.output_ids.tolist() == plain[1]


def ticking(engine: Engine, request: Request, seconds: float) -> Request:
    """The request, of whose grammar each call takes so many seconds of an invented clock."""
    now_s = itertools.count(step=seconds)
    tokenizer, info = engine.tokenizer, engine.info
    assert tokenizer is not None and request.params.grammar is not None
    grammars = Grammars(tokenizer, info.vocab_size, info.eos_token_ids, clock=lambda: next(now_s))
    request.grammar = grammars.start(request.params.grammar)
    return request


def test_slow_masks_wait_for_others_and_change_no_token(
    engines: dict[str, Engine], tokenizer: PreTrainedTokenizerFast, blanks: Biases, plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = engines["llma"]
    steps: list[dict[str, int]] = []  # rows by request
    execute = engine._executor.execute

    def noted(works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        steps.append({work.request.request_id: 0 if work.tree is None else len(work.tree.tokens) for work in works})
        return execute(works, top_k)

    monkeypatch.setattr(engine._executor, "execute", noted)
    wanted = requests(cases(blanks), tokenizer)[:4]
    slow = {request.request_id for request in wanted[:2]}
    for request in wanted[:2]:
        ticking(engine, request, MASK_S * 1.001)  # two calls are too slow for a step
    run(engine, wanted)
    assert [request.output_ids.tolist() for request in wanted] == plain[:4]
    beside = [step for step in steps[2:] if step.keys() - slow]  # in the first ones it is not known yet
    assert all(len(step.keys() & slow) <= 1 for step in beside)
    assert any(not step.keys() & slow for step in beside)
    assert all(step[one] == 1 for step in beside for one in step.keys() & slow)


def test_after_long_masks_the_account_s_next_requests_wait_for_others_from_their_first_step(
    engines: dict[str, Engine], tokenizer: PreTrainedTokenizerFast, blanks: Biases, plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = engines["llma"]
    planner, steps = engine._planner, list[list[str]]()
    plan = planner.plan

    def noted(width: int) -> list[ScheduledRequest]:
        works = plan(width)
        steps.append([work.request.request_id for work in works])
        return works

    monkeypatch.setattr(planner, "plan", noted)
    monkeypatch.setattr(planner, "_probation_until_s", {})
    wanted = requests(cases(blanks), tokenizer)[:4]
    for request in wanted[:2]:
        request.account = "long"
    run(engine, [ticking(engine, wanted[0], LONG_S), wanted[3]])
    assert "long" in planner._probation_until_s
    steps.clear()
    monkeypatch.setattr(planner, "_rest_until_s", time.perf_counter() + 0.05)
    run(engine, wanted[1:3])
    assert wanted[1].output_ids.tolist() == plain[1] and wanted[2].output_ids.tolist() == plain[2]
    assert wanted[1].request_id not in steps[0] and wanted[2].request_id in steps[0]


def test_masks_beyond_their_time_end_their_request_alone(
    engines: dict[str, Engine], tokenizer: PreTrainedTokenizerFast, blanks: Biases, plain: list[list[int]]
) -> None:
    engine = engines["llma"]
    wanted = requests(cases(blanks), tokenizer)[:4]
    wanted[1].params = replace(wanted[1].params, grammar_field="guided_json")
    outputs = run(engine, [wanted[0], ticking(engine, wanted[1], MAX_DEBT_S / 4), *wanted[2:]])
    assert (outputs[1][-1].finish_reason, outputs[1][-1].fault_field) == (FinishReason.ERROR, "guided_json")
    given = wanted[1].output_ids.tolist()
    assert 0 < len(given) < len(plain[1]) and given == plain[1][: len(given)]
    assert [wanted[at].output_ids.tolist() for at in (0, 2, 3)] == [plain[at] for at in (0, 2, 3)]


def test_ranks_that_share_the_steps_give_the_same(
    folder: str, tokenizer: PreTrainedTokenizerFast, blanks: Biases, plain: list[list[int]]
) -> None:
    options = EngineOptions(max_running=4, max_step_tokens=64)
    speculation = SpeculationOptions("auto", max_draft_tokens=16, options={"all_rows": True})
    with loaded_group(ModelOptions(folder, dtype="float32"), options, speculation, 2) as (leader, group):
        wanted = requests(cases(blanks), tokenizer)
        run(leader, wanted)
        assert [request.output_ids.tolist() for request in wanted] == plain
        state = group.state(2)
        assert state.ready == (0, 1) and (state.losses, state.divergences, state.disagreements) == (0, 0, 0)
        assert any(len(step.rank_s) == 2 and min(step.rows) > 1 for step in group.times)


def test_without_a_tokenizer_a_grammar_is_refused(engines: dict[str, Engine]) -> None:
    engine = engines["llma"]
    kept, engine._grammars = engine._grammars, None
    try:
        with pytest.raises(RequestError, match="response_format"):
            engine.add(Request("a", [1], SamplingParams(8, grammar=object_grammar())))
    finally:
        engine._grammars = kept
    assert not engine.has_work and np.isfinite(engine.counts().free_slots)
