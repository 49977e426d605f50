"""Base of request bodies: strict and bounded. A parameter that is not honoured is an error, never ignored.

``NO_OPS`` lists, for parameters that clients send by habit, the values that ask for nothing. They are taken; any other value is
refused.

Every text, list and number of a request has a bound, and a list is looked at up to its first wrong item only, so that no answer
about a body is larger than the body. The bounds are told in docs/operations.md, by ``cluster.http.types.bounds``.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text: no tokenizer and no response can carry it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not hold half of a surrogate pair") from None
    return text


MAX_TEXT = 2**22  # characters of a text: a body of the default size holds two of them
MAX_NAME = 512  # characters of what names something
MAX_TOKEN_IDS = 2**20
MAX_NUMBER = 2**31 - 1  # of tokens, and of token ids
MAX_UNKNOWN = 4  # fields without a meaning that are told of one by one
MAX_DEPTH, MAX_VALUES, MAX_INTEGER = 64, 20_000, 2**64  # of a JSON object whose form is the client's

ENCODABLE = AfterValidator(_encodable)
Text = Annotated[str, Field(max_length=MAX_TEXT), ENCODABLE]
Name = Annotated[str, Field(max_length=MAX_NAME), ENCODABLE]
TokenId = Annotated[int, Field(ge=0, le=MAX_NUMBER)]


def are_token_ids(value: Any) -> bool:
    """Return whether a value is a list of one or more token ids. Other threads go on meanwhile, unlike with compiled checks."""
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item <= MAX_NUMBER for item in value)


def _check_token_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if are_token_ids(value) and len(value) <= MAX_TOKEN_IDS else check(value)


TokenIds = Annotated[
    list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True), WrapValidator(_check_token_ids)
]  # checked once


def checked_json(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object of any form as it is. Raises ``ValueError``: it is too deep or too large, or what stands in it is."""
    level: list[Any] = [value]
    depth, count = 0, 1
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"must be nested at most {MAX_DEPTH} levels deep")
        inner: list[Any] = []
        for node in level:
            inner += node.values() if isinstance(node, dict) else node
            if isinstance(node, dict):
                inner += node  # names are texts, too
        count += len(inner)
        if count > MAX_VALUES:
            raise ValueError(f"must hold at most {MAX_VALUES} names and values")
        for leaf in inner:
            _check_leaf(leaf)
        level = [node for node in inner if isinstance(node, dict | list)]
    return value


def _check_leaf(leaf: Any) -> None:
    if isinstance(leaf, str):
        if len(leaf) > MAX_TEXT:
            raise ValueError(f"must hold texts of at most {MAX_TEXT} characters")
        _encodable(leaf)
    elif isinstance(leaf, float) and not math.isfinite(leaf):
        raise ValueError("must hold numbers that are finite")
    elif isinstance(leaf, int) and abs(leaf) > MAX_INTEGER:
        raise ValueError(f"must hold integers up to {MAX_INTEGER}")


JSON_BOUNDS = f"nested at most {MAX_DEPTH} levels deep, {MAX_VALUES} names and values, integers up to {MAX_INTEGER}"
JsonObject = Annotated[dict[str, Any], Field(json_schema_extra={"description": JSON_BOUNDS}), AfterValidator(checked_json)]


def unsupported(param: str, message: str) -> PydanticCustomError:
    """The error for a field whose value, or whose company, cannot be had; ``param`` is its name in the model that raises it."""
    return PydanticCustomError("unsupported_parameter", "{message}", {"param": param, "message": message})


def _same(value: Any, noop: Any) -> bool:
    """Equality in which true is not 1."""
    return bool(value == noop) and isinstance(value, bool) is isinstance(noop, bool)


class Strict(BaseModel):
    """A part of a request: unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() <= _own_names(cls):
            return data
        for name in data.keys() & cls.NO_OPS.keys():
            value = data[name]
            allowed = cls.NO_OPS[name]
            if value is not None and not any(_same(value, noop) for noop in allowed):
                advice = " or send ".join(["leave it out", *(json.dumps(noop) for noop in allowed)])
                raise unsupported(name, f"{name} is not supported; {advice}")
        left = {name: value for name, value in data.items() if name not in cls.NO_OPS}
        unknown = [name for name in left if name not in _names(cls)]
        if len(unknown) > MAX_UNKNOWN:
            message = f"{len(unknown)} unknown parameters; remove them"
            raise PydanticCustomError("unknown_parameters", "{message}", {"param": unknown[0], "message": message})
        return left

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema with the values that ask for nothing: the OpenAPI document says all that is taken."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, values in cls.NO_OPS.items():
            properties[name] = {"enum": [*values, None], "description": "Has no effect; other values are refused."}
        return schema


@functools.cache
def _names(kind: type[Strict]) -> frozenset[str]:
    """The fields of a kind of body, as clients spell them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@functools.cache
def _own_names(kind: type[Strict]) -> frozenset[str]:
    """Those that are taken whatever their value."""
    return _names(kind) - kind.NO_OPS.keys()
