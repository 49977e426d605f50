"""``POST /v1/compare``: one request answered twice, with drafts and without, and what that changed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Header

from cluster.admission.controller import AdmissionController
from cluster.admission.tenancy import Tenancy
from cluster.http import documents, errors
from cluster.http.answers.logprobs import TokenBytes
from cluster.http.answers.openai_shapes import PromptTokensDetails, Usage
from cluster.http.documents import ErrorDetails
from cluster.http.errors import ApiError
from cluster.http.job_planner import Planner
from cluster.http.text_threads import TextThreads
from cluster.http.types.compare import Against, CompareChatRequest, CompareRequest, Comparison, FirstDifference, Side
from cluster.serving.generation import EnginePort, Generation, Job
from decoding.request import PLAIN, FinishReason
from engine.loading.model import ModelInfo

logger = logging.getLogger(__name__)

Authorization = Annotated[str | None, Header(include_in_schema=False)]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What accelerated answers are compared with, beside plain decoding on their own engine."""

    engine: EnginePort
    kind: str  # as configured
    shares_devices: bool  # with the engine: then one waits for the other


@dataclass(slots=True)
class _Run:
    """What came of one side."""

    token_ids: list[int]
    text: str = ""
    reason: FinishReason | None = None
    steps: int = 0
    first: int = 0  # tokens that came at ttft_s: more than one where little of the prompt was to be computed
    ttft_s: float = 0.0
    latency_s: float = 0.0
    usage: Usage | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Those after the first step, over the time since."""
        took_s, rest = self.latency_s - self.ttft_s, len(self.token_ids) - self.first
        return rest / took_s if rest and took_s > 0 else None

    def side(self, strategy: str, kind: str | None) -> Side:
        """As it is answered."""
        return Side(
            strategy=strategy, kind=kind, text=self.text, finish_reason=self.reason, usage=self.usage,
            ttft_s=round(self.ttft_s, 6), latency_s=round(self.latency_s, 6),
            tokens_per_s=_rounded(self.tokens_per_s), tokens_per_step=_rounded(len(self.token_ids) / max(1, self.steps)),
        )  # fmt: skip


class CompareService:
    """Answers a request twice. The baseline's answer belongs to no tenant: it drafts from nothing and teaches nobody."""

    def __init__(
        self,
        engine: EnginePort,
        baseline: Baseline | None,
        threads: TextThreads,
        tenancy: Tenancy,
        admission: AdmissionController,
        model: Callable[[str | None], Awaitable[ModelInfo]],
        token_bytes: TokenBytes,
    ) -> None:
        """
        Args:
            engine: the replicas.
            baseline: deployed beside them; None where there is none.
            threads: with the tokenizer of the model.
            tenancy: whose requests share drafts.
            admission: each side counts as a choice.
            model: what is served; raises where another is named.
            token_bytes: of the tokenizer.
        """
        self._engine, self._baseline, self._threads = engine, baseline, threads
        self._tenancy, self._admission, self._model, self._token_bytes = tenancy, admission, model, token_bytes
        self._turns = itertools.count()

    async def compare(self, body: CompareRequest, authorization: str | None) -> Comparison:
        """Both answers.

        Raises:
            ApiError: the request is refused, or both sides failed: then the error of the accelerated one.
        """
        sharing, info = self._tenancy.sharing(authorization, body.cache), await self._model(body.model)
        against, other, apart = self._other(body.against)
        answer_id = f"cmp-{uuid.uuid4().hex}"
        planner = Planner(self._threads, info, answer_id, sharing, self._admission)
        (job,) = await (planner.chat(body) if isinstance(body, CompareChatRequest) else planner.completion(body))
        plain = dataclasses.replace(
            job, request_id=f"{answer_id}/1", tenant=None, public=False, references=(), strategy=PLAIN, max_draft_tokens=0
        )
        sides = []
        for engine, one in ((self._engine, job), (other, plain)):
            admitted, jobs = self._admission.admit(engine, [one], body)
            sides.append((admitted, jobs[0]))
        accelerated, baseline = await self._both(sides, apart)
        if isinstance(accelerated, ApiError) and isinstance(baseline, ApiError):
            raise accelerated
        asked = body.drafting
        kind = self._baseline.kind if against == "baseline" and self._baseline is not None else "plain"
        both = None if isinstance(accelerated, ApiError) or isinstance(baseline, ApiError) else (accelerated, baseline)
        return Comparison(
            id=answer_id, created=int(time.time()), model=info.served_name, against=against,
            lossless=info.is_lossless(asked.strategy, asked.max_draft_tokens),
            ran="at once" if apart else "in turns",
            accelerated=_side(accelerated, asked.strategy or info.strategy, None), baseline=_side(baseline, PLAIN, kind),
            identical=None if both is None else _ends(both[0]) == _ends(both[1]),
            first_difference=None if both is None else self._difference(*both),
            speedup=None if both is None else _ratio(both[0].tokens_per_s, both[1].tokens_per_s),
        )  # fmt: skip

    def _other(self, against: Against | None) -> tuple[Against, EnginePort, bool]:
        """What the request is compared with, its engine, and whether that computes on devices of its own."""
        if against == "plain" or (against is None and self._baseline is None):
            return "plain", self._engine, False
        if self._baseline is None:
            message = "against: this server has no baseline deployment (baseline.enabled): send 'plain', or leave it out"
            raise ApiError(400, message, param="against", code="invalid_value")
        return "baseline", self._baseline.engine, not self._baseline.shares_devices

    async def _both(self, sides: Sequence[tuple[EnginePort, Job]], apart: bool) -> tuple[_Run | ApiError, _Run | ApiError]:
        """Both runs, at once or in turns; the first to run is the second of the next comparison."""
        if apart:
            first, second = await asyncio.gather(*(_run(*side) for side in sides))
            return first, second
        if next(self._turns) % 2:
            second = await _run(*sides[1])
            return await _run(*sides[0]), second
        return await _run(*sides[0]), await _run(*sides[1])

    def _difference(self, accelerated: _Run, baseline: _Run) -> FirstDifference | None:
        pairs = itertools.zip_longest(accelerated.token_ids, baseline.token_ids)
        for index, (left, right) in enumerate(pairs):
            if left != right:
                return FirstDifference(index=index, accelerated=self._spelled(left), baseline=self._spelled(right))
        return None

    def _spelled(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._token_bytes(token_id).decode("utf-8", "backslashreplace")


async def _run(engine: EnginePort, job: Job) -> _Run | ApiError:
    """One side, or why it failed."""
    run, began_s = _Run([]), time.perf_counter()
    try:
        async with Generation(engine, [job]) as generation:
            async for _, output in generation.outputs():
                run.latency_s = time.perf_counter() - began_s
                if output.token_ids:
                    if not run.steps:
                        run.ttft_s, run.first = run.latency_s, len(output.token_ids)
                    run.steps += 1
                run.token_ids += output.token_ids
                run.text += output.text
                run.reason = output.finish_reason
            prompt, completion = generation.prompt_tokens, generation.completion_tokens
            details = PromptTokensDetails(cached_tokens=generation.cached_tokens)
            run.usage = Usage(
                prompt_tokens=prompt,
                completion_tokens=completion,
                total_tokens=prompt + completion,
                prompt_tokens_details=details,
            )
    except Exception as error:  # the other side's answer is still given
        told = errors.api_error(error)
        if told.status == 500:
            logger.exception("a side of a comparison failed")
        return told
    return run


def _side(run: _Run | ApiError, strategy: str, kind: str | None) -> Side:
    if isinstance(run, ApiError):
        return Side(strategy=strategy, kind=kind, error=ErrorDetails(**run.body()["error"]))
    return run.side(strategy, kind)


def _ends(run: _Run) -> tuple[Sequence[int], FinishReason | None]:
    return run.token_ids, run.reason


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else _rounded(one / other)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def add_compare_route(app: FastAPI, service: CompareService) -> None:
    """Gives an application the route."""
    responses: dict[int | str, dict[str, Any]] = documents.ERRORS | {200: {"model": Comparison}}

    @app.post("/v1/compare", responses=responses, response_model=None)
    async def compare(body: CompareRequest, authorization: Authorization = None) -> Comparison:
        return await service.compare(body, authorization)
