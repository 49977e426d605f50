"""Jobs for engine replicas, and the choices of an answer made from their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.actors.description import Description
from outrider.cluster.http.errors import ApiError
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import FinishReason, Request, SamplingParams, StepOutput, cache_namespace_of, log_label
from outrider.engine.errors import RequestError

_FOR_ROUTING = ("announced", "session", "avoid_s", "resumed", "version")  # fields of a job that the engine does not need


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One choice as sent to a replica."""

    request_id: str  # ANSWER_ID/INDEX: the id that the client sees, and the number of the choice
    prompt_ids: Int32Array  # [n]
    params: SamplingParams
    references: tuple[Int32Array, ...] = ()
    tenant: str | None = None  # drafts from this tenant's texts and adds its own; None for neither
    public: bool = True  # may draft from the public corpus
    adapter: str | None = None  # requested LoRA adapter; None for the model itself
    emitted: tuple[int, ...] = ()  # output tokens already emitted by another replica; they are not emitted again
    strategy: str | None = None  # drafting strategy, with options such as ``jacobi:window=5``; None for the engine's default
    as_published: bool | None = None  # draft all rows that the strategy's options ask for; None for the engine's default
    max_draft_tokens: int | None = None  # most drafted rows per step; None for the engine's limit
    priority: int = 0  # lower is scheduled first
    account: str = ""  # account whose share of slots and rows the job uses
    weight: float = 1.0  # weight of the account
    siblings: bool = False  # other jobs have the same prompt and ANSWER_ID: the prompt is computed once
    report: bool = False  # outputs include the source of each token
    prompt_logprobs: int | None = None  # alternatives per log-probability of the prompt; None for no log-probabilities
    embedding: Int32Array | None = None  # the client's embedding, in the form of ``decoding.sources.embeddings.signs_of``
    salt: str = ""  # KV is shared with jobs of the same tenant and salt only, and texts with none; empty for no salt
    choices: tuple[tuple[int, ...], ...] = ()  # continuations of the prompt to score, instead of generating
    quarantined: bool = False  # a replica ended, or a step failed, while computing it: it is computed alone for a while
    announced: bool = False  # a replica ended: outputs report when it is computed alone, as the next replica may end, too
    session: str | None = None  # session of the tenant: its requests go to one replica if possible
    avoid_s: float = 0.0  # seconds to avoid the job's previous replica, which was silent for too long; applies to all jobs
    resumed: bool = False  # a client resumes a stream: the job replaces the same request of its account
    http_id: str = ""  # ``X-Request-Id`` of the HTTP request, for log lines; empty if unknown
    version: str = ""  # model version, see ``cluster.app.version_of``: only replicas with it take the job; empty for any

    @property
    def cache_namespace(self) -> str | None:
        """Return the name of the history and KV that the job shares; see ``decoding.request.cache_namespace_of``."""
        return cache_namespace_of(self.tenant, self.adapter)

    @property
    def label(self) -> str:
        """Return the name of the job in log lines outside of its HTTP request; see ``decoding.request.log_label``."""
        return log_label(self.http_id, self.request_id)

    def request(self, references: tuple[Int32Array, ...]) -> Request:
        """Return the engine's request; ``references`` are the job's own, or copies shared with other jobs."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _FOR_ROUTING}
        return Request(**fields | {"references": references})


class OtherVersionError(Exception):
    """A job has another model version than the replica: its token ids mean something else there."""


class EnginePort(Protocol):
    """Engine replicas as the API sees them."""

    def generate(self, *jobs: GenerationJob) -> Sequence[AsyncGenerator[StepOutput, None]]:
        """Return one output stream per job of an answer; ``aclose`` frees the slot. A first, empty output confirms the job.

        Raises QueueFullError or RequestError (no engine takes it), ApiError (503, no engine answers).
        """
        ...

    async def describe(self) -> list[Description]:
        """Return one description per replica that serves; empty if none does."""
        ...


# Called with each job when it begins; returns a function that gets the job's outputs, including the empty first one, or None.
Listener = Callable[[GenerationJob], Callable[[StepOutput], object] | None]


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time limit of an answer."""

    at_s: float  # time.monotonic() seconds
    error: Callable[[], ApiError]  # makes the error to raise


