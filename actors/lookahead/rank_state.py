"""Leader's record of a rank: the tokens of each request that it holds, and pending replies."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.actors.lookahead.link import Link
from outrider.actors.lookahead.messages import OpenMessage, StepMessage, WorkMessage
from outrider.actors.lookahead.rank import text_digest
from outrider.decoding.arrays import Int32Array
from outrider.decoding.request import Request, RequestState
from outrider.decoding.tree import DraftTree, TreePart
from outrider.engine.forward.batch import ScheduledRequest

READY_LAG = 32  # a rank that lacks at most this many tokens of every request shares steps
_LAZY_LAG = 16  # a rank without a part of a tree computes new tokens in groups of this size
_NONE = np.zeros(0, np.int32)
_NO_TREE = (_NONE, _NONE, 0)


@dataclass(frozen=True, slots=True)
class SentStep:
    """Part of a step that was sent to a rank."""

    awaited: list[TreePart | None]  # for each work, the part whose outcome is awaited
    rows: int
    recomputed: int  # of these, tokens that other ranks had computed before


@dataclass(slots=True)
class RankKVState:
    """Request as one rank holds it."""

    request: Request
    number: int  # identifies it in messages
    computed: int = 0  # tokens whose KV the rank has
    preemptions: int = 0  # the request's preemptions when ``computed`` was last valid
    rope_length: int = 0  # the request's reach (RoPE length) when its number was assigned
    num_sent: int = -1  # output tokens sent to the rank; -1: the rank does not know the request yet


class RankKVStates:
    """Requests that one rank holds."""

    def __init__(self) -> None:
        self._states: dict[str, RankKVState] = {}  # by id of a running request
        self._numbers = itertools.count()
        self._ended: list[int] = []  # numbers of finished requests that the rank still knows

    def align(self, work: ScheduledRequest) -> RankKVState:
        """Return the record of a work's request, with nothing computed if the request is new or was preempted."""
        held = self._of(work.request)
        held.computed = min(held.computed, work.start)
        return held

    def place(self, request: Request, computed: int) -> None:
        """Record that a request got a slot in which ``computed`` tokens are computed."""
        self._of(request).computed = computed

    def _of(self, request: Request) -> RankKVState:
        held = self._states.get(request.request_id)
        if held is not None and held.rope_length != request.rope_length:  # recomputed: a new request to the rank
            self.end(request)
            held = None
        if held is None:
            held = self._states[request.request_id] = RankKVState(request, next(self._numbers), rope_length=request.rope_length)
        if held.preemptions != request.stats.preemptions:  # the slot has changed, or other requests used it
            held.computed, held.preemptions = 0, request.stats.preemptions
        return held

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Assert that no request has more computed tokens than tokens, and that finished requests were released."""
        alive = {request.request_id: request for request in running}
        for name, held in self._states.items():
            request = held.request
            assert alive.get(name) is request or request.state is RequestState.WAITING, name
            assert held.computed <= request.num_tokens, (name, held.computed, request.num_tokens)

    @property
    def live(self) -> bool:
        """Return whether any request is held."""
        return bool(self._states)

    def end(self, request: Request) -> None:
        """Release a finished request, if it is held."""
        held = self._states.pop(request.request_id, None)
        if held is not None and held.num_sent >= 0:
            self._ended.append(held.number)

    def take_ended(self) -> tuple[int, ...]:
        """Return and clear the numbers of finished requests that the rank knows."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def clear(self) -> None:
        """Release all requests."""
        for held in list(self._states.values()):
            self.end(held.request)


