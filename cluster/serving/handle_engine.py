"""Failover: the engine replicas behind a Serve handle, and how a request goes on when its replica is lost."""

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

from actors.description import Description, DeviceLostError
from cluster.http.errors import ApiError
from cluster.observe.device_failures import DeviceFailures
from cluster.serving.generation import Job, OtherVersionError
from cluster.serving.handles import all_results, for_this_loop, for_threads
from decoding.request import CLEARED_TOKENS, FinishReason, StepOutput
from engine.errors import ContextLengthError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
ACCEPT_TIMEOUT_S = 60.0  # a replica that died is replaced within that, or the request gets a 503
TOGETHER = 8  # most jobs of one call, which go to one replica: each call, and each of its events, takes the API a while
BEAT_S = 1.0  # a replica that has nothing new to say of a call says so that often
SILENCE_S = 5.0  # after that a request is sent again: its replica is stopped or hangs, or there is none yet
FIRST_WORD_S = 1.5  # likewise, where another replica may take what this one has not said a word of
_PARTS = 20  # in which either time is counted: a loop that was held for longer than a part reads what came before the next one
SILENT_S, EARLY_S = 30.0, 5.0  # a silent replica is avoided for so long after either; Serve replaces one that hangs meanwhile
MAX_LOSSES = 4  # replicas that one request may lose in a row without a token: more likely it is what ends them
MAX_LOSSES_IN_ALL = 16
_PAUSE_S = 0.1  # before a request is sent again; twice as long each time, up to _LONGEST_PAUSE_S
_LONGEST_PAUSE_S = 1.0

# Of a job: an output, why it is not taken, or that it has to go on elsewhere.
Item = StepOutput | QueueFullError | RequestError | OtherVersionError | DeviceLostError


def is_last(item: Item) -> bool:
    """Whether nothing comes of a job after it."""
    return isinstance(item, Exception) or item.finish_reason is not None


class _LostError(Exception):
    """The replica does not answer any more."""

    def __init__(self, error: BaseException) -> None:
        self.device = error if isinstance(error, DeviceLostError) else None
        super().__init__(type(error).__name__ if self.device is None else str(error))
        self.silent = isinstance(error, TimeoutError)


