"""The audit: what was served with drafts is computed again without them, and the two are compared token by token.

A choice is a function of prompt, parameters and seed, all of which are in its ``Job``. So the same job without drafts has to emit
the same tokens and end for the same reason, greedy or sampled, with a grammar, stop strings or penalties.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
import logging
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.http.errors import ApiError
from cluster.observe.difference import first_difference
from cluster.serving.generation import EnginePort, Job
from configs.slices import AuditOptions, EngineOptions, SpeculationOptions
from decoding.request import MAX_LOGIT_BIAS, PLAIN, FinishReason, SamplingParams, StepOutput, TokenLogprob
from engine.errors import QueueFullError, RequestError
from engine.loading.model_info import strategies_apart

logger = logging.getLogger(__name__)

LAST_DIFFERENCES = 16  # that are told
_LATEST = 2**31 - 1  # priority of a replay: the lowest that a request can have
_BACKLOG = 8  # sampled choices that wait for the engine to be idle
_PATIENCE_S = 60.0  # for that
_LOOK_S = 0.5  # between two looks at how busy the engine is


# Lets go of a tenant's answers, or of one of them, wherever they are kept; see ``Auditor.forget``.
Forget = Callable[[str, str | None], Awaitable[None]]


async def keeps_nothing(tenant: str, request_id: str | None) -> None:
    """The ``Forget`` of a server that keeps nothing."""


class Result(enum.StrEnum):
    """What came of one audit."""

    IDENTICAL = "identical"
    DIFFERENT = "different"
    SKIPPED = "skipped"  # plain decoding need not give the same tokens: the strategy is lossy, or draws on its own
    FAILED = "failed"  # it could not be computed again
    DROPPED = "dropped"  # the engine had no time for it


@dataclass(frozen=True, slots=True)
class Served:
    """A choice that was served to its end."""

    job: Job
    token_ids: tuple[int, ...]  # [m]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the tokens part. A token is None where that side had ended, for the reason that it gives."""

    position: int  # in the output, from 0
    served: int | None
    plain: int | None
    served_logprob: float | None = None  # of the model, after what both have in common; None where it is not known
    plain_logprob: float | None = None

    @property
    def gap(self) -> float | None:
        """How much likelier the model finds plain decoding's token than the one served, as a difference of log-probabilities.

        Where the model is not served exactly, near-ties may part: the gap is then within the rounding of the logits. A large one,
        or any where it is, is a fault.
        """
        if self.served_logprob is None or self.plain_logprob is None:
            return None
        return self.plain_logprob - self.served_logprob


@dataclass(frozen=True, slots=True)
class Audit:
    """One choice and what came of its audit."""

    request_id: str
    strategy: str | None  # that drafted; None: the server's own
    tokens: int  # served
    result: Result
    difference: Difference | None = None
    detail: str | None = None  # why it was skipped or failed, or how the ends differ


class ReplayError(RuntimeError):
    """A choice could not be computed again; the message says why."""


