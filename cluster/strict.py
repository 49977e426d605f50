"""What every body of a request is: strict. A parameter that is not honoured is an error, never ignored.

``NO_OPS`` lists, for parameters that clients send by habit, the values that ask for nothing. They are taken; any other value is
refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text: no tokenizer and no response can carry it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not hold half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


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
        if not isinstance(data, dict):
            return data
        for name in data.keys() & cls.NO_OPS.keys():
            value = data[name]
            allowed = cls.NO_OPS[name]
            if value is not None and not any(_same(value, noop) for noop in allowed):
                advice = " or send ".join(["leave it out", *(json.dumps(noop) for noop in allowed)])
                raise unsupported(name, f"{name} is not supported; {advice}")
        return {name: value for name, value in data.items() if name not in cls.NO_OPS}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema with the values that ask for nothing: the OpenAPI document says all that is taken."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, values in cls.NO_OPS.items():
            properties[name] = {"enum": [*values, None], "description": "Has no effect; other values are refused."}
        return schema
