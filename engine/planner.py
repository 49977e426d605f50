"""Plan of the next step: which requests take part, and with which draft trees."""

from __future__ import annotations

import math
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
from engine.text.grammar import MASK_S
from engine.text.outputs import Outputs


class StepPlanner:
    """Schedules requests, has draft trees proposed for those that decode, and gives the remaining rows to prefills.

    Requests whose grammar masks took too long in their last step (``Grammar.slow_s``) get no drafts and take turns, one per step.
    After each turn they pause while other requests run, so that slow masks take about ``MASK_S`` per step on average.
    """

    def __init__(
        self, scheduler: Scheduler, drafter: Drafter, info: ModelInfo, outputs: Outputs, rope: LengthRope | None = None
    ) -> None:
        self._scheduler, self._drafter, self._info, self._outputs, self._rope = scheduler, drafter, info, outputs, rope
        self._propose_s: float | None = None  # seconds of drafting in the last step
        self._slow: Request | None = None  # slow request that took part in the last step
        self._last_slow = -1  # arrival number of the last slow request that had its turn
        self._rest = 0  # steps until a slow request may take part again

    def plan(self, width: int) -> list[Work]:
        """Return the work of the next step, which ``width`` ranks will share; empty if there is nothing to do."""
        self._drafter.ranks = width
        shares, now = self._scheduler.schedule(width), time.perf_counter()
        left_out = self._left_out([share.request for share in shares])
        drafted = [share for share in shares if share.draft_rows > 0 and not _is_slow(share.request)]
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
            # With a root alone, every rule gives the target's own choice.
            rule = None if tree is None or len(tree) == 1 else tree.rule
            works.append(Work(request, request.num_computed, share.end, tree, self._outputs.end_tokens(request), rule))
        return works

    def _left_out(self, requests: Sequence[Request]) -> set[str]:
        """Return the ids of slow requests that skip this step."""
        slow = [request for request in requests if _is_slow(request)]
        if self._slow is not None and self._slow.grammar is not None:  # the time of its masks is known by now
            self._rest = math.ceil(self._slow.grammar.slow_s / MASK_S)
        self._slow = None
        if self._rest > 0 and len(slow) < len(requests):
            self._rest -= 1
        elif slow:
            last = self._last_slow
            self._slow = min(slow, key=lambda request: (request.arrival <= last, request.arrival))
            self._last_slow = self._slow.arrival
        return {request.request_id for request in slow if request is not self._slow}

    def _draft(self, shares: Sequence[Share], load: StepLoad, began_s: float) -> dict[str, DraftTree]:
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
            if kept.rule is None and request.grammar is not None:  # a rule needs all drafted tokens
                request.grammar.catch_up(request.output_ids)
                drafts[request.request_id] = permitted(kept, request.grammar)
        return drafts


def _is_slow(request: Request) -> bool:
    return request.grammar is not None and request.grammar.slow_s > 0.0


def _load(shares: Sequence[Share], propose_s: float | None) -> StepLoad:
    """Return the load of a step before drafting; ``propose_s`` are the seconds of drafting for the step before."""
    rows = context = prefill_rows = 0
    for share in shares:
        request = share.request
        computed = share.end - request.num_computed
        rows += computed
        context += request.num_computed
        if request.num_computed < request.num_tokens - 1:
            prefill_rows += computed
    return StepLoad(len(shares), rows, context, prefill_rows, propose_s)
