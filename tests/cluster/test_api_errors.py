"""What a request that cannot be served gets: a 4xx in OpenAI's shape that names the field, and the server lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CONTEXT = 16384  # as conftest.py builds the model
GOOD = {"model": "circle", "prompt": "<", "max_tokens": 4, "temperature": 0}
GOOD_CHAT = {"model": "circle", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
MISSING = object()
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def _still_answers(http: httpx.Client) -> Iterator[None]:
    yield
    assert http.post(COMPLETIONS, json=GOOD).json()["choices"][0]["text"] == "abcd"


def check(response: httpx.Response, status: int, param: str | None, *words: str) -> None:
    """The error has OpenAI's shape, names the field, and says these words."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["type"] == ("invalid_request_error" if status < 429 else body["error"]["type"])
    assert body["error"]["param"] == param, body
    for word in words:
        assert word in body["error"]["message"], body


BOTH = [
    ({"model": "gpt-9"}, 404, "model", ["gpt-9", "circle"]),
    ({"model": MISSING}, 400, "model", ["required"]),
    ({"model": None}, 400, "model", ["string"]),
    ({"max_tokens": -1}, 400, "max_tokens", ["-1", "greater than or equal to"]),
    ({"max_tokens": 0}, 400, "max_tokens", ["1"]),
    ({"max_tokens": "many"}, 400, "max_tokens", ["integer", "many"]),
    ({"max_tokens": 2.5}, 400, "max_tokens", ["integer"]),
    ({"max_tokens": True}, 400, "max_tokens", ["integer"]),
    ({"max_tokens": CONTEXT}, 400, "max_tokens", [str(CONTEXT)]),
    ({"max_tokens": 10**30}, 400, "max_tokens", ["less than or equal to"]),
    ({"temperature": 9}, 400, "temperature", ["9", "less than or equal to 2"]),
    ({"temperature": -0.1}, 400, "temperature", ["greater than or equal to 0"]),
    ({"temperature": "hot"}, 400, "temperature", ["number", "hot"]),
    ({"top_p": 0}, 400, "top_p", ["greater than 0"]),
    ({"top_p": 1.1}, 400, "top_p", ["less than or equal to 1"]),
    ({"top_k": -2}, 400, "top_k", ["-2"]),
    ({"seed": -5}, 400, "seed", ["-5"]),
    ({"seed": 2**63}, 400, "seed", ["less than"]),
    ({"stop": ""}, 400, "stop", ["non-empty"]),
    ({"stop": ["a", ""]}, 400, "stop", ["non-empty"]),
    ({"stop": list("abcde")}, 400, "stop", ["at most 4"]),
    ({"stop": 7}, 400, "stop", ["string"]),
    ({"stop": ["a", "b" * 1001]}, 400, "stop", ["1000 characters"]),
    ({"stop_token_ids": [258]}, 400, "stop_token_ids", ["257", "258"]),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids[0]", ["-1"]),
    ({"n": 0}, 400, "n", ["greater than or equal to 1"]),
    ({"n": 129}, 400, "n", ["less than or equal to 128"]),
    ({"priority": 1}, 400, "priority", ["engine.scheduling_policy", "fcfs"]),
    ({"priority": "high"}, 400, "priority", ["integer"]),
    ({"priority": 2**31}, 400, "priority", ["less than"]),
    ({"stream": "yes"}, 400, "stream", ["boolean"]),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", ["stream is true"]),
    ({"stream": True, "stream_options": {"include_use": True}}, 400, "stream_options.include_use", ["include_usage"]),
    ({"stream": True, "stream_options": {"include_usage": 3}}, 400, "stream_options.include_usage", ["boolean"]),
    ({"reference_documents": "one"}, 400, "reference_documents", ["list"]),
    ({"reference_documents": ["one", 2]}, 400, "reference_documents[1]", ["string"]),
    ({"temprature": 1}, 400, "temprature", ["temperature"]),
    ({"wibble": 1}, 400, "wibble", ["unknown parameter wibble"]),
    ({"\ud800": 1}, 400, "?", ["unknown parameter"]),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias.5", ["less than or equal to 100"]),
    ({"logit_bias": {"5": "much"}}, 400, "logit_bias.5", ["number", "much"]),
    ({"logit_bias": {"258": 1}}, 400, "logit_bias", ["257", "258"]),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias", ["token ids"]),
    ({"logit_bias": {"05": 1}}, 400, "logit_bias", ["token ids"]),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias", ["token ids"]),
    ({"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", ["token ids"]),
    ({"logit_bias": [5]}, 400, "logit_bias", ["dictionary"]),
    ({"frequency_penalty": 2.5}, 400, "frequency_penalty", ["less than or equal to 2"]),
    ({"presence_penalty": -3}, 400, "presence_penalty", ["greater than or equal to -2"]),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", ["greater than or equal to 0.01"]),
    ({"repetition_penalty": "much"}, 400, "repetition_penalty", ["number"]),
    ({"min_p": 1.1}, 400, "min_p", ["less than or equal to 1"]),
    ({"min_tokens": -1}, 400, "min_tokens", ["greater than or equal to 0"]),
    ({"min_tokens": 5}, 400, "min_tokens", ["4", "5"]),
    ({"response_format": {"type": "yaml"}}, 400, "response_format.type", ["json_object"]),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(("change", "status", "param", "words"), BOTH)
def test_what_both_refuse(
    http: httpx.Client, path: str, change: dict[str, Any], status: int, param: str, words: list[str]
) -> None:
    body = (GOOD if path == COMPLETIONS else GOOD_CHAT) | change
    body = {name: value for name, value in body.items() if value is not MISSING}
    check(http.post(path, content=json.dumps(body), headers=JSON), status, param, *words)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": ["<", ""]}, "prompt", ["empty"]),
        ({"prompt": [[]]}, "prompt", ["list of token ids"]),
        ({"prompt": MISSING}, "prompt", ["required"]),
        ({"prompt": None}, "prompt", ["must be a string"]),
        ({"prompt": {"text": "<"}}, "prompt", ["must be a string"]),
        ({"prompt": ["<", 5]}, "prompt", ["must be a string"]),
        ({"prompt": [5, -1]}, "prompt", ["must be a string"]),
        ({"prompt": [5, 258]}, "prompt", ["257", "258"]),
        ({"prompt": [2**40]}, "prompt", ["token ids"]),
        ({"prompt": ["<"] * 129}, "prompt", ["at most 128"]),
        ({"prompt": "x" * CONTEXT}, "prompt", [str(CONTEXT), "shorten"]),
        ({"prompt": "x" * CONTEXT, "stream": True}, "prompt", [str(CONTEXT)]),
        ({"prompt": "x" * (CONTEXT - 3)}, "max_tokens", [str(CONTEXT), str(CONTEXT + 1), "at most 3"]),
        ({"messages": []}, "messages", ["unknown parameter"]),
        ({"echo": False, "max_tokens": 0}, "max_tokens", ["echo: true"]),
        ({"prompt_logprobs": 21}, "prompt_logprobs", ["less than or equal to 20"]),
        ({"echo": "yes"}, "echo", ["boolean"]),
        ({"prompt": ["<"] * 43, "n": 3}, "n", ["43 prompts", "129", "128"]),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", ["unknown parameter"]),
        ({"best_of": 3}, "best_of", ["not supported"]),
        ({"suffix": "end"}, "suffix", ["not supported"]),
        ({"logprobs": 21}, "logprobs", ["less than or equal to 20"]),
        ({"logprobs": -1}, "logprobs", ["greater than or equal to 0"]),
        ({"logprobs": True}, "logprobs", ["integer"]),
        ({"top_logprobs": 2}, "top_logprobs", ["logprobs"]),
    ],
)
def test_what_completions_refuse(http: httpx.Client, change: dict[str, Any], param: str, words: list[str]) -> None:
    body = {name: value for name, value in (GOOD | change).items() if value is not MISSING}
    check(http.post(COMPLETIONS, json=body), 400, param, *words)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "messages", ["at least 1"]),
        ({"messages": "hi"}, "messages", ["list"]),
        ({"messages": MISSING}, "messages", ["required"]),
        ({"messages": ["hi"]}, "messages[0]", ["hi"]),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ["required"]),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", ["required"]),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", ["string"]),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", ["robot", "assistant"]),
        ({"messages": [{"role": "user", "content": "hi", "contents": "x"}]}, "messages[0].contents", ["content"]),
        ({"messages": [{"role": "user", "content": "hi", "name": "Ann"}]}, "messages[0].name", ["not supported"]),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "messages", ["must come first"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            ["text", "image_url"],
        ),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages", [str(CONTEXT)]),
        ({"max_tokens": MISSING, "max_completion_tokens": CONTEXT}, "max_completion_tokens", [str(CONTEXT)]),
        ({"max_completion_tokens": 5}, "max_completion_tokens", ["differ"]),
        ({"prompt": "hi"}, "prompt", ["unknown parameter"]),
        ({"logprobs": 2}, "logprobs", ["boolean"]),
        ({"top_logprobs": 2}, "top_logprobs", ["logprobs is true"]),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["less than or equal to 20"]),
        ({"tools": [{"type": "function"}]}, "tools[0].function", ["required"]),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", ["function"]),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ["a b"]),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools[0].function.strict",
            ["boolean"],
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parms": {}}}]}, "tools[0].function.parms", ["parameters"]),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", ["does not show tools"]),
        ({"tool_choice": "required"}, "tool_choice", ["needs tools"]),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", ["no tool 'f'"]),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", ["content"]),
        ({"prediction": {"type": "content"}}, "prediction.content", ["required"]),
        ({"prediction": {"type": "content", "content": "x", "contents": "y"}}, "prediction.contents", ["content"]),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id", ["role tool"]),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            ["JSON object"],
        ),
    ],
)
def test_what_chats_refuse(http: httpx.Client, change: dict[str, Any], param: str, words: list[str]) -> None:
    body = {name: value for name, value in (GOOD_CHAT | change).items() if value is not MISSING}
    check(http.post(CHATS, json=body), 400, param, *words)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"not json", b"[1, 2]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"model": "circle", "prompt": NaN}'],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_bodies_that_are_no_request(http: httpx.Client, path: str, content: bytes) -> None:
    response = http.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_not_json_is_called_that(http: httpx.Client) -> None:
    check(http.post(COMPLETIONS, content=b"{nope", headers=JSON), 400, None, "the body is not JSON")
    check(http.post(COMPLETIONS, data={"prompt": "<"}), 400, None, "JSON object", "application/json")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(http: httpx.Client, value: str) -> None:
    content = json.dumps(GOOD | {"temperature": "@"}).replace('"@"', value)
    check(http.post(COMPLETIONS, content=content, headers=JSON), 400, "temperature")


