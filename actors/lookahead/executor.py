"""Executor whose ranks share the draft trees of a step (arXiv 2402.02057, section 3.4)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from outrider.actors.description import GroupState
from outrider.actors.lookahead.link import LINK_ERRORS, Link
from outrider.actors.lookahead.membership import LostRank, RankMembership
from outrider.actors.lookahead.messages import EmulatedReply, OutcomeMessage, Reply
from outrider.actors.lookahead.rank import outcome_message
from outrider.actors.lookahead.rank_state import RankKVState, RankKVStates, RankState, SentStep
from outrider.actors.lookahead.width import WidthChoice, WidthChoices
from outrider.configs.slices import ParallelismOptions
from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import TargetRows
from outrider.decoding.request import Request
from outrider.decoding.tree import Acceptance, DraftTree, TreePart
from outrider.decoding.tree_rows import compile_partition
from outrider.engine.errors import one_line
from outrider.engine.executor import LocalExecutor, VerifyResult
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.rope import LengthRope


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times and counts of one group step. Rank 0, the leader, comes first."""

    rank_s: tuple[float, ...]  # compute seconds of each rank
    exchange_s: float  # step seconds beyond the slowest rank's compute: partitioning, messages, waiting, merging
    rows: tuple[int, ...]  # rows computed by each rank
    recomputed: tuple[int, ...]  # of these, tokens that other ranks had computed before
    emitted: int  # tokens


@dataclass(frozen=True, slots=True)
class LeaderStep:
    """Results of the leader's own part, one entry per work."""

    held: list[RankKVState]
    outcomes: list[VerifyResult | None]
    said: list[OutcomeMessage | None]  # outcomes in the form of a rank's reply
    seconds: float
    rows: int
    recomputed: int


