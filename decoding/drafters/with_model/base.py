"""Base class of strategies that draft with a second, smaller model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from outrider.decoding.budget.latency import StepLoad
from outrider.decoding.drafters.base import Drafter, DraftModel, Target
from outrider.decoding.drafters.options import check_options
from outrider.decoding.request import Request
from outrider.decoding.tree import SOURCES, DraftTree

if TYPE_CHECKING:
    import torch

    from outrider.decoding.drafters.with_model.draft_probabilities import (
        DraftDistributions,  # imports torch, which checking options does not need
    )

SOURCE = SOURCES.index("draft_model")

# One level of chains: (indices of n active requests, all chains, [n, vocab] logits at the active chains' ends) -> per active
# chain its next token, or None to end it, and whether another token may follow.
NextTokens = Callable[[Sequence[int], Sequence[Sequence[int]], "torch.Tensor"], Sequence[tuple[int | None, bool]]]


class ModelDrafter(Drafter):
    """Drafter that queries a draft model for up to ``num_draft_tokens`` tokens in a row. Its trees carry their rule."""

    needs_logits = True  # a replay of known outputs has no draft model

    def __init__(self, num_draft_tokens: int) -> None:
        check_options("speculative", num_draft_tokens=num_draft_tokens)
        self._num_draft_tokens = num_draft_tokens
        # More in strategies with several drafts.
        self.draft_rows = self.published_rows = num_draft_tokens
        self._distributions: DraftDistributions | None = None

    def prepare(self, target: Target) -> None:
        """Read the target's end tokens."""
        from outrider.decoding.drafters.with_model.draft_probabilities import DraftDistributions

        self._distributions = DraftDistributions(target.end_token_ids)

    @property
    def model(self) -> DraftModel:
        """Return the draft model."""
        assert self.draft_model is not None, "there must be a draft model before the first proposal"
        return self.draft_model

    @property
    def distributions(self) -> DraftDistributions:
        """Return the draft model's distributions under the requests' own rules."""
        assert self._distributions is not None, "prepare comes before the first proposal"
        return self._distributions

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """Return one tree per request: see ``draft``."""
        trees = [DraftTree.chain(request.root, ()) for request in requests]
        asking = [at for at, depth in enumerate(map(self._depth, requests, budgets)) if depth > 0]
        if asking:
            # A request that lacks more than one step's tokens in the draft model catches up without a draft.
            ready = self.model.catch_up([requests[at] for at in asking])
            chosen = [at for at, is_ready in zip(asking, ready, strict=True) if is_ready]
            if chosen:
                mine = [requests[at] for at in chosen]
                depths = [self._depth(requests[at], budgets[at]) for at in chosen]
                for at, tree in zip(chosen, self.draft(mine, depths, [budgets[at] for at in chosen]), strict=True):
                    trees[at] = tree
        return trees

    def _depth(self, request: Request, budget: int) -> int:
        """Return the maximum depth of a draft; the bonus token takes the last place of the request."""
        if budget == 0:
            return 0
        room = self.model.max_model_len - request.num_tokens
        return min(self._num_draft_tokens, budget, request.remaining - 1, room)

    @abstractmethod
    def draft(self, requests: Sequence[Request], depths: Sequence[int], budgets: Sequence[int]) -> list[DraftTree]:
        """Return trees for ready requests, at least one, given the maximum depth (at least 1) and rows of each."""

    def chains(self, requests: Sequence[Request], depths: Sequence[int], next_tokens: NextTokens) -> list[list[int]]:
        """Draft a chain of at most ``depths`` tokens for each ready request; a chain ends at the request's end tokens."""
        chains: list[list[int]] = [[] for _ in requests]
        ends = [self.distributions.ends(request) for request in requests]
        active = list(range(len(requests)))
        # One forward per level for all active chains.
        while active:
            logits = self.model.next_logits([requests[at] for at in active], [chains[at] for at in active])
            going = []
            for at, (token, more) in zip(active, next_tokens(active, chains, logits), strict=True):
                if token is not None:
                    chains[at].append(token)
                    if more and len(chains[at]) < depths[at] and token not in ends[at]:
                        going.append(at)
            active = going
        return chains

    def tracked_requests(self) -> Collection[str]:
        """See ``Drafter``."""
        return () if self._distributions is None else self._distributions.tracked_requests()

    def finish(self, request: Request) -> None:
        """Forget a request. Its KV in the draft model is dropped when the slot is needed."""
        if self._distributions is not None:
            self._distributions.forget(request)
