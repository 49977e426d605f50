"""Target-guided replay: known outputs driven through a drafter, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from decoding.drafters.base import Drafter, TargetRows, count_step
from decoding.request import Acceptance, Request, SamplingParams
from decoding.tree import DraftTree, Int32Array
from decoding.verify.exact import verify_exact

UNKNOWN = -1  # stands in ``TargetRows.ids`` where a replay cannot know what the target would say


@dataclass(frozen=True, slots=True)
class KnownText:
    """A prompt whose output is known."""

    id: str
    prompt_ids: Int32Array  # [n], n >= 1
    references: tuple[Int32Array, ...]
    output_ids: Int32Array  # [m], m >= 1: what the target says after the prompt, with the end token if it ended there


@dataclass(slots=True)
class ReplayCounts:
    """What a replay counted. Times are a value per call, in seconds of the clock that was given."""

    records: int = 0
    tokens: int = 0  # emitted, end tokens included
    steps: int = 0  # forwards that a target would have run, the prefill of each record included
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    propose_s: list[float] = field(default_factory=list)
    observe_s: list[float] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per forward; 0.0 before the first."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def drafted_per_step(self) -> float:
        """Drafted tokens per forward, prefills included; 0.0 before the first."""
        return self.drafted / self.steps if self.steps else 0.0


def replay_workload(
    texts: Sequence[KnownText],
    make_drafter: Callable[[], Drafter],
    budget: int,
    vocab_size: int,
    clock: Callable[[], float],
    keep_history: bool = True,
    on_record: Callable[[], None] = lambda: None,
    id_prefix: str = "",
    tenant: str = "local",
    ranks: int = 1,
) -> ReplayCounts:
    """Counts the steps that a drafter would have saved a target whose outputs are known.

    LLMA's target-guided simulation (arXiv 2304.04487, section 3.2 and Algorithm 2), for any drafter: a drafted token is accepted
    if it is the next token of the known output. Requests run one after another, each as the engine runs it: the prefill emits the
    first token with nothing drafted, then propose, clip, verify, commit, observe; the last step of a request is not observed. All
    have one tenant, so each may draft from the outputs before it.

    Example: the output ``4 5 6 7 0`` (0 is the end) and a drafter that proposes ``5 6 9`` after ``4``. The prefill emits 4; the
    next step accepts 5 and 6 and emits 7; the last one emits 0. Three steps for five tokens: 1.67 tokens per step.

    Departure from the paper: a match longer than what is left is cut at the end of the output, which Algorithm 2 passes.

    Args:
        texts: a workload, in its order.
        make_drafter: makes a drafter that was never used. Its ``prepare`` is not called: there is no target.
        budget: most drafted rows of a step, for each rank.
        vocab_size: drafted tokens are below it, others are clipped.
        clock: seconds; each call of the drafter is timed with it.
        keep_history: one drafter sees the whole workload, else each record gets a new one.
        on_record: called after each record.
        id_prefix: of the requests' ids, which count up behind it: calls that share a drafter each need another.
        tenant: of all requests.
        ranks: that would share each step: the drafter drafts as for so many. All rows of a tree count, whoever computes them.

    Raises:
        ValueError: the drafter needs the target's logits, or there is no rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    counts = ReplayCounts()
    drafter = make_drafter()
    if drafter.needs_logits:
        raise ValueError(f"{type(drafter).__name__} drafts from the target's logits, which known outputs do not have")
    for number, text in enumerate(texts):
        if number and not keep_history:
            drafter = make_drafter()
        drafter.ranks = ranks
        _Replay(drafter, text, f"{id_prefix}{number}", tenant, budget * ranks, vocab_size, clock, counts).run()
        on_record()
    return counts


class _Replay:
    """One record on its way through a drafter."""

    def __init__(
        self,
        drafter: Drafter,
        text: KnownText,
        request_id: str,
        tenant: str,
        budget: int,
        vocab_size: int,
        clock: Callable[[], float],
        counts: ReplayCounts,
    ) -> None:
        params = SamplingParams(max_tokens=len(text.output_ids))
        self._request = Request(request_id, text.prompt_ids, params, text.references, tenant=tenant)
        self._known: list[int] = text.output_ids.tolist()
        self._drafter, self._budget, self._vocab_size, self._clock, self._counts = drafter, budget, vocab_size, clock, counts

    def run(self) -> None:
        """From the prefill to the end of the output."""
        self._step(DraftTree.chain(self._request.root, ()))
        while self._request.remaining:
            self._step(self._propose())
        started = self._clock()
        self._drafter.finish(self._request)
        self._counts.finish_s.append(self._clock() - started)
        self._counts.records += 1

    def _propose(self) -> DraftTree:
        request, budget = self._request, self._budget
        if not budget or request.remaining == 1:  # nothing is drafted for a request that may emit one token
            return DraftTree.chain(request.root, ())
        started = self._clock()
        (tree,) = self._drafter.propose([request], [budget])
        self._counts.propose_s.append(self._clock() - started)
        return tree.clipped(budget + 1, request.remaining - 1, self._vocab_size)

    def _step(self, tree: DraftTree) -> None:
        """Verifies a tree against the known output, commits, and tells the drafter."""
        request, counts = self._request, self._counts
        upcoming: Iterator[int] = iter(self._known[request.num_output :])
        acceptance = verify_exact(tree, lambda row: next(upcoming), request.remaining, frozenset())
        rows = acceptance.rows
        request.commit([*tree.tokens[list(rows)].tolist(), acceptance.next_token])
        counts.tokens += acceptance.count
        count_step(counts, tree, rows)
        if request.remaining:
            target = known_rows(tree, acceptance)
            started = self._clock()
            self._drafter.observe(request, tree, target, acceptance)
            counts.observe_s.append(self._clock() - started)


def known_rows(tree: DraftTree, acceptance: Acceptance) -> TargetRows:
    """What a known output says below the rows of a tree: its next token on the accepted path, ``UNKNOWN`` elsewhere.

    Example: a root with the branches 1 2 and 3, of which 1 was accepted and 9 follows, gives ``[1, 9, -1, -1]``.
    """
    ids = np.full(len(tree), UNKNOWN, np.int32)
    row = 0
    for accepted in acceptance.rows:
        ids[row] = tree.tokens[accepted]
        row = accepted
    ids[row] = acceptance.next_token
    return TargetRows(ids, None)
