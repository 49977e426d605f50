"""Messages, tools and predicted output of a chat request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, ValidationError, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from outrider.cluster.http.types.strict import JsonObject, Name, Strict, Text, checked_json, unsupported

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # content parts of a message
MAX_ALL_PARTS = 8192  # content parts and tool calls of all messages of a request
MAX_TOOLS = 128  # tools of a request (OpenAI's limit), and tool calls of one message


Body = TypeVar("Body")
Index = Annotated[int, Field(ge=0, lt=MAX_TOOLS)]


class TextPart(Strict):
    """Text part of a message. Images, audio and files are not supported."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


def text_of(content: str | Sequence[TextPart]) -> str:
    """Return the text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionCall(Strict):
    """Function and arguments of an earlier tool call."""

    name: Name
    arguments: Text | None  # JSON object as a string, as the model wrote it: maybe cut, or no JSON
    parsed_arguments: JsonObject | None = None  # copy of the arguments by typed clients; without effect

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: str | None) -> str | None:
        checked_json(read_arguments(value))
        return value


def read_arguments(text: str | None) -> dict[str, Any]:
    """Return the arguments of an earlier call for the chat template; empty if they are not a JSON object."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


class ToolCall(Strict):
    """Tool call in an earlier message of the assistant."""

    index: Index | None = None  # of a call that was added up from a stream; the order of the list counts
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    """One message of a conversation."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
        "images": ([],),
        "thinking_blocks": ([],),
    }

    role: Name
    name: Name | None = None  # of the participant; for templates that read it
    content: Content  # optional in messages of the assistant
    reasoning: Text | None = None  # earlier reasoning of the assistant; the chat template decides whether to show it
    reasoning_content: Text | None = None  # older name of reasoning
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None  # assistant messages only
    tool_call_id: Name | None = None  # tool messages only: the call that the message answers
    parsed: JsonObject | None = None  # copy of the content by typed clients; without effect
    provider_specific_fields: JsonObject | None = None  # LiteLLM's copy of fields of the response; without effect

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, data: Any) -> Any:
        # `content` may be left out, or null, in messages of the assistant only.
        is_own = isinstance(data, dict) and data.get("role") == "assistant"
        return data | {"content": ""} if is_own and data.get("content") is None else data

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
        resolved["properties"]["content"]["description"] = "May be left out, or null, in messages of the assistant only."
        resolved["properties"]["content"]["anyOf"].append({"type": "null"})
        return schema

    def turn(self) -> dict[str, Any]:
        """Return the message for the chat template, with tool call arguments as objects, as in ``transformers``."""
        turn: dict[str, Any] = {"role": self.role, "content": text_of(self.content)}
        if thought := self.reasoning_content or self.reasoning:
            turn |= {"reasoning": thought, "reasoning_content": thought}
        if self.tool_calls:
            calls = ((call.id, call.function) for call in self.tool_calls)
            turn["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": made.name, "arguments": read_arguments(made.arguments)}}
                for name, made in calls
            ]
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class Function(Strict):
    """Function that the model may call."""

    name: Annotated[Name, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: Text | None = None
    parameters: JsonObject | None = None  # JSON schema; enforced if strict or if the response must be a call of the tool
    strict: bool | None = None  # guarantees that calls name a tool of the request, with valid arguments; see tool_grammar.py


class Tool(Strict):
    """Tool that the model may use."""

    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """Return the tool for the chat template."""
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": function | {"parameters": self.function.parameters or _NO_PARAMETERS}}


class NamedFunction(Strict):
    """Name of a function."""

    name: Name


class NamedTool(Strict):
    """Tool that the response must call."""

    type: Literal["function"]
    function: NamedFunction


def check_parts(value: Any, *fields: str) -> Any:
    """Raise ``ValueError`` if the lists in ``fields`` of all messages together have too many items."""
    messages = (message for message in value if isinstance(message, dict)) if isinstance(value, list) else ()
    count = sum(len(message[field]) for message in messages for field in fields if isinstance(message.get(field), list))
    if count > MAX_ALL_PARTS:
        raise ValueError(f"must hold at most {MAX_ALL_PARTS} parts and calls together, not {count}")
    return value


def checked_chat(build: Callable[[], Body], own_name: Callable[[str], str | None], prompt: str) -> Body:
    """Return the chat request that ``build`` makes of another one. Raises ``PydanticCustomError`` with that one's field names.

    Args:
        own_name: from a chat's field to the other request's; None if it has none.
        prompt: field of the other request that errors in the messages name.
    """
    try:
        return build()
    except ValidationError as error:
        (first, *_) = error.errors()
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).removeprefix(".")
        field = first.get("ctx", {}).get("param") or place
        own = own_name(f"{place}.{field}" if place and place != field else field) or prompt
        raise unsupported(own, f"{own}: {first['msg']}" if own == prompt else first["msg"]) from None


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(lambda value: check_parts(value, "content", "tool_calls")),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]

_NO_PARAMETERS = {"type": "object", "properties": {}}


class Prediction(Strict):
    """Predicted output: text that the response may repeat. It is used like a first item of ``reference_documents``."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """Return the predicted text."""
        return text_of(self.content)
