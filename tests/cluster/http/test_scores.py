"""Choices behind a prompt or a chat, and pairs of texts: scored as ``echo`` scores them, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cache_service.namespace import hash_key
from outrider.cluster.admission.controller import AdmissionOptions
from outrider.cluster.http.api import Service
from outrider.configs.slices import LimitsOptions, TenancyOptions, TenantOptions
from tests.cluster.circle import (
    CHATS,
    COMPLETIONS,
    CONTEXT,
    MESSAGES,
    TOKENIZER,
    LocalEngine,
    bearer,
    check_error,
    client_of,
    save_saying,
    speaking,
)

SCORE = "/v1/score"
PROMPT, CHOICES = "hgf<", ["abc", "a", "abz", "é", "bcd"]


def score(http: httpx.Client, model: str = "circle", **body: Any) -> dict[str, Any]:
    answer = http.post(SCORE, json={"model": model} | body).raise_for_status().json()
    assert (answer["object"], answer["model"]) == ("list", model) and answer["id"].startswith("score-")
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    assert {entry["object"] for entry in answer["data"]} == {"score"}
    return dict(answer)


def echoed(http: httpx.Client, text: str, model: str = "circle") -> tuple[list[str], list[float]]:
    """The tokens of a prompt and their log-probabilities, the first of which is None."""
    body = {"model": model, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    logprobs = http.post(COMPLETIONS, json=body).raise_for_status().json()["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def check_echoed(http: httpx.Client, prompt: str, choices: list[str], data: list[dict[str, Any]]) -> None:
    for choice, entry in zip(choices, data, strict=True):
        tokens, logprobs = (values[len(prompt.encode()) :] for values in echoed(http, prompt + choice))
        assert (entry["tokens"], entry["token_logprobs"], entry["score"]) == (tokens, logprobs, sum(logprobs))


def test_choices_of_a_prompt(http: httpx.Client, circle_engine: LocalEngine) -> None:
    before = circle_engine.replicas[0].describe().metrics
    answer = score(http, prompt=PROMPT, choices=CHOICES)
    after = circle_engine.replicas[0].describe().metrics
    assert before is not None and after is not None
    assert after.steps - before.steps == 2  # the prompt, and all choices
    assert after.generation_tokens == before.generation_tokens and after.finished["stop"] == before.finished["stop"] + 1
    data = answer["data"]
    check_echoed(http, PROMPT, CHOICES, data)
    weights = [math.exp(entry["score"]) for entry in data]
    assert [entry["probability"] for entry in data] == pytest.approx([weight / sum(weights) for weight in weights])
    assert max(data, key=lambda entry: entry["probability"])["index"] == CHOICES.index("a")
    tokens = len(PROMPT) + sum(len(choice.encode()) for choice in CHOICES)
    details = {"cached_tokens": 0}
    assert answer["usage"] == {
        "prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens, "prompt_tokens_details": details,
    }  # fmt: skip


def test_choices_of_a_chat(http: httpx.Client) -> None:
    data = score(http, messages=MESSAGES, choices=["abc", "b"])["data"]
    check_echoed(http, "[user]hi>", ["abc", "b"], data)
    assert http.post(CHATS, json={"model": "circle", "messages": MESSAGES, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("<", "abc", [("<", "abc")]),
        ("<", ["abc", "b", "abc"], [("<", "abc"), ("<", "b"), ("<", "abc")]),
        (["<"], ["a", "b"], [("<", "a"), ("<", "b")]),
        (["<", "b", "<"], ["a", "c", "b"], [("<", "a"), ("b", "c"), ("<", "b")]),
    ],
)
def test_pairs_of_texts(http: httpx.Client, first: Any, second: Any, pairs: list[tuple[str, str]]) -> None:
    data = score(http, text_1=first, text_2=second)["data"]
    for (prompt, choice), entry in zip(pairs, data, strict=True):
        check_echoed(http, prompt, [choice], [entry])


def test_tokens_across_the_border_of_prompt_and_choice(circle_model: Path, tmp_path: Path) -> None:
    saying = save_saying(circle_model, tmp_path / "saying", ["ga", "gam"], "{{ messages[0].content }}")
    with speaking(saying) as speaker, httpx.Client(base_url=speaker.url, timeout=60) as http:
        data = score(http, "saying", prompt="<g", choices=["ab", "b"])["data"]
        assert [entry["tokens"] for entry in data] == [["ga", "b"], ["g", "b"]]
        for text, entry in zip(("<gab", "<gb"), data, strict=True):
            assert entry["token_logprobs"] == echoed(http, text, "saying")[1][1:]
        for body, field in (({"prompt": "g", "choices": ["a"]}, "prompt"), ({"text_1": "g", "text_2": ["b", "a"]}, "text_1")):
            check_error(http.post(SCORE, json={"model": "saying"} | body), 400, param=field)


P, C, T = {"prompt": "<"}, {"choices": ["a", "b"]}, {"text_1": "<", "text_2": "a"}
WRONG: list[tuple[dict[str, Any], str]] = [
    (C, "prompt"),
    (P, "choices"),
    (P | {"choices": []}, "choices"),
    (P | {"choices": [""]}, "choices[0]"),
    (P | {"choices": ["a", 5]}, "choices[1]"),
    (P | {"choices": "a"}, "choices"),
    (P | {"choices": ["a", "b", "a"]}, "choices"),
    (P | {"choices": [str(at) for at in range(129)]}, "choices"),
    (P | {"choices": ["abcdefghij"]}, "choices"),  # nine tokens of the tree, of at most eight
    (P | {"choices": ["a", "x" * CONTEXT]}, "choices[1]"),
    (C | {"prompt": "x" * (CONTEXT + 1)}, "prompt"),
    (C | {"prompt": ""}, "prompt"),
    (C | {"prompt": [5]}, "prompt"),
    (C | {"messages": []}, "messages"),
    (C | {"messages": [*MESSAGES, {"role": "system", "content": "late"}]}, "messages"),
    (P | C | {"messages": MESSAGES}, "messages"),
    (P | T, "text_1"),
    (P | C | {"text_2": "a"}, "text_2"),
    (T | C, "choices"),
    ({"text_1": "<"}, "text_2"),
    ({"text_2": "<"}, "prompt"),
    (T | {"text_2": []}, "text_2"),
    (T | {"text_2": ["a", ""]}, "text_2[1]"),
    (T | {"text_1": ["<", "a"]}, "text_1"),
    (T | {"text_2": "abcdefghij"}, "text_2"),
    (P | C | {"n": 2}, "n"),
    (P | C | {"stream": True}, "stream"),
    (P | C | {"max_tokens": 5}, "max_tokens"),
    (P | C | {"priority": 1}, "priority"),
    (P | C | {"cache": "on"}, "cache"),
]


@pytest.mark.parametrize(("body", "field"), WRONG)
def test_what_is_refused(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    check_error(http.post(SCORE, json={"model": "circle"} | body), 400, param=field)


def test_other_refusals(http: httpx.Client) -> None:
    check_error(http.post(SCORE, json={"model": "other"} | P | C), 404, param="model", code="model_not_found")
    check_error(http.post(SCORE, json={"model": "circle"} | P | C, headers={"Last-Event-ID": "a"}), 400, param="Last-Event-ID")
    check_error(http.get(SCORE), 405)
    long = http.post(SCORE, json={"model": "circle"} | P | {"choices": ["abcdefghij"]}).json()["error"]["message"]
    assert "9 tokens, the maximum is 8" in long and "speculation.largest_tree" in long


def test_limits_of_a_key(circle_engine: LocalEngine) -> None:
    tenants = TenancyOptions(tenants={"acme": TenantOptions(keys=(hash_key("secret"),))})
    limits = LimitsOptions(max_prompt_tokens=6, tokens_per_minute=40)
    service = Service(circle_engine, TOKENIZER, tenants, admission=AdmissionOptions(require_key=True, limits=limits))
    with client_of(service) as http:
        body = {"model": "circle"} | P | C
        check_error(http.post(SCORE, json=body), 401, code="invalid_api_key")
        http.headers.update(bearer("secret"))
        check_error(http.post(SCORE, json=body | {"choices": ["abcdef"]}), 400, "7 tokens", param="choices[0]")
        answer = http.post(SCORE, json=body)
        # One token of the prompt and one of each choice.
        assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-tokens"] == "37"
