"""Replica: one engine and the one thread that steps it, behind an async generator."""

# The engine is not thread-safe and steps are long, so the event loop never calls it. Requests reach the engine's thread through
# an inbox, outputs return through `loop.call_soon_threadsafe`.

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from outrider.actors.description import Description, DeviceLostError, ReplicaError, identity_of
from outrider.actors.ranks import Ranks
from outrider.cache_service.access import CacheAccess
from outrider.cache_service.client.cache_client import CacheClient
from outrider.configs.slices import EmulationOptions, EngineOptions, ModelOptions, SpeculationOptions
from outrider.decoding.request import QUARANTINE_TOKENS, FinishReason, Request, RequestState, StepOutput, merge_outputs
from outrider.engine.engine import Engine
from outrider.engine.errors import DeviceError, QueueFullError, RequestError, StreamTakenError, one_line
from outrider.engine.measures.energy import EnergyMeter, measure_idle, open_meter

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # consecutive failures after which the device or the model is at fault, not one request
SETTLED_S = 5.0  # after the start, before background warm-up: other processes of the server need the CPU first
QUIET_S = 1.0  # without requests before background warm-up continues: it uses CPU, and KV slots whose content could be reused
STALL_S = 120.0  # a longer step counts as a hang
NOTIFY_QUARANTINE_S = 0.05  # for the quarantine notice to be sent before a step that may crash this process
STREAM_PERIOD_S = 0.04  # least time between two messages of a request under load: each event costs time for all requests
MANY = 4  # requests in a step from which STREAM_PERIOD_S applies
RESUME_PERIOD_S = 1.0  # least time between two takeovers of a stream: each recomputes it
_LAST_EVENT = "Last-Event-ID"
COMPILING = 2  # grammars compiled at a time
IDLE_S = 2.0  # duration of the idle power measurement at the start, if a meter exists
# Tokens. Held output is recomputed after a crash, so it must be less than what ends a quarantine.
MOST_HELD = QUARANTINE_TOKENS // 2


