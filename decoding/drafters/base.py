"""What a drafter is, what it may ask of the target model, and what drafters have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from decoding.budget.features import TOKEN_MASK
from decoding.budget.latency import LatencyCurve, StepLoad
from decoding.request import Acceptance, Request
from decoding.sources.branches import tree_of
from decoding.sources.embeddings import Int64Array
from decoding.sources.history import Histories
from decoding.sources.ranked.contexts import WORDS, signs_of
from decoding.step_output import BudgetCounts
from decoding.tree import SOURCES, DraftTree, Int32Array

if TYPE_CHECKING:
    import torch  # only where there are logits: a strategy's options are checked without it

    from decoding.drafters.with_model.draft_model import DraftModel
    from decoding.sampling.ranking import SignedArray

State = TypeVar("State")

_LOOKED_AT = 8  # continuations to look at for one branch: many say what an earlier one said


class StepCounts(Protocol):
    """Counters of steps, as of a request (``SpecStats``) or of a replay."""

    steps: int
    drafted: int
    accepted: int
    accepted_by_source: dict[str, int]


def count_step(counts: StepCounts, tree: DraftTree, accepted: Sequence[int]) -> None:
    """Counts a step that computed a tree and emitted its accepted rows."""
    counts.steps += 1
    counts.drafted += tree.num_candidates - 1
    counts.accepted += len(accepted)
    for row in accepted:
        source = SOURCES[tree.sources[row]]
        counts.accepted_by_source[source] = counts.accepted_by_source.get(source, 0) + 1


class TargetRows:
    """What the target said below each row of a computed tree. Valid during ``observe`` only: it refers to the step's logits."""

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
        """
        Args:
            ids: [n] the most likely token after each row, window rows included, whether the request is greedy or sampled. In a
                replay of known outputs (see ``decoding.replay``) only the accepted path is known: -1 elsewhere.
            logits: [>= first + n, vocab] with those of the same rows from ``first`` on, as the model gave them; None in a replay,
                and where the logits are on other ranks.
            ranked: [n, k] the k most likely tokens after each of the same rows as ``ranked`` gives them, where the ranks that
                computed them were asked for those (see ``Drafter.top_k``). Logits go before them.
            first: the root's row of the logits.
            highest: of all logits, as ``decoding.sampling.ranking.argmax_rows`` fills it, where they were ranked with it.
            hidden: [>= first + n, hidden size] the bits of what the output layer made the same rows of the logits from; None
                where it is not at hand.
        """
        assert logits is None or first + len(ids) <= logits.shape[0], (first, len(ids), logits.shape)
        assert ranked is None or len(ids) == len(ranked), (len(ids), len(ranked))
        self.ids, self._logits, self._ranked, self._first, self._highest = ids, logits, ranked, first, highest
        self._hidden = hidden

    @property
    def logits(self) -> torch.Tensor:
        """[n, vocab] of the rows, where they are."""
        assert self._logits is not None
        return self._logits[self._first : self._first + len(self.ids)]

    @property
    def signs(self) -> Int64Array:
        """[n, WORDS] of each row's last hidden state (``decoding.sources.ranked``), ``NO_SIGNS`` where it is not known."""
        if self._hidden is None:
            return np.zeros((len(self.ids), WORDS), np.int64)
        return signs_of(self._hidden, self._first, len(self.ids))

    @property
    def has_logits(self) -> bool:
        """Whether ``top_k`` can be asked: not in a replay of known outputs, nor where other ranks were not asked to rank."""
        return self._logits is not None or self._ranked is not None

    def top_k(self, rows: Sequence[int], k: int) -> Int32Array:
        """[len(rows), k] int32: the k most likely tokens after each of some rows, the most likely first; see ``ranked``."""
        tokens: Int32Array = self.ranked(rows, k) & TOKEN_MASK
        return tokens

    def ranked(self, rows: Sequence[int], k: int) -> Int32Array:
        """[len(rows), k] int32: as ``top_k``, and above ``TOKEN_BITS`` the bucket of how likely each is beside the others of its
        row (``decoding.budget.features.likelihood_bucket``).

        With logits it costs a pass over the vocabulary a row: ask for few rows, only where ``has_logits``, and for no more tokens
        than ``Drafter.top_k`` announced.
        """
        if self._logits is None:
            assert self._ranked is not None, "nothing was ranked: ask where has_logits, or declare needs_logits"
            assert k <= self._ranked.shape[1], (
                f"{k} tokens a row asked for, {self._ranked.shape[1]} announced by the drafter's top_k"
            )
            return self._ranked[list(rows), :k]
        from decoding.sampling.ranking import ranked_rows  # needs torch, which is there where logits are

        return ranked_rows(self._logits, [self._first + row for row in rows], k, self._highest)


class Target(Protocol):
    """What a drafter may ask of the target model before the first request. Answers are computed when asked for."""

    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_model_len: int

    def bigram_table(self, width: int) -> Int32Array:
        """[vocab, width] int32: the most likely next tokens after each token without a text before it, the most likely first."""
        ...

    def unigram_ranking(self, width: int) -> Int32Array:
        """[width] int32: tokens by the distance of their output embedding from the mean, the nearest first."""
        ...

    def latency(self) -> LatencyCurve:
        """How long its steps take on this device."""
        ...


