"""Placement of requests into KV slots, and reuse of cached KV."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from outrider.decoding.request import Request
from outrider.decoding.sources.history import Histories
from outrider.decoding.sources.text_keys import request_of
from outrider.engine.executor import Executor


class SlotPlacement:
    """Placement of the requests of one engine into KV slots, with prefix-cache statistics.

    The requests of a tenant reuse each other's KV until texts of the tenant are deleted (``memory`` then has another
    ``edition``). Requests without a tenant reuse nothing, except choices of one prompt. Prompt log-probabilities disable reuse.
    """

    def __init__(self, executor: Executor, memory: Histories | None, reuses: bool) -> None:
        self._executor, self._memory, self._reuses = executor, memory, reuses
        self._engine = uuid.uuid4().hex  # a rank may serve several engines with unrelated editions
        self._scopes: dict[str, tuple[object, int]] = {}  # by tenant: edition and its number
        self.queries = self.hits = 0  # tokens of admitted requests with a scope; reused ones of these

    def place(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """Return the slot for a request, one of ``free``, and the number of its tokens computed there (``Executor.place``).

        For a request with a slot, pass that slot alone: to copy tokens that others computed meanwhile, or because it ``crosses``.
        """
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
        tenant = request.cache_namespace
        if not self._reuses or request.prompt_logprobs is not None:
            return None
        if tenant is None:
            return f"{self._engine}/-/{request_of(request.text):x}" if request.siblings else None
        history = None if self._memory is None else self._memory.of(tenant)
        edition = None if history is None else history.version
        former, number = self._scopes.get(tenant, (edition, 0))
        if former is not edition:
            number += 1
        self._scopes[tenant] = edition, number
        return f"{self._engine}/{number}/{tenant}"
