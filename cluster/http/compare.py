"""``POST /v1/compare``: run one request with and without speculative decoding and compare outputs and speed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag, model_validator

from outrider.cluster.admission.controller import AdmittedRequest
from outrider.cluster.http import errors
from outrider.cluster.http.answers.logprobs import TokenBytes
from outrider.cluster.http.answers.openai_shapes import Usage
from outrider.cluster.http.answers.predicted import Predicted
from outrider.cluster.http.answers.respond import ChoiceReader, ResponseForm, usage_so_far
from outrider.cluster.http.documents import Authorization, ErrorDetails, SessionId
from outrider.cluster.http.errors import ApiError
from outrider.cluster.http.request_planner import PlannerServices
from outrider.cluster.http.types.openai import ChatCompletionRequest, CompletionRequest
from outrider.cluster.http.types.strict import Strict, unsupported
from outrider.cluster.observe.replay_check import Run, difference, plain_job
from outrider.cluster.serving.generation import EnginePort
from outrider.decoding.request import PLAIN, FinishReason
from outrider.engine.errors import RequestError

logger = logging.getLogger(__name__)

_Ran = tuple[Run, Usage]
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
    cut: str | None = None  # that drafts were smaller than the strategy's options ask for, and why
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
        form = ResponseForm(stream=False)
        if isinstance(body, CompareChatRequest):
            reasoning, calls = planner.reads(body, self.token_bytes)
            prediction = None if body.prediction is None else Predicted(job.references[0])
            form = ResponseForm(stream=False, prediction=prediction, reasoning=reasoning, calls=calls)
        pair = ((self.engine, job), (other, plain_job(job, f"{answer_id}/1")))
        sides = [(engine, self.answering.admission.admit([one], body), form) for engine, one in pair]
        accelerated, baseline = await self._both(sides, apart)
        if isinstance(accelerated, ApiError) and isinstance(baseline, ApiError):
            raise accelerated
        asked = body.drafting
        kind = self.baseline.kind if against == "baseline" and self.baseline is not None else "plain"
        judged: dict[str, Any] = dict.fromkeys(("identical", "first_difference", "speedup"))
        if not isinstance(accelerated, ApiError) and not isinstance(baseline, ApiError):
            judged = self._judged(accelerated[0], baseline[0])
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
        self, sides: Sequence[tuple[EnginePort, AdmittedRequest, ResponseForm]], apart: bool
    ) -> tuple[_Ran | ApiError, _Ran | ApiError]:
        """Run both sides, concurrently if they have separate devices."""
        if apart:
            first, second = await asyncio.gather(*(self._run(*side) for side in sides))
            return first, second
        if next(self._turns) % 2:  # the order alternates between comparisons
            second = await self._run(*sides[1])
            return await self._run(*sides[0]), second
        return await self._run(*sides[0]), await self._run(*sides[1])

    async def _run(self, engine: EnginePort, admitted: AdmittedRequest, form: ResponseForm) -> _Ran | ApiError:
        run, reader = Run(), ChoiceReader(form, 0, admitted.jobs[0].request_id)
        try:
            async with self.answering.generation(engine, admitted) as generation:
                async for _, output in generation.outputs():
                    run.on_output(output)
                    reader.read(output)
                return run, usage_so_far(generation, [reader])
        except Exception as error:  # the other side's response is still returned
            reported = errors.api_error(error)
            if reported.status == 500:
                logger.exception("a side of a comparison failed")
            return reported

    def _judged(self, accelerated: Run, baseline: Run) -> dict[str, Any]:
        found, first = difference(accelerated.token_ids, baseline.token_ids), None
        if found is not None:
            left, right = self._spelled(found.served), self._spelled(found.plain)
            first = FirstDifference(index=found.position, accelerated=left, baseline=right)
        fast, plain = accelerated.tokens_per_s, baseline.tokens_per_s
        return {
            "identical": found is None and accelerated.reason == baseline.reason,
            "first_difference": first,
            "speedup": None if fast is None or plain is None else round(fast / plain, 3),
        }

    def _spelled(self, token: int | None) -> str | None:
        return None if token is None else self.token_bytes(token).decode("utf-8", "backslashreplace")


def _side(ran: _Ran | ApiError, strategy: str, kind: str | None) -> Side:
    if isinstance(ran, ApiError):
        return Side(strategy=strategy, kind=kind, error=ErrorDetails(**ran.body()["error"]))
    run, usage = ran
    return Side(
        strategy=strategy, kind=kind, text=run.text, finish_reason=run.reason, usage=usage,
        ttft_s=round(run.ttft_s, 6), latency_s=round(run.latency_s, 6),
        tokens_per_s=None if run.tokens_per_s is None else round(run.tokens_per_s, 3),
        tokens_per_step=round(len(run.token_ids) / max(1, run.steps), 3),
        cut=None if run.stats is None else run.stats.cut(strategy),
    )  # fmt: skip
