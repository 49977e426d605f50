"""Requests of OpenAI's Responses API. Each is converted to a chat request and processed like one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError

from outrider.cluster.http.types.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Function, FunctionCall, check_parts, checked_chat
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionFields, Effort, MostTokens
from outrider.cluster.http.types.strict import JsonObject, Name, Strict, Text, unsupported
from outrider.cluster.http.types.structured import JsonSchemaFormat, ResponseFormat

MAX_METADATA = 16  # OpenAI's limit
_UNTOLD: dict[str, tuple[Any, ...]] = {
    # Fields of chats and completions; the Responses API has other names for them, or none.
    "max_tokens": (),
    "n": (1,),
    "response_format": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "logprob_token_ids": ([],),
    # Unsupported fields of the Responses API.
    "background": (False,),
    "conversation": (),
    "context_management": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_ITEM: dict[str, tuple[Any, ...]] = {
    "agent": (),
    "namespace": (),
    "caller": (),
    "phase": (),
    "internal_chat_message_metadata": (),
}
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """Text part of a message, or of a function's output."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {"prompt_cache_breakpoint": ()}

    type: Literal["input_text"]
    text: Text


class OutputText(Strict):
    """Text part of an earlier response."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["output_text"]
    text: Text
    parsed: JsonObject | None = None  # copy of the text by typed clients; without effect


class ThoughtText(Strict):
    """Text part of earlier reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class InputMessage(Strict):
    """One message of the conversation."""

    NO_OPS = _ITEM

    type: Literal["message"] = "message"
    role: Name
    content: Text | Annotated[list[InputText | OutputText], Field(max_length=MAX_PARTS, fail_fast=True)]
    id: Name | None = None
    status: Status | None = None


class InputCall(FunctionCall):
    """Earlier function call by the assistant."""

    NO_OPS = _ITEM

    type: Literal["function_call"]
    call_id: Name
    id: Name | None = None
    status: Status | None = None


class InputCallOutput(Strict):
    """Output of a called function."""

    NO_OPS = _ITEM

    type: Literal["function_call_output"]
    call_id: Name
    output: Text | Annotated[list[InputText], Field(max_length=MAX_PARTS, fail_fast=True)]
    id: Name | None = None
    status: Status | None = None


class InputReasoning(Strict):
    """Earlier reasoning of the assistant, before the items that follow."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {**_ITEM, "encrypted_content": (), "summary": ([],)}

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    id: Name | None = None
    status: Status | None = None


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)  # messages may omit it


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_item",
        custom_error_message="Must be an item of type message, function_call, function_call_output or reasoning",
    ),
]


class ResponseTool(Function):
    """Function that the model may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") != "function":  # otherwise every field would be an error
            raise unsupported("type", "type must be 'function': this server calls nothing itself")
        return data


class ResponseNamedTool(Strict):
    """Function that the response must call."""

    type: Literal["function"]
    name: Name


class TextFormat(Strict):
    """Format of the response's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            needs = "is required" if self.schema_ is None else "is only allowed"
            raise unsupported("schema", f"schema {needs} where the type is json_schema")
        return self

    def response_format(self) -> ResponseFormat:
        """Return the equivalent ``response_format`` of a chat."""
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        schema = {"name": self.name, "description": self.description, "schema": self.schema_, "strict": self.strict}
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat.model_validate(schema))


class TextOptions(Strict):
    """Options for the response's text."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ReasoningOptions(Strict):
    """Options for reasoning. Reasoning is returned in full, without summaries."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {"summary": (), "generate_summary": (), "context": (), "mode": ()}

    effort: Effort | None = None


class ResponseStreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: bool | None = None  # pad events; default: server.stream_guard


# Pairs of a chat's field and its name in the Responses API.
_NAMES = (
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", "input"),
)


def own_name(field: str | None) -> str | None:
    """Return the Responses API's name of a chat field. Example: ``tools[0].function.parameters`` is ``tools[0].parameters``."""
    if field is None:
        return None
    for name, own in _NAMES:
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            # Items and messages do not correspond one to one, so errors in messages name the whole input.
            return own if own == "input" else own + field[len(name) :]
    return field.replace("].function.", "].") if field.startswith("tools[") else field


