"""The fields that ``/v1/completions`` and ``/v1/chat/completions`` share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cluster.http.types.strict import ENCODABLE, MAX_NUMBER, MAX_TEXT, Name, Strict, Text, TokenId, unsupported
from cluster.http.types.structured import StructuredFields
from decoding.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_CHARS

MAX_STOPS = 4  # as OpenAI
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_DOCUMENTS = 1024
MAX_TIMEOUT_S = 1e9
MAX_CHOICES = 128  # of one request: its prompts, times n
COMMON_NO_OPS: dict[str, tuple[Any, ...]] = {
    "cache_salt": (),
}

Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, allow_inf_nan=False)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Filled = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), ENCODABLE]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Tokens = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
MostTokens = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
CacheChoice = Literal["tenant", "private", "off"]


class StreamOptions(Strict):
    """What a stream carries besides the text."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # beside include_usage: every chunk holds the usage so far, as vLLM
    include_obfuscation: bool | None = None  # events are padded; when absent as server.stream_guard says

    @model_validator(mode="after")
    def _check_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise unsupported("continuous_usage_stats", "continuous_usage_stats is only allowed when include_usage is true")
        return self


class SpeculationChoice(Strict):
    """How a request is drafted for, without effect on the distribution of the answer; with a strategy that has one the answer
    says ``lossless: false``. The configuration bounds both (``speculation``)."""

    strategy: Name | None = None  # one of the server's, listed by /v1/models; its own default when absent
    max_draft_tokens: Tokens | None = None  # most drafted rows in a step; 0 is plain decoding
    report: bool | None = None  # the answer says of every token who drafted it; see step_reports.py


class CompletionFields(StructuredFields):
    """What both kinds of completion take."""

    model: Name
    max_tokens: MostTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None  # 1.0 when absent; 0 is greedy
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_NUMBER)] | None = None  # 0 and -1: all tokens
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None  # by token id, written as a string
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None  # choices for each prompt; see job_planner.choice_seed
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # drawn when absent
    min_tokens: Tokens | None = None  # no end token before so many
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None  # the text holds what ended it, of stop and stop_token_ids
    skip_special_tokens: bool | None = None  # true when absent
    prompt_logprobs: Alternatives | None = None  # as vLLM: of the prompt's tokens, each with so many alternatives
    return_token_ids: bool | None = None  # as vLLM: the ids of the prompt and of the answer
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # texts the answer may repeat: they speed it up and do not change it
    reference_documents: Annotated[list[Text], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    cache: CacheChoice | None = None  # whose texts it drafts from, without effect on the answer; see cluster.admission.tenancy
    speculation: SpeculationChoice | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # lower first; see engine.scheduling_policy
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = None  # seconds, then a 504
    user: Name | None = None  # opaque label
    safety_identifier: Name | None = None  # opaque label

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:  # before each of them has an error of its own
            raise ValueError(f"must hold at most {MAX_BIASES} token ids")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            # Short enough for int(), and spelled in one way, so that no two keys mean one token.
            if not (key.isascii() and key.isdigit() and len(key) <= 18 and key == str(int(key))):
                raise ValueError("must map token ids, written as decimal strings, to numbers")
        return value

    @field_validator("stop", mode="before", json_schema_input_type=Stop | Stops | None)
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        """Before the type is looked at: a lone string has no place in a list that an error could name."""
        texts = [value] if isinstance(value, str) else value
        if texts is None:
            return None
        if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOPS} of them")
        if max(map(len, texts), default=0) > MAX_STOP_CHARS:
            raise ValueError(f"must be at most {MAX_STOP_CHARS} characters long, each string of a list too")
        return texts

    @model_validator(mode="after")
    def _check_stream_options(self) -> CompletionFields:
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "stream_options is only allowed when stream is true")
        return self

    @property
    def references(self) -> tuple[str, ...]:
        """Texts that the answer may repeat, the likeliest first."""
        return tuple(self.reference_documents or ())

    @property
    def drafting(self) -> SpeculationChoice:
        """How it is drafted for: the server's own way where nothing was said."""
        return self.speculation or SpeculationChoice()

    @property
    def skips_special(self) -> bool:
        """Whether the text is without the tokenizer's special tokens."""
        return self.skip_special_tokens is not False

    @property
    def reports_usage(self) -> bool:
        """Whether every chunk of a stream holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
