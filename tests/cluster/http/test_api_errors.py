"""What a request that cannot be served gets: a 4xx in OpenAI's shape that names the field in a few words; the server lives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from outrider.cluster.http.types.strict import MAX_DEPTH, MAX_NAME, MAX_VALUES
from tests.cluster.circle import CHAT, CHATS, COMPLETIONS, CONTEXT, MESSAGES, TEXT, check_error

COMPARE, TOKENIZE, DETOKENIZE = "/v1/compare", "/tokenize", "/detokenize"
BOTH = (COMPLETIONS, CHATS)
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: TEXT, CHATS: CHAT, COMPARE: TEXT, TOKENIZE: {}, DETOKENIZE: {}}
MISSING = object()
MANY = 60_000
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def _still_answers(http: httpx.Client) -> Iterator[None]:
    yield
    assert http.post(COMPLETIONS, json=TEXT).json()["choices"][0]["text"] == "abcd"


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user"} | message]}


def form(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema"} | schema}


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return value


# By route: what is changed of a good request, the field that the error names, and words of its message.
REFUSED: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
    BOTH: [
        ({"model": MISSING}, "model", "required"),
        ({"model": None}, "model", "string"),
        ({"max_tokens": -1}, "max_tokens", "-1", "greater than or equal to"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": "many"}, "max_tokens", "integer", "many"),
        ({"max_tokens": 2.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": CONTEXT}, "max_tokens", str(CONTEXT)),
        ({"max_tokens": 10**30}, "max_tokens", "less than or equal to"),
        ({"max_tokens": 10**4000}, "max_tokens", "less than or equal to 2147483647"),
        ({"temperature": 9}, "temperature", "9", "less than or equal to 2"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "number", "hot"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"top_k": 2**31}, "top_k", "less than or equal to"),
        ({"timeout": 1e10}, "timeout", "less than or equal to"),
        ({"seed": -5}, "seed", "-5"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": ["a", ""]}, "stop", "non-empty"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"stop": 7}, "stop", "string"),
        ({"stop": ["a", "b" * 1001]}, "stop", "1000 characters"),
        ({"stop": "x" * 1001}, "stop", "at most 1000 characters"),
        ({"stop": [5] * MANY}, "stop", "list of at most 4"),
        ({"stop_token_ids": [258]}, "stop_token_ids", "257", "258"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "-1"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"priority": 1}, "priority", "requires engine.scheduling_policy=priority"),
        ({"priority": "high"}, "priority", "integer"),
        ({"priority": 2**31}, "priority", "less than"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use", "include_usage"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage", "boolean"),
        ({"reference_documents": "one"}, "reference_documents", "list"),
        ({"reference_documents": ["one", 2]}, "reference_documents[1]", "string"),
        ({"reference_documents": ["a"] * 1025}, "reference_documents", "at most 1024 items"),
        ({"reference_documents": [5] * MANY}, "reference_documents[0]", "valid string"),
        ({"reference_embedding": []}, "reference_embedding", "at least 1 item"),
        ({"reference_embedding": [0.5] * 4097}, "reference_embedding", "at most 4096 items"),
        ({"reference_embedding": [0.0, 0]}, "reference_embedding", "must not be all zeros"),
        ({"reference_embedding": [0.5, "x"]}, "reference_embedding[1]", "number"),
        ({"reference_embedding": [0.5, None, None]}, "reference_embedding[1]", "number"),
        ({"reference_embedding": [1, 1e7]}, "reference_embedding[1]", "less than or equal to 1000000"),
        ({"reference_embedding": [10**400]}, "reference_embedding[0]", "number"),
        ({"reference_embedding": 0.5}, "reference_embedding", "list"),
        ({"reference_embeding": [1]}, "reference_embeding", "did you mean reference_embedding?"),
        ({"model": "x" * (MAX_NAME + 1)}, "model", "at most 512 characters"),
        ({"user": "x" * 1_000_000}, "user", "at most 512 characters"),
        ({"temprature": 1}, "temprature", "temperature"),
        ({"cach": "off"}, "cach", "did you mean cache?"),
        ({"cache": "shared"}, "cache", "'tenant', 'private' or 'off'"),
        ({"cache": True}, "cache", "'private'"),
        ({"wibble": 1}, "wibble", "unknown parameter wibble"),
        ({"\ud800": 1}, "?", "unknown parameter"),
        ({"x" * 1_000_000: 1}, "x" * 77 + "...", "unknown parameter"),
        ({f"name {number}": 1 for number in range(MANY)}, "name 0", "60000 unknown parameters"),
        ({"temperature": 9, "top_p": 9, "min_p": 9}, "temperature", "2 more fields are wrong"),
        ({"temperature": 9, "wibble": 9}, "temperature", "1 more field is wrong"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"5": "much"}}, "logit_bias.5", "number", "much"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "257", "258"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
        ({"logit_bias": [5]}, "logit_bias", "dictionary"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias", "at most 1024"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"repetition_penalty": "much"}, "repetition_penalty", "number"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"min_tokens": 5}, "min_tokens", "4", "5"),
        ({"speculation": {"strategy": "auto"}}, "speculation.strategy", "'auto'", "llma, prompt_lookup, autoregressive"),
        ({"speculation": {"strategy": "mjsd"}}, "speculation.strategy", "'mjsd'", "allowed: llma", "speculation.exact=false"),
        ({"speculation": {"strategy": ""}}, "speculation.strategy", "allowed: llma"),
        ({"speculation": {"strategy": 3}}, "speculation.strategy", "string"),
        ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens", "greater than or equal to 0"),
        ({"speculation": {"max_draft_tokens": 2.5}}, "speculation.max_draft_tokens", "integer"),
        ({"speculation": {"max_draft_tokens": True}}, "speculation.max_draft_tokens", "integer"),
        ({"speculation": {"strategies": "llma"}}, "speculation.strategies", "unknown parameter", "strategy"),
        ({"speculation": {"options": {"copy_length": 3}}}, "speculation.options", "unknown parameter"),
        ({"speculation": {"report": "all"}}, "speculation.report", "boolean"),
        ({"speculation": "llma"}, "speculation", "llma"),
        ({"speculation": ["llma"]}, "speculation"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object", "json_schema"),
        (form(), "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema", "only"),
        (form(json_schema={"name": "a"}), "response_format.json_schema.schema"),
        (form(json_schema={"schema": {"type": "objekt"}}), "response_format.json_schema.schema", "objekt"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": deep(MAX_DEPTH + 1)}, "guided_json", "64 levels"),
        ({"guided_json": {"enum": [0] * MAX_VALUES}}, "guided_json", "20000 names and values"),
        ({"guided_json": {"maximum": 10**30}}, "guided_json", "integers up to"),
        ({"guided_json": {"maximum": float("inf")}}, "guided_json", "finite"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs.jsno", "unknown"),
        ({"guided_regex": "a"} | form(json_schema={"schema": {"type": "object"}}), "guided_regex", "response_format"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "must be false"),
    ],
    (COMPLETIONS,): [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["<", ""]}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "list of token ids"),
        ({"prompt": MISSING}, "prompt", "required"),
        ({"prompt": None}, "prompt", "must be a string"),
        ({"prompt": {"text": "<"}}, "prompt", "must be a string"),
        ({"prompt": ["<", 5]}, "prompt", "must be a string"),
        ({"prompt": [5, -1]}, "prompt", "must be a string"),
        ({"prompt": [5, 258]}, "prompt", "257", "258"),
        ({"prompt": [2**40]}, "prompt", "token ids"),
        ({"prompt": [[2**31]]}, "prompt", "token ids"),
        ({"prompt": [1] * (2**20 + 1)}, "prompt", "at most 1048576 token ids"),
        ({"prompt": ["<"] * 129}, "prompt", "at most 128"),
        ({"prompt": "x" * CONTEXT}, "prompt", str(CONTEXT), "shorten"),
        ({"prompt": "x" * CONTEXT, "stream": True}, "prompt", str(CONTEXT)),
        ({"prompt": "x" * (CONTEXT - 3)}, "max_tokens", str(CONTEXT), str(CONTEXT + 1), "at most 3"),
        ({"messages": []}, "messages", "unknown parameter"),
        ({"echo": False, "max_tokens": 0}, "max_tokens", "echo: true"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"echo": "yes"}, "echo", "boolean"),
        ({"prompt": ["<"] * 43, "n": 3}, "n", "43 prompts", "129", "128"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "unknown parameter"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": -1}, "logprobs", "greater than or equal to 0"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ],
    (CHATS,): [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": MISSING}, "messages", "required"),
        ({"messages": ["hi"]}, "messages[0]", "hi"),
        ({"messages": MESSAGES * 4097}, "messages", "at most 4096 items"),
        (said(), "messages[0].content", "required"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "required"),
        (said(content=None), "messages[0].content", "string"),
        (said(role="robot", content="hi"), "messages[0].role", "robot", "assistant"),
        (said(content="hi", contents="x"), "messages[0].contents", "content"),
        (said(content="hi", name="Ann"), "messages[0].name", "not supported"),
        (said(content="x", tool_call_id="1"), "messages[0].tool_call_id", "role tool"),
        (said(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type", "text", "image_url"),
        (said(content="x" * CONTEXT), "messages", str(CONTEXT)),
        ({"messages": [*MESSAGES, {"role": "system", "content": "b"}]}, "messages", "must come first"),
        ({"max_tokens": MISSING, "max_completion_tokens": CONTEXT}, "max_completion_tokens", str(CONTEXT)),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "differ"),
        ({"prompt": "hi"}, "prompt", "unknown parameter"),
        ({"logprobs": 2}, "logprobs", "boolean"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", "function"),
        (tool(name="a b"), "tools[0].function.name", "a b"),
        (tool(name="f", strict=1), "tools[0].function.strict", "boolean"),
        (tool(name="f", parms={}), "tools[0].function.parms", "parameters"),
        (tool(name="f"), "tools", "does not show tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no tool 'f'"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "content"),
        ({"prediction": {"type": "content"}}, "prediction.content", "required"),
        ({"prediction": {"type": "content", "content": "x", "contents": "y"}}, "prediction.contents", "content"),
        (
            said(role="assistant", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "["}}]),
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        ),
    ],
    (COMPARE,): [
        ({"n": 2}, "n", "n must be 1"),
        ({"stream": True}, "stream", "not supported in a comparison"),
        ({"logprobs": 1}, "logprobs", "leave it out"),
        ({"echo": True}, "echo", "leave it out"),
        ({"speculation": {"report": True}}, "speculation.report", "leave it out"),
        ({"prompt": ["a", "b"]}, "prompt", "one prompt"),
        ({"against": "baseline"}, "against", "baseline.enabled"),
        ({"against": "generate"}, "against", "'baseline' or 'plain'"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"speculation": {"strategy": "trie"}}, "speculation.strategy", "allowed: llma"),
        ({"messagez": []}, "messagez", "unknown parameter"),
        ({"messages": [{"role": "user"}], "prompt": MISSING}, "messages[0].content", "required"),
        ({"priority": 1}, "priority", "scheduling_policy"),  # by the engine, of both sides
    ],
    (TOKENIZE,): [
        ({}, "prompt", "either"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt", "either"),
        ({"prompt": ["a"]}, "prompt", "string"),
        ({"promt": "a"}, "promt", "did you mean prompt"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt", "messages"),
        ({"messages": []}, "messages", "at least 1"),
        (said(role="robot", content="a"), "messages[0].role", "robot"),
    ],
    (DETOKENIZE,): [
        ({}, "tokens", "required"),
        ({"tokens": [258]}, "tokens", "257"),
        ({"tokens": [2**70]}, "tokens[0]", "less than or equal to"),
        ({"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
        ({"tokens": "a"}, "tokens", "list"),
    ],
}
CASES = [
    (path, change, param, words) for paths, rows in REFUSED.items() for path in paths for change, param, *words in rows
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "param", "words"), CASES)
def test_what_is_refused(http: httpx.Client, path: str, change: dict[str, Any], param: str, words: list[str]) -> None:
    body = {name: value for name, value in (BODIES[path] | change).items() if value is not MISSING}
    refused = http.post(path, content=json.dumps(body), headers=JSON)
    check_error(refused, 400, *words, param=param)
    assert len(refused.content) < 1024


@pytest.mark.parametrize("path", [*BOTH, COMPARE])
def test_a_session_is_no_text(http: httpx.Client, path: str) -> None:
    words = "at most 512 characters"
    check_error(http.post(path, json=BODIES[path], headers={"X-Session-ID": "s" * 513}), 400, words, param="X-Session-ID")
    check_error(http.post(path, json=BODIES[path] | {"prompt_cache_key": "s" * 513}), 400, words, param="prompt_cache_key")


@pytest.mark.parametrize("path", [*BOTH, COMPARE, TOKENIZE])
def test_a_model_that_is_not_there(http: httpx.Client, path: str) -> None:
    body = BODIES[path] | {"model": "gpt-9"} | ({"prompt": "a"} if path == TOKENIZE else {})
    check_error(http.post(path, json=body), 404, "gpt-9", "circle", param="model", code="model_not_found")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"not json", b"[1, 2]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"model": "circle", "prompt": NaN}'],
)
@pytest.mark.parametrize("path", [*BOTH, COMPARE])
def test_bodies_that_are_no_request(http: httpx.Client, path: str, content: bytes) -> None:
    response = http.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_not_json_is_called_that(http: httpx.Client) -> None:
    check_error(http.post(COMPLETIONS, content=b"{nope", headers=JSON), 400, "the body is not JSON")
    check_error(http.post(COMPLETIONS, data={"prompt": "<"}), 400, "JSON object", "application/json")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(("field", "change"), [
    ("temperature", "@"), ("timeout", "@"), ("guided_json", {"maximum": "@"}),
])  # fmt: skip
def test_numbers_that_are_none(http: httpx.Client, field: str, change: Any, value: str) -> None:
    content = json.dumps(TEXT | {field: change}).replace('"@"', value)
    check_error(http.post(COMPLETIONS, content=content, headers=JSON), 400, param=field)


@pytest.mark.parametrize(("field", "value"), [("prompt", '"a\\ud800b"'), ("model", '"\\ud800"'), ("stop", '"\\udfff"')])
def test_half_of_a_surrogate_pair(http: httpx.Client, field: str, value: str) -> None:
    content = json.dumps(TEXT | {field: "@"}).replace('"@"', value)
    response = http.post(COMPLETIONS, content=content, headers=JSON)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"].startswith(field)


def test_routes(http: httpx.Client) -> None:
    check_error(http.get("/v1/nothing"), 404, "GET /v1/nothing")
    check_error(http.get(COMPLETIONS), 405, "GET /v1/completions")
    check_error(http.delete("/v1/models"), 405, "DELETE")
    check_error(http.get("/v1/models/gpt-9"), 404, "gpt-9", param="model")


def test_codes(http: httpx.Client) -> None:
    for change, code in (
        ({"max_tokens": CONTEXT}, "context_length_exceeded"), ({"prompt": "x" * CONTEXT}, "context_length_exceeded"),
        ({"wibble": 1}, "unknown_parameter"), ({"suffix": "end"}, "unsupported_parameter"), ({"temperature": 9}, "invalid_value"),
    ):  # fmt: skip
        assert http.post(COMPLETIONS, json=TEXT | change).json()["error"]["code"] == code


def test_the_client_understands(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="<")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="circle", messages=MESSAGES, temperature=9, stream=True)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
