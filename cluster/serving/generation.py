"""Jobs for engine replicas, and their outputs as the choices of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.description import Description
from cluster.http.errors import ApiError
from decoding.request import FinishReason, Request, SamplingParams, StepOutput, memory_name
from decoding.tree import Int32Array
from engine.errors import RequestError

_FOR_ROUTING = ("announced", "session", "avoid_s", "resumed", "version")  # of a job: what its engine need not know


@dataclass(frozen=True, slots=True)
class Job:
    """What a replica needs for one choice."""

    request_id: str  # ANSWER_ID/INDEX: the id that the client sees, and the number of the choice
    prompt_ids: Int32Array  # [n]
    params: SamplingParams
    references: tuple[Int32Array, ...] = ()
    tenant: str | None = None  # whose texts it drafts from and adds to; None: nobody's
    public: bool = True  # may draft from the public corpus
    adapter: str | None = None  # whose output is asked for; None: the model's own
    emitted: tuple[int, ...] = ()  # output tokens that another replica emitted before; their outputs do not come again
    strategy: str | None = None  # who drafts for it; None: the engine's own
    max_draft_tokens: int | None = None  # most drafted rows in a step; None: as many as the engine's own limit
    priority: int = 0  # lower goes first
    account: str = ""  # whose share of slots and rows it takes
    weight: float = 1.0  # of the account
    siblings: bool = False  # other jobs have the same prompt and the same ANSWER_ID: it is computed once
    report: bool = False  # outputs say who drafted their tokens
    prompt_logprobs: int | None = None  # alternatives told with each log-probability of the prompt; None: none are told
    embedding: Int32Array | None = None  # of the client's, as ``decoding.sources.embeddings.signs_of`` gives it
    quarantined: bool = False  # a replica ended, or a step failed, while it was computed: it is computed alone for a while
    announced: bool = False  # a replica ended: outputs say when the next one computes it alone, and may end as well
    session: str | None = None  # of the tenant: its requests go to one replica, where that can be
    avoid_s: float = 0.0  # it was sent before, to a replica that said nothing for too long: nobody else goes there for so long
    resumed: bool = False  # a client that was cut off goes on with it: it takes the place of the same request of its account
    version: str = ""  # of what is served, see ``cluster.app``: only replicas of this one take it; empty: all do

    @property
    def memory(self) -> str | None:
        """Whose outputs and KV it shares: see ``decoding.request.memory_name``."""
        return memory_name(self.tenant, self.adapter)

    def request(self, references: tuple[Int32Array, ...]) -> Request:
        """As an engine takes it; ``references`` are the job's own, or copies that it shares with others."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in _FOR_ROUTING}
        return Request(**fields | {"references": references})


class OtherVersionError(Exception):
    """A job is of another version than the replica that it came to: its tokens mean something else there."""


class EnginePort(Protocol):
    """The engine replicas as the API sees them."""

    def generate(self, *jobs: Job) -> Sequence[AsyncGenerator[StepOutput, None]]:
        """The outputs of each of some jobs of an answer; the first is empty and says that an engine took it. ``aclose`` frees the
        slot.

        The engine knows a job by ``request_id``, from which the names of its texts in the shared memory follow.

        Raises:
            engine.errors.QueueFullError, engine.errors.RequestError: no engine takes it.
            cluster.http.errors.ApiError: 503, no engine answers.
        """
        ...

    async def describe(self) -> list[Description]:
        """One description for each replica that serves; empty when none does."""
        ...


# Asked about each job when it begins: what it gives hears the outputs of that job, the first, empty one included.
Listener = Callable[[Job], Callable[[StepOutput], object] | None]


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when an answer has to be there."""

    at_s: float  # of time.monotonic
    error: Callable[[], ApiError]  # what is raised then


async def heard(
    stream: AsyncGenerator[StepOutput, None], job: Job, listeners: Sequence[Listener], deadline: Deadline | None = None
) -> AsyncGenerator[StepOutput, None]:
    """A stream of ``EnginePort.generate``, listened to. Raises the deadline's error when it has passed."""
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
            raise  # not ours
    raise deadline.error()


class Generation:
    """The choices of one request while they are computed: ``async with`` starts them, leaving it frees their slots."""

    def __init__(
        self,
        engine: EnginePort,
        jobs: Sequence[Job],
        n: int = 1,
        silent: bool = False,
        listeners: Sequence[Listener] = (),
        deadline: Deadline | None = None,
    ) -> None:
        """
        Args:
            engine: computes them.
            jobs: one for each choice, ``n`` of each prompt side by side.
            n: choices of a prompt, which counts once in the usage.
            silent: what the jobs emit is left out: only their prompts are scored.
            listeners: who follows the jobs.
            deadline: of the answer; None where there is none.
        """
        self._silent, self._n, self.num_choices = silent, n, len(jobs)
        self.prompt_tokens = sum(len(job.prompt_ids) for job in jobs[::n])
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}  # of the prompts, by choice; of choices that have ended
        self.energy_j: float | None = 0.0  # of choices that have ended; None where one of them was not measured
        streams = zip(engine.generate(*jobs), jobs, strict=True)
        self._streams = [heard(stream, job, listeners, deadline) for stream, job in streams]
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Generation:
        """Returns when an engine has taken every job. Raises what ``EnginePort.generate`` does."""
        try:
            for stream in self._streams:
                await self._open.enter_async_context(contextlib.aclosing(stream))
            async with asyncio.TaskGroup() as group:
                for stream in self._streams:
                    group.create_task(_accepted(stream))
        except ExceptionGroup as refusals:
            await self._open.aclose()
            raise refusals.exceptions[0] from None
        except BaseException:  # a cancelled request, above all: nothing may keep running
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts whose KV was there already. What one choice computed and the others took over was not."""
        fewest: dict[int, int] = {}  # by prompt
        for index, count in self._cached.items():
            fewest[index // self._n] = min(count, fewest.get(index // self._n, count))
        return sum(fewest.values())

    async def outputs(self) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """The outputs of all choices as they come, with the number of the choice.

        Raises:
            engine.errors.RequestError: a choice cannot go on, by the request's own fault.
            ApiError: a choice failed.
        """
        async for index, output in _merge(self._streams):
            if output.fault_field is not None:
                raise RequestError(output.fault_field, output.error or "the request cannot be served as it is")
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
    """What several streams give, in the order in which it comes; the first failure is raised."""
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
                await pumps[index]  # raises what the stream raised
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
