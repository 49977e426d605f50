"""Requests of Anthropic's Messages API. Each is converted to a chat request and processed like one."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from outrider.cluster.http.types.chat import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, check_parts, checked_chat
from outrider.cluster.http.types.openai import (
    ChatCompletionRequest,
    CompletionFields,
    Effort,
    MostTokens,
    RequestFields,
    Stop,
    Stops,
)
from outrider.cluster.http.types.strict import JsonObject, Name, Strict, Text, unsupported

_KEEPS_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_REQUEST_NO_OPS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "container": (),
    "context_management": ({}, {"edits": []}, _KEEPS_THINKING),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
# Fields of chats that the Messages API has under another name, or not at all.
_MESSAGE_NO_OPS: dict[str, tuple[Any, ...]] = _REQUEST_NO_OPS | {
    "stop": (),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "response_format": (),
    "stream_options": (),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
}


class _Block(Strict):
    """Base class of content blocks, tools and the system prompt."""

    cache_control: JsonObject | None = None  # without effect: the KV of a prompt's beginning is always reused


class TextBlock(_Block):
    """Text of a message."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {"citations": ([],)}

    type: Literal["text"]
    text: Text


class ThinkingBlock(_Block):
    """Earlier reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None  # not verified


class RedactedThinkingBlock(_Block):
    """Earlier reasoning that cannot be read; it is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(_Block):
    """Earlier tool call of the assistant."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},), "toolset_name": ()}

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: JsonObject


class ToolResultBlock(_Block):
    """Output of a called tool."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None  # the template shows the content alone


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_block",
        custom_error_message="Must be a block of type text, thinking, redacted_thinking, tool_use or tool_result: "
        "images and files are not supported",
    ),
]
TextBlocks = Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputTurn(Strict):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[ContentBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ToolDefinition(_Block):
    """Tool that the model may call and the client runs."""

    NO_OPS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (True, False),
        "input_examples": ([],),
    }

    type: Literal["custom"] | None = None
    name: Annotated[Name, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") not in (None, "custom"):  # otherwise every field would be an error
            raise unsupported("type", "type must be 'custom': this server runs no tools itself")
        return data

    def function(self) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema, "strict": self.strict}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


class ToolUseChoice(Strict):
    """Whether the model must call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolUseChoice:
        if (self.type == "tool") != (self.name is not None):
            raise unsupported("name", "name belongs to tool_choice of type tool, which requires it")
        return self

    @property
    def of_chat(self) -> Any:
        """Return the choice as a chat has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class ThinkingOptions(Strict):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: MostTokens | None = None  # reasoning is ended after so many tokens
    display: Literal["summarized", "omitted"] | None = None  # omitted: the response has no reasoning

    @property
    def is_hidden(self) -> bool:
        """Return whether the response has no reasoning."""
        return self.type == "disabled" or self.display == "omitted"

    @model_validator(mode="after")
    def _check_budget(self) -> ThinkingOptions:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise unsupported("budget_tokens", "budget_tokens belongs to thinking of type enabled, which requires it")
        return self


class OutputFormat(Strict):
    """JSON schema that the response's text follows."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Strict):
    """Options of the response."""

    effort: Effort | None = None  # variable reasoning_effort of the chat template, if it has one
    format: OutputFormat | None = None


class MessagesChat(ChatCompletionRequest):
    """Chat request that was made from one of the Messages API."""

    LENIENT: ClassVar[bool] = True

    thinking: bool | None = None

    @property
    def thinks(self) -> bool | None:
        """Return whether the model should reason; None for the template's default."""
        return self.thinking


