"""A request that goes on where another engine left it: the rest is what would have come, to the token and the character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.decoding.request import PLAIN, FinishReason, Request, SamplingParams, TokenLogprob
from outrider.engine.engine import Engine

PROMPT = [10, 20, 30, 10, 20, 40]
TOKENS = 40
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11, "top_p": 0.95},
    "penalized": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "logprobs": {"temperature": 1.0, "seed": 5, "logprobs": 3},
    "min_tokens": {
        "temperature": 1.5, "seed": 6, "min_tokens": 30, "stop_token_ids": tuple(range(1, 300, 2)), "ignore_eos": False,
    },
}  # fmt: skip


@dataclass
class Output:
    """All that a request gave."""

    token_ids: list[int]
    texts: list[str]  # shown with each token
    logprobs: list[TokenLogprob]
    reason: FinishReason | None


def run(engine: Engine, params: SamplingParams, before: Sequence[list[int]], **fields: Any) -> list[Output]:
    """What comes of requests, at once, that have emitted some tokens before."""
    outputs = {}
    for number, emitted in enumerate(before):
        request = Request(f"cmpl-1/{number}", PROMPT, params, emitted=emitted, **fields)
        assert (request.num_output, request.output_ids.tolist()) == (len(emitted), emitted)
        engine.add(request)
        outputs[request.request_id] = Output([], [], [], None)
    while engine.has_work:
        for step in engine.step():
            output = outputs[step.request_id]
            output.token_ids.extend(step.token_ids)
            output.texts.append(step.text)
            output.logprobs.extend(step.logprobs or ())
            output.reason = step.finish_reason
    return list(outputs.values())


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **changes})


def whole_of(engine: Engine, asked: SamplingParams) -> Output:
    """The output without a cut, with one text for each token."""
    (whole,) = run(engine, asked, [[]], strategy=PLAIN)
    assert len(whole.texts) == len(whole.token_ids)
    return whole


def assert_same_rest(engine: Engine, whole: Output, asked: SamplingParams, strategy: str = PLAIN, step: int = 1) -> None:
    cuts = range(0, len(whole.token_ids), step)
    rests = run(engine, asked, [whole.token_ids[:cut] for cut in cuts], strategy=strategy)
    for cut, rest in zip(cuts, rests, strict=True):
        assert rest.token_ids == whole.token_ids[cut:]
        assert "".join(rest.texts) == "".join(whole.texts[cut:])
        assert rest.reason is whole.reason
        assert [entry.token_id for entry in rest.logprobs] == [entry.token_id for entry in whole.logprobs[cut:]]
        for ours, theirs in zip(rest.logprobs, whole.logprobs[cut:], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("rules", RULES)
def test_the_rest_of_an_output_is_the_same_after_every_cut(engine: Engine, rules: str) -> None:
    asked = params(**RULES[rules])
    whole = whole_of(engine, asked)
    assert len(whole.token_ids) >= 30 and bool(whole.logprobs) is (rules == "logprobs")
    assert_same_rest(engine, whole, asked)


@pytest.mark.parametrize(
    "strategy", ["auto", "jacobi", "llma", "trie", "suffix", "suffix_decoding", "sam", "recycling", "racer", "adapld"]
)
def test_every_strategy_goes_on_from_what_others_emitted(engine: Engine, strategy: str) -> None:
    for rules in ("greedy", "sampled"):
        asked = params(**RULES[rules])
        assert_same_rest(engine, whole_of(engine, asked), asked, strategy, step=6)


def test_a_stop_string_that_spans_the_cut_ends_the_text_where_it_did(engine: Engine) -> None:
    full = "".join(whole_of(engine, params()).texts)
    for length in (2, 5):
        stop = next(part for at in range(12, len(full)) if (part := full[at : at + length]).isascii() and full.index(part) == at)
        asked = params(stop=(stop, stop[:1] + "never"))
        whole = whole_of(engine, asked)
        assert whole.reason is FinishReason.STOP and "".join(whole.texts) == full[: full.index(stop)]
        assert_same_rest(engine, whole, asked)


def test_a_character_in_several_tokens_is_shown_by_whoever_finishes_it(engine: Engine) -> None:
    assert engine.tokenizer is not None
    text = "a🦙b東c"
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 5
    for cut in range(1, len(ids)):
        asked = SamplingParams(max_tokens=len(ids), ignore_eos=True, logit_bias=((ids[cut], 100.0),))  # says which comes next
        request = Request("a", PROMPT, asked, emitted=ids[:cut], strategy=PLAIN)
        engine.add(request)
        (output,) = engine.step()
        engine.abort("a")
        assert output.token_ids == (ids[cut],)
        shown, shown_then = (engine.tokenizer.decode(ids[:end]).rstrip("\ufffd") for end in (cut, cut + 1))
        assert shown + output.text == shown_then and text.startswith(shown_then)


def test_a_tenants_history_holds_the_resumed_text_once_and_whole(engine: Engine) -> None:
    whole = whole_of(engine, params()).token_ids
    run(engine, params(), [whole[:17]], tenant="acme")
    assert engine.histories is not None
    history = engine.histories.of("acme")
    assert history is not None
    assert (len(history._texts), history.num_tokens) == (1, TOKENS)


def test_what_was_emitted_leaves_room_for_a_token() -> None:
    with pytest.raises(ValueError, match="emitted must hold fewer tokens"):
        Request("a", PROMPT, SamplingParams(max_tokens=3), emitted=[1, 2, 3])
    assert Request("a", PROMPT, SamplingParams(max_tokens=3), emitted=[1, 2]).remaining == 1
