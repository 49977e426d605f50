"""``POST /v1/compare``: run one request with and without speculative decoding and compare outputs and speed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag, model_validator

from outrider.cluster.admission.controller import AdmittedRequest
from outrider.cluster.http import errors
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.openai_shapes import Usage, usage_of
from outrider.cluster.http.documents import Authorization, ErrorDetails, SessionId
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.request_planner import PlannerServices
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from outrider.cluster.http.types.strict import Strict, unsupported
from outrider.cluster.observe.difference import first_difference
from outrider.cluster.observe.timed_run import TimedRun
from outrider.cluster.serving.generation import EnginePort
from outrider.decoding.request import PLAIN, FinishReason
from outrider.engine.errors import RequestError

logger = logging.getLogger(__name__)


Against = Literal["baseline", "plain"]

# Fields of the other routes that a comparison does not support, because its response has no field for their effect.
_NO_PLACE = ("stream", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids")


class _Compared(Strict):
    """Fields of a comparison besides those of a completion."""

    # "plain" is the same engine without speculation. Default: the baseline deployment if there is one, otherwise "plain".
    against: Against | None = None

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
    """Chat request to run twice."""


class CompareCompletionRequest(CompletionRequest, _Compared):
    """Completion request with one prompt, to run twice."""

    @model_validator(mode="after")
    def _check_one(self) -> CompareCompletionRequest:
        if len(self.prompt) > 1:
            raise unsupported("prompt", "prompt must be one prompt in a comparison: ask for each of several alone")
        return self


def _kind(body: Any) -> str | None:
    """Return the union tag of a body, which may be validated already; None if it is not an object."""
    if isinstance(body, CompareChatRequest | CompareCompletionRequest):
        return "<chat>" if isinstance(body, CompareChatRequest) else "<text>"
    if isinstance(body, dict):
        return "<chat>" if "messages" in body else "<text>"
    return None


# Pydantic puts the tags into the paths of errors. The angle brackets keep them distinct from field names (cluster.http.errors).
CompareRequest = Annotated[
    Annotated[CompareChatRequest, Tag("<chat>")] | Annotated[CompareCompletionRequest, Tag("<text>")], Discriminator(_kind)
]


class Side(BaseModel):
    """One of the two responses, with times measured in the API process. A failed side has an ``error`` and no results."""

    strategy: str  # drafting strategy
    kind: str | None = None  # kind of the baseline; "plain" is plain decoding on an engine of this server
    text: str | None = None
    finish_reason: FinishReason | None = None  # stop or length
    usage: Usage | None = None  # cached prompt tokens (prompt_tokens_details) make ttft_s shorter
    ttft_s: float | None = None  # time to the first token
    latency_s: float | None = None  # time to the last token
    tokens_per_s: float | None = None  # rate of the tokens after the first step; null if there was only one step
    tokens_per_step: float | None = None  # emitted tokens per target forward that emitted any
    error: ErrorDetails | None = None


class FirstDifference(BaseModel):
    """First token that differs; null on a side that ended before it."""

    index: int  # position in the response, from 0
    accelerated: str | None  # text of the token
    baseline: str | None


class Comparison(BaseModel):
    """Two responses to one request. The fields that compare them are null if either side failed."""

    id: str
    object: Literal["comparison"] = "comparison"
    created: int  # Unix time in seconds
    model: str
    lossless: bool  # whether the accelerated response has the distribution of plain decoding
    against: Against
    ran: Literal["in turns", "at once"]  # "in turns" if both sides share devices; the first side alternates
    accelerated: Side
    baseline: Side
    identical: bool | None  # same tokens and same finish reason
    first_difference: FirstDifference | None
    speedup: float | None  # ratio of tokens_per_s, accelerated over baseline; prefill time is not included


@dataclass(frozen=True, slots=True)
class Baseline:
    """Baseline deployment that accelerated responses are compared with."""

    engine: EnginePort
    kind: str  # baseline.kind of the configuration
    shares_devices: bool  # whether it runs on the engine's devices, so that the two sides must run in turns


@dataclass(slots=True)
class _Run(TimedRun):
    usage: Usage | None = None

    def side(self, strategy: str, kind: str | None) -> Side:
        """Return the result in the response format."""
        return Side(
            strategy=strategy, kind=kind, text=self.text, finish_reason=self.reason, usage=self.usage,
            ttft_s=round(self.ttft_s, 6), latency_s=round(self.latency_s, 6),
            tokens_per_s=_rounded(self.tokens_per_s), tokens_per_step=_rounded(len(self.token_ids) / max(1, self.steps)),
        )  # fmt: skip


@dataclass(slots=True)
class CompareService:
    """Service behind ``POST /v1/compare``."""

    engine: EnginePort
    baseline: Baseline | None  # None if no baseline is deployed
    answering: PlannerServices
    token_bytes: TokenBytes
    _turns: Iterator[int] = field(default_factory=itertools.count, init=False)

    async def compare(
        self, body: CompareRequest, authorization: Authorization = None, session_id: SessionId = None
    ) -> Comparison:
        """Run the request on both sides and compare the results. Raises ApiError if it is refused or both sides fail."""
        planner = await self.answering.planner("cmp-", body, authorization, session_id)
        answer_id, info = planner.beginning.answer_id, planner.info
        against, other, apart = self._other(body.against)
        (job,) = await (planner.chat(body) if isinstance(body, CompareChatRequest) else planner.completion(body))
        # The baseline's job has no tenant: it uses no draft sources and adds nothing to any tenant's history.
        plain = dataclasses.replace(
            job, request_id=f"{answer_id}/1", tenant=None, public=False, references=(), strategy=PLAIN, max_draft_tokens=0
        )
        sides = [(engine, self.answering.admission.admit([one], body)) for engine, one in ((self.engine, job), (other, plain))]
        accelerated, baseline = await self._both(sides, apart)
        if isinstance(accelerated, ApiError) and isinstance(baseline, ApiError):
            raise accelerated
        asked = body.drafting
        kind = self.baseline.kind if against == "baseline" and self.baseline is not None else "plain"
        judged: dict[str, Any] = dict.fromkeys(("identical", "first_difference", "speedup"))
        if not isinstance(accelerated, ApiError) and not isinstance(baseline, ApiError):
            judged = self._judged(accelerated, baseline)
        return Comparison(
            id=answer_id, created=planner.beginning.created, model=body.model, against=against,
            lossless=info.is_lossless(asked.strategy, asked.max_draft_tokens),
            ran="at once" if apart else "in turns",
            accelerated=_side(accelerated, asked.strategy or info.strategy, None), baseline=_side(baseline, PLAIN, kind),
            **judged,
        )  # fmt: skip

    def _other(self, against: Against | None) -> tuple[Against, EnginePort, bool]:
        """Return the kind of the other side, its engine, and whether it runs on separate devices."""
        if against == "plain" or (against is None and self.baseline is None):
            return "plain", self.engine, False
        if self.baseline is None:
            raise RequestError(
                "against", "this server has no baseline deployment (baseline.enabled): send 'plain', or leave it out"
            )
        return "baseline", self.baseline.engine, not self.baseline.shares_devices

    async def _both(
        self, sides: Sequence[tuple[EnginePort, AdmittedRequest]], apart: bool
    ) -> tuple[_Run | ApiError, _Run | ApiError]:
        """Run both sides, concurrently if they have separate devices."""
        if apart:
            first, second = await asyncio.gather(*(self._run(*side) for side in sides))
            return first, second
        if next(self._turns) % 2:  # the order alternates between comparisons
            second = await self._run(*sides[1])
            return await self._run(*sides[0]), second
        return await self._run(*sides[0]), await self._run(*sides[1])

    async def _run(self, engine: EnginePort, admitted: AdmittedRequest) -> _Run | ApiError:
        run, began_s = _Run(), time.perf_counter()
        try:
            async with self.answering.generation(engine, admitted) as generation:
                async for _, output in generation.outputs():
                    run.on_output(output, time.perf_counter() - began_s)
                run.usage = usage_of(generation)
        except Exception as error:  # the other side's response is still returned
            told = errors.api_error(error)
            if told.status == 500:
                logger.exception("a side of a comparison failed")
            return told
        return run

    def _judged(self, accelerated: _Run, baseline: _Run) -> dict[str, Any]:
        index, first = first_difference(accelerated.token_ids, baseline.token_ids), None
        if index is not None:
            left, right = self._spelled(accelerated.token_ids, index), self._spelled(baseline.token_ids, index)
            first = FirstDifference(index=index, accelerated=left, baseline=right)
        fast, plain = accelerated.tokens_per_s, baseline.tokens_per_s
        return {
            "identical": index is None and accelerated.reason == baseline.reason,
            "first_difference": first,
            "speedup": None if fast is None or plain is None else round(fast / plain, 3),
        }

    def _spelled(self, token_ids: Sequence[int], index: int) -> str | None:
        return self.token_bytes(token_ids[index]).decode("utf-8", "backslashreplace") if index < len(token_ids) else None


def _side(run: _Run | ApiError, strategy: str, kind: str | None) -> Side:
    if isinstance(run, ApiError):
        return Side(strategy=strategy, kind=kind, error=ErrorDetails(**run.body()["error"]))
    return run.side(strategy, kind)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