@dataclass(slots=True)
class RunningRequest:
    """Running request and the queue of the event loop that receives its outputs."""

    request: Request
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[StepOutput | Exception]
    published: int = 0  # output tokens already passed to the cache client
    held: StepOutput | None = None  # output delayed until the next one
    delivered_s: float = -math.inf  # time of the last delivery to the event loop
    resumed: bool = False  # replaces a running request of the same id and account
    notifies_quarantine: bool = False  # the consumer is notified when the request is computed alone
    began_s: float = field(default_factory=time.monotonic)

    def deliver(self, output: StepOutput, now_s: float, period_s: float) -> bool:
        """Deliver an output, or hold it if the last delivery was less than ``period_s`` ago. Return the result of ``put``."""
        held = 0 if self.held is None else len(self.held.token_ids)
        # Final outputs, step reports and more than a few tokens are never held.
        at_once = output.finish_reason is not None or output.report is not None or held + len(output.token_ids) >= MOST_HELD
        if now_s - self.delivered_s >= period_s or at_once:
            self.delivered_s = now_s
            return self.put(output)
        self.held = output if self.held is None else merge_outputs((self.held, output))
        return True

    def put(self, item: StepOutput | Exception) -> bool:
        """Send an item, after any held output, to the event loop from another thread. Return False if the loop is closed."""
        if isinstance(item, StepOutput):
            item = item if self.held is None else merge_outputs((self.held, item))
            self.held = None
        try:
            if self.held is not None:
                self.loop.call_soon_threadsafe(self.items.put_nowait, self.held)
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Request whose consumer has gone."""

    running: RunningRequest


@dataclass(frozen=True, slots=True)
class UpdatesReady:
    """Signal that updates of other replicas are ready to be applied."""


Command = RunningRequest | AbortRequest | UpdatesReady | None  # None: stop


class Replica:
    """Engine that serves many requests at once from any event loop of this process."""

    def __init__(
        self,
        model: ModelOptions,
        engine: EngineOptions,
        speculation: SpeculationOptions,
        cache: CacheAccess | None = None,
        ranks: Ranks | None = None,
        meter: Callable[[Sequence[str]], EnergyMeter] | None = open_meter,
        end: Callable[[], object] | None = None,
        emulation: EmulationOptions | None = None,
    ) -> None:
        """Load the model and the shared cache, wait for the ranks, and start the engine's thread.

        Args:
            cache: access to the cache shared with other replicas; None shares nothing.
            ranks: ranks that share the steps; closed with the replica. None computes alone.
            meter: opens the energy meter of the devices; None if their counters also include other work.
            end: ends this process after a device failure, once all requests are notified.
            emulation: the device, if it is emulated.

        Raises ModelLoadError, GroupError, or ValueError for an option or Redis address.
        """
        self._ranks, self._end = ranks, end
        self._cache_client: CacheClient | None = None
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._live: dict[str, RunningRequest] = {}  # by request id; for the engine's thread, except in `_close`
        self._closing = threading.Lock()  # after the inbox was drained for the last time, no command may enter it
        self._fault: ReplicaError | None = None  # reason why new requests are refused
        self._failed_steps = 0
        self._alone: RunningRequest | None = None  # last request whose consumer was notified that it is computed alone
        self._unapplied = False  # updates of other replicas remain
        self._step_began: float | None = None
        self._busy = False  # state last reported to the ranks
        self._compiling = ThreadPoolExecutor(COMPILING, thread_name_prefix="grammars")
        self._turns: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Lock] = WeakValueDictionary()
        with contextlib.ExitStack() as parts:
            parts.callback(self._close_parts)  # close them if the replica cannot start
            if ranks is None:
                self._engine = Engine.load(model, engine, speculation, defer_warmup=True, emulation=emulation)
            else:
                self._engine = Engine.load(
                    model, engine, speculation, ranks.world_size, ranks.executor, ranks.runner, emulation=emulation
                )
            self._info, self._counts = self._engine.info, self._engine.counts()
            self._cache_client = self._open_cache_client(cache)
            if ranks is not None:
                ranks.start()
            if meter is not None:
                self._open_meter(meter)
            # All parts have started: from here on, `stop` closes them.
            parts.pop_all()
        self._engine.on_step = self._notify_quarantine
        if ranks is not None and end is not None:
            ranks.device_failed = self._lose_device
        self._warmup_from_s = time.monotonic() + SETTLED_S
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self, request: Request, resumed: bool = False, announced: bool = False
    ) -> AsyncGenerator[StepOutput, None]:
        """Yield the outputs of one request as they are computed; the first is empty, the last has a finish reason.

        Tokens that the request emitted on another replica (``Request.emitted``) are not yielded again.

        Args:
            resumed: abort a running request of the same id and account, which ends with a ``StreamTakenError``; this one gets the
                error instead if that one was itself resumed within ``RESUME_PERIOD_S``.
            announced: also yield outputs without tokens that report whether the next step runs this quarantined request alone.

        Raises:
            engine.errors.QueueFullError, engine.errors.RequestError: the engine refuses the request (before the first output).
            ReplicaError: the replica has failed or stopped (``DeviceLostError``: its device failed); another one can continue.
        """
        if request.params.grammar is not None:
            try:
                await self._compile(request)
            except RequestError:
                raise
            except Exception as error:
                logger.exception("%s: its grammar cannot be compiled", request.label)
                yield _failure(request.request_id, error)
                return
        live = RunningRequest(
            request, asyncio.get_running_loop(), asyncio.Queue(), resumed=resumed, notifies_quarantine=announced
        )
        if not self._send(live):
            assert self._fault is not None
            raise _again(self._fault)
        finished = False
        try:
            while not finished:
                item = await live.items.get()
                finished = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not finished:
                # The consumer has stopped reading: the engine frees the slot before its next step.
                self._send(AbortRequest(live))

    async def _compile(self, request: Request) -> None:
        """Compile a request's grammar in a thread while steps continue. Each account uses one thread at a time."""
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault((loop, request.account), asyncio.Lock())
        await turn.acquire()
        compiling = loop.run_in_executor(self._compiling, self._engine.compile, request)
        compiling.add_done_callback(lambda _: turn.release())  # the thread is busy until then, even if the waiter is cancelled
        await asyncio.shield(compiling)

    def describe(self) -> Description:
        """Return the model info and the counts after the last step. Raises the errors of ``check_health``."""
        self.check_health()
        cache = None if self._cache_client is None else self._cache_client.counts()
        group = None if self._ranks is None else self._ranks.state()
        engine = self._engine
        return Description(
            self._info, self._counts, cache, group, engine.by_strategy(), engine.energy(), engine.metrics(),
            emulated=engine.emulated(),
        )  # fmt: skip

    def check_health(self) -> None:
        """Raise ``ReplicaError`` if the engine's thread has ended or one step has been running for ``STALL_S``."""
        if self._fault is not None or not self._thread.is_alive():
            raise _again(self._fault or ReplicaError("the engine's thread has ended"))
        began = self._step_began
        if began is not None and time.monotonic() - began > STALL_S:
            raise ReplicaError(f"one step of the engine has been running for {time.monotonic() - began:.0f} s")

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the thread after its current step; running requests get an error. Idempotent."""
        self._send(None)
        self._thread.join(timeout_s)
        self._close_parts()
        if self._thread.is_alive():
            raise ReplicaError(f"the engine's thread did not end within {timeout_s:.0f} s")

    def _close_parts(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        if self._cache_client is not None:
            self._cache_client.close()

    def _open_meter(self, opened: Callable[[Sequence[str]], EnergyMeter]) -> None:
        """Enable energy metering if every device of the replica and its ranks has a counter. Takes ``IDLE_S``."""
        others = () if self._ranks is None else self._ranks.devices()
        if others is not None:
            meter = opened((self._info.device, *others))
            measure_idle(meter, IDLE_S)
            self._engine.meter(meter)

    def _open_cache_client(self, cache: CacheAccess | None) -> CacheClient | None:
        memory = self._engine.histories
        if cache is None or memory is None:
            return None
        client = CacheClient(cache, identity_of(self._info), memory, lambda: self._inbox.put(UpdatesReady()))
        client.start(cache.options.start_timeout_s)
        return client

    def _send(self, command: Command) -> bool:
        with self._closing:
            if self._fault is None:
                self._inbox.put(command)
            return self._fault is None

    # ---- below: the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        fault = ReplicaError("the replica was stopped")
        try:
            while self._take_commands():
                self._counts = self._engine.counts()
                self._unapplied = self._cache_client is not None and self._cache_client.apply()
                self._tell_ranks()
                if self._engine.has_work:
                    self._step()
                    self._warmup_from_s = max(self._warmup_from_s, time.monotonic() + QUIET_S)
                    self._counts = self._engine.counts()
                    self._tell_ranks()
                elif self._until_warmup_s() == 0.0:
                    self._engine.run_warmup_slice()
        except DeviceError as error:
            self._lose_device(error)
        except Exception as error:
            logger.exception("the engine's thread failed")
            fault = ReplicaError(f"the engine failed: {one_line(error)}")
        finally:
            self._close(fault)

    def _tell_ranks(self) -> None:
        if self._ranks is not None and self._busy != self._engine.has_work:
            self._busy = self._engine.has_work
            self._ranks.occupied(self._busy)

    def _take_commands(self) -> bool:
        """Run the commands in the inbox, waiting for one if there is nothing to compute. Return False to stop."""
        wait = not self._engine.has_work and not self._unapplied
        while True:
            try:
                command = self._inbox.get(wait, self._until_warmup_s() if wait else None)
            except queue.Empty:
                return True
            # Wait for the first command only, then drain the inbox: one step serves all requests that have arrived.
            wait = False
            if command is None:
                return False
            if isinstance(command, AbortRequest):
                self._abort(command.running)
            elif isinstance(command, RunningRequest):
                self._add(command)

    def _until_warmup_s(self) -> float | None:
        """Return the seconds until background warm-up may continue; None if it is complete."""
        if not self._engine.has_warmup:
            return None
        return max(self._warmup_from_s - time.monotonic(), 0.0)

    def _add(self, live: RunningRequest) -> None:
        request_id = live.request.request_id
        try:
            other = self._live.get(request_id)
            if other is not None:
                if not (live.resumed and live.request.account == other.request.account):
                    raise RequestError("request_id", f"{request_id!r} is in use by a live request")
                if other.resumed and time.monotonic() - other.began_s < RESUME_PERIOD_S:
                    raise StreamTakenError(_LAST_EVENT, "another client resumed this stream less than a second ago")
                # The consumer of the older stream may have disconnected unnoticed.
                self._abort(other)
                other.put(StreamTakenError(_LAST_EVENT, "another client has resumed this stream"))
            self._engine.add(live.request, live.began_s)
        except (QueueFullError, RequestError) as error:
            live.put(error)
            return
        except Exception as error:
            logger.exception("%s: the engine could not take it", live.request.label)
            live.put(_failure(request_id, error))
            return
        self._live[request_id] = live
        # The empty output confirms that the engine took the request: a response may start now.
        live.put(StepOutput(request_id, (), ""))

    def _abort(self, live: RunningRequest) -> None:
        request_id = live.request.request_id
        # Otherwise it has finished, and another request may use its id.
        if self._live.get(request_id) is live:
            del self._live[request_id]
            self._engine.abort(request_id)
            self._publish(live, final=True)

    def _publish(self, live: RunningRequest, final: bool) -> None:
        """Send the tokens emitted since the last call to the tenant's other replicas."""
        request = live.request
        if self._cache_client is None or request.cache_namespace is None or not self._engine.keeps_output(request):
            return
        # The first call also sends tokens that another replica emitted: that replica may have crashed before it sent them.
        # Receivers ignore duplicates.
        if request.num_output:
            self._cache_client.publish(
                request.cache_namespace, request.text, live.published, request.output_ids[live.published :], final
            )
            live.published = request.num_output
        history = self._engine.histories.of(request.cache_namespace) if final and self._engine.histories is not None else None
        for key, tokens in [] if history is None else history.notes(request):
            if tokens.max() < self._info.vocab_size:  # in very small vocabularies a note's numbers may not be valid tokens
                self._cache_client.publish(request.cache_namespace, key, 0, tokens, True)

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            outputs = self._engine.step()
        except DeviceError:
            raise
        except Exception as error:
            logger.exception("a step failed")
            self._fail_step(error)
            return
        finally:
            self._step_began = None
        self._failed_steps = 0
        now_s, period_s = time.monotonic(), STREAM_PERIOD_S if len(outputs) >= MANY else 0.0
        for output in outputs:
            self._deliver(output, now_s, period_s)
        delivered = {output.request_id for output in outputs}
        for request_id, live in self._live.items():
            # The time of its next step is unknown, so send held output now.
            if live.held is not None and request_id not in delivered:
                live.put(StepOutput(request_id, (), ""))

    def _notify_quarantine(self, alone: Request | None) -> None:
        """Notify consumers, before a step that may crash the process, which request it computes alone."""
        live = None if alone is None else self._live.get(alone.request_id)
        before, self._alone = self._alone, live if live is not None and live.notifies_quarantine else None
        if before is self._alone:
            return
        if before is not None and self._live.get(before.request.request_id) is before:
            before.put(StepOutput(before.request.request_id, (), "", alone=False))
        if self._alone is not None:
            self._alone.put(StepOutput(self._alone.request.request_id, (), "", alone=True))
        time.sleep(NOTIFY_QUARANTINE_S)

    def _deliver(self, output: StepOutput, now_s: float, period_s: float) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return  # aborted
        self._publish(live, output.finish_reason is not None)
        if output.finish_reason is not None:
            del self._live[output.request_id]
        if not live.deliver(output, now_s, period_s):
            self._abort(live)

    def _fail_step(self, error: Exception) -> None:
        """Abort the requests of the failed step (all running ones if the step was not planned); the others continue."""
        running = [key for key, live in self._live.items() if live.request.state is RequestState.RUNNING]
        in_step = [key for key in self._engine.in_step if key in self._live] or running or list(self._live)
        for request_id in in_step:
            live = self._live.pop(request_id)
            self._engine.abort(request_id, FinishReason.ERROR)
            self._publish(live, final=True)
            live.put(_failure(request_id, error))
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise ReplicaError(f"{self._failed_steps} steps in a row failed, the last with: {one_line(error)}") from error

    def _lose_device(self, error: DeviceError) -> None:
        """Report a failed device to all requests, then end this process."""
        # May run in any thread: the engine's thread may hang.
        count, device = len(self._live), self._info.device
        if self._close(DeviceLostError(self._engine.metrics().engine, error.kind, error.reason)):
            text = "device_failed: %s on %s, %d requests move to other replicas and this process ends: %s"
            logger.critical(text, error.kind, device, count, error.reason, exc_info=error)
            # Not `_send`, which refuses commands now: the engine's thread may be waiting for one, and has to end.
            self._inbox.put(None)
            if self._end is not None:
                self._end()

    def _close(self, fault: ReplicaError) -> bool:
        """Refuse new requests and report the fault to the running ones. Return False if already closed."""
        with self._closing:
            if self._fault is not None:
                return False
            self._fault = fault
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if isinstance(command, RunningRequest):
                    command.put(_again(fault))
        # A copy: this may run in another thread than the engine's.
        for live in list(self._live.values()):
            live.put(_again(fault))
        self._live.clear()
        return True


def _again(fault: ReplicaError) -> ReplicaError:
    # A new object for each consumer: one that several tasks raise collects all their tracebacks.
    return type(fault)(*fault.args)


def _failure(request_id: str, error: Exception) -> StepOutput:
    return StepOutput(request_id, (), "", FinishReason.ERROR, f"the engine failed: {one_line(error)}")
