"""What a drafter is, what it may ask of the target model, and the names of those who propose rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from decoding.budget.latency import LatencyCurve, StepLoad
from decoding.budget.row_budget import BudgetCounts
from decoding.request import Acceptance, Request
from decoding.sources.history import Histories
from decoding.tree import DraftTree, Int32Array

if TYPE_CHECKING:
    import torch  # only where there are logits: a strategy's options are checked without it

    from decoding.drafters.with_model.draft_model import DraftModel
    from decoding.sampling.ranking import SignedArray
    from decoding.verify.rules import Rule

# ``DraftTree.sources`` holds indices into this tuple. Append only: they are kept in records.
SOURCES = (
    "root", "prompt_lookup", "llma", "trie", "context_ngram", "bigram", "unigram", "jacobi", "suffix", "recycling", "copy",
    "history", "draft_model", "grammar",
)  # fmt: skip


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

    __slots__ = ("_first", "_highest", "_logits", "_ranked", "ids")

    def __init__(
        self,
        ids: Int32Array,
        logits: torch.Tensor | None,
        ranked: Int32Array | None = None,
        first: int = 0,
        highest: SignedArray | None = None,
    ) -> None:
        """
        Args:
            ids: [n] the most likely token after each row, window rows included, whether the request is greedy or sampled. In a
                replay of known outputs (see ``decoding.replay``) only the accepted path is known: -1 elsewhere.
            logits: [>= first + n, vocab] with those of the same rows from ``first`` on, as the model gave them; None in a replay,
                and where the logits are on other ranks.
            ranked: [n, k] the k most likely tokens after each of the same rows, the most likely first, where the ranks that
                computed them were asked for those (see ``Drafter.top_k``). Logits go before them.
            first: the root's row of the logits.
            highest: of all logits, as ``decoding.sampling.ranking.argmax_rows`` fills it, where they were ranked with it.
        """
        assert logits is None or first + len(ids) <= logits.shape[0], (first, len(ids), logits.shape)
        assert ranked is None or len(ids) == len(ranked), (len(ids), len(ranked))
        self.ids, self._logits, self._ranked, self._first, self._highest = ids, logits, ranked, first, highest

    @property
    def logits(self) -> torch.Tensor:
        """[n, vocab] of the rows, where they are."""
        assert self._logits is not None
        return self._logits[self._first : self._first + len(self.ids)]

    @property
    def has_logits(self) -> bool:
        """Whether ``top_k`` can be asked: not in a replay of known outputs, nor where other ranks were not asked to rank."""
        return self._logits is not None or self._ranked is not None

    def top_k(self, rows: Sequence[int], k: int) -> Int32Array:
        """[len(rows), k] int32: the k most likely tokens after each of some rows, the most likely first.

        With logits it costs a pass over the vocabulary a row: ask for few rows, only where ``has_logits``, and for no more tokens
        than ``Drafter.top_k`` announced.
        """
        if self._logits is None:
            assert self._ranked is not None, "nothing was ranked: ask where has_logits, or declare needs_logits"
            assert k <= self._ranked.shape[1], (
                f"{k} tokens a row asked for, {self._ranked.shape[1]} announced by the drafter's top_k"
            )
            return self._ranked[list(rows), :k]
        from decoding.sampling.ranking import top_rows  # needs torch, which is there where logits are

        return top_rows(self._logits, [self._first + row for row in rows], k, self._highest)


class Target(Protocol):
    """What a drafter may ask of the target model before the first request. Answers are computed when asked for."""

    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_model_len: int

    def bigram_table(self, width: int) -> Int32Array:
        """[vocab, width] int32: the most likely next tokens after each token alone, the most likely first."""
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
    own_rules = False  # whether any of its trees is verified otherwise than by ``verify_exact`` (see ``rule``)
    memory: Histories | None = None  # the texts that it drafts from beyond a request's own, by tenant; None: it remembers none

    def remembers(self, request: Request) -> bool:
        """Whether the output of a request is kept for others of its tenant, if it has one."""
        return self.memory is not None

    @property
    def top_k(self) -> int:
        """How many of the target's most likely tokens after each row ``observe`` may ask for of the next step; 0: none.

        Read once before each step. Where ranks share a step, what is not announced here does not travel: ``observe`` of that step
        has then no logits.
        """
        return 0

    @property
    def draft_rows(self) -> int:
        """How many rows its draft model must hold behind a request's tokens; 0: it drafts without one."""
        return 0

    def attach(self, model: DraftModel) -> None:  # noqa: B027  most draft without one
        """Called once, before ``prepare``, with a draft model: where ``draft_rows`` is not 0."""

    def prepare(self, target: Target) -> None:  # noqa: B027  most need nothing of the target
        """Called once, before the first request, when the target is loaded."""

    def scale(self, ranks: int) -> None:  # noqa: B027  what is one chain cannot be partitioned among ranks
        """Drafts for so many ranks from now on: a step's tree is partitioned among them, so it pays to draft that much wider.

        Options that bound rows or branches are those of one rank. With one rank, which is how a drafter begins, it drafts as
        published, and again so when the number comes back to one. Requests under way go on.

        Args:
            ranks: that share the next steps, at least 1. Called before ``propose`` whenever the number has changed.
        """

    def plan(self, load: StepLoad) -> None:  # noqa: B027  a strategy as published drafts the same under any load
        """What the next step computes besides drafted rows. Called before each ``propose`` of the engine; a drafter that was not
        told goes by the requests that it is asked for."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[DraftTree]:
        """One tree per request, in order.

        Args:
            requests: requests whose next tokens are wanted; the root of each tree is the request's last committed token.
            budgets: the most rows to draft for each, the root not counted, window rows counted, on all ranks together; 0 asks
                for the root alone.
        """

    def rule(self, request: Request) -> Rule | None:
        """How the tree that was last proposed for a request is to be verified; None: by ``verify_exact``, which keeps the output.

        Asked right after a ``propose``, once for each request that it drafted for.
        """
        return None

    def budget(self) -> BudgetCounts | None:
        """What decides how many rows pay has decided; None for a strategy that drafts as many as it may. From any thread."""
        return None

    def timed(self, seconds: float) -> None:  # noqa: B027
        """How long the last ``propose`` took, by the engine's clock."""

    def observe(self, request: Request, tree: DraftTree, target: TargetRows, acceptance: Acceptance) -> None:  # noqa: B027
        """What a step taught, after the emitted tokens were committed. Not called for the step that ends a request.

        Args:
            request: the request as it is now.
            tree: the tree that was computed. It may hold fewer rows than the proposed one (see ``DraftTree.clipped``), and is a
                root alone where nothing was asked of the drafter, as after a prefill.
            target: the target's own tokens below the rows of ``tree``.
            acceptance: what was kept of ``tree``.
        """

    def held(self) -> Collection[str]:
        """The ids of requests of which something is held, as far as the strategy can tell: they have not been finished."""
        return ()

    def finish(self, request: Request) -> None:  # noqa: B027
        """Forgets a request, which holds its whole output. Called once for each request that is not ``Request.plain``, whatever
        became of it."""
