"""Table of the bounds of all request fields, derived from the types that validate them."""

# `chat.MAX_ALL_PARTS`, `openai.MAX_REPORTED_VALUES` and `cluster.http.checked_bodies` bound whole requests.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

from outrider.cluster.http.compare import CompareRequest
from outrider.cluster.http.types.anthropic import MessagesRequest
from outrider.cluster.http.types.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ScoreRequest,
    TokenizeRequest,
)
from outrider.cluster.http.types.responses import ResponsesRequest

BODIES: tuple[Any, ...] = (
    ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CompareRequest, ScoreRequest,
    TokenizeRequest, DetokenizeRequest,
)  # fmt: skip


class UnboundedError(TypeError):
    """Raised for a request field without a bound; the message is its path."""


def bounds() -> dict[str, tuple[str, ...]]:
    """Return the fields by bound: ``{"at most 4 items": ("stop",), ...}``. Raises ``UnboundedError`` for a field without one."""
    found: dict[str, dict[str, None]] = {}
    for kind in BODIES:
        schema = TypeAdapter(kind).json_schema()
        for path, bound in _walk(schema, schema.get("$defs", {}), ""):
            found.setdefault(bound, {})[path] = None
    return {bound: tuple(paths) for bound, paths in found.items()}


def _walk(node: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Yield path and bound of a field and of its nested fields. Enumerated values need no bound."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    for option in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _walk(option, definitions, path)
    kind = node.get("type")
    if "enum" in node or "const" in node or kind in (None, "boolean", "null"):
        return
    if kind == "object" and "properties" in node:
        for name, inner in node["properties"].items():
            yield from _walk(inner, definitions, f"{path}.{name}".removeprefix("."))
        return
    yield path, _bound(node, path)
    if kind == "array":
        yield from _walk(node["items"], definitions, f"{path}[]")
    elif isinstance(node.get("additionalProperties"), Mapping):
        yield from _walk(node["additionalProperties"], definitions, f"{path}.*")


def _bound(node: Mapping[str, Any], path: str) -> str:
    kind = node["type"]
    if kind in ("integer", "number"):
        lows = [_number(node["minimum"])] if "minimum" in node else []
        lows += [f"above {_number(node['exclusiveMinimum'])}"] if "exclusiveMinimum" in node else []
        highs = [node["maximum"]] if "maximum" in node else []
        highs += [node["exclusiveMaximum"] - 1] if "exclusiveMaximum" in node else []  # exclusive maxima occur for integers only
        if not lows or not highs:
            raise UnboundedError(path)
        return f"{lows[0]} to {_number(highs[0])}"
    low_key, high_key, unit = {
        "string": ("minLength", "maxLength", "characters"),
        "array": ("minItems", "maxItems", "items"),
        "object": ("minProperties", "maxProperties", "names"),
    }[kind]
    if high_key not in node:
        if kind != "object" or "description" not in node:
            raise UnboundedError(path)
        return str(node["description"])
    low = node.get(low_key, 0)
    return f"{low:,} to {node[high_key]:,} {unit}" if low else f"at most {node[high_key]:,} {unit}"


def _number(value: float) -> str:
    return f"{value:,}".removesuffix(".0")