class LookaheadParallelExecutor:
    """``Executor`` whose ranks verify disjoint branches of the same draft trees.

    Each step, ``DraftTree.partition`` distributes the branches; every rank computes and verifies its part, and the longest
    accepted walk is emitted. ``execute`` is called by one thread.

    Example: root 7 with the branches 1 2 and 3, two ranks. The leader computes 7 1 2, the other rank 7 3. The target says 3 after
    7 and 5 after 3: the leader's walk emits 3, the other's emits 3 5 and wins. The leader's next step begins with 3 5, of which
    it lacks the KV, and the other's with 5.
    """

    # Differences from the published code: only the leader drafts; one message per step goes each way instead of four collectives;
    # ranks join and leave; several requests share a step; sampled requests are supported, because a choice depends only on seed
    # and position.
    # Messages hold token ids and row numbers, no activations and no KV: a rank recomputes tokens accepted elsewhere as a longer
    # spine of its next step. `WidthChoice` decides by measured speed whether a step is shared; if not, the leader computes the
    # whole tree and the ranks only the accepted tokens.
    check_steps = 64  # steps between comparisons of the committed texts' hashes

    def __init__(self, local: LocalExecutor, options: ParallelismOptions, chunk: int) -> None:
        self._local, self._adaptive = local, options.adaptive
        self._leader_states = RankKVStates()  # requests as the leader holds them
        self._membership = RankMembership(options, chunk)
        self._lock = threading.Lock()  # one step at a time; links are only read with it
        self._steps = self._divergences = 0
        self._exchange_s = 0.0
        self._exchange_bytes = 0
        self._choices = WidthChoices()
        self._choice: WidthChoice | None = None  # for the next step
        self._decoding, self._began = 1, 0.0  # requests of the last step that emitted tokens, and start time of the step
        self.times: deque[StepTimes] = deque(maxlen=4096)  # latest steps that emitted tokens
        compile_partition()

    def begin_step(self) -> int:
        """See ``Executor``. Apply membership changes and choose how many ranks share the step."""
        if self._membership.changes:
            with self._lock:
                self._membership.change()
        # A copy: `tend` may remove a rank concurrently.
        ranks = 1 + sum(not rank_state.refilling for rank_state in self._membership.rank_states.copy().values())
        self._choice = self._choices.of(ranks, self._decoding) if self._adaptive and ranks > 1 else None
        self._began = self._local.clock()
        return 1 if self._choice is not None and not self._choice.shared else ranks

    @property
    def rope(self) -> LengthRope | None:
        """See ``Executor``."""
        return self._local.rope

    @property
    def slots(self) -> int:
        """See ``Executor``. All ranks have the same number."""
        return self._local.slots

    def add_rank(self, rank: int, link: Link) -> None:
        """Add a rank, from any thread. It first receives the running requests, then shares the steps."""
        self._membership.changes.append((rank, link))

    def remove_rank(self, rank: int) -> None:
        """Remove a rank from the next step on, from any thread. Its link stays open. Does nothing for an unknown rank."""
        self._membership.changes.append((rank, None))

    def take_lost(self) -> list[LostRank]:
        """Return the ranks lost since the last call, from any thread."""
        lost = []
        while self._membership.lost:
            lost.append(self._membership.lost.popleft())
        return lost

    def state(self, world_size: int) -> GroupState:
        """Return the group's composition, from any thread. ``world_size`` is the number of ranks that it should have."""
        membership = self._membership
        rank_states = sorted(membership.rank_states.copy().items())
        return GroupState(
            world_size=world_size,
            ready=(0, *(rank for rank, rank_state in rank_states if not rank_state.refilling)),
            refilling=tuple(rank for rank, rank_state in rank_states if rank_state.refilling),
            losses=membership.losses,
            last_loss=membership.last_loss,
            divergences=self._divergences,
            disagreements=membership.disagreements,
            exchange_s=self._exchange_s,
            exchange_bytes=self._exchange_bytes,
        )

    def check_liveness(self) -> None:
        """Detect ranks lost between steps, from any thread. Call it a few times per second."""
        # Not while a step runs: it reads the links itself, and waiting for it would block the supervisor's thread.
        if self._lock.acquire(blocking=False):
            try:
                self._membership.change()
                self._membership.check_liveness()
                if not self._leader_states.live:
                    self._membership.mark_ready()
            finally:
                self._lock.release()

    def place(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """See ``Executor``. Only the leader's reusable tokens count; each rank checks its own."""
        with self._lock:
            slot, computed = self._local.place(request, free)
            self._leader_states.place(request, computed)
        return slot, computed

    def end(self, request: Request) -> None:
        """See ``Executor``. The ranks learn of it with the next message."""
        with self._lock:
            self._local.end(request)
            for holdings in (
                self._leader_states,
                *(rank_state.kv_states for rank_state in self._membership.rank_states.values()),
            ):
                holdings.end(request)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """See ``Executor``."""
        with self._lock:
            self._local.check_integrity(running)
            for holdings in (
                self._leader_states,
                *(rank_state.kv_states for rank_state in self._membership.rank_states.values()),
            ):
                holdings.check_integrity(running)

    def execute(self, works: Sequence[ScheduledRequest], top_k: int = 0) -> list[VerifyResult | None]:
        """See ``Executor``."""
        with self._lock:
            began, hidden_s = self._local.clock(), self._hidden_s()
            self._membership.change()
            rank_states = self._membership.ready(works)
            moved = _moved(rank_states)
            shared = self._choice is None or self._choice.shared
            parts = [
                [] if work.tree is None else _parts(work.tree, 1 + len(rank_states), shared and work.request.choices is None)
                for work in works
            ]
            self._steps += 1
            partitioned = self._partition(works, parts, rank_states, top_k)
            own = self._compute(works, [part[0].tree if part else None for part in parts], top_k if rank_states else 0)
            replies = self._gather(
                [rank_state for rank_state, partition in partitioned.items() if any(partition.awaited)], hidden_s
            )
            outcomes = self._merge(works, parts, own, partitioned, replies)
            emitted = sum(outcome.acceptance.count for outcome in outcomes if outcome is not None)
            if emitted:
                self._exchange_bytes += _moved(rank_states) - moved
                self._judge(works, emitted)
                self._time(
                    began, emitted, own, [(reply.compute_s, partitioned[rank_state]) for rank_state, reply in replies.items()]
                )
            return outcomes

    # ---- below: with the lock held --------------------------------------------------------------------------------------------

    def _partition(
        self, works: Sequence[ScheduledRequest], parts: Sequence[list[TreePart]], rank_states: Sequence[RankState], top_k: int
    ) -> dict[RankState, SentStep]:
        compare = self._steps % self.check_steps == 0
        partitioned = {}
        for at, rank_state in enumerate(rank_states, start=1):
            try:
                partitioned[rank_state] = rank_state.send_step(
                    works, [part[at] if part else None for part in parts], top_k, compare
                )
            except LINK_ERRORS as error:
                # Nothing is recomputed: every part contains the root, so the other ranks' results are still a valid step.
                self._membership.lose(rank_state, f"sending a message failed: {one_line(error)}")
        return partitioned

    def _compute(self, works: Sequence[ScheduledRequest], trees: Sequence[DraftTree | None], top_k: int) -> LeaderStep:
        began = self._local.clock()
        held = [self._leader_states.align(work) for work in works]
        mine = [
            ScheduledRequest(work.request, has.computed, work.end, tree, work.end_tokens)
            for work, has, tree in zip(works, held, trees, strict=True)
        ]
        rows = sum(work.end - work.start + (0 if work.tree is None else len(work.tree) - 1) for work in mine)
        recomputed = sum(work.start - own.start for work, own in zip(works, mine, strict=True))
        outcomes = self._local.execute(mine)
        said = [None if outcome is None else outcome_message(outcome, top_k) for outcome in outcomes]
        for has, work, outcome in zip(held, mine, outcomes, strict=True):
            has.computed = work.end + (0 if outcome is None else len(outcome.acceptance.rows))
        return LeaderStep(held, outcomes, said, self._local.clock() - began, rows, recomputed)

    def _hidden_s(self) -> float:
        device = self._local.runner.emulated
        return 0.0 if device is None else device.clock.hidden_s

    def _gather(self, rank_states: Sequence[RankState], hidden_s: float) -> dict[RankState, Reply]:
        """Return the replies, and book the wait for emulated devices; ``hidden_s`` is the leader's when it sent the step."""
        device = self._local.runner.emulated
        if device is None:
            return self._membership.gather(rank_states)
        began = device.clock.wall()
        replies = self._membership.gather(rank_states)
        told = [(reply.ended_s, reply.hidden_s) for reply in replies.values() if isinstance(reply, EmulatedReply)]
        device.clock.join(hidden_s, began, told)
        return replies

    def _merge(
        self,
        works: Sequence[ScheduledRequest],
        parts: Sequence[list[TreePart]],
        own: LeaderStep,
        partitioned: dict[RankState, SentStep],
        replies: dict[RankState, Reply],
    ) -> list[VerifyResult | None]:
        outcomes_by_rank = {rank_state: iter(reply.outcomes) for rank_state, reply in replies.items()}
        outcomes: list[VerifyResult | None] = []
        for at, (work, part, mine) in enumerate(zip(works, parts, own.outcomes, strict=True)):
            # Only the leader has a branch of this tree, so no other rank's outcome is awaited.
            if mine is None or all(len(one.tree) == 1 for one in part[1:]):
                outcomes.append(mine)
                continue
            said = own.said[at]
            assert said is not None and work.tree is not None
            shares = [RankResult(part[0], own.held[at], said)]
            for rank_state, others in outcomes_by_rank.items():
                share = partitioned[rank_state].awaited[at]
                if share is not None:
                    shares.append(RankResult(share, rank_state.kv_states.align(work), next(others)))
            merged, left_out = merge_results(work.tree, work.end, shares)
            self._divergences += left_out
            outcomes.append(merged)
        return outcomes

    def _judge(self, works: Sequence[ScheduledRequest], emitted: int) -> None:
        """Record the step's speed for the width choice. Steps that also prefill are not recorded."""
        self._decoding = len(works)
        if self._choice is not None and all(work.tree is not None and work.end - work.start == 1 for work in works):
            self._choice.record_step(emitted, self._local.clock() - self._began)

    def _time(self, began: float, emitted: int, own: LeaderStep, others: Sequence[tuple[float, SentStep]]) -> None:
        rank_s = (own.seconds, *(seconds for seconds, _ in others))
        rows = (own.rows, *(partition.rows for _, partition in others))
        recomputed = (own.recomputed, *(partition.recomputed for _, partition in others))
        exchange_s = self._local.clock() - began - max(rank_s)
        self._exchange_s += exchange_s
        self.times.append(StepTimes(rank_s, exchange_s, rows, recomputed, emitted))


def _moved(rank_states: Sequence[RankState]) -> int:
    return sum(rank_state.link.sent + rank_state.link.received for rank_state in rank_states)


def _parts(tree: DraftTree, ranks: int, shared: bool) -> list[TreePart]:
    """Return each rank's part. If the step is not shared, the leader gets the whole tree and the others only its root."""
    if shared:
        return tree.partition(ranks)
    root = np.zeros(1, np.int32)
    return [*tree.partition(1), *([TreePart(root, tree.take(root))] * (ranks - 1))]


@dataclass(frozen=True, slots=True)
class RankResult:
    """Rank's part of a tree, and its outcome."""

    part: TreePart
    held: RankKVState  # the request as the rank holds it
    said: OutcomeMessage

    def tokens(self) -> list[int]:
        """Return the tokens that the rank's walk emits."""
        walked = self.said.acceptance
        return [*self.part.tree.tokens[list(walked.rows)].tolist(), walked.next_token]


def merge_results(tree: DraftTree, end: int, shares: Sequence[RankResult]) -> tuple[VerifyResult, int]:
    """Return the outcome of the longest walk (ties: lowest rank), and the number of walks dropped as different from rank 0's.

    ``shares`` are of the ranks that replied, rank 0 first. Sets their computed counts to ``end`` plus the prefix that is kept.
    """
    walks = [share.tokens() for share in shares]
    # Ranks on different processors, or with engine.exact=rounding, may resolve a near-tie differently: the leader's token counts.
    same = [at for at, walk in enumerate(walks) if walk[0] == walks[0][0]]
    best = max(same, key=lambda at: (len(walks[at]), -at))
    winner, longest = shares[best].said, walks[best]
    for share, walk in zip(shares, walks, strict=True):
        same_drafts = takewhile(lambda pair: pair[0] == pair[1], zip(walk[:-1], longest[:-1], strict=False))
        # Of a rank's own walk, only the drafts that the longest walk shares have KV of the committed text.
        share.held.computed = end + sum(1 for _ in same_drafts)
    # Rows of lost ranks were not computed: the outcome's tree is cut to the others.
    kept = np.zeros(len(tree), np.bool_)
    for share in shares:
        kept[share.part.rows] = True
    places = None
    if not kept.all():
        tree = tree.take(np.flatnonzero(kept).astype(np.int32))
        places = np.cumsum(kept, dtype=np.int32) - 1
    target = _target(len(tree), shares, places)
    rows = shares[best].part.rows[list(winner.acceptance.rows)]
    accepted = tuple((rows if places is None else places[rows]).tolist())
    return VerifyResult(tree, Acceptance(accepted, winner.acceptance.next_token), target, winner.logprobs), len(shares) - len(
        same
    )


def _target(count: int, shares: Sequence[RankResult], places: Int32Array | None) -> TargetRows:
    """Return the target's tokens for each row."""
    ids = np.empty(count, np.int32)
    own = shares[0].said.ranked
    ranked = None if own is None else np.empty((count, own.shape[1]), np.int32)
    # Lowest rank last: if several ranks computed a row, its result overwrites theirs.
    for share in reversed(shares):
        rows = share.part.rows if places is None else places[share.part.rows]
        ids[rows] = share.said.ids
        if ranked is not None:
            assert share.said.ranked is not None
            ranked[rows] = share.said.ranked
    return TargetRows(ids, None, ranked)
