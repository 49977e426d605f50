"""Every field of a request is bounded, the documentation says so, and a body of wrong items makes few errors."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from outrider.cluster.http.types import bounds
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest, DetokenizeRequest
from outrider.cluster.http.types.responses import ResponsesRequest
from outrider.cluster.http.types.strict import Strict
from tests.cluster.circle import CHAT, TEXT

MANY = 60_000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, CHAT | {"messages": [5] * MANY}),
        (ChatCompletionRequest, CHAT | {"messages": [{"role": "user", "content": [7] * MANY}]}),
        (ChatCompletionRequest, CHAT | {"tools": [{}] * MANY}),
        (ChatCompletionRequest, CHAT | {"reference_documents": [None] * MANY}),
        (ChatCompletionRequest, CHAT | {"reference_embedding": ["x"] * 4096}),
        (ChatCompletionRequest, CHAT | {f"name {number}": 1 for number in range(MANY)}),
        (CompletionRequest, TEXT | {"stop_token_ids": ["x"] * MANY}),
        (CompletionRequest, TEXT | {"logit_bias": {str(number): "x" for number in range(MANY)}}),
        (CompletionRequest, TEXT | {"structured_outputs": {"choice": [1] * MANY}}),
        (CompletionRequest, TEXT | {"structured_outputs": {f"name {number}": 1 for number in range(MANY)}}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
        (ResponsesRequest, {"model": "circle", "input": [5] * MANY}),
        (ResponsesRequest, {"model": "circle", "input": [{"role": "user", "content": [7] * MANY}]}),
        (ResponsesRequest, {"model": "circle", "input": "hi", "tools": [{}] * MANY}),
    ],
)
def test_a_list_of_wrong_items_makes_few_errors(kind: type[Strict], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(body)
    assert refusal.value.error_count() <= 10


def test_a_field_without_a_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in (str, list[Annotated[str, Field(max_length=3)]], int, Annotated[float, Field(ge=0)], dict[str, int]):
        kind = TypeAdapter(field)
        monkeypatch.setattr(bounds, "BODIES", (kind._type,))
        with pytest.raises(bounds.UnboundedError):
            bounds.bounds()
    monkeypatch.setattr(bounds, "BODIES", (Annotated[list[Annotated[int, Field(gt=0, lt=5)]], Field(max_length=3)],))
    assert bounds.bounds() == {"at most 3 items": ("",), "above 0 to 4": ("[]",)}
