"""vLLM's fields that bind tokens, prompts and what is shared, with drafts and without; ids of requests, and unknown fields."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from outrider.cache_service.namespace import hash_key
from outrider.cluster.http.api import Service
from outrider.configs.slices import TenancyOptions, TenantOptions
from outrider.decoding.request import SamplingParams, ThinkingBudget
from tests.cluster.circle import (
    CHAT,
    CHATS,
    CIRCLE,
    COMPLETIONS,
    TEXT,
    TOKENIZER,
    LocalEngine,
    build_tokenizer,
    byte_ids,
    check_error,
    client_of,
)

A, B, C = byte_ids("abc")
PLAIN: dict[str, Any] = {"speculation": {"max_draft_tokens": 0}}
DRAFTED: dict[str, Any] = {"reference_documents": [CIRCLE * 2]}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bad_words": ["b"]}, "a"),
        ({"bad_words": ["abc"]}, "ab"),
        ({"allowed_token_ids": [A, B]}, "ab"),
        ({"bad_words": ["ab"], "temperature": 1, "seed": 5}, ""),
        ({"allowed_token_ids": [A, B, C], "temperature": 1, "seed": 5}, ""),
    ],
)
def test_rules_of_tokens_with_drafts_and_without(http: httpx.Client, changes: dict[str, Any], text: str) -> None:
    body = TEXT | {"max_tokens": 8} | changes
    found = [http.post(COMPLETIONS, json=body | more).raise_for_status().json() for more in (PLAIN, DRAFTED)]
    answers = [answer["choices"][0]["text"] for answer in found]
    assert answers[0] == answers[1] and answers[0].startswith(text)
    assert not any(word in answers[0] for word in changes.get("bad_words", ()))
    if "allowed_token_ids" in changes:
        assert set(byte_ids(answers[0])) <= set(changes["allowed_token_ids"]) and len(answers[0]) == 8


def test_log_probabilities_of_chosen_tokens(http: httpx.Client) -> None:
    answer = http.post(CHATS, json=CHAT | {"logprobs": True, "logprob_token_ids": [B, A]}).raise_for_status().json()
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert {one["token"] for one in entry["top_logprobs"]} == {"a", "b"}
    whole = http.post(COMPLETIONS, json=TEXT | {"logprobs": 20}).raise_for_status().json()["choices"][0]["logprobs"]
    some = http.post(COMPLETIONS, json=TEXT | {"logprobs": 0, "logprob_token_ids": [A]}).raise_for_status().json()
    part = some["choices"][0]["logprobs"]
    assert part["top_logprobs"][0]["a"] == whole["top_logprobs"][0]["a"] and part["token_logprobs"] == whole["token_logprobs"]


def test_prompts_are_cut_and_continued(http: httpx.Client, circle_engine: LocalEngine) -> None:
    http.post(COMPLETIONS, json=TEXT | {"prompt": "abc<", "truncate_prompt_tokens": 2}).raise_for_status()
    assert circle_engine.jobs[-1].prompt_ids.tolist() == byte_ids("c<")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]
    http.post(CHATS, json=CHAT | {"messages": turns, "continue_final_message": True}).raise_for_status()
    assert TOKENIZER.decode(circle_engine.jobs[-1].prompt_ids) == "[user]hi[assistant]ab"


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [99999]}, "allowed_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [1], "structured_outputs": {"choice": ["a"]}}, "allowed_token_ids"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"bad_words": [""]}, "bad_words[0]"),
        (COMPLETIONS, {"cache_salt": ""}, "cache_salt"),
        (COMPLETIONS, {"request_id": "a b"}, "request_id"),
        (CHATS, {"thinking_token_budget": 3}, "thinking_token_budget"),
        (CHATS, {"documents": [{"text": "a"}]}, "documents"),
        (CHATS, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_is_refused(http: httpx.Client, path: str, changes: dict[str, Any], param: str) -> None:
    check_error(http.post(path, json=(TEXT if path == COMPLETIONS else CHAT) | changes), 400, param=param)


OPENING, CLOSING = (1, 2), (3, 4)


@pytest.mark.parametrize(
    ("is_open", "output", "forced"),
    [
        (True, [7], None), (True, [7, 8], 3), (True, [7, 8, 3], 4), (True, [7, 8, 3, 4], None), (True, [7, 3], 4),
        (True, [3, 4], None), (False, [1, 2, 7, 8], 3), (False, [9, 1, 2, 7, 8, 3], 4), (False, [7, 8, 9, 9, 9], None),
        (True, [], None),
    ],
)  # fmt: skip
def test_a_budget_closes_the_reasoning(is_open: bool, output: list[int], forced: int | None) -> None:
    budget = ThinkingBudget(2, OPENING, CLOSING, is_open)
    assert budget.forced(output) == forced and SamplingParams(thinking=budget).alters_logits


def test_ids_unknown_fields_and_origins(circle_engine: LocalEngine, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(circle_engine, TOKENIZER, allowed_origins=("https://app.example",), warns_of_unknown=True)
    with client_of(service) as http, caplog.at_level(logging.WARNING):
        headers = {"X-Request-Id": "mine", "Origin": "https://app.example"}
        answer = http.post(COMPLETIONS, json=TEXT | {"nothing": 1}, headers=headers)
        assert answer.status_code == 200 and answer.headers["X-Request-Id"] == circle_engine.jobs[-1].http_id == "mine"
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example" and "nothing" in caplog.text
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        assert http.options(COMPLETIONS, headers=asked).status_code == 200
        assert http.options(COMPLETIONS, headers=asked | {"Origin": "https://other.example"}).status_code == 400
        assert http.post(COMPLETIONS, json=TEXT | {"best_of": 3}).status_code == 400
        assert http.get("/v1/models").headers["X-Request-Id"]


def test_documents_are_shown_by_a_template_that_reads_them(circle_engine: LocalEngine) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for each in documents or [] %}({{ each.text }}){% endfor %}{{ messages[0].content }}"
    with client_of(Service(circle_engine, tokenizer)) as http:
        for documents, prompt in ((None, "hi"), ([{"text": "ab"}, {"text": "c"}], "(ab)(c)hi")):
            http.post(CHATS, json=CHAT | {"documents": documents}).raise_for_status()
            assert TOKENIZER.decode(circle_engine.jobs[-1].prompt_ids) == prompt


def test_a_salt_narrows_what_a_tenant_shares(circle_engine: LocalEngine) -> None:
    """KV is found again by the same tenant with the same salt only, and no text is drafted from another request."""
    tenancy = TenancyOptions({"acme": TenantOptions((hash_key("k"),)), "other": TenantOptions((hash_key("o"),))})
    body = TEXT | {"prompt": "salted " * 40 + "<"}
    with client_of(Service(circle_engine, TOKENIZER, tenancy)) as http:

        def cached(key: str, **more: str) -> int:
            answer = http.post(COMPLETIONS, json=body | more, headers={"Authorization": f"Bearer {key}"})
            return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        first = [cached("k", cache_salt="x"), cached("k", cache_salt="y"), cached("o", cache_salt="x")]
        assert first == [0, 0, 0] and cached("k", cache_salt="x") > 0 and cached("o", cache_salt="x") > 0


def test_a_salt_keeps_requests_apart() -> None:
    from outrider.decoding.request import Request

    requests = [Request(f"r{at}", [1], SamplingParams(), tenant="acme", salt=salt) for at, salt in enumerate(("", "x", "y"))]
    assert len({request.kv_namespace for request in requests}) == 3
    assert [request.cache_namespace for request in requests] == ["acme", None, None]
    assert Request("r", [1], SamplingParams(), salt="x").kv_namespace is None
