"""Plan of the next step: which requests take part, and with which draft trees."""

from __future__ import annotations

import time
from collections.abc import Sequence

from decoding.budget.latency import StepLoad
from decoding.drafters import Drafter
from decoding.tree import DraftTree
from decoding.verify.grammar import permitted
from decoding.verify.rules import Rule
from engine.forward.batch import Work
from engine.loading.model import ModelInfo
from engine.scheduling.scheduler import Scheduler, Share
from engine.text.outputs import Outputs


class StepPlanner:
    """Schedules, then has those that decode drafted for, and gives the rows that are left to prefills."""

    def __init__(self, scheduler: Scheduler, drafter: Drafter, info: ModelInfo, outputs: Outputs) -> None:
        """
        Args:
            scheduler: of the engine.
            drafter: of the engine, prepared.
            info: of the model.
            outputs: of the live requests.
        """
        self._scheduler, self._drafter, self._info, self._outputs = scheduler, drafter, info, outputs
        self._width = 1  # ranks that the drafter drafts for

    def plan(self, width: int) -> list[Work]:
        """The work of the next step; empty when there is nothing to do.

        Args:
            width: ranks that will share it.
        """
        if width != self._width:
            self._drafter.scale(width)
            self._width = width
        shares, now = self._scheduler.schedule(width), time.perf_counter()
        self._drafter.plan(_load(shares))
        drafts, rules = self._draft([share for share in shares if share.draft_rows > 0], now)
        rows = sum(-(-(len(tree.tokens) - 1) // width) for tree in drafts.values())
        works = []
        for share in self._scheduler.top_up(shares, rows):
            request = share.request
            if request.admitted_s is None:
                request.admitted_s = now
            tree = None
            if share.end == request.num_tokens:
                tree = drafts.get(request.request_id) or DraftTree.chain(request.root, ())
            ends, rule = self._outputs.end_tokens(request), rules.get(request.request_id)
            works.append(Work(request, request.num_computed, share.end, tree, ends, rule))
        return works

    def _draft(self, shares: Sequence[Share], began_s: float) -> tuple[dict[str, DraftTree], dict[str, Rule]]:
        """Trees and, where they have one, the rules by which they are verified, by request."""
        trees = self._drafter.propose([share.request for share in shares], [share.draft_rows for share in shares])
        propose_s = time.perf_counter() - began_s
        self._drafter.timed(propose_s)
        drafts: dict[str, DraftTree] = {}
        rules: dict[str, Rule] = {}
        for share, tree in zip(shares, trees, strict=True):
            request = share.request
            request.stats.propose_s += propose_s
            drafts[request.request_id] = tree
            if len(tree.tokens) == 1:  # the target's own choice under every rule
                continue
            kept = drafts[request.request_id] = tree.clipped(
                share.draft_rows + 1,
                request.remaining - 1,
                self._info.vocab_size,
                self._info.max_model_len - request.num_tokens,
            )
            rule = self._drafter.rule(request)
            if rule is not None and len(kept) > 1:
                rules[request.request_id] = rule
            elif request.grammar is not None:  # a rule counts on all that was drawn
                request.grammar.catch_up(request.output_ids)
                drafts[request.request_id] = permitted(kept, request.grammar)
        return drafts, rules


def _load(shares: Sequence[Share]) -> StepLoad:
    """What a step computes before anything is drafted."""
    rows = context = prefill_rows = 0
    for share in shares:
        request = share.request
        computed = share.end - request.num_computed
        rows += computed
        context += request.num_computed
        if request.num_computed < request.num_tokens - 1:
            prefill_rows += computed
    return StepLoad(len(shares), rows, context, prefill_rows)
