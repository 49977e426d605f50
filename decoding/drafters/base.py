"""Interface of drafters, their view of the target model, and shared base classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from outrider.decoding.arrays import Int32Array, Int64Array, SignedArray
from outrider.decoding.budget.features import TOKEN_MASK
from outrider.decoding.budget.latency import LatencyCurve, StepLoad
from outrider.decoding.request import BudgetCounts, Request
from outrider.decoding.sources.history import Histories
from outrider.decoding.sources.ranked.contexts import WORDS, signs_of
from outrider.decoding.tree import SOURCES, Acceptance, DraftTree, tree_of

if TYPE_CHECKING:
    import torch  # needed only for logits: a strategy's options are checked without torch

State = TypeVar("State")

_LOOKED_AT = 8  # continuations examined per branch, since many repeat an earlier one


class StepCounts(Protocol):
    """Step counters, of a request (``SpecStats``) or of a replay."""

    steps: int
    drafted: int
    accepted: int
    accepted_by_source: dict[str, int]


def count_step(counts: StepCounts, tree: DraftTree, accepted: Sequence[int]) -> None:
    """Count a step that computed a tree and emitted its accepted rows."""
    counts.steps += 1
    counts.drafted += tree.num_candidates - 1
    counts.accepted += len(accepted)
    for row in accepted:
        source = SOURCES[tree.sources[row]]
        counts.accepted_by_source[source] = counts.accepted_by_source.get(source, 0) + 1


class TargetRows:
    """Outputs of the target at each row of a computed tree. Valid during ``observe`` only: it refers to the step's logits.

    Args:
        ids: [n] most likely token after each row, window rows included, for greedy and sampled requests alike; in a replay
            (``decoding.replay``) -1 off the accepted path.
        logits: [>= first + n, vocab] raw logits; None in a replay, or if they are on other ranks.
        ranked: [n, k] result of ``ranked`` from the ranks that computed the rows (``Drafter.top_k``). Ignored with logits.
        first: row of the root in ``logits`` and ``hidden``.
        highest: argmax data of all logits from ``decoding.sampling.ranking.argmax_rows``, if available.
        hidden: [>= first + n, hidden size] bits of the final hidden states of the same rows, if available.
    """

    __slots__ = ("_first", "_hidden", "_highest", "_logits", "_ranked", "ids")

    def __init__(
        self,
        ids: Int32Array,
        logits: torch.Tensor | None,
        ranked: Int32Array | None = None,
        first: int = 0,
        highest: SignedArray | None = None,
        hidden: SignedArray | None = None,
    ) -> None:
        assert logits is None or first + len(ids) <= logits.shape[0], (first, len(ids), logits.shape)
        assert ranked is None or len(ids) == len(ranked), (len(ids), len(ranked))
        self.ids, self._logits, self._ranked, self._first, self._highest = ids, logits, ranked, first, highest
        self._hidden = hidden

    @property
    def logits(self) -> torch.Tensor:
        """Return [n, vocab] logits of the rows. They must be available."""
        assert self._logits is not None
        return self._logits[self._first : self._first + len(self.ids)]

    @property
    def signs(self) -> Int64Array:
        """Return [n, WORDS] signs of each row's last hidden state (``decoding.sources.ranked``); ``NO_SIGNS`` if unknown."""
        if self._hidden is None:
            return np.zeros((len(self.ids), WORDS), np.int64)
        return signs_of(self._hidden, self._first, len(self.ids))

    @property
    def has_logits(self) -> bool:
        """Return whether ``top_k`` and ``ranked`` are available: not in a replay, nor if other ranks were not asked to rank."""
        return self._logits is not None or self._ranked is not None

    def top_k(self, rows: Sequence[int], k: int) -> Int32Array:
        """Return [len(rows), k] int32: the k most likely tokens after each row, the most likely first; see ``ranked``."""
        tokens: Int32Array = self.ranked(rows, k) & TOKEN_MASK
        return tokens

    def ranked(self, rows: Sequence[int], k: int) -> Int32Array:
        """Return ``top_k`` with likelihood buckets, relative to the row's other tokens, above ``TOKEN_BITS``."""
        if self._logits is None:
            assert self._ranked is not None, "no ranked tokens: check has_logits first, or declare needs_logits"
            assert k <= self._ranked.shape[1], f"{k} tokens per row requested, but the drafter's top_k is {self._ranked.shape[1]}"
            return self._ranked[list(rows), :k]
        # With logits each row costs a pass over the vocabulary.
        from outrider.decoding.sampling.ranking import ranked_rows  # imports torch, which is installed if there are logits

        return ranked_rows(self._logits, [self._first + row for row in rows], k, self._highest)


class Target(Protocol):
    """Information about the target model that a drafter may query before the first request, computed on demand."""

    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_model_len: int

    def bigram_table(self, width: int) -> Int32Array:
        """Return [vocab, width] int32: the most likely tokens after each token without context, the most likely first."""
        ...

    def unigram_ranking(self, width: int) -> Int32Array:
        """Return [width] int32: tokens by the distance of their output embedding from the mean, the nearest first."""
        ...

    def latency(self) -> LatencyCurve:
        """Return the latency curve of its steps on this device."""
        ...


