"""The audit: served choices are computed again without drafts and compared token by token."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import enum
import functools
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from outrider.cluster.http.errors import ApiError
from outrider.cluster.observe import replay_check
from outrider.cluster.observe.replay_check import Difference, ReplayError, Run, difference, is_drafted, recorder
from outrider.cluster.serving.generation import EnginePort, GenerationJob
from outrider.configs.slices import AuditOptions, EngineOptions, SpeculationOptions
from outrider.decoding.request import FinishReason, StepOutput
from outrider.engine.errors import QueueFullError, RequestError
from outrider.engine.loading.model_info import samples_apart, strategies_apart

logger = logging.getLogger(__name__)

REPLAY_ERRORS = (ApiError, QueueFullError, RequestError, ReplayError)
LAST_DIFFERENCES = 16  # latest differences that are kept
_LATEST = 2**31 - 1  # priority of a replay: the lowest that a request can have
_BACKLOG = 8  # sampled choices that may wait for the engine to be idle
_PATIENCE_S = 60.0  # seconds that a sampled choice waits for the engine to be idle
_LOOK_S = 0.5  # seconds between two checks for idleness


# Callback that deletes a tenant's kept answers, or one of them, on all API replicas; see ``Auditor.forget``.
Forget = Callable[[str, str | None], Awaitable[None]]


async def keeps_nothing(tenant: str, request_id: str | None) -> None:
    """Do nothing: the ``Forget`` of a server that keeps no answers."""


class Result(enum.StrEnum):
    """Result of one audit."""

    IDENTICAL = "identical"
    DIFFERENT = "different"
    SKIPPED = "skipped"  # plain decoding may give other tokens: the strategy is lossy, or has its own random draws
    FAILED = "failed"  # the choice could not be computed again
    DROPPED = "dropped"  # the engine was not idle in time, or the queue of sampled choices was full


@dataclass(frozen=True, slots=True)
class Served:
    """Choice that was served to its end."""

    job: GenerationJob
    token_ids: tuple[int, ...]  # [m]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Audit:
    """Audit of one choice."""

    request_id: str
    strategy: str | None  # drafting strategy; None for the server's default
    tokens: int  # number of served tokens
    result: Result
    difference: Difference[int] | None = None
    detail: str | None = None  # reason for skipping or failing, or how the finish reasons differ


class Auditor:
    """Auditor that keeps the latest choices, replays them on request or as a random sample, and counts the results."""

    # One choice is replayed at a time. A replay has no tenant, no drafts, no reuse of other requests' KV, and the lowest priority
    # if the engine has priorities.

    def __init__(
        self, engine: EnginePort, options: AuditOptions, speculation: SpeculationOptions, scheduling: EngineOptions
    ) -> None:
        self._engine, self._options = engine, options
        self._apart = strategies_apart(speculation)
        self._priority = _LATEST if scheduling.scheduling_policy == "priority" else 0
        self._kept: deque[Served] = deque(maxlen=options.keep)
        self._sampled: deque[Served] = deque()
        self._worker: asyncio.Task[None] | None = None  # runs while sampled choices wait
        self._one_at_a_time = asyncio.Lock()
        self._counts = dict.fromkeys(Result, 0)
        self._differences: deque[tuple[GenerationJob, Audit]] = deque(maxlen=LAST_DIFFERENCES)
        self._deletions: Counter[str | None] = Counter()  # number of deletions by tenant

    def on_output(self, job: GenerationJob) -> Callable[[StepOutput], None] | None:
        """Return a listener that keeps a drafted choice; None for others, and without a tenant unless ``audit.private``."""
        some = self._options.keep > 0 or self._options.sample > 0
        if not (is_drafted(job) and some and (self._options.private or job.tenant is not None)):
            return None
        kept = dataclasses.replace(job, references=())  # references are only used for drafting

        def ended(run: Run) -> None:
            assert run.reason is not None
            self.keep(Served(kept, tuple(run.token_ids), run.reason))

        return recorder(job, ended)

    def keep(self, one: Served) -> None:
        """Keep a choice that was served to its end, and queue a random sample for an audit."""
        self._kept.append(one)
        if random.random() >= self._options.sample:
            return
        if len(self._sampled) == _BACKLOG:
            self._counts[Result.DROPPED] += 1
            return
        self._sampled.append(one)
        if self._worker is None or self._worker.done():
            # In a separate context: otherwise all its log lines had the id of the request that is being answered now.
            self._worker = asyncio.create_task(self._replay_sampled(), context=contextvars.Context())

    def last(self, number: int | None = None) -> list[Served]:
        """Return the latest choices, newest last; all that are kept if ``number`` is None."""
        kept = list(self._kept)
        return kept if number is None else kept[-number:] if number else []

    async def forget(self, tenant: str, request_id: str | None = None) -> None:
        """Delete a tenant's choices and differences, or those of the answer with this ``id``; counters stay."""

        answer = None if request_id is None else request_id.partition("/")[0]

        def is_meant(job: GenerationJob) -> bool:
            return tenant in (job.tenant, job.cache_namespace) and answer in (None, job.request_id.partition("/")[0])

        self._deletions[tenant] += 1  # a replay that is running will not be recorded either
        self._kept = deque((one for one in self._kept if not is_meant(one.job)), self._kept.maxlen)
        self._sampled = deque(one for one in self._sampled if not is_meant(one.job))
        self._differences = deque((pair for pair in self._differences if not is_meant(pair[0])), LAST_DIFFERENCES)

    def counts(self) -> dict[str, int]:
        """Return the number of audits since the start, by result."""
        return {result.value: count for result, count in self._counts.items()}

    def differences(self) -> list[Audit]:
        """Return the latest audits that found a difference, newest last."""
        return [found for _, found in self._differences]

    @property
    def num_kept(self) -> int:
        """Return the number of choices that can be replayed."""
        return len(self._kept)

    async def audit(self, served: Served) -> Audit:
        """Replay a choice, count the result, and log a difference."""
        job, deletions = served.job, self._deletions[served.job.tenant]
        tell = functools.partial(Audit, job.request_id, job.strategy, len(served.token_ids))
        try:
            async with self._one_at_a_time:
                why_not = await self._why_not(job)
                found = tell(Result.SKIPPED, detail=why_not) if why_not else await self._compare(served, tell)
        except REPLAY_ERRORS as error:
            found = tell(Result.FAILED, detail=str(error))
        self._counts[found.result] += 1
        if found.result is Result.DIFFERENT:
            if self._deletions[job.tenant] == deletions:
                self._differences.append((job, found))
            logger.error("%s: audit: the served tokens differ from plain decoding: %s", job.label, found.difference)
        return found

    async def _why_not(self, job: GenerationJob) -> str | None:
        """Return why plain decoding may give other tokens; None if it must give the same."""
        replicas = await self._engine.describe()
        if not replicas:
            raise ReplayError("no engine replica is answering")
        info = replicas[0].info
        name = job.strategy or info.strategy
        if not info.is_lossless(job.strategy, job.max_draft_tokens):
            return f"{name} is lossy"
        if samples_apart(name, self._apart) and not job.params.greedy:
            return f"{name} samples on its own: same distribution as plain decoding, but other text for the same seed"
        return None

    async def _compare(self, served: Served, tell: Callable[..., Audit]) -> Audit:
        """Replay a choice by plain decoding and find the first token that differs."""
        plain = replay_check.background_job(served.job, "audit", self._priority)
        run = await replay_check.replay(self._engine, plain)
        found = difference(served.token_ids, run.token_ids)
        if found is None and run.reason is served.finish_reason:
            return tell(Result.IDENTICAL)
        if found is None:
            detail = f"served ended with {served.finish_reason}, plain with {run.reason}"
            return tell(Result.DIFFERENT, Difference(len(run.token_ids), None, None), detail)
        try:
            found = await replay_check.with_logprobs(self._engine, plain, found, run)
        except REPLAY_ERRORS as error:  # the difference counts without them, too
            logger.warning("%s: audit: no log-probabilities: %s", served.job.label, error)
        return tell(Result.DIFFERENT, found, f"plain ended with {run.reason}" if found.plain is None else None)

    async def _replay_sampled(self) -> None:
        while self._sampled:
            served = self._sampled.popleft()
            tenant = served.job.tenant
            deletions = self._deletions[tenant]
            try:
                if await self._until_idle() and self._deletions[tenant] == deletions:
                    await self.audit(served)
                else:
                    self._counts[Result.DROPPED] += 1
            except Exception:  # no client waits for it: continue with the next one
                logger.exception("a background audit failed")
                self._counts[Result.FAILED] += 1

    async def _until_idle(self) -> bool:
        """Wait until a slot is free and no request waits; return False after ``_PATIENCE_S``."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            if await replay_check.has_room(self._engine):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_S)
