"""Bodies and answers of ``POST /v1/compare``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag, model_validator

from cluster.http.answers.openai_shapes import Usage
from cluster.http.documents import ErrorDetails
from cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from cluster.http.types.strict import Strict, unsupported
from decoding.request import FinishReason

Against = Literal["baseline", "plain"]

# Fields of the other routes whose effect the answer of a comparison has no place for.
_NO_PLACE = ("stream", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids")


class _Compared(Strict):
    """What a comparison takes beside the fields of a completion."""

    against: Against | None = None  # plain: the same engine without drafts; the baseline, where one is deployed, when absent

    @model_validator(mode="after")
    def _check_form(self) -> _Compared:
        for name in _NO_PLACE:
            if getattr(self, name, None) not in (None, False):
                raise unsupported(name, f"{name} is not supported in a comparison; leave it out")
        if (getattr(self, "n", None) or 1) > 1:
            raise unsupported("n", "n must be 1 in a comparison: ask for each choice by its seed")
        speculation = getattr(self, "speculation", None)
        if speculation is not None and speculation.report:
            raise unsupported("speculation.report", "speculation.report is not supported in a comparison; leave it out")
        return self


class CompareChatRequest(ChatCompletionRequest, _Compared):
    """A chat to be answered twice."""


class CompareCompletionRequest(CompletionRequest, _Compared):
    """A prompt to be continued twice."""

    @model_validator(mode="after")
    def _check_one(self) -> CompareCompletionRequest:
        if len(self.prompt) > 1:
            raise unsupported("prompt", "prompt must be one prompt in a comparison: ask for each of several alone")
        return self


def _kind(body: Any) -> str | None:
    """Which of the two a body is; None for what is no object."""
    if isinstance(body, dict):
        return "<chat>" if "messages" in body else "<text>"
    return None


# The tags are in the paths of errors; in brackets, no field has their names (see cluster.http.errors).
CompareRequest = Annotated[
    Annotated[CompareChatRequest, Tag("<chat>")] | Annotated[CompareCompletionRequest, Tag("<text>")], Discriminator(_kind)
]


class Side(BaseModel):
    """One of the two answers, with the times that the API's process saw; only ``strategy`` and ``error`` where it failed."""

    strategy: str  # that drafted
    kind: str | None = None  # of the other side: what it is; plain is plain decoding in an engine of this server's own
    text: str | None = None
    finish_reason: FinishReason | None = None  # stop or length
    usage: Usage | None = None  # prompt_tokens_details says what of the prompt was not computed: compare ttft_s with it in mind
    ttft_s: float | None = None  # to the first token
    latency_s: float | None = None  # to the last token
    tokens_per_s: float | None = None  # of the tokens after the first step; null where there is one step only
    tokens_per_step: float | None = None  # emitted tokens over forwards of the model that emitted some
    error: ErrorDetails | None = None


class FirstDifference(BaseModel):
    """The first token that is not the same; null on a side that has ended before it."""

    index: int  # in the answer, from 0
    accelerated: str | None  # what the token stands for
    baseline: str | None


class Comparison(BaseModel):
    """Two answers to one request. What compares them is null where one of them failed."""

    id: str
    object: Literal["comparison"] = "comparison"
    created: int  # seconds since 1970
    model: str
    lossless: bool  # whether the accelerated answer has the distribution of plain decoding
    against: Against
    ran: Literal["in turns", "at once"]  # in turns where both compute on the same devices, who begins alternates
    accelerated: Side
    baseline: Side
    identical: bool | None  # token for token, and ended for the same reason
    first_difference: FirstDifference | None
    speedup: float | None  # tokens_per_s of the accelerated answer over those of the baseline: the prompt's time is not in it
