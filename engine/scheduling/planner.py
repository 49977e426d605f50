"""Plan of the next step: which requests take part, with which draft trees, and in which KV slots."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter
from outrider.decoding.request import Request, cache_namespace_of
from outrider.decoding.sources.history import Histories
from outrider.decoding.sources.text_keys import request_of
from outrider.decoding.tree import DraftTree, permitted
from outrider.engine.emulation.device import EmulatedDevice
from outrider.engine.executor import Executor
from outrider.engine.forward.batch import ScheduledRequest
from outrider.engine.forward.rope import LengthRope
from outrider.engine.loading.model_info import ModelInfo
from outrider.engine.scheduling.scheduler import RowAllotment, Scheduler
from outrider.engine.text.outputs import Outputs

MASK_RESTS = 20.0  # pause after slow masks, relative to their duration
LONG_S = 0.05  # duration of one request's masks in a step that puts its account on probation
PROBATION_S = 60.0


class SlotPlacement:
    """Placement of the requests of one engine into KV slots, with prefix-cache statistics."""

    def __init__(self, executor: Executor, memory: Histories | None, reuses: bool) -> None:
        self._executor, self._memory, self._reuses = executor, memory, reuses
        self._engine = uuid.uuid4().hex  # a rank may serve several engines with unrelated editions
        self._scopes: dict[str, tuple[object, int]] = {}  # by tenant: edition and its number
        self.queries = self.hits = 0  # tokens of admitted requests with a scope; reused ones of these

    def place(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """Return the slot for a request, one of ``free``, and the number of its tokens computed there (``Executor.place``)."""
        # A request with a slot is placed in that slot alone: to copy what others computed meanwhile, or because it crosses.
        if request.slot is None or self.crosses(request):
            rope = self._executor.rope
            request.rope_length = 0 if rope is None else rope.rope_length(request)
            request.scope = self._scope(request)
            if request.scope is not None and request.rope_length:
                # KV computed with other RoPE frequencies belongs to another scope.
                request.scope += f"/{request.rope_length}"
        slot, computed = self._executor.place(request, free)
        assert slot in free and request.num_computed <= computed < request.num_tokens, (slot, computed, request.num_tokens)
        again = request.stats.preemptions > 0 or request.rope_length > request.num_prompt
        if request.scope is not None and not again:  # tokens that the request computed itself are no hits
            self.queries += request.num_tokens if request.slot is None else 0
            self.hits += computed - request.num_computed
            request.stats.cached_tokens += min(computed, request.num_prompt) - min(request.num_computed, request.num_prompt)
        return slot, computed

    def crosses(self, request: Request) -> bool:
        """Return whether a running request has grown so long that RoPE uses other frequencies for all its tokens."""
        rope = self._executor.rope
        return rope is not None and rope.rope_length(request) != request.rope_length

    def _scope(self, request: Request) -> str | None:
        # Prompt log-probabilities need all rows of the prompt.
        if not self._reuses or request.prompt_logprobs is not None:
            return None
        tenant = cache_namespace_of(request.tenant, request.adapter)
        # Requests without a tenant reuse nothing, except choices of one prompt.
        if tenant is None:
            return f"{self._engine}/-/{request_of(request.text):x}" if request.siblings else None
        # The requests of a tenant, and salt, reuse each other's KV until texts of the tenant are deleted.
        history = None if self._memory is None else self._memory.of(tenant)
        edition = None if history is None else history.version
        former, number = self._scopes.get(tenant, (edition, 0))
        if former is not edition:
            number += 1
        self._scopes[tenant] = edition, number
        return f"{self._engine}/{number}/{request.kv_namespace}"


class StepPlanner:
    """Schedules requests, has draft trees proposed for those that decode, and gives the remaining rows to prefills."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafter: Drafter,
        info: ModelInfo,
        outputs: Outputs,
        rope: LengthRope | None = None,
        limit_name: str | None = None,
        device: EmulatedDevice | None = None,  # if it is emulated
    ) -> None:
        """Create a planner. ``limit_name``: option that limits the rows of all drafts, ``as_published`` or not, if it is set."""
        self._scheduler, self._drafter, self._info, self._outputs, self._rope = scheduler, drafter, info, outputs, rope
        self._limit_name = limit_name
        self._clock, self._delay_s = (time.perf_counter, 0.0) if device is None else (device.clock.now, device.drafter_s)
        self._propose_s: float | None = None  # seconds of drafting in the last step
        self._constrained: list[Request] = []  # requests with a grammar in the last step
        self._probation_until_s: dict[str, float] = {}  # by account: end of its probation
        self._last_slow = -1  # arrival number of the last slow request that had its turn
        self._rest_until_s = 0.0  # end of the pause

    def plan(self, width: int) -> list[ScheduledRequest]:
        """Return the work of the next step, which ``width`` ranks will share; empty if there is nothing to do."""
        self._drafter.ranks = width
        shares, now = self._scheduler.schedule(width), self._clock()
        left_out = self._left_out([share.request for share in shares], now)
        drafting = [share for share in shares if share.draft_rows > 0]
        drafted = [share for share in drafting if share.request.choices is None and not self._is_slow(share.request)]
        drafts = self._draft(drafted, step_load(shares, self._propose_s), now)
        rows = sum(-(-(len(tree.tokens) - 1) // width) for tree in drafts.values())
        for share in drafting:
            if (choices := share.request.choices) is not None:  # a tree that ranks do not share
                drafts[share.request.request_id] = choices.tree
                rows += choices.rows
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
        # Requests whose grammar masks took too long in their last step (``Grammar.slow_s``) get no drafts and take turns, one per
        # step, with pauses of ``MASK_RESTS`` times the duration of the masks while other requests run.
        took_s = 0.0  # duration of the slow masks of the last step
        for request in self._constrained:
            if request.grammar is not None and request.grammar.slow_s > 0.0:
                took_s += request.grammar.slow_s
                # All requests of the account that have a grammar are treated so: a mask cannot be interrupted, and the next may
                # be as slow.
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
        if shares and self._delay_s:
            time.sleep(self._delay_s)
        propose_s = self._propose_s = self._clock() - began_s
        drafts: dict[str, DraftTree] = {}
        for share, tree in zip(shares, trees, strict=True):
            request = share.request
            request.stats.propose_s += propose_s
            drafts[request.request_id] = tree
            if request.max_draft_tokens is None:
                self._record_cut(share, tree)
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

    def _record_cut(self, share: RowAllotment, tree: DraftTree) -> None:
        """Record in the request's statistics whether its strategy's options ask for more rows than it got, and why."""
        request, stats = share.request, share.request.stats
        wanted, is_paying = self._drafter.cut_rows(request, tree, share.draft_rows)
        if not wanted:
            return
        stats.wanted_rows = wanted
        if is_paying:
            stats.cut_reason = "more do not pay on this device; as_published drafts all"
        elif share.draft_rows < self._scheduler.draft_limit(request) * self._drafter.ranks:
            stats.cut_reason = "engine.max_step_tokens leaves no room for more"
        elif self._limit_name is None and not request.as_published:
            stats.cut_reason = "as_published drafts all"
        else:
            stats.cut_reason = f"{self._limit_name or 'speculation.largest_tree'} is the limit"


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
