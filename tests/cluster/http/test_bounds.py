"""Bounds of bodies: counted in pieces before they are parsed, one for every field, and few errors of wrong items."""

from __future__ import annotations

import json
import random
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from outrider.cluster.http import checked_bodies
from outrider.cluster.http.checked_bodies import MAX_NESTED, MAX_STRINGS, parse
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.text_threads import SHORT
from outrider.cluster.http.types import bounds
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest, DetokenizeRequest
from outrider.cluster.http.types.responses import ResponsesRequest
from outrider.cluster.http.types.strict import Strict
from tests.cluster.circle import CHAT, TEXT

FILL = {"fill": "x" * SHORT}


def counts(value: Any) -> tuple[int, int]:
    """Return the strings, and the objects and lists, of a value."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, dict | list):
        return 0, 0
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    found = [counts(part) for part in parts]
    return sum(strings for strings, _ in found), 1 + sum(nested for _, nested in found)


def drawn(rng: random.Random, depth: int = 0) -> Any:
    """Return a random value, with quotes, brackets and backslashes in its texts."""
    kind = rng.randrange(5 if depth < 4 else 2)
    if kind == 0:
        return rng.choice([None, True, 1, -2.5])
    if kind in (1, 2):
        return "".join(rng.choice('ab"\\[]{}\n') for _ in range(rng.randrange(9)))
    parts = [drawn(rng, depth + 1) for _ in range(rng.randrange(5))]
    return parts if kind == 3 else {f'{at}"\\{{': part for at, part in enumerate(parts)}


@pytest.mark.slow
@pytest.mark.parametrize("chars", [1, 2, 3, 7, 64])
def test_what_a_body_holds_is_counted_in_pieces_as_it_is_parsed(chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_bodies, "_PIECE_CHARS", chars)
    for seed in range(100):
        value = FILL | {"value": drawn(random.Random(seed))}
        body = json.dumps(value).encode()
        strings, nested = counts(value)
        monkeypatch.setattr(checked_bodies, "MAX_STRINGS", strings)
        monkeypatch.setattr(checked_bodies, "MAX_NESTED", nested)
        assert parse(body) == value
        monkeypatch.setattr(checked_bodies, "MAX_STRINGS", strings - 1)
        with pytest.raises(ApiError, match="names and texts"):
            parse(body)
        monkeypatch.setattr(checked_bodies, "MAX_STRINGS", strings)
        monkeypatch.setattr(checked_bodies, "MAX_NESTED", nested - 1)
        with pytest.raises(ApiError, match="objects and lists"):
            parse(body)


@pytest.mark.parametrize("value", [["a"] * (MAX_STRINGS + 1), [[]] * (MAX_NESTED + 1)])
def test_a_body_with_too_much_is_refused(value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse(json.dumps(value).encode())
    assert caught.value.status == 400


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
