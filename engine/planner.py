"""Plan of the next step: which requests take part, and with which draft trees."""

from __future__ import annotations

import time
from collections.abc import Sequence

from decoding.budget.latency import StepLoad
from decoding.drafters.base import Drafter
from decoding.request import Request
from decoding.tree import DraftTree
from decoding.verify.grammar import permitted
from engine.forward.batch import Work
from engine.forward.rope import LengthRope
from engine.loading.model_info import ModelInfo
from engine.scheduling.scheduler import Scheduler, Share
from engine.text.outputs import Outputs

MASK_RESTS = 20.0
LONG_S = 0.05
PROBATION_S = 60.0


class StepPlanner:
    """Schedules, then has those that decode drafted for, and gives the rows that are left to prefills.

    Requests with a grammar whose masks took too long in their last step (``Grammar.slow_s``) are not drafted for. One of them
    takes part in a step, in turns, and where there are other requests none for ``MASK_RESTS`` times as long as its masks took, so
    that slow masks hold up other requests seldom, however long each takes. After masks of ``LONG_S`` all requests of the account
    that have a grammar are treated so for ``PROBATION_S``: the next one may be as slow, and nothing ends a mask that has begun.
    """

    def __init__(
        self, scheduler: Scheduler, drafter: Drafter, info: ModelInfo, outputs: Outputs, rope: LengthRope | None = None
    ) -> None:
        self._scheduler, self._drafter, self._info, self._outputs, self._rope = scheduler, drafter, info, outputs, rope
        self._propose_s: float | None = None  # of the last step
        self._bound: list[Request] = []  # those with a grammar of the last step
        self._slow_until_s: dict[str, float] = {}  # by account, all of whose requests with a grammar count as slow
        self._last_slow = -1  # arrival of the last one that had its turn
        self._rest_until_s = 0.0  # when slow masks are computed again

    def plan(self, width: int) -> list[Work]:
        """The work of the next step, which ``width`` ranks will share; empty when there is nothing to do."""
        self._drafter.ranks = width
        shares, now = self._scheduler.schedule(width), time.perf_counter()
        left_out = self._left_out([share.request for share in shares], now)
        drafted = [share for share in shares if share.draft_rows > 0 and not self._is_slow(share.request)]
        drafts = self._draft(drafted, _load(shares, self._propose_s), now)
        rows = sum(-(-(len(tree.tokens) - 1) // width) for tree in drafts.values())
        works = []
        for share in self._scheduler.top_up(shares, rows):
            request = share.request
            if request.request_id in left_out:
                continue
            if request.admitted_s is None:
                request.admitted_s = now
            tree = None
            if share.end == request.num_tokens:
                tree = drafts.get(request.request_id) or DraftTree.chain(request.root, ())
            # A root alone: every rule is the target's own choice.
            rule = None if tree is None or len(tree) == 1 else tree.rule
            works.append(Work(request, request.num_computed, share.end, tree, self._outputs.end_tokens(request), rule))
        self._bound = [work.request for work in works if work.request.grammar is not None]
        return works

    def _left_out(self, requests: Sequence[Request], now_s: float) -> set[str]:
        """Ids of the requests with slow masks that do not take part in a step of these requests."""
        took_s = 0.0  # by slow masks of the last step
        for request in self._bound:
            if request.grammar is not None and request.grammar.slow_s > 0.0:
                took_s += request.grammar.slow_s
                if request.grammar.slow_s > LONG_S:
                    self._slow_until_s[request.account] = now_s + PROBATION_S
        if took_s > 0.0:
            self._rest_until_s = now_s + MASK_RESTS * took_s
        self._slow_until_s = {account: until_s for account, until_s in self._slow_until_s.items() if until_s > now_s}
        slow = [request for request in requests if self._is_slow(request)]
        chosen = None
        if slow and (now_s >= self._rest_until_s or len(slow) == len(requests)):
            last = self._last_slow
            chosen = min(slow, key=lambda request: (request.arrival <= last, request.arrival))
            self._last_slow = chosen.arrival
        return {request.request_id for request in slow if request is not chosen}

    def _is_slow(self, request: Request) -> bool:
        return request.grammar is not None and (request.grammar.slow_s > 0.0 or request.account in self._slow_until_s)

    def _draft(self, shares: Sequence[Share], load: StepLoad, began_s: float) -> dict[str, DraftTree]:
        """Trees by request."""
        trees = self._drafter.propose([share.request for share in shares], [share.draft_rows for share in shares], load)
        propose_s = self._propose_s = time.perf_counter() - began_s
        drafts: dict[str, DraftTree] = {}
        for share, tree in zip(shares, trees, strict=True):
            request = share.request
            request.stats.propose_s += propose_s
            drafts[request.request_id] = tree
            if len(tree.tokens) == 1:
                continue
            room = self._info.max_model_len - request.num_tokens
            if self._rope is not None:
                room = min(room, self._rope.depth(request))
            kept = drafts[request.request_id] = tree.clipped(
                share.draft_rows + 1, min(request.remaining - 1, room), self._info.vocab_size, room
            )
            kept.rule = tree.rule
            if kept.rule is None and request.grammar is not None:  # a rule counts on all that was drawn
                request.grammar.catch_up(request.output_ids)
                drafts[request.request_id] = permitted(kept, request.grammar)
        return drafts


def _load(shares: Sequence[Share], propose_s: float | None) -> StepLoad:
    """What a step computes before anything is drafted; it took so long to draft for the one before."""
    rows = context = prefill_rows = 0
    for share in shares:
        request = share.request
        computed = share.end - request.num_computed
        rows += computed
        context += request.num_computed
        if request.num_computed < request.num_tokens - 1:
            prefill_rows += computed
    return StepLoad(len(shares), rows, context, prefill_rows, propose_s)