class _Call:
    """One call of a replica for some jobs, which are read one by one. It begins with the first reader and ends with the last."""

    def __init__(self, handle: Callable[[], DeploymentHandle[Any]], jobs: Sequence[Job], patience_s: float = SILENCE_S) -> None:
        """
        Args:
            handle: gives that of the deployment, in the loop of the readers.
            jobs: of one answer.
            patience_s: for the first word.
        """
        self._handle, self._jobs, self.patience_s = handle, tuple(jobs), patience_s
        self._items: list[asyncio.Queue[Item | _LostError]] = [asyncio.Queue() for _ in jobs]
        self._calling: asyncio.Task[None] | None = None
        self._readers = 0
        self.heard_s: float | None = None  # when the replica said something last
        self._quiet = 0  # parts of the time since then
        self._timer: asyncio.TimerHandle | None = None  # of the next part

    async def items(self, place: int) -> AsyncGenerator[Item, None]:
        """What comes of a job, to its last item. Raises ``_LostError``."""
        if self._calling is None:
            # In a context of its own: else Serve takes all calls for an HTTP request for one, and cannot route them apart.
            self._calling = asyncio.create_task(self._call(), context=contextvars.Context())
        self._readers += 1
        try:
            while True:
                item = await self._items[place].get()
                if isinstance(item, _LostError):
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
            logger.debug("a replica is lost with %s", [self._jobs[place].request_id for place in live], exc_info=error)
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
                self._items[place].put_nowait(_LostError(end))

    def _count_part(self, limit: asyncio.Timeout) -> None:
        """Count a part of the time in which the replica says nothing, and end the call after the last one.

        The time of a timer would also pass while the event loop is held, and what came meanwhile would not be read. A part that
        begins after that gives the loop a turn for it.
        """
        loop = asyncio.get_running_loop()
        if self._quiet == _PARTS:
            limit.reschedule(loop.time())
            return
        self._quiet += 1
        self._timer = loop.call_later((self.patience_s if self.heard_s is None else SILENCE_S) / _PARTS, self._count_part, limit)


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far a request has come, on all its replicas together."""

    deadline_s: float  # for a replica to take it
    spare: bool  # a replica that is full may be left for another, once
    emitted: list[int] = dataclasses.field(default_factory=list)
    taken: bool = False  # the consumer was told that a replica has it
    attempts: int = 0
    avoid_s: float = 0.0  # for which nobody else goes to its last replica, which said nothing for too long
    quarantined: bool = False  # it was computed when a replica ended or a step failed, and is not cleared
    ended: bool = False  # with quarantined: a replica ended
    losses: int = 0  # since its last token
    losses_in_all: int = 0
    failed_engine: str | None = None  # whose device failed last, if no token came since
    failed_at: int | None = None  # tokens that had been emitted when a step with it failed
    pause_s: float = _PAUSE_S

    @property
    def hopeless(self) -> bool:
        """Whether it has lost so many replicas that it may be what ends them."""
        return self.losses > MAX_LOSSES or self.losses_in_all > MAX_LOSSES_IN_ALL


class HandleEngine:
    """The ``EnginePort`` over a deployment of ``EngineReplica``.

    Outputs are a function of prompt, parameters and seed. So a request whose replica is lost goes on at another, or at the one
    that takes its place, from the tokens that came: the consumer sees a pause, and no token is lost or comes twice.

    A replica's end may be a request's fault. Who lost one is *quarantined*: the next replica computes it in steps of its own,
    until it has emitted ``CLEARED_TOKENS`` more, and says before and after each. If that replica ends as well in such a step, the
    request is refused; requests that waited there meanwhile are sent again and bear no blame. A replica takes one quarantined
    request of an account: the next one waits here for its turn.

    A device that fails is no request's fault, and the replica says so before it ends. Who loses two devices and no token came in
    between is quarantined as well.

    Example: a replica ends after it has sent ``7`` and ``8 9``. The job is sent again with ``emitted=(7, 8, 9)``; another replica
    computes their KV with the prompt's, and its first new output is the fourth token.
    """

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
        """
        Args:
            handle: of the deployment.
            resume_timeout_s: a request that lost its replica gets that long until another one has taken it.
            describe_timeout_s: a replica that does not describe itself within it counts as missing.
            replicas: of the deployment. Where there are several, the jobs of an answer are in as many calls at least, and a job
                that one refuses for a full queue or its shorter context is sent once more, to another one.
            accept_timeout_s: a request that no replica has taken gets that long.
            version: of what is served. In a redeploy there may be replicas of another one, which count as none; empty: all count.
            failures: counts those of the replicas' devices; to nobody when absent.
        """
        self._handle, self._described = handle, for_threads(handle)
        self._stream: tuple[asyncio.AbstractEventLoop, DeploymentHandle[Any]] | None = None
        self._resume_timeout_s, self._describe_timeout_s, self._replicas = resume_timeout_s, describe_timeout_s, replicas
        self._accept_timeout_s, self._version = accept_timeout_s, version
        self._failures = failures or DeviceFailures()
        self._waking: asyncio.Task[None] | None = None

    def _streaming(self) -> DeploymentHandle[Any]:
        """The handle for jobs of the running loop."""
        loop = asyncio.get_running_loop()
        if self._stream is None or self._stream[0] is not loop:
            self._stream = loop, for_this_loop(self._handle)
        return self._stream[1]

    def generate(self, *jobs: Job) -> list[AsyncGenerator[StepOutput, None]]:
        """See ``EnginePort.generate``. The counters of a last output are those of the last replica; the energy is not told when
        others used some, too."""
        jobs = tuple(dataclasses.replace(job, version=self._version) for job in jobs)
        size = min(TOGETHER, -(-len(jobs) // self._replicas))
        patience_s = FIRST_WORD_S if self._replicas > 1 else SILENCE_S
        calls = [_Call(self._streaming, jobs[first : first + size], patience_s) for first in range(0, len(jobs), size)]
        return [self._generate(job, calls[at // size], at % size) for at, job in enumerate(jobs)]

    async def _generate(self, job: Job, call: _Call | None, place: int) -> AsyncGenerator[StepOutput, None]:
        """The outputs of a job: from its place in a call, and from calls of its own where that one does not bring them."""
        progress = _Progress(time.monotonic() + self._accept_timeout_s, spare=self._replicas > 1)
        while True:
            reason: Exception
            try:
                progress.attempts += 1
                if call is None:
                    emitted = (*job.emitted, *progress.emitted)
                    resumed = job.resumed and not progress.taken  # it has the place of the older stream by now
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
            except _LostError as lost:
                reason = lost
            except (QueueFullError, RequestError) as refusal:
                if isinstance(refusal, QueueFullError | ContextLengthError) and progress.spare and not progress.taken:
                    progress.spare = False
                    progress.attempts -= 1  # nothing was computed
                    continue
                if not (_passes(refusal, progress) or self._fits_others(refusal, progress)):
                    raise
                reason = refusal
            if progress.hopeless or time.monotonic() + progress.pause_s > progress.deadline_s:
                logger.error("request %s: given up after %d tokens: %s", job.request_id, len(progress.emitted), reason)
                message = f"the engine replica failed or is not answering ({reason}); try again"
                raise ApiError(503, message, code="engine_unavailable") from reason
            level = logging.DEBUG if isinstance(reason, QueueFullError) else logging.WARNING  # it waits for its turn
            logger.log(level, "request %s: sent again after %d tokens: %s", job.request_id, len(progress.emitted), reason)
            await asyncio.sleep(progress.pause_s)
            progress.pause_s = min(2 * progress.pause_s, _LONGEST_PAUSE_S)

    def _fits_others(self, refusal: QueueFullError | RequestError, progress: _Progress) -> bool:
        """Return whether a running request was sent to a replica with a shorter context than the one it lost."""
        return isinstance(refusal, ContextLengthError) and progress.taken and self._replicas > 1

    async def _attempt(self, job: Job, call: _Call, place: int, progress: _Progress) -> AsyncGenerator[StepOutput, None]:
        """What is new of the outputs of one replica.

        A failed step ends all requests in it, whosever fault it was. So it ends without a finish reason then, to be made again,
        alone, unless the last attempt failed as well and this one emitted nothing since. A request's own fault is final.

        Raises:
            _LostError: the replica does not answer any more. Beyond that what ``EnginePort.generate`` raises.
            ApiError: nor did the last one, and this one computed the request alone.
        """
        given, alone = len(progress.emitted), False
        try:
            async with contextlib.aclosing(call.items(place)) as items:
                async for item in items:
                    if isinstance(item, DeviceLostError):
                        raise _LostError(item)
                    if isinstance(item, Exception):
                        raise item
                    step_failed = item.finish_reason is FinishReason.ERROR and item.fault_field is None
                    if step_failed and progress.failed_at != len(progress.emitted):
                        logger.warning("request %s: a step failed, it is tried again: %s", job.request_id, item.error)
                        progress.failed_at, progress.quarantined = len(progress.emitted), True
                        return
                    alone = alone if item.alone is None else item.alone
                    if item.token_ids or is_last(item) or not progress.taken:
                        progress.taken = True
                        progress.emitted += item.token_ids
                        if item.token_ids:
                            progress.losses, progress.failed_engine = 0, None
                        if len(progress.emitted) - given >= CLEARED_TOKENS:
                            alone = progress.quarantined = progress.ended = False
                        yield item
        except _LostError as lost:
            heard = call.heard_s is not None
            if lost.silent:  # one that had little time may only be slow
                progress.avoid_s = SILENT_S if heard or call.patience_s >= SILENCE_S else EARLY_S
            if lost.device is not None:
                ended = self._lose_device(lost.device, progress)
            else:
                if heard or not lost.silent:  # else it may be that none was there to hear it
                    progress.losses += 1
                    progress.losses_in_all += 1
                ended = heard and not lost.silent
            if alone and ended:
                message = "an engine replica ended twice while it computed this request, the second time with no other one"
                never = {"x-should-retry": "false"}  # which OpenAI's clients heed
                raise ApiError(500, f"{message}: it is not tried again", code="engine_crashed", headers=never) from lost
            progress.quarantined |= ended
            progress.ended |= ended
            raise
        finally:
            if call.heard_s is not None:
                progress.deadline_s = call.heard_s + self._resume_timeout_s

    def _lose_device(self, lost: DeviceLostError, progress: _Progress) -> bool:
        """Count a failed device and avoid its replica. Return whether the request may be what makes devices fail."""
        self._failures.add(lost)
        progress.avoid_s = EARLY_S
        if lost.engine == progress.failed_engine:  # which has not ended yet
            return False
        again, progress.failed_engine = progress.failed_engine is not None, lost.engine
        progress.losses_in_all += 1
        return again

    async def _check_version(self, job: Job, progress: _Progress) -> None:
        """Returns where a replica can still take a job that one of another version refused. Raises ``ApiError`` (503)."""
        if time.monotonic() < progress.deadline_s and await self.describe():
            return
        logger.warning("request %s: what it asks for was replaced, after %d tokens", job.request_id, len(progress.emitted))
        if progress.taken:
            message = "the model was replaced while it computed this answer: ask anew"
        else:
            message = "the model is being replaced, and this API with it: ask again"
        raise ApiError(503, message, code="model_replaced", headers={"Retry-After": "1"})

    async def has_only_others(self) -> bool:
        """Whether replicas of other versions answer, and none of this one."""
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
        """Has Serve start a replica where there is none, as a request would."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        try:
            await self._described.describe.remote()
        except (RayError, RayServeException) as error:
            logger.warning("no engine replica starts: %s", error)


def _passes(refusal: QueueFullError | RequestError, progress: _Progress) -> bool:
    """Whether a request that is under way only has to wait: for a place, or for a replica that has not let go of it yet."""
    if isinstance(refusal, RequestError) and refusal.field == "request_id":
        return progress.taken or progress.attempts > 1
    return (progress.taken or progress.quarantined) and isinstance(refusal, QueueFullError)