class Auditor:
    """Keeps what was served last, computes it again when asked or now and then, and counts what came of it.

    One choice is replayed at a time. A replay belongs to no tenant, drafts nothing, reuses nobody's KV and has the lowest
    priority where there are any.
    """

    def __init__(
        self, engine: EnginePort, options: AuditOptions, speculation: SpeculationOptions, scheduling: EngineOptions
    ) -> None:
        """
        Args:
            engine: computes the replays; the one that served.
            options: what is kept and sampled.
            speculation: of the engine.
            scheduling: of the engine.
        """
        self._engine, self._options = engine, options
        self._apart = strategies_apart(speculation)
        self._priority = _LATEST if scheduling.scheduling_policy == "priority" else 0
        self._kept: deque[Served] = deque(maxlen=options.keep)
        self._sampled: deque[Served] = deque()
        self._worker: asyncio.Task[None] | None = None  # while choices are sampled
        self._one_at_a_time = asyncio.Lock()
        self._counts = dict.fromkeys(Result, 0)
        self._differences: deque[tuple[Job, Audit]] = deque(maxlen=LAST_DIFFERENCES)
        self._deletions: Counter[str | None] = Counter()  # by tenant

    def listen(self, job: Job) -> Callable[[StepOutput], None] | None:
        """A ``Listener`` that takes note of choices that are drafted for, and their tenant's or not private to nobody."""
        drafted = job.max_draft_tokens != 0 and job.strategy != PLAIN
        some = self._options.keep > 0 or self._options.sample > 0
        if not (drafted and some and (self._options.private or job.tenant is not None)):
            return None
        tokens = list(job.emitted)

        def hear(output: StepOutput) -> None:
            tokens.extend(output.token_ids)
            if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                kept = dataclasses.replace(job, references=())  # they only ever draft
                self.keep(Served(kept, tuple(tokens), output.finish_reason))

        return hear

    def keep(self, one: Served) -> None:
        """Keeps a choice that was served to its end, and has some of them audited."""
        self._kept.append(one)
        if random.random() >= self._options.sample:
            return
        if len(self._sampled) == _BACKLOG:
            self._counts[Result.DROPPED] += 1
            return
        self._sampled.append(one)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._replay_sampled())

    def last(self, number: int | None = None) -> list[Served]:
        """The choices served last, the latest last; all that are kept when no number is given."""
        kept = list(self._kept)
        return kept if number is None else kept[-number:] if number else []

    async def forget(self, tenant: str, request_id: str | None = None) -> None:
        """Lets go of a tenant's choices and of what was found about them, or of those of one answer; counters stay.

        Args:
            tenant: whose.
            request_id: ``id`` of the answer; None for all.
        """

        answer = None if request_id is None else request_id.partition("/")[0]

        def is_meant(job: Job) -> bool:
            return tenant in (job.tenant, job.memory) and answer in (None, job.request_id.partition("/")[0])

        self._deletions[tenant] += 1  # what is being computed again is not noted either
        self._kept = deque((one for one in self._kept if not is_meant(one.job)), self._kept.maxlen)
        self._sampled = deque(one for one in self._sampled if not is_meant(one.job))
        self._differences = deque((pair for pair in self._differences if not is_meant(pair[0])), LAST_DIFFERENCES)

    def counts(self) -> dict[str, int]:
        """Audits since the start, by result."""
        return {result.value: count for result, count in self._counts.items()}

    def differences(self) -> list[Audit]:
        """The last audits that found one, the latest last."""
        return [found for _, found in self._differences]

    @property
    def num_kept(self) -> int:
        """Choices that can be replayed."""
        return len(self._kept)

    async def audit(self, served: Served) -> Audit:
        """Computes a choice again, counts what came of it, and logs a difference."""
        job, deletions = served.job, self._deletions[served.job.tenant]
        tell = functools.partial(Audit, job.request_id, job.strategy, len(served.token_ids))
        try:
            async with self._one_at_a_time:
                why_not = await self._why_not(job)
                found = tell(Result.SKIPPED, detail=why_not) if why_not else await self._compare(served, tell)
        except (ApiError, QueueFullError, RequestError, ReplayError) as error:
            found = tell(Result.FAILED, detail=str(error))
        self._counts[found.result] += 1
        if found.result is Result.DIFFERENT:
            if self._deletions[job.tenant] == deletions:
                self._differences.append((job, found))
            logger.error("audit: %s was served other tokens than plain decoding gives: %s", job.request_id, found.difference)
        return found

    async def _why_not(self, job: Job) -> str | None:
        """Why the choice need not have plain decoding's tokens; None where it must."""
        replicas = await self._engine.describe()
        if not replicas:
            raise ReplayError("no engine replica is answering")
        info = replicas[0].info
        name = job.strategy or info.strategy
        if not info.is_lossless(job.strategy, job.max_draft_tokens):
            return f"{name} is lossy"
        if name in self._apart and not job.params.greedy:
            return f"{name} draws by itself: the text has the model's distribution, and is not the seed's of plain decoding"
        return None

    async def _compare(self, served: Served, tell: Callable[..., Audit]) -> Audit:
        """Plain decoding beside what was served, up to the first token that differs."""
        params = dataclasses.replace(served.job.params, logprobs=2)
        plain, reason = list[TokenLogprob](), None
        async with contextlib.aclosing(self._engine.generate(self._plain(served.job, params))[0]) as outputs:
            async for output in outputs:
                plain += output.logprobs or ()
                reason = _ended(output)
        position = first_difference(served.token_ids, [one.token_id for one in plain])
        if position is None:
            if reason is served.finish_reason:
                return tell(Result.IDENTICAL)
            detail = f"served ended with {served.finish_reason}, plain with {reason}"
            return tell(Result.DIFFERENT, Difference(len(plain), None, None), detail)
        token = served.token_ids[position] if position < len(served.token_ids) else None
        if position == len(plain):
            return tell(Result.DIFFERENT, Difference(position, token, None), f"plain ended with {reason}")
        return tell(Result.DIFFERENT, await self._differing(served, position, token, plain[position]))

    async def _differing(self, served: Served, position: int, token: int | None, plain: TokenLogprob) -> Difference:
        """The difference with what the model thinks of both tokens."""
        found = dict(plain.top).get(token) if token is not None else None
        if found is None and token is not None:
            found = await logprob_of(self._engine, self._plain(served.job, served.job.params), served.token_ids[:position], token)
        return Difference(position, token, plain.token_id, found, plain.logprob)

    def _plain(self, job: Job, params: SamplingParams) -> Job:
        """The job without drafts, of nobody, behind all others."""
        return Job(
            f"audit-{secrets.token_hex(12)}/0", job.prompt_ids, params,
            public=False, adapter=job.adapter, strategy=PLAIN, max_draft_tokens=0, priority=self._priority,
        )  # fmt: skip

    async def _replay_sampled(self) -> None:
        """Audits what was sampled, until nothing is left."""
        while self._sampled:
            served = self._sampled.popleft()
            tenant = served.job.tenant
            deletions = self._deletions[tenant]
            try:
                if await self._until_idle() and self._deletions[tenant] == deletions:
                    await self.audit(served)
                else:
                    self._counts[Result.DROPPED] += 1
            except Exception:  # nobody waits for it: the next one has its turn
                logger.exception("a background audit failed")
                self._counts[Result.FAILED] += 1

    async def _until_idle(self) -> bool:
        """Whether a replay comes to take nothing from a request, in time: slots are free, and nobody waits for one."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            counts = [replica.counts for replica in await self._engine.describe()]
            if any(one.free_slots for one in counts) and not any(one.waiting for one in counts):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_S)


async def logprob_of(engine: EnginePort, plain: Job, emitted: tuple[int, ...], token: int) -> float | None:
    """The model's log-probability of a token after some: a bias makes it come, and does not count.

    Args:
        engine: computes it.
        plain: the job without drafts.
        emitted: output tokens before it.
        token: that is asked about.

    Raises:
        ReplayError: the engine broke off.
    """
    params = SamplingParams(max_tokens=len(emitted) + 1, logprobs=0, logit_bias=((token, MAX_LOGIT_BIAS),))
    name = f"{plain.request_id.partition('/')[0]}-{secrets.token_hex(4)}/0"
    job = dataclasses.replace(plain, request_id=name, params=params, emitted=emitted)
    async with contextlib.aclosing(engine.generate(job)[0]) as outputs:
        async for output in outputs:
            _ended(output)
            for one in output.logprobs or ():
                return one.logprob if one.token_id == token else None
    return None


def _ended(output: StepOutput) -> FinishReason | None:
    """Why an output is the last one. Raises ``ReplayError`` where the engine broke off."""
    if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        raise ReplayError(output.error or "the engine ended the request")
    return output.finish_reason