class DraftModel(Protocol):
    """Smaller causal language model over the same tokens, with its own KV in the requests' slots; calls add missing tokens."""

    vocab_size: int  # the target's, and the size of the logits: -inf for tokens that the draft model lacks
    max_model_len: int  # maximum tokens of a sequence, its draft included

    def catch_up(self, requests: Sequence[Request]) -> list[bool]:
        """Return whether each request can be drafted for now: not if it is too long, or lacks more than one step's tokens."""
        ...

    def next_logits(self, requests: Sequence[Request], chains: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [n, vocab] logits after each ready request's tokens and its chain, with one forward for all."""
        ...

    def tree_logits(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[torch.Tensor]:
        """Return [len(tree), vocab] logits after each row of each ready request's tree, all computed anew, with one forward."""
        ...


class TooManySettingsError(ValueError):
    """A request's options need another drafter, and all drafters for such options have running requests."""


class Drafter(ABC):
    """Source of draft trees. Wrong drafts never change the output, and a drafter never changes a request."""

    needs_logits = False  # drafts from the target's logits, so that it cannot be replayed on known outputs
    looks_ahead = False  # computes guesses for later steps beside its candidates
    own_rules = False  # some of its trees have a ``DraftTree.rule`` instead of ``verify_exact``
    published_rows = 0  # rows below the root that its options ask for in a step, per rank; 0: it decides itself
    draft_rows = 0  # rows that its draft model holds after a request's tokens; 0: no draft model
    histories: Histories | None = None  # past outputs by tenant and public texts to draft from; None: none

    # Maximum top-k tokens per row that ``observe`` of the next step may request; 0: none. Read once per step, after ``propose``.
    # If ranks share a step, only this many per row are sent between ranks; with 0 ``observe`` has no ranking (``has_logits``).
    top_k = 0

    # Set by the caller.
    draft_model: DraftModel | None = None  # set before ``prepare`` if ``draft_rows`` is not 0
    # Number of ranks that share the next steps. Trees are partitioned among them, so options that limit rows or branches apply
    # per rank. With one rank a strategy drafts as published. May change before each ``propose``; running requests continue.
    ranks = 1

    def keeps_output(self, request: Request) -> bool:
        """Return whether the output of a request is kept for others of its tenant, if it has one."""
        return self.histories is not None

    def prepare(self, target: Target) -> None:  # noqa: B027  most drafters need nothing of the target
        """Prepare for the loaded target. Called once, before the first request."""

    def admit(self, request: Request) -> None:  # noqa: B027  only drafters of several strategies need it
        """Prepare to draft for a request, which ``finish`` ends.

        Raises:
            ValueError: it cannot be drafted for with its options; ``TooManySettingsError``: not now.
        """

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """Return one tree per request, in order, rooted at its last committed token.

        Args:
            budgets: maximum rows per request, on all ranks together, without the root but with window rows; 0: the root alone.
            load: other work of the step; by default a step of these requests alone. Published strategies ignore it.
        """

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:  # noqa: B027
        """Learn from a step and its computed tree, after its tokens were committed. Not called for a request's last step."""

    def cut_rows(self, request: Request, tree: DraftTree, budget: int) -> tuple[int, bool]:
        """Return the rows that the options ask for if the request's last tree was cut to fewer, else 0; whether more do not pay.

        ``tree`` is the one that ``propose`` returned, ``budget`` the number of rows that it got.
        """
        wanted = self.published_rows * self.ranks
        # A strategy that looks ahead drafts nothing rather than a part of its rows.
        cut = budget < wanted and (self.looks_ahead or len(tree) > budget)
        return wanted if cut else 0, False

    def budget(self) -> BudgetCounts | None:
        """Return the decisions of the row budget, or None if the strategy has none. Callable from any thread."""
        return None

    def tracked_requests(self) -> Collection[str]:
        """Return the ids of requests with state in the drafter, as far as it can tell; they are not finished."""
        return ()

    def finish(self, request: Request) -> None:  # noqa: B027
        """Forget a request. Called once for each request that is not ``Request.plain``, however it ended."""


class RequestDrafter(Drafter, Generic[State]):
    """Drafter that drafts for each request separately, from a state per request."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    @abstractmethod
    def begin(self, request: Request) -> State:
        """Return a new state for a request, at its first draft or observation."""

    @abstractmethod
    def draft(self, request: Request, state: State, budget: int) -> DraftTree:
        """Return the tree of a request, with at most ``budget`` rows below the root."""

    def state(self, request: Request) -> State:
        """Return the state of a request, creating it if needed."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = self.begin(request)
        return state

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """See ``Drafter``."""
        return [self.draft(request, self.state(request), budget) for request, budget in zip(requests, budgets, strict=True)]

    def tracked_requests(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._states

    def finish(self, request: Request) -> None:
        """See ``Drafter``."""
        self._states.pop(request.request_id, None)


class CopyDrafter(RequestDrafter[State]):
    """Drafter that copies the tokens after earlier occurrences of the text's end: one branch per rank that shares the step."""

    source: int  # in ``SOURCES``

    @abstractmethod
    def copies(self, request: Request, state: State, most: int) -> Iterator[Sequence[int] | Int32Array]:
        """Yield the tokens after each occurrence, at most ``most``, the best occurrence first."""

    def draft(self, request: Request, state: State, budget: int) -> DraftTree:
        """Return one chain, or as many branches as ranks share the step."""
        copies = self.copies(request, state, budget)
        if self.ranks == 1:
            return DraftTree.chain(request.root, next(copies, ()), self.source)
        rows = ((np.asarray(copy, np.int32).tolist(), self.source) for copy in islice(copies, _LOOKED_AT * self.ranks))
        return tree_of(request.root, rows, budget, self.ranks)
