"""Requests of OpenAI's API, and of vLLM's ``/v1/score``, ``/tokenize`` and ``/detokenize``; unsupported parameters are errors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WrapValidator, field_validator, model_validator

from outrider.cluster.http.request_ids import REQUEST_ID
from outrider.cluster.http.types.chat import Messages, NamedTool, Prediction, Tools, text_of
from outrider.cluster.http.types.strict import (
    ENCODABLE,
    MAX_NUMBER,
    MAX_TEXT,
    MAX_TOKEN_IDS,
    JsonObject,
    Name,
    Strict,
    Text,
    TokenId,
    TokenIds,
    are_token_ids,
    unsupported,
)
from outrider.cluster.http.types.structural_tag import CallMarks
from outrider.cluster.http.types.structured import StructuredFields
from outrider.cluster.http.types.tool_grammar import left_out, tools_grammar
from outrider.decoding.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_CHARS
from outrider.decoding.sources.embeddings import MAX_EMBEDDING

MAX_STOPS = 16  # OpenAI allows 4; the tasks of lm-eval-harness have more
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_LOGPROB_IDS = 128
MAX_DOCUMENTS = 1024
MAX_OPTIONS = 16  # of a strategy
MAX_COMPONENT = 1e6  # absolute value of an embedding's component
MAX_TIMEOUT_S = 1e9
MAX_CHOICES = 128  # prompts times n of one request
MAX_REPORTED_VALUES = 1 << 20  # log-probabilities (alternatives included) and reported tokens of a response: 100 MB of JSON
_COMMON_NO_OPS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
_CHAT_NO_OPS: dict[str, tuple[Any, ...]] = _COMMON_NO_OPS | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "add_special_tokens": (False,),
    "chat_template": (),
    "echo": (False,),
    "mm_processor_kwargs": ({},),
}
_COMPLETION_NO_OPS: dict[str, tuple[Any, ...]] = _COMMON_NO_OPS | {
    "suffix": ("",),
    "add_special_tokens": (True,),
    "documents": ([],),
    "prompt_embeds": (),
    "thinking_token_budget": (),
}
_SCORE_NO_OPS: dict[str, tuple[Any, ...]] = {"n": (1,), "stream": (False,)}

Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, allow_inf_nan=False)]
Component = Annotated[float, Field(ge=-MAX_COMPONENT, le=MAX_COMPONENT, allow_inf_nan=False)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Filled = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), ENCODABLE]
FilledList = Annotated[list[Filled], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), ENCODABLE]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Tokens = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
MostTokens = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
CacheChoice = Literal["tenant", "private", "off"]
Prompt = Filled | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)]
CheckedIds = Annotated[list[int], WrapValidator(lambda value, check: value if isinstance(value, list) else check(value))]
PromptInput = Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES)]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None  # send a last chunk with the usage
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk; requires include_usage
    include_obfuscation: bool | None = None  # pad events; default: server.stream_guard

    @model_validator(mode="after")
    def _check_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise unsupported("continuous_usage_stats", "continuous_usage_stats is only allowed when include_usage is true")
        return self


OptionName = Annotated[str, Field(min_length=1, max_length=64)]
OptionNumber = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, allow_inf_nan=False)]
OptionValue = bool | Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)] | OptionNumber | OptionName


class SpeculationChoice(Strict):
    """Speculative decoding of a request.

    The output distribution does not depend on it, except with lossy strategies, for which the response has ``lossless: false``.
    The server's configuration limits all of it (section ``speculation``).
    """

    strategy: Name | None = None  # a strategy listed by /v1/models; default: the server's
    options: Annotated[dict[OptionName, OptionValue], Field(max_length=MAX_OPTIONS)] | None = None  # see docs/strategies.md
    as_published: bool | None = None  # draft all rows that the options ask for, not only those that pay; default: the server's
    max_draft_tokens: Tokens | None = None  # maximum draft tokens per step; 0 is plain decoding
    report: bool | None = None  # report the draft source of every token; see openai_shapes.py


class RequestFields(Strict):
    """Fields of all requests that an engine computes."""

    model: Name
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None  # choices per prompt; see request_planner.choice_seed
    stream: bool | None = None
    cache: CacheChoice | None = None  # allowed draft sources; does not change the output; see cluster.admission.tenancy
    cache_salt: Annotated[Name, Field(min_length=1)] | None = None  # KV is shared with requests of the same salt only
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # lower runs first; see engine.scheduling_policy
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = None  # seconds until a 504
    prompt_cache_key: Name | None = None  # session id; requests of a session go to the same replica if possible
    request_id: Annotated[str, Field(max_length=128, pattern=REQUEST_ID)] | None = None  # name in log lines and X-Request-Id
    user: Name | None = None  # opaque label
    safety_identifier: Name | None = None  # opaque label


class CompletionFields(StructuredFields, RequestFields):
    """Fields of all requests that generate text. Sampling parameters have the defaults that /v1/models lists."""

    max_tokens: MostTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None  # 0 is greedy
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None  # 0 keeps the most likely token
    top_k: Annotated[int, Field(ge=-1, le=MAX_NUMBER)] | None = None  # 0 and -1 disable it
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None  # keys are token ids as strings
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # default: random
    min_tokens: Tokens | None = None  # number of tokens before which no end token is allowed
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None  # vLLM's, as the next four; no other tokens
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None  # not in the output
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LOGPROB_IDS, fail_fast=True)] | None = None  # with logprobs
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_NUMBER)] | None = None  # last tokens kept; -1: as many as fit
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None  # keep the stop string or stop token in the text
    skip_special_tokens: bool | None = None  # default true
    prompt_logprobs: Alternatives | None = None  # vLLM's: alternatives per prompt token
    return_token_ids: bool | None = None  # vLLM's: return token ids of prompt and output
    stream_options: StreamOptions | None = None
    # Texts that the response may repeat. They speed up generation and do not change the output.
    reference_documents: Annotated[list[Text], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    # Embedding of the request. Outputs of the tenant's past requests with a similar embedding are used as draft sources.
    reference_embedding: Annotated[list[Component], Field(min_length=1, max_length=MAX_EMBEDDING, fail_fast=True)] | None = None
    speculation: SpeculationChoice | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:  # before pydantic reports an error for each of them
            raise ValueError(f"must hold at most {MAX_BIASES} token ids")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            # Short enough for int(), and in canonical form, so that no two keys name the same token.
            if not (key.isascii() and key.isdigit() and len(key) <= 18 and key == str(int(key))):
                raise ValueError("must map token ids, written as decimal strings, to numbers")
        return value

    @field_validator("reference_embedding")
    @classmethod
    def _check_embedding(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and not any(value):
            raise ValueError("must not be all zeros: it has no direction")
        return value

    @field_validator("stop", mode="before", json_schema_input_type=Stop | Stops | None)
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        # Runs before type validation: for a single string, errors must not name a list index.
        texts = [value] if isinstance(value, str) else value
        if texts is None:
            return None
        if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOPS} of them")
        if max(map(len, texts), default=0) > MAX_STOP_CHARS:
            raise ValueError(f"must be at most {MAX_STOP_CHARS} characters long, each string of a list too")
        return texts

    @model_validator(mode="after")
    def _check_token_ids(self) -> CompletionFields:
        if self.truncate_prompt_tokens == 0:
            raise unsupported("truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1 for as many as fit")
        wanted = getattr(self, "logprobs", None)
        if self.logprob_token_ids and (wanted is None or wanted is False):
            raise unsupported("logprob_token_ids", "logprob_token_ids is only allowed with logprobs")
        if self.logprob_token_ids and getattr(self, "top_logprobs", None):
            raise unsupported("logprob_token_ids", "logprob_token_ids and top_logprobs name alternatives; send one of them")
        if self.logprob_token_ids and len(set(self.logprob_token_ids)) < len(self.logprob_token_ids):
            raise unsupported("logprob_token_ids", "logprob_token_ids must name each token once")
        if self.allowed_token_ids and self.bound_by is not None:
            message = f"allowed_token_ids and {self.bound_by} cannot both bind the answer; send one of them"
            raise unsupported("allowed_token_ids", message)
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> CompletionFields:
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "stream_options is only allowed when stream is true")
        return self

    @property
    def references(self) -> tuple[str, ...]:
        """Return the texts that the response may repeat, most likely first."""
        return tuple(self.reference_documents or ())

    @property
    def drafting(self) -> SpeculationChoice:
        """Return the options for speculative decoding; the defaults if absent."""
        return self.speculation or SpeculationChoice()

    @property
    def skips_special(self) -> bool:
        """Return whether special tokens are left out of the text."""
        return self.skip_special_tokens is not False

    @property
    def reports_usage(self) -> bool:
        """Return whether every chunk of a stream has the usage."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(CompletionFields):
    """Body of ``POST /v1/completions``. Each prompt gives ``n`` choices, in the order of the prompts."""

    NO_OPS = _COMPLETION_NO_OPS
    PROMPT: ClassVar[str] = "prompt"  # name of the field with the prompt

    max_tokens: Tokens | None = None  # 0 requires echo: returns the prompt only, for scoring with logprobs
    prompt: list[Text | CheckedIds]  # a single string or list of token ids is accepted too
    logprobs: Alternatives | None = None  # alternatives per token; the emitted token is always included
    echo: bool | None = None  # the text begins with the prompt

    @field_validator("prompt", mode="before", json_schema_input_type=PromptInput)
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        is_one = isinstance(value, str) or are_token_ids(value)
        prompts = [value] if is_one else value
        if not is_one and not (isinstance(value, list) and all(isinstance(each, str) or are_token_ids(each) for each in value)):
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
            raise unsupported("n", f"{n} choices for each of {prompts} prompts make {prompts * n}, the maximum is {MAX_CHOICES}")
        if self.max_tokens == 0 and not self.echo:
            raise unsupported("max_tokens", "max_tokens must be at least 1, or 0 beside echo: true")
        return self

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """Return the field that limits the output tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None without log-probabilities."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the number of alternatives per prompt token; None without log-probabilities."""
        wanted = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(wanted, default=None)


