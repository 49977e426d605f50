"""Requests of OpenAI's HTTP API, as far as this server honours them.

A parameter that is not honoured is an error, see ``cluster.http.types.strict``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from cluster.http.types.chat import Messages, NamedTool, Prediction, Tools
from cluster.http.types.completion_fields import (
    COMMON_NO_OPS,
    MAX_CHOICES,
    Alternatives,
    CompletionFields,
    Filled,
    MostTokens,
    Tokens,
)
from cluster.http.types.strict import MAX_NUMBER, MAX_TOKEN_IDS, Strict, Text, TokenId, unsupported
from cluster.http.types.text import TEXT_BODIES
from cluster.http.types.tool_grammar import tools_grammar

_CHAT_NO_OPS: dict[str, tuple[Any, ...]] = COMMON_NO_OPS | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
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
_COMPLETION_NO_OPS: dict[str, tuple[Any, ...]] = COMMON_NO_OPS | {
    "suffix": ("",),
    "best_of": (1,),
    "add_special_tokens": (True,),
}

Prompt = Filled | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)]
PromptInput = Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES)]


class CompletionRequest(CompletionFields):
    """``POST /v1/completions``. Each of several prompts gives ``n`` choices, in order."""

    NO_OPS = _COMPLETION_NO_OPS

    max_tokens: Tokens | None = None  # 0 beside echo only: the prompt alone, to be scored by logprobs
    prompt: list[Text | list[int]]  # also taken: one string, one list of token ids
    logprobs: Alternatives | None = None  # alternatives of each token; the token itself always comes along
    echo: bool | None = None  # the text begins with the prompt's

    @field_validator("prompt", mode="before", json_schema_input_type=PromptInput)
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        prompts = [value] if isinstance(value, str) or _token_ids(value) else value
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) or _token_ids(prompt) for prompt in prompts):
            raise ValueError("must be a string, a list of token ids, or a list of strings or of lists of token ids")
        if not prompts or not all(prompts):
            raise ValueError("must not be empty")
        if len(prompts) > MAX_CHOICES:
            raise ValueError(f"must hold at most {MAX_CHOICES} prompts")
        if any(len(prompt) > MAX_TOKEN_IDS for prompt in prompts if isinstance(prompt, list)):
            raise ValueError(f"must hold at most {MAX_TOKEN_IDS} token ids")
        return prompts

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        prompts, n = len(self.prompt), self.n or 1
        if prompts * n > MAX_CHOICES:
            raise unsupported("n", f"{n} choices for each of {prompts} prompts make {prompts * n}, at most {MAX_CHOICES} may be")
        if self.max_tokens == 0 and not self.echo:
            raise unsupported("max_tokens", "max_tokens must be at least 1, or 0 beside echo: true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token, None for no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each token of the prompt, None for no log-probabilities."""
        wanted = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(wanted, default=None)


class ChatCompletionRequest(CompletionFields):
    """``POST /v1/chat/completions``."""

    NO_OPS = _CHAT_NO_OPS

    messages: Messages
    max_completion_tokens: MostTokens | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Tools | None = None  # shown to the model by its chat template
    # none: the tools are not shown; auto, the default: the model decides; required: the answer is calls; or the one to call
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # false: of several calls in an answer only the first is told
    prediction: Prediction | None = None  # a text the answer may repeat: as reference_documents

    @property
    def references(self) -> tuple[str, ...]:
        """The prediction and the documents."""
        predicted = () if self.prediction is None else (self.prediction.text,)
        return (*predicted, *(self.reference_documents or ()))

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, as chat templates take them."""
        return [] if self.tool_choice == "none" else [tool.shown() for tool in self.tools or ()]

    @property
    def binds_calls(self) -> str | None:
        """The field that says of which form calls in the answer are; None where none does."""
        if self.tool_choice not in (None, "none", "auto"):
            return "tool_choice"
        shown = () if self.tool_choice == "none" else self.tools or ()
        strict = (index for index, tool in enumerate(shown) if tool.function.strict)
        return next((f"tools[{index}].function.strict" for index in strict), None)

    def calls_grammar(self, own_tokens: Collection[str]) -> str:
        """The grammar of the answer where ``binds_calls``; see ``cluster.http.types.tool_grammar.tools_grammar``."""
        return tools_grammar(self.tools or (), self.tool_choice, self.parallel_tool_calls is False, own_tokens)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each token, None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives of each token of the prompt, None for no log-probabilities."""
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            raise unsupported("tool_choice", "tool_choice: required needs tools to choose from")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise unsupported("tool_choice", f"there is no tool {self.tool_choice.function.name!r} in tools")
        if self.binds_calls is not None and len(set(names)) < len(names):
            raise unsupported("tools", "two tools have the same name")
        if self.binds_calls is not None and self.bound_by is not None:
            message = f"{self.binds_calls} and {self.bound_by} cannot both bind the answer; send one of them"
            raise unsupported(self.bound_by.partition(".")[0], message)
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> ChatCompletionRequest:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise unsupported("max_completion_tokens", "max_completion_tokens and max_tokens differ; send one")
        return self


_BODIES: dict[str, type[Strict]] = {"/chat/completions": ChatCompletionRequest, "/completions": CompletionRequest}


def known_names(url_path: str, path: Sequence[int | str]) -> list[str]:
    """The names a field at ``path`` of a request to ``url_path`` may have."""
    kinds = (kind for ending, kind in (_BODIES | TEXT_BODIES).items() if url_path.endswith(ending))
    kind: type[Strict] = next(kinds, CompletionRequest)
    for step in path[:-1]:
        found = kind.model_fields.get(step) if isinstance(step, str) else None
        kind = (None if found is None else _model_in(found.annotation)) or kind
    return [*(field.alias or name for name, field in kind.model_fields.items()), *kind.NO_OPS]


def _model_in(annotation: Any) -> type[Strict] | None:
    """The kind of objects that a field holds, alone or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    inner = (_model_in(argument) for argument in get_args(annotation))
    return next((kind for kind in inner if kind is not None), None)


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item <= MAX_NUMBER for item in value)