async def next_output(
    stream: AsyncGenerator[StepOutput, None], job: GenerationJob, listeners: Sequence[Listener], deadline: Deadline | None = None
) -> AsyncGenerator[StepOutput, None]:
    """Yield a job's outputs and pass them to the listeners. Raise the deadline's error when it has passed."""
    hearers = [hear for listener in listeners if (hear := listener(job)) is not None]
    async with contextlib.aclosing(stream) as outputs:
        while True:
            try:
                output = await _next(outputs, deadline)
            except StopAsyncIteration:
                return
            for hear in hearers:
                hear(output)
            yield output


async def _next(outputs: AsyncIterator[StepOutput], deadline: Deadline | None) -> StepOutput:
    if deadline is None:
        return await anext(outputs)
    try:
        async with asyncio.timeout(deadline.at_s - time.monotonic()) as limit:
            return await anext(outputs)
    except TimeoutError:
        if not limit.expired():
            raise  # raised by the stream
    raise deadline.error()


class Generation:
    """Choices of one request while they are computed: ``async with`` starts them, leaving it frees their slots."""

    def __init__(
        self,
        engine: EnginePort,
        jobs: Sequence[GenerationJob],
        n: int = 1,
        silent: bool = False,
        listeners: Sequence[Listener] = (),
        deadline: Deadline | None = None,
    ) -> None:
        """Prepare one job per choice, ``n`` per prompt side by side; ``silent`` drops emitted tokens to score only prompts."""
        self._silent, self._n, self.num_choices = silent, n, len(jobs)
        self.prompt_tokens = sum(len(job.prompt_ids) for job in jobs[::n])
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}  # cached prompt tokens of ended choices, by choice
        self.energy_j: float | None = 0.0  # sum over ended choices; None if one of them was not measured
        streams = zip(engine.generate(*jobs), jobs, strict=True)
        self._streams = [next_output(stream, job, listeners, deadline) for stream, job in streams]
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Generation:
        """Return once an engine has taken every job. Raise as ``EnginePort.generate``."""
        try:
            # Registered before any is awaited: if one is refused, all are closed.
            for stream in self._streams:
                await self._open.enter_async_context(contextlib.aclosing(stream))
            async with asyncio.TaskGroup() as group:
                for stream in self._streams:
                    group.create_task(_accepted(stream))
        except ExceptionGroup as refusals:
            await self._open.aclose()
            raise refusals.exceptions[0] from None
        except BaseException:  # above all for a cancelled request: nothing may keep running
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    @property
    def cached_tokens(self) -> int:
        """Return the prompt tokens whose KV was cached, without those that one choice computed for the others."""
        fewest: dict[int, int] = {}  # by prompt, which counts once in the usage
        for index, count in self._cached.items():
            fewest[index // self._n] = min(count, fewest.get(index // self._n, count))
        return sum(fewest.values())

    async def outputs(self) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """Yield the outputs of all choices with their number. Raises ``RequestError`` or, for a failed choice, ``ApiError``."""
        async for index, output in _merge(self._streams):
            if output.fault_field is not None:
                raise RequestError(output.fault_field, output.error or "the request is invalid")
            if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise ApiError(500, output.error or "the engine ended the request", code="engine_error")
            if self._silent:
                reason = output.finish_reason and FinishReason.LENGTH
                output = dataclasses.replace(output, token_ids=(), text="", logprobs=None, report=None, finish_reason=reason)
            self.completion_tokens += len(output.token_ids)
            if output.stats is not None:
                self._cached[index] = output.stats.cached_tokens
                energy_j = output.stats.energy_j
                self.energy_j = None if energy_j is None or self.energy_j is None else self.energy_j + energy_j
            yield index, output


async def _accepted(stream: AsyncIterator[StepOutput]) -> None:
    await anext(stream)


async def _merge(streams: Sequence[AsyncIterator[StepOutput]]) -> AsyncIterator[tuple[int, StepOutput]]:
    """Yield the items of several streams in order of arrival; raise the first failure."""
    # One choice needs no queue and no further task.
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    items: asyncio.Queue[tuple[int, StepOutput | None]] = asyncio.Queue()  # None: the stream has ended

    async def pump(index: int, stream: AsyncIterator[StepOutput]) -> None:
        try:
            async for output in stream:
                items.put_nowait((index, output))
        finally:
            items.put_nowait((index, None))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        live = len(pumps)
        while live:
            index, item = await items.get()
            if item is not None:
                yield index, item
            else:
                live -= 1
                await pumps[index]  # raises the stream's exception
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
