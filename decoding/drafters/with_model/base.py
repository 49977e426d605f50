"""Base class of strategies that draft with a second, smaller model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from decoding.budget.latency import StepLoad
from decoding.drafters.base import Drafter, Target, check_least
from decoding.drafters.with_model.draft_model import DraftModel
from decoding.request import Request
from decoding.tree import SOURCES, DraftTree

if TYPE_CHECKING:
    import torch

    from decoding.drafters.with_model.draft_probabilities import (
        DraftDistributions,  # has torch, which those who only check options do not need
    )

SOURCE = SOURCES.index("draft_model")

# One level of chains: which of the requests have one, all chains, and [n, vocab] what the draft model says at their ends, to
# what comes next in each: a token, or None where the chain ends without one, and whether another may follow.
NextTokens = Callable[[Sequence[int], Sequence[Sequence[int]], "torch.Tensor"], Sequence[tuple[int | None, bool]]]


class ModelDrafter(Drafter):
    """Asks the draft model for continuations, whose trees say how they are to be verified.

    A request that the draft model has not caught up with, or that is longer than its context, gets the root alone.
    """

    needs_logits = True  # a replay of known outputs has no draft model

    def __init__(self, num_draft_tokens: int) -> None:
        """
        Args:
            num_draft_tokens: most tokens of a draft, one after the other.

        Raises:
            ValueError: below 1.
        """
        check_least(1, num_draft_tokens=num_draft_tokens)
        self._num_draft_tokens = num_draft_tokens
        self.draft_rows = num_draft_tokens  # strategies with several drafts have more
        self._distributions: DraftDistributions | None = None

    def prepare(self, target: Target) -> None:
        """Learns the target's end tokens."""
        from decoding.drafters.with_model.draft_probabilities import DraftDistributions

        self._distributions = DraftDistributions(target.end_token_ids)

    @property
    def model(self) -> DraftModel:
        """The draft model."""
        assert self.draft_model is not None, "there must be a draft model before the first proposal"
        return self.draft_model

    @property
    def distributions(self) -> DraftDistributions:
        """What the draft model says by the requests' own rules."""
        assert self._distributions is not None, "prepare comes before the first proposal"
        return self._distributions

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request: see ``draft``."""
        trees = [DraftTree.chain(request.root, ()) for request in requests]
        asking = [at for at, depth in enumerate(map(self._depth, requests, budgets)) if depth > 0]
        if asking:
            ready = self.model.catch_up([requests[at] for at in asking])
            chosen = [at for at, is_ready in zip(asking, ready, strict=True) if is_ready]
            if chosen:
                mine = [requests[at] for at in chosen]
                depths = [self._depth(requests[at], budgets[at]) for at in chosen]
                for at, tree in zip(chosen, self.draft(mine, depths, [budgets[at] for at in chosen]), strict=True):
                    trees[at] = tree
        return trees

    def _depth(self, request: Request, budget: int) -> int:
        """The most tokens to draft one after the other: the token after them takes the last place of the request."""
        if budget == 0:
            return 0
        room = self.model.max_model_len - request.num_tokens
        return min(self._num_draft_tokens, budget, request.remaining - 1, room)

    @abstractmethod
    def draft(self, requests: Sequence[Request], depths: Sequence[int], budgets: Sequence[int]) -> list[DraftTree]:
        """Trees for requests that the draft model is ready for, at least one.

        Args:
            requests: in any order.
            depths: most tokens one after the other, at least 1.
            budgets: most rows below the root, at least as many.
        """

    def chains(self, requests: Sequence[Request], depths: Sequence[int], next_tokens: NextTokens) -> list[list[int]]:
        """A chain for each request, token by token, one forward a level for all of them. It ends with the request's end tokens.

        Args:
            requests: that are ready.
            depths: most tokens of each, at least 1.
            next_tokens: chooses them.
        """
        chains: list[list[int]] = [[] for _ in requests]
        ends = [self.distributions.ends(request) for request in requests]
        active = list(range(len(requests)))
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

    def held(self) -> Collection[str]:
        """See ``Drafter``."""
        return () if self._distributions is None else self._distributions.held()

    def finish(self, request: Request) -> None:
        """Drops what is kept of a request. What the draft model computed of it goes when its slot is needed."""
        if self._distributions is not None:
            self._distributions.forget(request)
