"""Rank that follows a leader: a model and KV slots, no drafter, no scheduler. Computes its parts of draft trees."""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from outrider.actors.lookahead.link import LINK_ERRORS, Address, Link, accept, shutdown
from outrider.actors.lookahead.messages import (
    Detached,
    EmulatedReply,
    Failure,
    Heartbeat,
    OutcomeMessage,
    Reply,
    StepMessage,
    WorkMessage,
)
from outrider.configs.slices import ParallelismOptions
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import Request, RequestState
from outrider.decoding.tree import DraftTree
from outrider.engine.accelerator import device_error
from outrider.engine.errors import DeviceError, one_line
from outrider.engine.executor import LocalExecutor, VerifyResult
from outrider.engine.forward.batch import ScheduledRequest

logger = logging.getLogger(__name__)

BEATS = 4  # per rank_timeout_s
ACCEPT_PAUSE_S = 0.5  # after a failed accept


class DisagreementError(RuntimeError):
    """Error of a rank whose committed text differs from the leader's."""


def text_digest(tokens: Int32Array) -> bytes:
    """Return 8 bytes of the BLAKE2b hash of a committed sequence, the same on every host."""
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8).digest()


class Rank:
    """Requests of one leader, and the model. Not thread-safe."""

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self._requests: dict[int, tuple[Request, frozenset[int]]] = {}

    def handle(self, message: StepMessage) -> Reply:
        """Compute a step. Raises DisagreementError if the committed text differs from the leader's, or any forward error."""
        # After an error the rank is unusable: its KV may lack tokens that the leader counts on.
        for number in message.closed:
            self._close(number)
        for one in message.opened:
            request = Request(one.request_id, one.prompt, one.params, adapter=one.adapter, http_id=one.http_id)
            request.state, request.scope, request.rope_length = RequestState.RUNNING, one.scope, one.rope_length
            self._requests[one.number] = request, frozenset(one.end_tokens)
            self._executor.expect(request)
        made = [self._work(work) for work in message.works]
        works = [work for work in made if work is not None]
        clock, device = self._executor.clock, self._executor.runner.emulated
        began, hidden_s = clock(), 0.0 if device is None else device.clock.hidden_s
        outcomes = self._executor.execute(works) if works else []
        messages = tuple(outcome_message(outcome, message.top_k) for outcome in outcomes if outcome is not None)
        compute_s = clock() - began
        if device is None:
            return Reply(message.sequence, compute_s, messages)
        return EmulatedReply(message.sequence, compute_s, messages, device.clock.wall(), device.clock.hidden_s - hidden_s)

    def forget(self, failed: bool = False) -> None:
        """Drop all requests and free their slots. After a failure, also clear the prefix cache."""
        if failed:
            self._executor.runner.cache.prefixes.clear()
        for number in list(self._requests):
            self._close(number)

    def _close(self, number: int) -> None:
        request, _ = self._requests.pop(number)
        self._executor.end(request)

    def _work(self, work: WorkMessage) -> ScheduledRequest | None:
        """Return the work of a message; None if it has no tree and all of it is already computed."""
        request, end_tokens = self._requests[work.number]
        request.commit(work.committed.tolist())
        if work.start == 0:
            request.slot, request.num_computed = self._executor.place(request, (work.slot,))
        assert request.slot == work.slot, (request.request_id, request.slot, work.slot)
        assert work.end <= request.num_tokens, (request.request_id, work.end, request.num_tokens)
        if work.digest and work.digest != text_digest(request.tokens):
            raise DisagreementError(
                f"the committed text of request {request.request_id}, {request.num_tokens} tokens, has the hash "
                f"{work.digest.hex()} at the leader and {text_digest(request.tokens).hex()} at this rank"
            )
        tree = None
        if len(work.tokens):
            sources = np.zeros(len(work.tokens), np.int8)
            tree = DraftTree(work.tokens, work.parents, sources, work.num_candidates)
            assert work.end == request.num_tokens, (request.request_id, work.end, request.num_tokens)
        start = max(work.start, request.num_computed)  # the leader does not know how many tokens this rank reused
        return ScheduledRequest(request, start, work.end, tree, end_tokens) if start < work.end else None


