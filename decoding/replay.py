"""Target-guided replay: runs a drafter over known outputs, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.decoding.arrays import Int32Array
from outrider.decoding.drafters.base import Drafter, TargetRows, count_step
from outrider.decoding.request import Request, SamplingParams
from outrider.decoding.tree import Acceptance, DraftTree
from outrider.decoding.verify.exact import verify_exact

UNKNOWN = -1  # value in ``TargetRows.ids`` of rows whose target token a replay cannot know


@dataclass(frozen=True, slots=True)
class KnownText:
    """Prompt with a known output."""

    id: str
    prompt_ids: Int32Array  # [n], n >= 1
    references: tuple[Int32Array, ...]
    output_ids: Int32Array  # [m], m >= 1: the target's output, with the end token if it ended there


@dataclass(slots=True)
class ReplayCounts:
    """Counters of a replay. The ``*_s`` lists hold one value per call, in seconds of the given clock."""

    records: int = 0
    tokens: int = 0  # emitted, end tokens included
    steps: int = 0  # forwards of the target, the prefill of each record included
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    propose_s: list[float] = field(default_factory=list)
    observe_s: list[float] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Return emitted tokens per forward; 0.0 before the first."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def drafted_per_step(self) -> float:
        """Return drafted tokens per forward, prefills included; 0.0 before the first."""
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
    """Count the steps that a drafter needs for known outputs.

    This is LLMA's target-guided simulation (arXiv 2304.04487, section 3.2 and Algorithm 2) for any drafter: a drafted token is
    accepted if it is the next token of the known output. Requests run one after another, as in the engine. A request's last step
    is not observed. Departure from the paper: a match longer than the rest of the output is cut at its end.

    Example: the output ``4 5 6 7 0`` (0 is the end) and a drafter that proposes ``5 6 9`` after ``4``. The prefill emits 4; the
    next step accepts 5 and 6 and emits 7; the last one emits 0. Three steps for five tokens: 1.67 tokens per step.

    Args:
        make_drafter: returns a new drafter. Its ``prepare`` is not called, since there is no target.
        budget: maximum drafted rows of a step, per rank.
        clock: returns seconds; it times each call of the drafter.
        keep_history: use one drafter for the whole workload; else a new one for each record.
        id_prefix: prefix of request ids, followed by a number. Calls that share a drafter need different prefixes.
        tenant: tenant of all requests, so that each may draft from earlier outputs.
        ranks: number of ranks that share each step. All rows of a tree are counted, whichever rank computes them.

    Raises:
        ValueError: the drafter needs the target's logits, or ``ranks`` is below 1.
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
        self._step(DraftTree.chain(self._request.root, ()))
        while self._request.remaining:
            self._step(self._propose())
        started = self._clock()
        self._drafter.finish(self._request)
        self._counts.finish_s.append(self._clock() - started)
        self._counts.records += 1

    def _propose(self) -> DraftTree:
        request, budget = self._request, self._budget
        if not budget or request.remaining == 1:  # a request that may emit only one token gets no draft
            return DraftTree.chain(request.root, ())
        started = self._clock()
        (tree,) = self._drafter.propose([request], [budget])
        self._counts.propose_s.append(self._clock() - started)
        return tree.clipped(budget + 1, request.remaining - 1, self._vocab_size)

    def _step(self, tree: DraftTree) -> None:
        request, counts = self._request, self._counts
        acceptance = verify_known(tree, request, self._known)
        rows = acceptance.rows
        request.commit([*tree.tokens[list(rows)].tolist(), acceptance.next_token])
        counts.tokens += acceptance.count
        count_step(counts, tree, rows)
        if request.remaining:
            target = known_rows(tree, acceptance)
            started = self._clock()
            self._drafter.observe(request, tree, target, acceptance)
            counts.observe_s.append(self._clock() - started)


def verify_known(tree: DraftTree, request: Request, known: Sequence[int]) -> Acceptance:
    """Return the rows of a tree that continue a request's known output, with the next token."""
    upcoming: Iterator[int] = iter(known[request.num_output :])
    return verify_exact(tree, lambda row: next(upcoming), request.remaining, frozenset())


def known_rows(tree: DraftTree, acceptance: Acceptance) -> TargetRows:
    """Return the known next token at the rows of the accepted path, and ``UNKNOWN`` at all other rows."""
    ids = np.full(len(tree), UNKNOWN, np.int32)
    row = 0
    for accepted in acceptance.rows:
        ids[row] = tree.tokens[accepted]
        row = accepted
    ids[row] = acceptance.next_token
    return TargetRows(ids, None)