class Drafter(ABC):
    """Guesses continuations. It may be wrong in any way without changing the output, and never changes a request."""

    needs_logits = False  # whether it drafts from what the target says, so that known outputs alone cannot drive it (see replay)
    looks_ahead = False  # whether it computes guesses for later steps beside its candidates
    own_rules = False  # whether any of its trees is verified otherwise than by ``verify_exact`` (see ``DraftTree.rule``)
    draft_rows = 0  # how many rows its draft model must hold behind a request's tokens; 0: it drafts without one
    memory: Histories | None = None  # the texts that it drafts from beyond a request's own, by tenant; None: it remembers none

    # How many of the target's most likely tokens after each row ``observe`` may ask for of the next step; 0: none. Read once in
    # each step, after ``propose``. Where ranks share a step, what is not announced here does not travel: ``observe`` of that step
    # has then no logits.
    top_k = 0

    # Set by who drafts with it.
    draft_model: DraftModel | None = None  # before ``prepare``, where ``draft_rows`` is not 0
    # Ranks that share the next steps. A step's tree is partitioned among them, so it pays to draft that much wider: options that
    # bound rows or branches are those of one rank. With one rank it drafts as published. It may change before each ``propose``,
    # and requests under way go on.
    ranks = 1

    def remembers(self, request: Request) -> bool:
        """Whether the output of a request is kept for others of its tenant, if it has one."""
        return self.memory is not None

    def prepare(self, target: Target) -> None:  # noqa: B027  most need nothing of the target
        """Called once, before the first request, when the target is loaded."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """One tree per request, in order.

        Args:
            requests: requests whose next tokens are wanted; the root of each tree is the request's last committed token.
            budgets: the most rows to draft for each, the root not counted, window rows counted, on all ranks together; 0 asks
                for the root alone.
            load: what the step computes besides drafted rows; a step of these requests alone when absent. A strategy as published
                drafts the same under any load.
        """

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:  # noqa: B027
        """What a step taught, after the emitted tokens were committed. Not called for the step that ends a request.

        Args:
            request: the request as it is now.
            tree: the tree that was computed. It may hold fewer rows than the proposed one (see ``DraftTree.clipped``), and is a
                root alone where nothing was asked of the drafter, as after a prefill.
            target: the target's own tokens below the rows of ``tree``.
            acceptance: what was kept of ``tree``.
        """

    def budget(self) -> BudgetCounts | None:
        """What decides how many rows pay has decided; None for a strategy that drafts as many as it may. From any thread."""
        return None

    def held(self) -> Collection[str]:
        """The ids of requests of which something is held, as far as the strategy can tell: they have not been finished."""
        return ()

    def finish(self, request: Request) -> None:  # noqa: B027
        """Forgets a request, which holds its whole output. Called once for each request that is not ``Request.plain``, whatever
        became of it."""


class RequestDrafter(Drafter, Generic[State]):
    """Drafts for each request by itself, from what it keeps of that request."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    @abstractmethod
    def begin(self, request: Request) -> State:
        """What is kept of a request, made when it is drafted for or observed for the first time."""

    @abstractmethod
    def draft(self, request: Request, state: State, budget: int) -> DraftTree:
        """The tree of a request, of up to ``budget`` rows below the root."""

    def state(self, request: Request) -> State:
        """What is kept of a request."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = self.begin(request)
        return state

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], load: StepLoad | None = None) -> list[DraftTree]:
        """See ``Drafter``."""
        return [self.draft(request, self.state(request), budget) for request, budget in zip(requests, budgets, strict=True)]

    def held(self) -> Collection[str]:
        """See ``Drafter``."""
        return self._states

    def finish(self, request: Request) -> None:
        """See ``Drafter``."""
        self._states.pop(request.request_id, None)


class CopyDrafter(RequestDrafter[State]):
    """Drafts what followed an occurrence of the text's end. Where ranks share a step, each gets a copy: the tree has as many
    branches, copies that begin alike share rows, and one that says nothing new is passed over."""

    source: int  # in ``SOURCES``

    @abstractmethod
    def copies(self, request: Request, state: State, most: int) -> Iterator[Sequence[int] | Int32Array]:
        """What followed each occurrence, up to ``most`` tokens, the best occurrence first."""

    def draft(self, request: Request, state: State, budget: int) -> DraftTree:
        """One chain; where ranks share the step, as many branches as there are ranks."""
        copies = self.copies(request, state, budget)
        if self.ranks == 1:
            return DraftTree.chain(request.root, next(copies, ()), self.source)
        rows = ((np.asarray(copy, np.int32).tolist(), self.source) for copy in islice(copies, _LOOKED_AT * self.ranks))
        return tree_of(request.root, rows, budget, self.ranks)


def check_least(least: int, **options: int) -> None:
    """Raises ``ValueError`` for the first of some options that is below the least that they may be."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_choice(known: Collection[str], **option: str) -> None:
    """Raises ``ValueError`` for an option that is none of the known values."""
    for name, value in option.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
