"""Messages, tools and prediction of a chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from cluster.http.types.strict import JsonObject, Name, Strict, Text, checked_json, unsupported

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of a message
MAX_ALL_PARTS = 8192  # and calls of tools, of all messages of a request
MAX_TOOLS = 128  # as OpenAI; and calls of one message


class TextPart(Strict):
    """A piece of a message. Images, sound and files are not supported."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


def text_of(content: str | Sequence[TextPart]) -> str:
    """A content as one string."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionCall(Strict):
    """What the assistant called in an earlier turn."""

    name: Name
    arguments: Text  # a JSON object, spelled as text

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: str) -> str:
        try:
            arguments = json.loads(value or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError("must be a JSON object, spelled as a string")
        checked_json(arguments)
        return value or "{}"


class ToolCall(Strict):
    """A call in an earlier turn of the assistant."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    """One turn of a conversation."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "name": (),
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
    }

    role: Name
    content: Content  # may be left out, or null, beside tool_calls and reasoning
    reasoning: Text | None = None  # of the assistant, as it was told; templates decide what they show of it
    reasoning_content: Text | None = None  # the same by its older name
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None  # of the assistant
    tool_call_id: Name | None = None  # of a tool: the call that it answers

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, data: Any) -> Any:
        told = isinstance(data, dict) and any(data.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
        return data | {"content": ""} if told and data.get("content") is None else data

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise unsupported("tool_calls", "tool_calls belong to messages of the assistant")
        for name, value in (("reasoning", self.reasoning), ("reasoning_content", self.reasoning_content)):
            if value and self.role != "assistant":
                raise unsupported(name, f"{name} belongs to messages of the assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise unsupported("tool_call_id", "tool_call_id belongs to messages of the role tool")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        resolved = handler.resolve_ref_schema(schema)
        resolved["required"] = ["role"]
        resolved["properties"]["content"]["description"] = "May be left out, or null, beside tool_calls and reasoning only."
        resolved["properties"]["content"]["anyOf"].append({"type": "null"})
        return schema

    def turn(self) -> dict[str, Any]:
        """The message as chat templates take it: arguments of calls are objects, as in ``transformers``."""
        turn: dict[str, Any] = {"role": self.role, "content": text_of(self.content)}
        if thought := self.reasoning_content or self.reasoning:
            turn |= {"reasoning": thought, "reasoning_content": thought}
        if self.tool_calls:
            calls = ((call.id, call.function) for call in self.tool_calls)
            turn["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": made.name, "arguments": json.loads(made.arguments)}}
                for name, made in calls
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[Name, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: Text | None = None
    parameters: JsonObject | None = None  # JSON schema; shown to the model, and enforced where the answer is bound
    strict: bool | None = None  # calls are of tools that were sent, and this one's arguments valid; see tool_grammar.py


class Tool(Strict):
    """Something that the model may use."""

    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": function | {"parameters": self.function.parameters or _NO_PARAMETERS}}


class NamedFunction(Strict):
    """Which function."""

    name: Name


class NamedTool(Strict):
    """The one tool that the answer calls."""

    type: Literal["function"]
    function: NamedFunction


def check_parts(value: Any, *fields: str) -> Any:
    """Refuse messages whose lists in ``fields`` hold too many items together, before each of them is checked."""
    messages = (message for message in value if isinstance(message, dict)) if isinstance(value, list) else ()
    count = sum(len(message[field]) for message in messages for field in fields if isinstance(message.get(field), list))
    if count > MAX_ALL_PARTS:
        raise ValueError(f"must hold at most {MAX_ALL_PARTS} parts and calls together, not {count}")
    return value


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(lambda value: check_parts(value, "content", "tool_calls")),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]

_NO_PARAMETERS = {"type": "object", "properties": {}}


class Prediction(Strict):
    """OpenAI's predicted output: a text that the answer may repeat. Here it is the first of the reference documents."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The content as one string."""
        return text_of(self.content)
