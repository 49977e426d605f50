"""Base class and field types of request bodies. Unsupported parameters are errors and never ignored."""

# Every string, list and number has a bound, listed in docs/runbook.md by `cluster.http.types.bounds`. Lists are validated up to
# their first wrong item, so that no error response is larger than the body.

from __future__ import annotations

import functools
import json
import math
from contextvars import ContextVar
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
    # JSON can contain a lone surrogate, which neither a tokenizer nor a response can encode.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not hold half of a surrogate pair") from None
    return text


MAX_TEXT = 2**22  # characters of a text; a body of the default maximum size has room for two
MAX_NAME = 512  # characters of a name or id
MAX_TOKEN_IDS = 2**20
MAX_NUMBER = 2**31 - 1  # number of tokens, or a token id
MAX_UNKNOWN = 4  # unknown fields that are reported one by one
MAX_DEPTH, MAX_VALUES, MAX_INTEGER = 64, 20_000, 2**64  # bounds of free-form JSON objects

# Collects the unknown fields that are left out of a body while it is validated; None if they are errors.
UNKNOWN: ContextVar[list[str] | None] = ContextVar("unknown fields of the body that is being validated", default=None)

ENCODABLE = AfterValidator(_encodable)
Text = Annotated[str, Field(max_length=MAX_TEXT), ENCODABLE]
Name = Annotated[str, Field(max_length=MAX_NAME), ENCODABLE]
TokenId = Annotated[int, Field(ge=0, le=MAX_NUMBER)]


def are_token_ids(value: Any) -> bool:
    """Return whether a value is a non-empty list of token ids."""
    # Python code, unlike compiled validators, lets other threads run meanwhile.
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item <= MAX_NUMBER for item in value)


def _check_token_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if are_token_ids(value) and len(value) <= MAX_TOKEN_IDS else check(value)


TokenIds = Annotated[
    list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True), WrapValidator(_check_token_ids)
]  # validated only once: the compiled check runs if the Python check fails


def checked_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return a free-form JSON object unchanged. Raises ``ValueError`` if it, or a value in it, exceeds the bounds."""
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
                inner += node  # names are checked like values
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
    """Return the error for an unsupported value or combination; ``param`` is the field's name in the model that raises it."""
    return PydanticCustomError("unsupported_parameter", "{message}", {"param": param, "message": message})


def _same(value: Any, noop: Any) -> bool:
    return bool(value == noop) and isinstance(value, bool) is isinstance(noop, bool)  # True is not 1


class Strict(BaseModel):
    """Base class of request bodies and their parts. Unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    # Unsupported parameters that clients often send, with the values that have no effect: these are accepted, all others refused.
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
        if (ignored := UNKNOWN.get()) is not None:
            ignored += unknown
            return {name: value for name, value in left.items() if name in _names(cls)}
        if len(unknown) > MAX_UNKNOWN:
            message = f"{len(unknown)} unknown parameters; remove them"
            raise PydanticCustomError("unknown_parameters", "{message}", {"param": unknown[0], "message": message})
        return left

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema, including the parameters in ``NO_OPS``."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, values in cls.NO_OPS.items():
            properties[name] = {"enum": [*values, None], "description": "Has no effect; other values are refused."}
        return schema


@functools.cache
def _names(kind: type[Strict]) -> frozenset[str]:
    """Return the field names of a body type as clients write them (aliases)."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@functools.cache
def _own_names(kind: type[Strict]) -> frozenset[str]:
    return _names(kind) - kind.NO_OPS.keys()
