"""Every field of a request is bounded, the documentation says so, and what is refused costs no more than the request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import Field, TypeAdapter, ValidationError

from cluster.http.api import Service, create_api
from cluster.http.types import bounds
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.http.types.strict import MAX_DEPTH, MAX_NAME, MAX_VALUES, Strict
from cluster.http.types.text import DetokenizeRequest

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT = {"model": "circle", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"model": "circle", "prompt": "<", "max_tokens": 2}
MANY = 60_000


@pytest.fixture(scope="module")
def http(
    circle_engine: Any, byte_tokenizer: Any, serve_api: Callable[[FastAPI], AbstractContextManager[str]]
) -> Iterator[httpx.Client]:
    with serve_api(create_api(Service(circle_engine, byte_tokenizer))) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, CHAT | {"messages": [5] * MANY}),
        (ChatCompletionRequest, CHAT | {"messages": [{"role": "user", "content": [7] * MANY}]}),
        (ChatCompletionRequest, CHAT | {"tools": [{}] * MANY}),
        (ChatCompletionRequest, CHAT | {"reference_documents": [None] * MANY}),
        (ChatCompletionRequest, CHAT | {f"name {number}": 1 for number in range(MANY)}),
        (CompletionRequest, TEXT | {"stop_token_ids": ["x"] * MANY}),
        (CompletionRequest, TEXT | {"logit_bias": {str(number): "x" for number in range(MANY)}}),
        (CompletionRequest, TEXT | {"structured_outputs": {"choice": [1] * MANY}}),
        (CompletionRequest, TEXT | {"structured_outputs": {f"name {number}": 1 for number in range(MANY)}}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)
def test_a_list_of_wrong_items_makes_few_errors(kind: type[Strict], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(body)
    assert refusal.value.error_count() <= 10


@pytest.mark.parametrize(
    ("path", "change", "param", "word"),
    [
        (CHATS, {"reference_documents": ["a"] * 1025}, "reference_documents", "at most 1024 items"),
        (CHATS, {"reference_documents": [5] * MANY}, "reference_documents[0]", "valid string"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}] * 4097}, "messages", "at most 4096 items"),
        (CHATS, {"model": "x" * (MAX_NAME + 1)}, "model", "at most 512 characters"),
        (CHATS, {"user": "x" * 1_000_000}, "user", "at most 512 characters"),
        (COMPLETIONS, {"x" * 1_000_000: 1}, "x" * 77 + "...", "unknown parameter"),
        (COMPLETIONS, {"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias", "at most 1024"),
        (COMPLETIONS, {"prompt": [1] * (2**20 + 1)}, "prompt", "at most 1048576 token ids"),
        (COMPLETIONS, {"prompt": [[2**31]]}, "prompt", "token ids"),
        (COMPLETIONS, {"stop": "x" * 1001}, "stop", "at most 1000 characters"),
        (COMPLETIONS, {"stop": [5] * MANY}, "stop", "list of at most 4"),
        (COMPLETIONS, {"max_tokens": 10**4000}, "max_tokens", "less than or equal to 2147483647"),
        (COMPLETIONS, {"top_k": 2**31}, "top_k", "less than or equal to"),
        (COMPLETIONS, {"timeout": 1e10}, "timeout", "less than or equal to"),
        (COMPLETIONS, {"guided_json": deep(MAX_DEPTH + 1)}, "guided_json", "64 levels"),
        (COMPLETIONS, {"guided_json": {"enum": [0] * MAX_VALUES}}, "guided_json", "20000 names and values"),
        (COMPLETIONS, {"guided_json": {"maximum": 10**30}}, "guided_json", "integers up to"),
        (COMPLETIONS, {"guided_json": {"maximum": float("inf")}}, "guided_json", "finite"),
        (COMPLETIONS, {f"name {number}": 1 for number in range(MANY)}, "name 0", "60000 unknown parameters"),
        (COMPLETIONS, {"temperature": 9, "top_p": 9, "min_p": 9}, "temperature", "2 more fields are wrong"),
        (COMPLETIONS, {"temperature": 9, "wibble": 9}, "temperature", "1 more field is wrong"),
    ],
)
def test_what_is_too_large_is_named_in_a_few_words(
    http: httpx.Client, path: str, change: dict[str, Any], param: str, word: str
) -> None:
    body = (CHAT if path == CHATS else TEXT) | change
    response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param and word in response.json()["error"]["message"], response.text
    assert len(response.content) < 1024


def test_a_number_beyond_all_floats_is_refused(http: httpx.Client) -> None:
    content = json.dumps(TEXT | {"timeout": "@", "guided_json": {"maximum": "@"}}).replace('"@"', "1e400")
    response = http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert {"timeout": "timeout", "guided_json": "guided_json"}[response.json()["error"]["param"]]


def test_a_field_without_a_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in (str, list[Annotated[str, Field(max_length=3)]], int, Annotated[float, Field(ge=0)], dict[str, int]):
        kind = TypeAdapter(field)
        monkeypatch.setattr(bounds, "BODIES", (kind._type,))
        with pytest.raises(bounds.UnboundedError):
            bounds.bounds()
    monkeypatch.setattr(bounds, "BODIES", (Annotated[list[Annotated[int, Field(gt=0, lt=5)]], Field(max_length=3)],))
    assert bounds.bounds() == {"at most 3 items": ("",), "above 0 to 4": ("[]",)}
