"""Requests of OpenAI's HTTP API, as far as this server honours them.

A parameter that is not honoured is an error, never ignored: ``NO_OPS`` lists, for parameters that clients send by habit, the
values that ask for nothing. They are taken; any other value is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from decoding.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_STOPS = 4  # as OpenAI
MAX_PROMPTS = 128

_COMMON_NO_OPS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "prompt_logprobs": (),
    "cache_salt": (),
}
_CHAT_NO_OPS: dict[str, tuple[Any, ...]] = _COMMON_NO_OPS | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "add_generation_prompt": (True,),
}
_COMPLETION_NO_OPS: dict[str, tuple[Any, ...]] = _COMMON_NO_OPS | {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "add_special_tokens": (True,),
}
_MESSAGE_NO_OPS: dict[str, tuple[Any, ...]] = {
    "name": (),
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text: no tokenizer and no response can carry it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must not hold half of a surrogate pair") from None
    return text


def _same(value: Any, noop: Any) -> bool:
    """Equality in which true is not 1."""
    return bool(value == noop) and isinstance(value, bool) is isinstance(noop, bool)


def _unsupported(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported_parameter", "{message}", {"param": param, "message": message})


Text = Annotated[str, AfterValidator(_encodable)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, allow_inf_nan=False)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
CacheChoice = Literal["tenant", "private", "off"]


class _Strict(BaseModel):
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
                raise _unsupported(name, f"{name} is not supported; {advice}")
        return {name: value for name, value in data.items() if name not in cls.NO_OPS}


class StreamOptions(_Strict):
    """What a stream carries besides the text."""

    NO_OPS = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool | None = None  # a last chunk with the usage


class SpeculationChoice(_Strict):
    """How a request is drafted for, without effect on the law of the answer; with a strategy that has one the answer says
    ``lossless: false``. The configuration bounds both (``speculation``)."""

    strategy: Text | None = None  # one of the server's, listed by /v1/models; its own default when absent
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None  # most drafted rows in a step; 0 is plain decoding


class _GenerationRequest(_Strict):
    """What both kinds of completion take."""

    model: Text
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None  # 1.0 when absent; 0 is greedy
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1: all tokens
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None  # by token id, written as a string
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # drawn when absent
    min_tokens: Annotated[int, Field(ge=0)] | None = None  # no end token before so many
    stop: list[Text] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    reference_documents: list[Text] | None = None  # texts the answer may repeat: they speed it up and do not change it
    cache: CacheChoice | None = None  # whose texts it drafts from, without effect on the answer; see cluster.tenancy
    speculation: SpeculationChoice | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # lower first; see engine.scheduling_policy
    user: Text | None = None  # opaque label
    safety_identifier: Text | None = None  # opaque label

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            # Short enough for int(), and spelled in one way, so that no two keys mean one token.
            if not (key.isascii() and key.isdigit() and len(key) <= 18 and key == str(int(key))):
                raise ValueError("must map token ids, written as decimal strings, to numbers")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if texts is None:
            return None
        if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOPS} of them")
        return texts

    @model_validator(mode="after")
    def _check_stream_options(self) -> _GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _unsupported("stream_options", "stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(_GenerationRequest):
    """``POST /v1/completions``. Each of several prompts gives a choice, in order."""

    NO_OPS = _COMPLETION_NO_OPS

    prompt: list[Text | list[int]]  # also taken: one string, one list of token ids
    logprobs: Alternatives | None = None  # alternatives of each token; the token itself always comes along

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        prompts = [value] if isinstance(value, str) or _token_ids(value) else value
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) or _token_ids(prompt) for prompt in prompts):
            raise ValueError("must be a string, a list of token ids, or a list of strings or of lists of token ids")
        if not prompts or not all(prompts):
            raise ValueError("must not be empty")
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"must hold at most {MAX_PROMPTS} prompts")
        return prompts

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token, None for no log-probabilities."""
        return self.logprobs


class TextPart(_Strict):
    """A piece of a message. Images, sound and files are not supported."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Strict):
    """One turn of a conversation."""

    NO_OPS = _MESSAGE_NO_OPS

    role: Text
    content: Text | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(_GenerationRequest):
    """``POST /v1/chat/completions``."""

    NO_OPS = _CHAT_NO_OPS

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token, None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise _unsupported("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> ChatCompletionRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise _unsupported("max_completion_tokens", "max_completion_tokens and max_tokens differ; send one")
        return self


def known_names(url_path: str, path: Sequence[int | str]) -> list[str]:
    """The names a field at ``path`` of a request to ``url_path`` may have."""
    kind: type[_Strict] = ChatCompletionRequest if "chat" in url_path else CompletionRequest
    if len(path) > 1:
        nested: dict[int | str, type[_Strict]] = {
            "stream_options": StreamOptions, "messages": ChatMessage, "speculation": SpeculationChoice,
        }  # fmt: skip
        kind = TextPart if "content" in path else nested.get(path[0], kind)
    return [*kind.model_fields, *kind.NO_OPS]


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)