@pytest.mark.parametrize(("field", "value"), [("prompt", '"a\\ud800b"'), ("model", '"\\ud800"'), ("stop", '"\\udfff"')])
def test_half_of_a_surrogate_pair(http: httpx.Client, field: str, value: str) -> None:
    content = json.dumps(GOOD | {field: "@"}).replace('"@"', value)
    response = http.post(COMPLETIONS, content=content, headers=JSON)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"].startswith(field)


def test_routes(http: httpx.Client) -> None:
    check(http.get("/v1/nothing"), 404, None, "GET /v1/nothing")
    check(http.get(COMPLETIONS), 405, None, "GET /v1/completions")
    check(http.delete("/v1/models"), 405, None, "DELETE")
    check(http.get("/v1/models/gpt-9"), 404, "model", "gpt-9")


def test_codes(http: httpx.Client) -> None:
    def code(change: dict[str, Any]) -> str:
        return str(http.post(COMPLETIONS, json=GOOD | change).json()["error"]["code"])

    assert code({"model": "gpt-9"}) == "model_not_found"
    assert code({"max_tokens": CONTEXT}) == "context_length_exceeded"
    assert code({"prompt": "x" * CONTEXT}) == "context_length_exceeded"
    assert code({"wibble": 1}) == "unknown_parameter"
    assert code({"suffix": "end"}) == "unsupported_parameter"
    assert code({"temperature": 9}) == "invalid_value"


def test_the_client_understands(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="<")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="circle", messages=[{"role": "user", "content": "hi"}], temperature=9, stream=True)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
