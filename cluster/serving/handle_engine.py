"""Failover: the engine replicas behind a Serve handle, and how a request continues when its replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, cast

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from outrider.actors.description import Description, DeviceLostError
from outrider.cluster.http.errors import ApiError
from outrider.cluster.observe.device_failures import DeviceFailures
from outrider.cluster.serving.generation import GenerationJob, OtherVersionError
from outrider.cluster.serving.handles import all_results, for_this_loop, for_threads
from outrider.decoding.request import QUARANTINE_TOKENS, FinishReason, StepOutput
from outrider.engine.errors import ContextLengthError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
ACCEPT_TIMEOUT_S = 60.0  # a dead replica is replaced within this time, or the request gets a 503
TOGETHER = 8  # most jobs per call and replica: each call and each of its events costs the API time
BEAT_S = 1.0  # heartbeat interval of a call without new outputs
SILENCE_S = 5.0  # after this silence a request is sent again: its replica hangs or is stopped, or none has started
FIRST_WORD_S = 1.5  # the same before the first item of a call, if there are other replicas
_PARTS = 20  # silence is counted in parts, so that a blocked event loop can still read items that arrived in the meantime
SILENT_S, EARLY_S = 30.0, 5.0  # seconds to avoid a silent replica, after either time; Serve replaces one that hangs meanwhile
MAX_LOSSES = 4  # give up after more consecutive losses without a token: the request is probably causing them
MAX_LOSSES_IN_ALL = 16
_PAUSE_S = 0.1  # pause before a request is sent again, doubled each time up to _LONGEST_PAUSE_S
_LONGEST_PAUSE_S = 1.0

# Item of a job's stream: an output, a refusal, or a reason to continue on another replica.
Item = StepOutput | QueueFullError | RequestError | OtherVersionError | DeviceLostError


def is_last(item: Item) -> bool:
    """Return whether the item is the last one of its job."""
    return isinstance(item, Exception) or item.finish_reason is not None


class ReplicaLostError(Exception):
    """The replica no longer answers."""

    def __init__(self, error: BaseException) -> None:
        self.device = error if isinstance(error, DeviceLostError) else None
        super().__init__(type(error).__name__ if self.device is None else str(error))
        self.silent = isinstance(error, TimeoutError)


class _Call:
    """Call of a replica for some jobs, which are read separately. It starts with the first reader and ends with the last."""

    def __init__(
        self, handle: Callable[[], DeploymentHandle[Any]], jobs: Sequence[GenerationJob], patience_s: float = SILENCE_S
    ) -> None:
        """Prepare a call for jobs of one answer; ``patience_s`` is the longest silence before its first item."""
        self._handle, self._jobs, self.patience_s = handle, tuple(jobs), patience_s
        self._items: list[asyncio.Queue[Item | ReplicaLostError]] = [asyncio.Queue() for _ in jobs]
        self._calling: asyncio.Task[None] | None = None
        self._readers = 0
        self.heard_s: float | None = None  # time of the latest item or heartbeat
        self._quiet = 0  # parts of silence since then
        self._timer: asyncio.TimerHandle | None = None  # timer of the next part

    async def items(self, place: int) -> AsyncGenerator[Item, None]:
        """Yield the items of a job up to the last one. Raise ``ReplicaLostError``."""
        if self._calling is None:
            # In a separate context: otherwise Serve takes all calls of an HTTP request for one and cannot route them separately.
            self._calling = asyncio.create_task(self._call(), context=contextvars.Context())
        self._readers += 1
        try:
            while True:
                item = await self._items[place].get()
                if isinstance(item, ReplicaLostError):
                    raise item
                yield item
                if is_last(item):
                    return
        finally:
            self._readers -= 1
            if not self._readers:
                self._calling.cancel()

    async def _call(self) -> None:
        response = cast("DeploymentResponseGenerator[Any]", self._handle().generate.remote(self._jobs))
        live = set(range(len(self._jobs)))
        end: BaseException = asyncio.CancelledError()
        try:
            async with asyncio.timeout(None) as limit:
                self._count_part(limit)
                while live:
                    batch = await response.__anext__()
                    self.heard_s, self._quiet = time.monotonic(), 0
                    for place, item in batch:
                        self._items[place].put_nowait(item)
                        if is_last(item):
                            live.discard(place)
        except (RayError, RayServeException, grpc.RpcError, StopAsyncIteration, TimeoutError) as error:
            logger.debug("lost a replica that was running %s", [self._jobs[place].label for place in live], exc_info=error)
            end = error
        except Exception as error:
            end = error
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if live:
                response.cancel()
            for place in live:
                self._items[place].put_nowait(ReplicaLostError(end))

    def _count_part(self, limit: asyncio.Timeout) -> None:
        # A single timer would also run out while the event loop is blocked, before it can read what arrived meanwhile.
        loop = asyncio.get_running_loop()
        if self._quiet == _PARTS:
            limit.reschedule(loop.time())
            return
        self._quiet += 1
        self._timer = loop.call_later((self.patience_s if self.heard_s is None else SILENCE_S) / _PARTS, self._count_part, limit)


@dataclasses.dataclass(slots=True)
class _Progress:
    deadline_s: float  # time by which a replica has to take the request
    spare: bool  # may be moved once from a full replica to another
    emitted: list[int] = dataclasses.field(default_factory=list)
    taken: bool = False  # the consumer knows that a replica took it
    attempts: int = 0
    avoid_s: float = 0.0  # seconds for which other requests avoid its last replica, which was silent for too long
    quarantined: bool = False  # a replica ended or a step failed while computing it, and it is not cleared yet
    ended: bool = False  # with quarantined: a replica ended
    losses: int = 0  # since its last token
    losses_in_all: int = 0
    failed_engine: str | None = None  # engine whose device failed last, if no token was emitted since
    failed_at: int | None = None  # number of emitted tokens when a step last failed
    pause_s: float = _PAUSE_S

    @property
    def hopeless(self) -> bool:
        """Return whether it lost too many replicas: it is probably the cause."""
        return self.losses > MAX_LOSSES or self.losses_in_all > MAX_LOSSES_IN_ALL


class HandleEngine:
    """``EnginePort`` over a deployment of ``EngineReplica``; a request whose replica is lost continues on another one.

    Example: a replica ends after it has sent ``7`` and ``8 9``. The job is sent again with ``emitted=(7, 8, 9)``; another replica
    computes their KV with the prompt's, and its first new output is the fourth token.
    """

    # Outputs are a function of prompt, parameters and seed. A lost request therefore continues from the tokens that were emitted:
    # the consumer sees a pause, and no token is lost or repeated.
    # A request may be the cause of a replica's end. One that lost a replica is *quarantined*: the next replica computes it alone
    # in its steps until it has emitted `QUARANTINE_TOKENS` more, and reports this before and after. If that replica ends in one
    # of these steps, the request is refused; requests that waited there are sent again without blame. A replica takes one
    # quarantined request per account; the next one waits here.
    # A device failure is no request's fault, and the replica reports it before it ends. A request that loses two devices without
    # a token in between is quarantined as well.

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        resume_timeout_s: float,
        describe_timeout_s: float = DESCRIBE_TIMEOUT_S,
        replicas: int = 1,
        accept_timeout_s: float = ACCEPT_TIMEOUT_S,
        version: str = "",
        failures: DeviceFailures | None = None,
    ) -> None:
        """Initialize the engine.

        Args:
            resume_timeout_s: time for another replica to take a request that lost its own.
            describe_timeout_s: a replica that does not answer within it counts as missing.
            replicas: number of replicas. With several, the jobs of an answer are spread over at least as many calls, and a job
                that one refuses (full queue, shorter context) is sent to another one once.
            accept_timeout_s: time for a replica to take a new request.
            version: model version; during a redeploy, replicas of other versions are ignored. Empty for any.
        """
        self._handle, self._described = handle, for_threads(handle)
        self._stream: tuple[asyncio.AbstractEventLoop, DeploymentHandle[Any]] | None = None
        self._resume_timeout_s, self._describe_timeout_s, self._replicas = resume_timeout_s, describe_timeout_s, replicas
        self._accept_timeout_s, self._version = accept_timeout_s, version
        self._failures = failures or DeviceFailures()
        self._waking: asyncio.Task[None] | None = None

    def _streaming(self) -> DeploymentHandle[Any]:
        loop = asyncio.get_running_loop()
        if self._stream is None or self._stream[0] is not loop:
            self._stream = loop, for_this_loop(self._handle)
        return self._stream[1]

    def generate(self, *jobs: GenerationJob) -> list[AsyncGenerator[StepOutput, None]]:
        """Return one output stream per job; see ``EnginePort.generate``."""
        # The counters in a last output are those of the last replica; energy is None if several replicas computed the job.
        jobs = tuple(dataclasses.replace(job, version=self._version) for job in jobs)
        size = min(TOGETHER, -(-len(jobs) // self._replicas))
        patience_s = FIRST_WORD_S if self._replicas > 1 else SILENCE_S
        calls = [_Call(self._streaming, jobs[first : first + size], patience_s) for first in range(0, len(jobs), size)]
        return [self._generate(job, calls[at // size], at % size) for at, job in enumerate(jobs)]

    async def _generate(self, job: GenerationJob, call: _Call | None, place: int) -> AsyncGenerator[StepOutput, None]:
        """Yield the outputs of a job, from its shared call and then from calls for this job alone."""
        progress = _Progress(time.monotonic() + self._accept_timeout_s, spare=self._replicas > 1)
        while True:
            reason: Exception
            try:
                progress.attempts += 1
                if call is None:
                    emitted = (*job.emitted, *progress.emitted)
                    resumed = job.resumed and not progress.taken  # it has already replaced the older stream
                    again = dataclasses.replace(
                        job, emitted=emitted, quarantined=progress.quarantined, announced=progress.ended, resumed=resumed,
                        avoid_s=progress.avoid_s,
                    )  # fmt: skip
                    progress.avoid_s = 0.0
                    call, place = _Call(self._streaming, (again,)), 0
                attempt, call = self._attempt(job, call, place, progress), None
                async with contextlib.aclosing(attempt) as outputs:
                    async for output in outputs:
                        if progress.attempts > 1 and output.stats is not None:
                            output.stats.energy_j = None
                        yield output
                        if output.finish_reason is not None:
                            return
                continue  # a step failed
            except OtherVersionError:
                await self._check_version(job, progress)
                await asyncio.sleep(_PAUSE_S)
                continue
            except ReplicaLostError as lost:
                reason = lost
            except (QueueFullError, RequestError) as refusal:
                if isinstance(refusal, QueueFullError | ContextLengthError) and progress.spare and not progress.taken:
                    progress.spare = False
                    progress.attempts -= 1  # no replica computed anything
                    continue
                if not (_passes(refusal, progress) or self._fits_others(refusal, progress)):
                    raise
                reason = refusal
            if progress.hopeless or time.monotonic() + progress.pause_s > progress.deadline_s:
                logger.error("request %s: given up after %d tokens: %s", job.request_id, len(progress.emitted), reason)
                message = f"the engine replica failed or is not answering ({reason}); try again"
                raise ApiError(503, message, code="engine_unavailable") from reason
            level = logging.DEBUG if isinstance(reason, QueueFullError) else logging.WARNING  # a full queue only makes it wait
            logger.log(level, "request %s: resubmitted after %d tokens: %s", job.request_id, len(progress.emitted), reason)
            await asyncio.sleep(progress.pause_s)
            progress.pause_s = min(2 * progress.pause_s, _LONGEST_PAUSE_S)

    def _fits_others(self, refusal: QueueFullError | RequestError, progress: _Progress) -> bool:
        """Return whether a running request was sent to a replica with a shorter context than that of its lost one."""
        return isinstance(refusal, ContextLengthError) and progress.taken and self._replicas > 1

    async def _attempt(
        self, job: GenerationJob, call: _Call, place: int, progress: _Progress
    ) -> AsyncGenerator[StepOutput, None]:
        """Yield the new outputs of one replica; return without a finish reason if a step failed.

        Raises ReplicaLostError, or as ``EnginePort.generate``. ApiError: a second replica ended while it computed only this one.
        """
        given, alone = len(progress.emitted), False
        try:
            async with contextlib.aclosing(call.items(place)) as items:
                async for item in items:
                    if isinstance(item, DeviceLostError):
                        raise ReplicaLostError(item)
                    if isinstance(item, Exception):
                        raise item
                    # A failed step ends all its requests, whichever caused it: they are computed again alone, unless the previous
                    # attempt also failed at the same token. An error of the request itself is final.
                    step_failed = item.finish_reason is FinishReason.ERROR and item.fault_field is None
                    if step_failed and progress.failed_at != len(progress.emitted):
                        logger.warning("request %s: a step failed, retrying: %s", job.request_id, item.error)
                        progress.failed_at, progress.quarantined = len(progress.emitted), True
                        return
                    alone = alone if item.alone is None else item.alone
                    if item.token_ids or is_last(item) or not progress.taken:
                        progress.taken = True
                        progress.emitted += item.token_ids
                        if item.token_ids:
                            progress.losses, progress.failed_engine = 0, None
                        if len(progress.emitted) - given >= QUARANTINE_TOKENS:
                            alone = progress.quarantined = progress.ended = False
                        yield item
        except ReplicaLostError as lost:
            heard = call.heard_s is not None
            if lost.silent:  # after the short patience it may only be slow
                progress.avoid_s = SILENT_S if heard or call.patience_s >= SILENCE_S else EARLY_S
            if lost.device is not None:
                ended = self._lose_device(lost.device, progress)
            else:
                if heard or not lost.silent:  # otherwise no replica may have existed
                    progress.losses += 1
                    progress.losses_in_all += 1
                ended = heard and not lost.silent
            # Nothing else ran in that step: the request is refused before it ends more replicas.
            if alone and ended:
                message = "an engine replica ended twice while it computed this request, the second time without other requests"
                never = {"x-should-retry": "false"}  # OpenAI's clients do not retry then
                raise ApiError(500, f"{message}: it is not retried", code="engine_crashed", headers=never) from lost
            progress.quarantined |= ended
            progress.ended |= ended
            raise
        finally:
            if call.heard_s is not None:
                progress.deadline_s = call.heard_s + self._resume_timeout_s

    def _lose_device(self, lost: DeviceLostError, progress: _Progress) -> bool:
        """Count a device failure and avoid its replica; return whether the request may cause device failures."""
        self._failures.add(lost)
        progress.avoid_s = EARLY_S
        if lost.engine == progress.failed_engine:  # the same replica, which has not ended yet
            return False
        again, progress.failed_engine = progress.failed_engine is not None, lost.engine
        progress.losses_in_all += 1
        # A second device without a token in between: now the request may be the cause.
        return again

    async def _check_version(self, job: GenerationJob, progress: _Progress) -> None:
        """Return if a replica of this version can still take the job. Raise ``ApiError`` (503) otherwise."""
        if time.monotonic() < progress.deadline_s and await self.describe():
            return
        logger.warning("request %s: the model was replaced after %d tokens", job.request_id, len(progress.emitted))
        if progress.taken:
            message = "the model was replaced while it computed this answer: please retry"
        else:
            message = "the model is being redeployed: please retry"
        raise ApiError(503, message, code="model_replaced", headers={"Retry-After": "1"})

    async def has_only_others(self) -> bool:
        """Return whether only replicas of other versions answer."""
        versions = {answer.version for answer in await self._answering()}
        return bool(versions) and self._version not in versions

    async def describe(self) -> list[Description]:
        """See ``EnginePort.describe``."""
        return [answer for answer in await self._answering() if self._version in ("", answer.version)]

    async def _answering(self) -> list[Description]:
        try:
            answers = await all_results(self._described.broadcast("describe"), self._describe_timeout_s)
        except (RayError, RayServeException, TimeoutError):
            logger.exception("no engine replica answers")
            return []
        return [answer for answer in answers if isinstance(answer, Description)]

    def wake(self) -> None:
        """Make Serve start a replica if there is none, as a request would."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        try:
            await self._described.describe.remote()
        except (RayError, RayServeException) as error:
            logger.warning("starting an engine replica failed: %s", error)


def _passes(refusal: QueueFullError | RequestError, progress: _Progress) -> bool:
    """Return whether a running request only has to wait: for a place, or until a replica frees its previous attempt."""
    if isinstance(refusal, RequestError) and refusal.field == "request_id":
        return progress.taken or progress.attempts > 1
    return (progress.taken or progress.quarantined) and isinstance(refusal, QueueFullError)
