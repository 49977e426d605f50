"""Placement of requests into KV slots, and reuse of the KV that is there."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from decoding.request import Request, request_of
from decoding.sources.history import Histories
from engine.executor import Executor


class SlotPlacement:
    """Places requests of one engine, and counts what of them did not have to be computed.

    A tenant's requests reuse each other's KV until texts of the tenant are deleted: what was computed before then is not reused
    any more, as its history's ``edition`` is another. Requests of no tenant reuse nothing, but for choices of one prompt, which
    compute it once. Who asks for log-probabilities of the prompt has it computed.
    """

    def __init__(self, executor: Executor, memory: Histories | None, reuses: bool) -> None:
        """Without a memory of the tenants nothing is kept that could be deleted."""
        self._executor, self._memory, self._reuses = executor, memory, reuses
        self._engine = uuid.uuid4().hex  # a rank may follow several engines, whose editions have nothing to do with each other
        self._scopes: dict[str, tuple[object, int]] = {}  # by tenant: edition, and which one it is
        self.queries = self.hits = 0  # tokens of admitted requests that might reuse some, and of these the reused ones

    def place(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """The slot of a request, one of ``free``, and how many of its first tokens are computed there: see ``Executor.place``.

        A request that has a slot is asked for again, with that slot alone, when others may have computed what it lacks, and when
        it ``crosses``: what was computed with other frequencies is of another scope.
        """
        if request.slot is None or self.crosses(request):
            rope = self._executor.rope
            request.reach = 0 if rope is None else rope.reach(request)
            request.scope = self._scope(request)
            if request.scope is not None and request.reach:
                request.scope += f"/{request.reach}"
        slot, computed = self._executor.place(request, free)
        assert slot in free and request.num_computed <= computed < request.num_tokens, (slot, computed, request.num_tokens)
        again = request.stats.preemptions > 0 or request.reach > request.num_prompt
        if request.scope is not None and not again:  # what it computed itself before is no hit
            self.queries += request.num_tokens if request.slot is None else 0
            self.hits += computed - request.num_computed
            request.stats.cached_tokens += min(computed, request.num_prompt) - min(request.num_computed, request.num_prompt)
        return slot, computed

    def crosses(self, request: Request) -> bool:
        """Whether the text of a running request has become so long that all of it has other frequencies than before."""
        rope = self._executor.rope
        return rope is not None and rope.reach(request) != request.reach

    def _scope(self, request: Request) -> str | None:
        tenant = request.memory
        if not self._reuses or request.prompt_logprobs is not None:
            return None
        if tenant is None:
            return f"{self._engine}/-/{request_of(request.text):x}" if request.siblings else None
        history = None if self._memory is None else self._memory.of(tenant)
        edition = None if history is None else history.edition
        former, number = self._scopes.get(tenant, (edition, 0))
        if former is not edition:
            number += 1
        self._scopes[tenant] = edition, number
        return f"{self._engine}/{number}/{tenant}"