class PromptFields(RequestFields):
    """Fields that determine the prompt."""

    NO_OPS = _REQUEST_NO_OPS
    PROMPT: ClassVar[str] = "messages"

    messages: Annotated[list[InputTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: JsonObject | None = None  # without effect, see _Block
    metadata: JsonObject | None = None  # opaque labels
    chat_template_kwargs: JsonObject | None = None  # same as in chats

    @field_validator("messages", mode="before")
    @classmethod
    def _check_parts(cls, value: Any) -> Any:
        return check_parts(value, "content")

    @model_validator(mode="after")
    def _check_chat(self) -> PromptFields:
        _ = self.chat
        return self

    @functools.cached_property
    def chat(self) -> MessagesChat:
        """Return the equivalent chat request. Raises ``PydanticCustomError`` with this request's field names."""
        fields = self._fields()
        return checked_chat(
            lambda: MessagesChat.model_validate({name: value for name, value in fields.items() if value is not None}),
            own_name,
            "messages",
        )

    def _fields(self) -> dict[str, Any]:
        thinking, config = self.thinking, self.output_config or OutputConfig()
        schema = None if config.format is None else {"schema": config.format.schema_, "strict": True}
        choice, turns = self.tool_choice, _turns(self.messages)
        if self.system is not None:
            turns.insert(0, {"role": "system", "content": _text(self.system)})
        return {
            "model": self.model,
            "messages": turns,
            "tools": [tool.function() for tool in self.tools] if self.tools else None,
            "tool_choice": None if choice is None or (choice.type == "auto" and not self.tools) else choice.of_chat,
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "response_format": schema and {"type": "json_schema", "json_schema": schema},
            "reasoning_effort": config.effort,
            "thinking": None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled",
            "thinking_token_budget": None if thinking is None else thinking.budget_tokens,
            "include_reasoning": False if thinking is not None and thinking.is_hidden else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            # A last message of the assistant is the beginning of the response.
            "continue_final_message": True if self.messages[-1].role == "assistant" else None,
        }  # fmt: skip


class CountTokensRequest(PromptFields):
    """Body of ``POST /v1/messages/count_tokens``."""


class MessagesRequest(PromptFields, CompletionFields):
    """Body of ``POST /v1/messages``."""

    NO_OPS = _MESSAGE_NO_OPS

    max_tokens: MostTokens
    stop_sequences: Stops | None = None

    @field_validator("stop_sequences", mode="before", json_schema_input_type=Stop | Stops | None)
    @classmethod
    def _check_stop_sequences(cls, value: Any) -> Any:
        return cls._check_stop(value)

    @model_validator(mode="after")
    def _check_report(self) -> MessagesRequest:
        if self.drafting.report:
            raise unsupported("speculation.report", "speculation.report is not supported in /v1/messages; leave it out")
        return self

    def _fields(self) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in CompletionFields.model_fields if name not in _MESSAGE_NO_OPS}
        # The stop string is kept in the text, which tells it from the others; the response leaves it out.
        stops = {"stop": self.stop_sequences, "include_stop_str_in_output": True} if self.stop_sequences else {}
        lengths = {"max_tokens": None, "max_completion_tokens": self.max_tokens}
        return shared | super()._fields() | stops | lengths


def _turns(messages: Sequence[InputTurn]) -> list[dict[str, Any]]:
    """Return the messages of the chat: each tool result is a message."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")})
        turn: dict[str, Any] = {"role": message.role, "content": _text([one for one in blocks if isinstance(one, TextBlock)])}
        if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
            turn["reasoning_content"] = "".join(thoughts)
        if calls := [block for block in blocks if isinstance(block, ToolUseBlock)]:
            turn["tool_calls"] = [
                {"id": one.id, "function": {"name": one.name, "arguments": json.dumps(one.input)}} for one in calls
            ]
        if turn["content"] or not any(isinstance(block, ToolResultBlock) for block in blocks):
            turns.append(turn)
    return turns


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


# Pairs of a chat's field and its name in the Messages API.
_NAMES = (
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    ("max_completion_tokens", "max_tokens"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("tool_choice.function", "tool_choice"),
    ("stop", "stop_sequences"),
)


def own_name(field: str | None) -> str | None:
    """Return the Messages API's name of a chat field. Example: ``tools[0].function.parameters`` is ``tools[0].input_schema``."""
    if field is None:
        return None
    for name, own in _NAMES:
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return own + field[len(name) :]
    if field.startswith("messages["):  # blocks and the messages of a chat do not correspond one to one
        return "messages"
    return field.replace("].function.parameters", "].input_schema").replace("].function.", "].")