class ChatCompletionRequest(CompletionFields):
    """Body of ``POST /v1/chat/completions``."""

    NO_OPS = _CHAT_NO_OPS
    PROMPT: ClassVar[str] = "messages"
    # Whether hints that the model does not support, and a longer output than the context allows, are no errors.
    LENIENT: ClassVar[bool] = False

    messages: Messages
    max_completion_tokens: MostTokens | None = None  # newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Tools | None = None  # given to the chat template
    # "none": tools are not shown; "auto" (default): the model decides; "required": only tool calls; or the tool to call
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # false returns only the first tool call
    prediction: Prediction | None = None  # text that the response may repeat, like reference_documents
    include_reasoning: bool | None = None  # vLLM's: false removes the reasoning from the response
    reasoning_effort: Effort | None = None  # variable of the chat template
    chat_template_kwargs: JsonObject | None = None  # vLLM's: variables of the chat template, such as enable_thinking
    thinking_token_budget: Tokens | None = None  # vLLM's: reasoning is ended after so many tokens
    documents: Annotated[list[JsonObject], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None  # for the template
    add_generation_prompt: bool | None = None  # default true, without continue_final_message
    continue_final_message: bool | None = None  # the response continues the last message, which stays open

    @property
    def opens_message(self) -> bool:
        """Return whether the prompt ends with the header of a new message of the assistant."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def thinks(self) -> bool | None:
        """Return whether the model should reason; None for the template's default."""
        return False if self.reasoning_effort == "none" else None

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """Return the field that limits the output tokens, and its value."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def references(self) -> tuple[str, ...]:
        """Return the prediction and the reference documents."""
        predicted = () if self.prediction is None else (self.prediction.text,)
        return (*predicted, *(self.reference_documents or ()))

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Return the tools for the chat template; empty with tool_choice "none"."""
        return [] if self.tool_choice == "none" else [tool.shown() for tool in self.tools or ()]

    @property
    def binds_calls(self) -> str | None:
        """Return the field that constrains tool calls in the response; None if they are unconstrained."""
        if self.tool_choice not in (None, "none", "auto"):
            return "tool_choice"
        shown = () if self.tool_choice == "none" else self.tools or ()
        strict = (index for index, tool in enumerate(shown) if tool.function.strict)
        return next((f"tools[{index}].function.strict" for index in strict), None)

    def calls_grammar(self, marks: CallMarks) -> str:
        """Return the grammar of the response if ``binds_calls`` is set; see ``tool_grammar.tools_grammar``."""
        return tools_grammar(self.tools or (), self.tool_choice, self.parallel_tool_calls is False, marks)

    def left_out(self) -> list[str]:
        """Return the paths of the keywords of schemas that are not enforced, because they are not strict."""
        return super().left_out() if self.binds_calls is None else left_out(self.tools or (), self.tool_choice)

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None without log-probabilities."""
        return len(self.logprob_token_ids or ()) or self.top_logprobs or 0 if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the number of alternatives per prompt token; None without log-probabilities."""
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise unsupported("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _check_final_message(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message continues a message, and add_generation_prompt begins one; send one of them"
            raise unsupported("continue_final_message", message)
        if self.continue_final_message and (self.messages[-1].tool_calls or not text_of(self.messages[-1].content).strip()):
            raise unsupported("continue_final_message", "continue_final_message needs a last message with text")
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if self.allowed_token_ids and self.binds_calls is not None:
            message = f"allowed_token_ids and {self.binds_calls} cannot both bind the answer; send one of them"
            raise unsupported("allowed_token_ids", message)
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


class ScoreRequest(RequestFields):
    """Body of ``POST /v1/score``: choices that may continue a prompt or a chat, or vLLM's pairs of texts."""

    NO_OPS = _SCORE_NO_OPS

    prompt: Filled | None = None
    messages: Messages | None = None
    choices: FilledList | None = None  # with prompt or messages
    text_1: FilledList | None = None  # one for all of text_2, or one for each; a single string is accepted too
    text_2: FilledList | None = None

    @field_validator("text_1", "text_2", mode="before", json_schema_input_type=Filled | FilledList | None)
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_input(self) -> ScoreRequest:
        given = [name for name in ("prompt", "messages", "text_1") if getattr(self, name) is not None]
        if len(given) != 1:
            raise unsupported(given[1] if given else "prompt", "send either prompt, messages or text_1")
        field, other = ("choices", "text_2") if self.text_1 is None else ("text_2", "choices")
        if getattr(self, field) is None:
            raise unsupported(field, f"{field} is required with {self.prompt_field}")
        if getattr(self, other) is not None:
            raise unsupported(other, f"{other} does not belong to {self.prompt_field}; send {field} alone")
        if self.choices is not None and len(set(self.choices)) < len(self.choices):
            raise unsupported("choices", "choices must name each choice once")
        if len(self.text_1 or ()) not in (0, 1, len(self.text_2 or ())):
            raise unsupported("text_1", "text_1 must be one text, or as many as text_2")
        return self

    @property
    def prompt_field(self) -> str:
        """Return the field with the prompt."""
        return "text_1" if self.text_1 is not None else "prompt" if self.messages is None else "messages"

    @property
    def choices_field(self) -> str:
        """Return the field with the choices."""
        return "choices" if self.text_1 is None else "text_2"

    @property
    def pairs(self) -> list[tuple[str | ChatCompletionRequest, list[str]]]:
        """Return each prompt with its choices."""
        choices = self.choices or self.text_2 or []
        if self.text_1 is not None and len(self.text_1) > 1:
            return [(text, [choice]) for text, choice in zip(self.text_1, choices, strict=True)]
        if self.messages is not None:
            return [(ChatCompletionRequest(model=self.model, messages=self.messages), choices)]
        return [(self.prompt or (self.text_1 or [""])[0], choices)]


class TokenizeRequest(Strict):
    """Body of ``POST /tokenize``: a prompt as in completions, or messages as in chats."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None  # with messages only
    chat_template_kwargs: JsonObject | None = None  # with messages only
    add_generation_prompt: bool = True  # with messages only: append the header of the assistant's message
    continue_final_message: bool | None = None  # with messages only: leave the last message open, without a header after it
    add_special_tokens: bool | None = None  # with prompt only; default true
    return_token_strs: bool | None = None  # return the vocabulary entries of the tokens too

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise unsupported("prompt", "send either prompt or messages")
        if self.messages is None and (self.tools or self.chat_template_kwargs or not self.add_generation_prompt):
            name = "tools" if self.tools else "chat_template_kwargs" if self.chat_template_kwargs else "add_generation_prompt"
            raise unsupported(name, f"{name} belongs to messages, not to a prompt")
        if self.messages is not None and self.add_special_tokens:
            raise unsupported("add_special_tokens", "a chat has the special tokens of its template; leave add_special_tokens out")
        return self


class DetokenizeRequest(Strict):
    """Body of ``POST /detokenize``."""

    model: Name | None = None
    tokens: TokenIds