class RankState:
    """One rank of the group, from the leader's side."""

    # It is *refilling* until it holds the running requests: it gets their tokens in chunks, one message at a time, whose replies
    # no step waits for. Sent tokens count as computed, because a rank handles its messages in order.

    def __init__(self, rank: int, link: Link, sequences: Iterator[int]) -> None:
        self.rank, self.link, self._sequences = rank, link, sequences
        self.kv_states = RankKVStates()
        self.refilling = True
        self.unanswered: deque[tuple[int, float]] = deque()  # (sequence number, time of sending)
        self._joins = True

    def lag(self, works: Sequence[ScheduledRequest]) -> int:
        """Return the most tokens of one request that the group has computed and this rank has not."""
        lag = 0
        for work in works:
            lag = max(lag, work.start - self.kv_states.align(work).computed)
        return lag

    def refill(self, works: Sequence[ScheduledRequest], rows: int) -> None:
        """Send the next chunk of at most ``rows`` rows."""
        chunks = []
        for work in works:
            held = self.kv_states.align(work)
            target = work.end if work.tree is None else work.end - 1  # the root is computed by the next step
            end = min(target, held.computed + rows)
            if end > held.computed:
                rows -= end - held.computed
                chunks.append((work, held, end))
        self._send([self._chunk(work, held, end) for work, held, end in chunks], chunks, 0)

    def send_step(
        self, works: Sequence[ScheduledRequest], parts: Sequence[TreePart | None], top_k: int, compare: bool
    ) -> SentStep:
        """Send this rank's part of a step. Raises the errors of ``Link.send``."""
        messages: list[WorkMessage] = []
        partitioned: list[tuple[ScheduledRequest, RankKVState, int]] = []
        awaited: list[TreePart | None] = []
        rows = recomputed = 0
        for work, part in zip(works, parts, strict=True):
            held = self.kv_states.align(work)
            share = part if part is not None and len(part.tree) > 1 else None
            awaited.append(share)
            end = work.end - 1 if part is not None and share is None else work.end  # no outcome is needed for a root alone
            if share is None and end - held.computed < (1 if part is None else _LAZY_LAG):
                continue
            rows += end - held.computed + (0 if share is None else len(share.tree) - 1)
            recomputed += work.start - held.computed
            partitioned.append((work, held, end))
            messages.append(self._chunk(work, held, end, None if share is None else share.tree, compare))
        if messages:
            self._send(messages, partitioned, top_k)
        return SentStep(awaited, rows, recomputed)

    def leave(self) -> None:
        """Release the rank. Raises the errors of ``Link.send``."""
        self.kv_states.clear()
        ended = self.kv_states.take_ended()
        # A rank that never got a message of this leader knows none of its requests.
        if not self._joins:
            self.link.send(StepMessage(next(self._sequences), (), ended, (), 0))

    def _chunk(
        self, work: ScheduledRequest, held: RankKVState, end: int, tree: DraftTree | None = None, compare: bool = False
    ) -> WorkMessage:
        request = work.request
        assert request.slot is not None
        committed: Int32Array = request.output_ids[max(0, held.num_sent) :]
        digest = text_digest(request.tokens) if compare else b""
        tokens, parents, candidates = _NO_TREE if tree is None else (tree.tokens, tree.parents, tree.num_candidates)
        return WorkMessage(held.number, request.slot, held.computed, end, committed, tokens, parents, candidates, digest)

    def _send(
        self, messages: Sequence[WorkMessage], partitioned: Sequence[tuple[ScheduledRequest, RankKVState, int]], top_k: int
    ) -> None:
        opened = tuple(
            OpenMessage(
                held.number,
                work.request.request_id,
                work.request.prompt_ids,
                work.request.params,
                tuple(work.end_tokens),
                work.request.scope,
                work.request.adapter,
                work.request.rope_length,
                work.request.http_id,
            )
            for work, held, _ in partitioned
            if held.num_sent < 0
        )
        for work, held, end in partitioned:
            held.computed, held.num_sent = end, work.request.num_output
        sequence = next(self._sequences)
        self.unanswered.append((sequence, time.monotonic()))
        self.link.send(StepMessage(sequence, opened, self.kv_states.take_ended(), tuple(messages), top_k, self._joins))
        self._joins = False
