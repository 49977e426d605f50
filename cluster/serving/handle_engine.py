"""Failover: the engine replicas behind a Serve handle, and how a request goes on when its replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.description import Description
from cluster.http.errors import ApiError
from cluster.serving.generation import Job
from cluster.serving.handles import for_this_loop, for_threads
from decoding.request import CLEARED_TOKENS, FinishReason, StepOutput
from engine.errors import QueueFullError, RequestError

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
ACCEPT_TIMEOUT_S = 60.0  # a replica that died is replaced within that, or the request gets a 503
BEAT_S = 1.0  # a replica that has nothing new to say of a request says so that often
SILENCE_S = 5.0  # after that a request is sent again: its replica is stopped or hangs, or there is none yet
MAX_LOSSES = 4  # replicas that one request may lose in a row without a token: more likely it is what ends them
MAX_LOSSES_IN_ALL = 16
_PAUSE_S = 0.1  # before a request is sent again; twice as long each time, up to _LONGEST_PAUSE_S
_LONGEST_PAUSE_S = 1.0


class _LostError(Exception):
    """The replica does not answer any more."""


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far a request has come, on all its replicas together."""

    deadline_s: float  # for a replica to take it
    spare: bool  # a replica that is full may be left for another, once
    emitted: list[int] = dataclasses.field(default_factory=list)
    taken: bool = False  # the consumer was told that a replica has it
    attempts: int = 0
    suspect: bool = False  # it was computed when a replica was lost or a step failed, and is not cleared
    losses: int = 0  # since its last token
    losses_in_all: int = 0
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

    A replica's end may be a request's fault. Who lost one is a *suspect*: the next replica computes it alone, until it has
    emitted ``CLEARED_TOKENS`` more. If that one ends as well while it does, the request is refused; requests that waited there
    meanwhile are sent again and bear no blame.

    Example: a replica ends after it has sent ``7`` and ``8 9``. The job is sent again with ``emitted=(7, 8, 9)``; another replica
    computes their KV with the prompt's, and its first new output is the fourth token.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        resume_timeout_s: float,
        describe_timeout_s: float = DESCRIBE_TIMEOUT_S,
        replicas: int = 1,
    ) -> None:
        """
        Args:
            handle: of the deployment.
            resume_timeout_s: a request that lost its replica gets that long until another one has taken it.
            describe_timeout_s: a replica that does not describe itself within it counts as missing.
            replicas: of the deployment. Where there are several, a request that one refuses for a full queue is sent once more:
                Serve sends it where fewer requests are.
        """
        self._handle, self._described = handle, for_threads(handle)
        self._stream: tuple[asyncio.AbstractEventLoop, DeploymentHandle[Any]] | None = None
        self._resume_timeout_s, self._describe_timeout_s, self._replicas = resume_timeout_s, describe_timeout_s, replicas

    def _streaming(self) -> DeploymentHandle[Any]:
        """The handle for jobs of the running loop."""
        loop = asyncio.get_running_loop()
        if self._stream is None or self._stream[0] is not loop:
            self._stream = loop, for_this_loop(self._handle)
        return self._stream[1]

    async def generate(self, job: Job) -> AsyncGenerator[StepOutput, None]:
        """See ``EnginePort.generate``. The counters of the last output are those of the last replica; the energy is not told when
        others used some, too."""
        progress = _Progress(time.monotonic() + ACCEPT_TIMEOUT_S, spare=self._replicas > 1)
        while True:
            reason: Exception
            try:
                progress.attempts += 1
                attempt = dataclasses.replace(job, emitted=(*job.emitted, *progress.emitted), suspect=progress.suspect)
                async with contextlib.aclosing(self._attempt(attempt, progress)) as outputs:
                    async for output in outputs:
                        if progress.attempts > 1 and output.stats is not None:
                            output.stats.energy_j = None
                        yield output
                        if output.finish_reason is not None:
                            return
                continue  # a step failed
            except _LostError as lost:
                reason = lost
            except (QueueFullError, RequestError) as refusal:
                if isinstance(refusal, QueueFullError) and progress.spare and not progress.taken:
                    progress.spare = False
                    progress.attempts -= 1  # nothing was computed
                    continue
                if not _passes(refusal, progress):
                    raise
                reason = refusal
            if progress.hopeless or time.monotonic() + progress.pause_s > progress.deadline_s:
                logger.error("request %s: given up after %d tokens: %s", job.request_id, len(progress.emitted), reason)
                message = f"the engine replica failed or is not answering ({reason}); try again"
                raise ApiError(503, message, code="engine_unavailable") from reason
            logger.warning("request %s: sent again after %d tokens: %s", job.request_id, len(progress.emitted), reason)
            await asyncio.sleep(progress.pause_s)
            progress.pause_s = min(2 * progress.pause_s, _LONGEST_PAUSE_S)

    async def _attempt(self, job: Job, progress: _Progress) -> AsyncGenerator[StepOutput, None]:
        """What is new of the outputs of one replica.

        A failed step ends all requests in it, whosever fault it was. So it ends without a finish reason then, to be made again,
        alone, unless the last attempt failed as well and this one emitted nothing since.

        Raises:
            _LostError: the replica does not answer any more. Beyond that what ``EnginePort.generate`` raises.
            ApiError: nor did the last one, and this one computed the request alone.
        """
        response = cast("DeploymentResponseGenerator[Any]", self._streaming().generate.remote(job))
        heard = finished = accepted = alone = False
        given = len(progress.emitted)
        try:
            while not finished:
                async with asyncio.timeout(SILENCE_S):
                    item = await response.__anext__()
                heard = True
                progress.deadline_s = time.monotonic() + self._resume_timeout_s
                if item is None:
                    continue  # a beat
                finished = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                if item.finish_reason is FinishReason.ERROR and progress.failed_at != len(progress.emitted):
                    logger.warning("request %s: a step failed, it is tried again: %s", job.request_id, item.error)
                    progress.failed_at, progress.suspect = len(progress.emitted), True
                    continue
                alone, accepted = alone or (job.suspect and accepted), True
                if item.token_ids or finished or not progress.taken:
                    progress.taken = True
                    progress.emitted += item.token_ids
                    if item.token_ids:
                        progress.losses = 0
                    if len(progress.emitted) - given >= CLEARED_TOKENS:
                        alone = progress.suspect = False
                    yield item
        except (RayError, RayServeException, grpc.RpcError, StopAsyncIteration, TimeoutError) as error:
            logger.debug("request %s: a replica is lost", job.request_id, exc_info=error)
            if heard or not isinstance(error, TimeoutError):  # else it may be that none was there to hear it
                progress.losses += 1
                progress.losses_in_all += 1
            ended = heard and not isinstance(error, TimeoutError)
            if alone and ended:
                message = "an engine replica ended twice while it computed this request, the second time with no other one"
                never = {"x-should-retry": "false"}  # which OpenAI's clients heed
                raise ApiError(500, f"{message}: it is not tried again", code="engine_crashed", headers=never) from error
            progress.suspect |= ended
            raise _LostError(type(error).__name__) from error
        finally:
            if not finished:
                response.cancel()

    async def describe(self) -> list[Description]:
        """See ``EnginePort.describe``."""
        try:
            # In a thread: results_async gives up all answers when a single one does not come in time.
            response = self._described.broadcast("describe")
            answers = await asyncio.to_thread(response.results, timeout_s=self._describe_timeout_s, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            logger.exception("no engine replica answers")
            return []
        return [answer for answer in answers if isinstance(answer, Description)]


def _passes(refusal: QueueFullError | RequestError, progress: _Progress) -> bool:
    """Whether a request that is under way only has to wait: for a place, or for a replica that has not let go of it yet."""
    waits = isinstance(refusal, QueueFullError) or refusal.field == "request_id"
    return progress.taken and waits
