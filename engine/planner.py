"""Plan of the next step: which requests take part, and with which draft trees."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.request import Request
from outrider.decoding.tree import DraftTree, permitted
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.rope import LengthRope
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.scheduling.scheduler import RowAllotment, Scheduler
from outrider.engine.text.outputs import Outputs

MASK_RESTS = 20.0  # pause after slow masks, relative to their duration
LONG_S = 0.05  # duration of one request's masks in a step that puts its account on probation
PROBATION_S = 60.0


class StepPlanner:
    """Schedules requests, has draft trees proposed for those that decode, and gives the remaining rows to prefills.

    Requests whose grammar masks took too long in their last step (``Grammar.slow_s``) get no drafts and take turns, one per step.
    After each turn they pause while other requests run, for ``MASK_RESTS`` times the duration of the masks. After masks of
    ``LONG_S`` all requests of the account that have a grammar are treated so for ``PROBATION_S``: a mask cannot be interrupted,
    and the next request may be as slow.
    """

    def __init__(
        self, scheduler: Scheduler, drafter: Drafter, info: ModelInfo, outputs: Outputs, rope: LengthRope | None = None
    ) -> None:
        self._scheduler, self._drafter, self._info, self._outputs, self._rope = scheduler, drafter, info, outputs, rope
        self._propose_s: float | None = None  # seconds of drafting in the last step
        self._constrained: list[Request] = []  # requests with a grammar in the last step
        self._probation_until_s: dict[str, float] = {}  # by account: end of its probation
        self._last_slow = -1  # arrival number of the last slow request that had its turn
        self._rest_until_s = 0.0  # end of the pause

    def plan(self, width: int) -> list[ScheduledRequest]:
        """Return the work of the next step, which ``width`` ranks will share; empty if there is nothing to do."""
        self._drafter.ranks = width
        shares, now = self._scheduler.schedule(width), time.perf_counter()
        left_out = self._left_out([share.request for share in shares], now)
        drafted = [share for share in shares if share.draft_rows > 0 and not self._is_slow(share.request)]
        drafts = self._draft(drafted, step_load(shares, self._propose_s), now)
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
            works.append(
                ScheduledRequest(request, request.num_computed, share.end, tree, self._outputs.end_tokens(request), rule)
            )
        self._constrained = [work.request for work in works if work.request.grammar is not None]
        return works

    def _left_out(self, requests: Sequence[Request], now_s: float) -> set[str]:
        """Return the ids of slow requests that skip this step."""
        took_s = 0.0  # duration of the slow masks of the last step
        for request in self._constrained:
            if request.grammar is not None and request.grammar.slow_s > 0.0:
                took_s += request.grammar.slow_s
                if request.grammar.slow_s > LONG_S:
                    self._probation_until_s[request.account] = now_s + PROBATION_S
        if took_s > 0.0:
            self._rest_until_s = now_s + MASK_RESTS * took_s
        self._probation_until_s = {account: until_s for account, until_s in self._probation_until_s.items() if until_s > now_s}
        slow = [request for request in requests if self._is_slow(request)]
        chosen = None
        if slow and (now_s >= self._rest_until_s or len(slow) == len(requests)):
            last = self._last_slow
            chosen = min(slow, key=lambda request: (request.arrival <= last, request.arrival))
            self._last_slow = chosen.arrival
        return {request.request_id for request in slow if request is not chosen}

    def _is_slow(self, request: Request) -> bool:
        return request.grammar is not None and (request.grammar.slow_s > 0.0 or request.account in self._probation_until_s)

    def _draft(self, shares: Sequence[RowAllotment], load: StepLoad, began_s: float) -> dict[str, DraftTree]:
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


def step_load(shares: Sequence[RowAllotment], propose_s: float | None) -> StepLoad:
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