class ResponsesRequest(CompletionFields):
    """Body of ``POST /v1/responses``."""

    NO_OPS = _UNTOLD
    PROMPT: ClassVar[str] = "input"

    input: Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | Text
    instructions: Text | None = None  # system message before the input
    max_output_tokens: MostTokens | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    parallel_tool_calls: bool | None = None  # false returns only the first function call
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None  # same as in chats
    chat_template_kwargs: JsonObject | None = None  # same as in chats
    metadata: Annotated[dict[Name, Name], Field(max_length=MAX_METADATA)] | None = None  # returned with the response
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]  # has fewer options than in chats
    store: bool | None = None  # true is refused, because no responses are stored
    previous_response_id: Name | None = None  # any value is refused, for the same reason

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        properties = handler.resolve_ref_schema(schema)["properties"]
        properties["store"] = {"enum": [False, None], "description": "Nothing is kept; true is refused."}
        properties["previous_response_id"] = {"enum": [None], "description": "Nothing is kept: send the earlier items as input."}
        return schema

    @field_validator("input", mode="before")
    @classmethod
    def _check_parts(cls, value: Any) -> Any:
        return check_parts(value, "content", "output")

    @field_validator("metadata", mode="before")
    @classmethod
    def _check_metadata(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_METADATA:  # before pydantic reports an error for each of them
            lengths = {"field_type": "Dictionary", "max_length": MAX_METADATA, "actual_length": len(value)}
            raise PydanticKnownError("too_long", lengths)
        return value

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        if self.previous_response_id is not None:
            message = (
                "previous_response_id is not supported, since this server keeps no responses; send the earlier items as input"
            )
            raise unsupported("previous_response_id", message)
        if self.store:
            raise unsupported("store", "store: true is not supported: this server keeps no responses; leave it out")
        # Built here, so that an error of the chat becomes one of this request, with this request's field names.
        checked_chat(lambda: self.chat, own_name, "input")
        return self

    @functools.cached_property
    def chat(self) -> ChatCompletionRequest:
        """Return the equivalent chat request."""
        fields = {name: getattr(self, name) for name in CompletionFields.model_fields if name != "stream_options"}
        form = None if self.text is None else self.text.format
        choice = self.tool_choice
        fields |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, ResponseNamedTool)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": form.response_format() if form is not None else None,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "include_reasoning": self.include_reasoning,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatCompletionRequest.model_validate({name: value for name, value in fields.items() if value is not None})

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat. Consecutive reasoning, text and calls of the assistant form one message."""
        messages: list[dict[str, Any]] = []
        thought = ""
        for item in [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, InputReasoning):
                thought += _text(item.content or ())
                continue
            if isinstance(item, InputCallOutput):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                continue
            role = "assistant" if isinstance(item, InputCall) else item.role
            if isinstance(item, InputMessage) or thought or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": role, "content": ""})
            turn = messages[-1]
            if role == "assistant" and thought:
                turn["reasoning_content"], thought = thought, ""
            if isinstance(item, InputCall):
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                turn.setdefault("tool_calls", []).append(call)
            else:
                turn["content"] = _text(item.content)
        if self.instructions is not None:
            if messages and messages[0]["role"] in ("system", "developer"):  # templates accept only one system message
                messages[0]["content"] = f"{self.instructions}\n\n{messages[0]['content']}"
            else:
                messages.insert(0, {"role": "system", "content": self.instructions})
        return messages


def _tool(tool: ResponseTool) -> dict[str, Any]:
    fields = {name: getattr(tool, name) for name in Function.model_fields}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _text(content: str | Sequence[InputText | OutputText | ThoughtText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def response_fields(body: ResponsesRequest) -> Mapping[str, Any]:
    """Return the request fields that the response repeats."""
    choice, form = body.tool_choice or "auto", None if body.text is None else body.text.format
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (form or TextFormat(type="text")).model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [
            {"description": None, "parameters": None, "strict": False} | {name: value for name, value in one if value is not None}
            for one in body.tools or ()
        ],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "background": False,
        "user": body.user,
    }
