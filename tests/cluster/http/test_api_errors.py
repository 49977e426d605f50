"""What a request that cannot be served gets: a 4xx in OpenAI's shape that names the field in a few words; the server lives."""

from __future__ import annotations

import json
import re
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
SYSTEM = {"role": "system", "content": "b"}


@pytest.fixture(autouse=True)
def _still_answers(http: httpx.Client) -> Iterator[None]:
    yield
    assert http.post(COMPLETIONS, json=TEXT).json()["choices"][0]["text"] == "abcd"


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function}]


def said(**message: Any) -> dict[str, Any]:
    return {"role": "user"} | message


def form(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema"} | schema


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return value


# By route, and by the field that the error names: values of this field, or of the one that holds it.
WRONG: dict[tuple[str, ...], dict[str, list[Any]]] = {
    BOTH: {
        "model": [MISSING, None, "x" * (MAX_NAME + 1)],
        "max_tokens": [-1, 0, "many", 2.5, True, CONTEXT, 10**30, 10**4000],
        "temperature": [9, -0.1, "hot"],
        "top_p": [-0.1, 1.1],
        "top_k": [-2, 2**31],
        "timeout": [1e10],
        "seed": [-(2**63) - 1, 2**63],
        "stop": ["", ["a", ""], list("abcdefghijklmnopq"), 7, ["a", "b" * 1001], "x" * 1001, [5] * MANY],
        "stop_token_ids": [[258]],
        "stop_token_ids[0]": [[-1]],
        "n": [0, 129],
        "priority": [1, "high", 2**31],
        "stream": ["yes"],
        "stream_options": [{"include_usage": True}],
        "reference_documents": ["one", ["a"] * 1025],
        "reference_documents[0]": [[5] * MANY],
        "reference_documents[1]": [["one", 2]],
        "reference_embedding": [[], [0.5] * 4097, [0.0, 0], 0.5],
        "reference_embedding[0]": [[10**400]],
        "reference_embedding[1]": [[0.5, "x"], [0.5, None, None], [1, 1e7]],
        "user": ["x" * 1_000_000],
        "cache": ["shared", True],
        "wibble": [1],
        "logit_bias": [{name: 1} for name in ("258", "a", "05", "-1", "9" * 5000)] + [[5], {str(at): 0 for at in range(1025)}],
        "logit_bias.5": [{"5": 101}, {"5": "much"}],
        "frequency_penalty": [2.5],
        "presence_penalty": [-3],
        "repetition_penalty": [0, "much"],
        "min_p": [1.1],
        "min_tokens": [-1, 5],
        "speculation": ["llma", ["llma"]],
        "speculation.strategy": [{"strategy": name} for name in ("auto", "mjsd", "", 3)],
        "speculation.max_draft_tokens": [{"max_draft_tokens": number} for number in (-1, 2.5, True)],
        "speculation.strategies": [{"strategies": "llma"}],
        "speculation.options": [
            {"options": {"copy_len": 3}}, {"options": {"copy_length": 0}}, {"options": {"copy_length": "3"}},
            {"options": {"history_tokens": 9}},
        ],
        "speculation.report": [{"report": "all"}],
        "response_format.type": [{"type": "yaml"}],
        "response_format.json_schema": [form(), {"type": "json_object", "json_schema": {"schema": {}}}],
        "response_format.json_schema.schema": [form(json_schema={"name": "a"}), form(json_schema={"schema": {"type": "objekt"}})],
        "guided_json": [
            {"type": "array", "uniqueItems": True}, "{", deep(MAX_DEPTH + 1), {"enum": [0] * MAX_VALUES}, {"maximum": 10**30},
            {"maximum": float("inf")},
        ],
        "guided_regex": ["(a"],
        "guided_choice": [[]],
        "structured_outputs.regex": [{"regex": "(a"}],
        "structured_outputs.jsno": [{"jsno": {}}],
    },
    (COMPLETIONS,): {
        "prompt": [
            "", [], ["<", ""], [[]], MISSING, None, {"text": "<"}, ["<", 5], [5, -1], [5, 258], [2**40], [[2**31]],
            [1] * (2**20 + 1), ["<"] * 129, "x" * CONTEXT,
        ],
        "messages": [[]],
        "prompt_logprobs": [21],
        "echo": ["yes"],
        "prediction": [{"type": "content", "content": "x"}],
        "best_of": [3],
        "suffix": ["end"],
        "logprobs": [21, -1, True],
        "top_logprobs": [2],
    },
    (CHATS,): {
        "messages": [[], "hi", MISSING, MESSAGES * 4097, [said(content="x" * CONTEXT)], [*MESSAGES, SYSTEM]],
        "messages[0]": [["hi"]],
        "messages[0].content": [[said()], [said(content=None)]],
        "messages[0].role": [[{"content": "hi"}], [said(role="robot", content="hi")]],
        "messages[0].contents": [[said(content="hi", contents="x")]],
        "messages[0].name": [[said(content="hi", name=3)]],
        "messages[0].tool_call_id": [[said(content="x", tool_call_id="1")]],
        "messages[0].content[0].type": [[said(content=[{"type": "image_url", "image_url": {"url": "x"}}])]],
        "messages[0].tool_calls[0].function.arguments": [
            [said(role="assistant", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": 3}}])]
        ],
        "max_completion_tokens": [5],
        "prompt": ["hi"],
        "logprobs": [2],
        "top_logprobs": [2],
        "tools": [tool(name="f")],
        "tools[0].function": [[{"type": "function"}]],
        "tools[0].type": [[{"type": "web_search", "function": {"name": "f"}}]],
        "tools[0].function.name": [tool(name="a b")],
        "tools[0].function.strict": [tool(name="f", strict=1)],
        "tools[0].function.parms": [tool(name="f", parms={})],
        "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
        "prediction.type": [{"type": "text", "content": "x"}],
        "prediction.content": [{"type": "content"}],
        "prediction.contents": [{"type": "content", "content": "x", "contents": "y"}],
    },
    (COMPARE,): {
        "n": [2],
        "stream": [True],
        "logprobs": [1],
        "echo": [True],
        "speculation.report": [{"report": True}],
        "prompt": [["a", "b"]],
        "against": ["baseline", "generate"],
        "temperature": [-1],
        "speculation.strategy": [{"strategy": "trie"}],
        "messagez": [[]],
        "priority": [1],  # by the engine, of both sides
    },
    (TOKENIZE,): {
        "prompt": [MISSING, ["a"]],
        "promt": ["a"],
        "messages": [[]],
        "messages[0].role": [[said(role="robot", content="a")]],
    },
    (DETOKENIZE,): {"tokens": [MISSING, [258], "a"], "tokens[0]": [[2**70], [-1]]},
}  # fmt: skip
# Fields that are wrong together, or whose error has a message that depends on the request.
TOGETHER: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
    BOTH: [
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use", "include_usage"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"reference_embeding": [1]}, "reference_embeding", "reference_embedding"),
        ({"cach": "off"}, "cach", "cache"),
        ({"\ud800": 1}, "?"),
        ({"x" * 1_000_000: 1}, "x" * 77 + "..."),
        ({f"name {number}": 1 for number in range(MANY)}, "name 0", "60000"),
        ({"temperature": 9, "top_p": 9, "min_p": 9}, "temperature", "2 more"),
        ({"temperature": 9, "wibble": 9}, "temperature", "1 more"),
        ({"max_tokens": CONTEXT}, "max_tokens", str(CONTEXT)),
        ({"speculation": {"strategy": "mjsd"}}, "speculation.strategy", "llma, prompt_lookup, autoregressive"),
        ({"guided_regex": "a", "response_format": form(json_schema={"schema": {"type": "object"}})}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
    (COMPLETIONS,): [
        ({"prompt": "x" * CONTEXT, "stream": True}, "prompt", str(CONTEXT)),
        ({"prompt": "x" * (CONTEXT - 3)}, "max_tokens", str(CONTEXT), str(CONTEXT + 1), "at most 3"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"prompt": ["<"] * 43, "n": 3}, "n", "129", "128"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ],
    (CHATS,): [
        ({"max_tokens": MISSING, "max_completion_tokens": CONTEXT}, "max_completion_tokens", str(CONTEXT)),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
    (COMPARE,): [({"messages": [{"role": "user"}], "prompt": MISSING}, "messages[0].content")],
    (TOKENIZE,): [
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    ],
}  # fmt: skip


def check_refused(http: httpx.Client, path: str, change: dict[str, Any], param: str, *words: str) -> None:
    body = {name: value for name, value in (BODIES[path] | change).items() if value is not MISSING}
    refused = http.post(path, content=json.dumps(body), headers=JSON)
    check_error(refused, 400, *words, param=param)
    assert len(refused.content) < 1024


@pytest.mark.parametrize(("path", "param"), [(path, param) for paths, rows in WRONG.items() for path in paths for param in rows])
def test_wrong_values(http: httpx.Client, path: str, param: str) -> None:
    (values,) = [rows[param] for paths, rows in WRONG.items() if path in paths and param in rows]
    for value in values:
        check_refused(http, path, {re.split(r"[.\[]", param)[0]: value}, param)


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [(path, change, param, words) for paths, rows in TOGETHER.items() for path in paths for change, param, *words in rows],
)
def test_fields_together(http: httpx.Client, path: str, change: dict[str, Any], param: str, words: list[str]) -> None:
    check_refused(http, path, change, param, *words)


@pytest.mark.parametrize("path", [*BOTH, COMPARE])
def test_session_names(http: httpx.Client, path: str) -> None:
    check_error(http.post(path, json=BODIES[path], headers={"X-Session-ID": "s" * 513}), 400, param="X-Session-ID")
    check_error(http.post(path, json=BODIES[path] | {"prompt_cache_key": "s" * 513}), 400, param="prompt_cache_key")


@pytest.mark.parametrize("path", [*BOTH, COMPARE, TOKENIZE])
def test_unknown_model(http: httpx.Client, path: str) -> None:
    body = BODIES[path] | {"model": "gpt-9"} | ({"prompt": "a"} if path == TOKENIZE else {})
    check_error(http.post(path, json=body), 404, "gpt-9", "circle", param="model", code="model_not_found")


@pytest.mark.parametrize("path", [*BOTH, COMPARE])
def test_bodies_that_are_no_request(http: httpx.Client, path: str) -> None:
    for content in (
        b"", b"{", b"{nope", b"not json", b"[1, 2]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000,
        b'{"model": "circle", "prompt": NaN}',
    ):  # fmt: skip
        response = http.post(path, content=content, headers=JSON)
        assert response.status_code == 400, content[:20]
        assert response.json()["error"]["type"] == "invalid_request_error"
    check_error(http.post(path, data={"prompt": "<"}), 400)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_without_a_value(http: httpx.Client, value: str) -> None:
    for field, change in (("temperature", "@"), ("timeout", "@"), ("guided_json", {"maximum": "@"})):
        content = json.dumps(TEXT | {field: change}).replace('"@"', value)
        check_error(http.post(COMPLETIONS, content=content, headers=JSON), 400, param=field)


def test_half_of_a_surrogate_pair(http: httpx.Client) -> None:
    for field, value in (("prompt", '"a\\ud800b"'), ("model", '"\\ud800"'), ("stop", '"\\udfff"')):
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