def outcome_message(outcome: VerifyResult, top_k: int) -> OutcomeMessage:
    """Return the message for an outcome, with the ``top_k`` likeliest next tokens of each row."""
    ranked = outcome.target.ranked(range(len(outcome.tree)), top_k) if top_k and outcome.target.has_logits else None
    return OutcomeMessage(outcome.acceptance, outcome.target.ids, ranked, outcome.logprobs)


class RankServer:
    """Server that follows the leader that joined last and sends beats to all. Turns leaders away while busy (``occupy``)."""

    def __init__(
        self,
        executor: LocalExecutor,
        secret: bytes,
        options: ParallelismOptions,
        host: str = "127.0.0.1",
        prepare: Callable[[], None] | None = None,
        device_failed: Callable[[DeviceError], object] | None = None,
    ) -> None:
        """Listen on a free port. Each computing thread calls ``prepare`` first; a new one ``device_failed``. Raises OSError."""
        self._rank, self._secret, self._options, self._prepare = Rank(executor), secret, options, prepare
        self._model_device, self._device_failed = executor.runner.model.device, device_failed
        self._device = threading.Lock()  # one step at a time, and none while busy
        self._guard = threading.Lock()  # guards the fields below
        self._links: list[Link] = []
        self._leader: Link | None = None
        self._busy = self._closed = False
        self._wake = threading.Event()
        self._listener = socket.create_server((host, 0))
        self.address: Address = self._listener.getsockname()[:2]
        for work in (self._accept, self._beat):
            threading.Thread(target=work, name=f"rank-{work.__name__.strip('_')}", daemon=True).start()

    def attach(self, busy: bool) -> None:
        """Turn leaders away from now on, or accept them again. Returns when no step of a leader is running."""
        self._busy = busy  # set before the lock is taken, so that a leader waiting for it is turned away
        self._wake.set()  # notify leaders at once
        if busy:
            with self._device:
                self._leader = None
                self._rank.forget()

    def close(self) -> None:
        """End all connections. Idempotent."""
        with self._guard:
            self._closed = True
            links = list(self._links)
        shutdown(self._listener)  # wakes the accepting thread
        self._listener.close()
        self._wake.set()
        for link in links:
            link.end()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("accepting a connection failed: %s: %s", type(error).__name__, error)  # too many files, perhaps
                time.sleep(ACCEPT_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(raw,), name="rank-leader", daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        try:
            link = accept(raw, self._secret, self._options.rank_timeout_s)
        except LINK_ERRORS as error:
            logger.warning("refused a connection: %s: %s", type(error).__name__, error)
            return
        with self._guard:
            self._links.append(link)
        self._wake.set()  # report at once whether this rank is busy
        # `close` may have copied the list of links just before this one was added.
        if self._closed:
            link.end()
        try:
            if self._prepare is not None:
                self._prepare()
            while True:
                message = link.receive(None)
                if isinstance(message, StepMessage):
                    link.send(self._answer(link, message))
        except LINK_ERRORS as error:
            if not self._closed:
                logger.info("a connection ended: %s: %s", type(error).__name__, error)
        finally:
            self._leave(link)

    def _answer(self, link: Link, message: StepMessage) -> Reply | Failure | Detached:
        with self._device:
            if message.joins and not self._busy:
                self._rank.forget()
                self._leader = link
            if self._busy or self._leader is not link:
                return Detached()
            try:
                return self._rank.handle(message)
            except Exception as error:  # any error of the model or device: the leader continues without this rank
                logger.exception("a step failed")
                self._leader = None
                self._rank.forget(failed=True)
                lost = device_error(error, self._model_device)
                if lost is not None and self._device_failed is not None:
                    # In a new thread: the callback may not return, and this one still has to send the reply.
                    threading.Thread(target=self._device_failed, args=(lost,), name="rank-device-failed", daemon=True).start()
                return Failure(one_line(error), isinstance(error, DisagreementError))

    def _leave(self, link: Link) -> None:
        link.close()
        with self._guard:
            self._links.remove(link)
        with self._device:
            if self._leader is link:
                self._leader = None
                self._rank.forget()

    def _beat(self) -> None:
        while not self._closed:
            with self._guard:
                links = list(self._links)
            for link in links:
                try:
                    link.send(Heartbeat(self._busy))
                except LINK_ERRORS:  # the link's own thread notices and removes it
                    link.end()
            self._wake.wait(self._options.rank_timeout_s / BEATS)
            self._wake.clear()
