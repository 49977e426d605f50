"""What an engine counts for dashboards: plain numbers and histograms (``engine.measures.histogram``).

The engine's thread counts, any thread reads. Nothing here asks the device for anything, and there is no lock: an increment is
seen now or at the next reading.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decoding.budget.row_budget import BudgetCounts
from decoding.drafters.base import SOURCES
from decoding.request import FinishReason, Request
from decoding.tree import DraftTree
from engine.forward.batch import Work
from engine.measures.histogram import FIRST_TOKEN_S, REQUEST_S, STEP_TOKENS, TOKEN_S, Histogram, HistogramCounts, one_two_five

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where the system has no ``/proc``."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MetricsCounts:
    """What an engine has counted since its start. Plain data: it travels."""

    engine: str  # its name: another one for an engine that takes its place, so that nothing named so ever falls
    prompt_tokens: int  # of requests that emitted their first token here
    generation_tokens: int  # emitted here
    steps: int  # forwards of the target
    rows: int  # of tokens and drafts that these computed
    forward_s: float  # seconds that these took, verification included
    draft_tokens: int
    accepted_lengths: tuple[int, ...]  # [n] times that so many draft tokens of a tree were accepted, of trees that had any
    accepted_by_source: dict[str, int]  # accepted draft tokens of requests that have ended, by drafter
    finished: dict[str, int]  # requests that have ended, by ``FinishReason``
    histograms: dict[str, HistogramCounts]  # by vLLM's name without its prefix
    history_bytes: int | None = None  # of remembered outputs; None for a strategy that remembers none
    drafts_by_source: dict[str, int] = field(default_factory=dict)  # trees that held draft tokens of a drafter
    drafted_by_source: dict[str, int] = field(default_factory=dict)  # these tokens
    budget: BudgetCounts | None = None  # None for a strategy that drafts as many rows as it may
    # Memory of the process, not a count of the engine's; None where the system does not tell.
    resident_bytes: int | None = field(default=None, compare=False)

    @property
    def drafts(self) -> int:
        """Trees that held draft tokens, one a request and step."""
        return sum(self.accepted_lengths)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """[n] accepted draft tokens by depth in their tree, those below the root first; together they are all accepted ones.

        Example: lengths 2, 1, 1 (two trees of which nothing was accepted, one each of one token and of two) are 2 and 1.
        """
        lengths = self.accepted_lengths
        return tuple(sum(lengths[depth:]) for depth in range(1, len(lengths)))


class EngineMetrics:
    """The counters of one engine. All methods but ``read`` are the engine's thread's."""

    def __init__(self, max_model_len: int) -> None:
        """
        Args:
            max_model_len: the context in tokens, which bounds the histograms of lengths.
        """
        self._engine = uuid.uuid4().hex[:8]
        self._prompt_tokens = self._generation_tokens = self._steps = self._rows = self._draft_tokens = 0
        self._seen_tokens = 0  # generation tokens at the end of the step before
        self._forward_s = 0.0
        self._accepted_lengths = [0]
        self._accepted_by_source: dict[str, int] = {}
        self._drafts_by_source, self._drafted_by_source = [0] * len(SOURCES), [0] * len(SOURCES)
        self._finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self._first_token, self._inter_token = Histogram(FIRST_TOKEN_S), Histogram(TOKEN_S)
        self._iteration = Histogram(STEP_TOKENS)
        lengths = one_two_five(max_model_len)
        self._prompt, self._generation, self._max_tokens = Histogram(lengths), Histogram(lengths), Histogram(lengths)
        self._token_time = Histogram(TOKEN_S)
        self._latency, self._queue, self._inference = Histogram(REQUEST_S), Histogram(REQUEST_S), Histogram(REQUEST_S)
        self._prefill, self._decode = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self._histograms = {
            "time_to_first_token_seconds": self._first_token,
            "inter_token_latency_seconds": self._inter_token,
            "request_time_per_output_token_seconds": self._token_time,
            "e2e_request_latency_seconds": self._latency,
            "request_queue_time_seconds": self._queue,
            "request_inference_time_seconds": self._inference,
            "request_prefill_time_seconds": self._prefill,
            "request_decode_time_seconds": self._decode,
            "request_prompt_tokens": self._prompt,
            "request_generation_tokens": self._generation,
            "request_params_max_tokens": self._max_tokens,
            "iteration_tokens_total": self._iteration,
        }

    def emitted(self, request: Request, tree: DraftTree, tokens: int, accepted: int, now_s: float) -> None:
        """Counts what a step gave a request, before the request's own times say so.

        A request that began elsewhere has had its first token there: its prompt and its time to first token do not count again.

        Args:
            request: as it was before the step, but for its tokens.
            tree: of the step; rows of a jacobi window are no draft tokens.
            tokens: emitted, at least one.
            accepted: of these, draft tokens.
            now_s: the engine's clock.
        """
        self._generation_tokens += tokens
        began = request.first_token_s
        if began is not None:
            self._inter_token.observe(now_s - began - request.stats.decode_s)
        elif not request.num_given:
            self._prompt_tokens += request.num_prompt
            self._first_token.observe(now_s - request.arrived_s)
        if tree.num_candidates > 1:
            self._drafted(tree, accepted)

    def _drafted(self, tree: DraftTree, accepted: int) -> None:
        """Counts the tokens of a tree that holds any, who drafted them, and how many were accepted."""
        self._draft_tokens += tree.num_candidates - 1
        lengths = self._accepted_lengths
        if accepted >= len(lengths):
            lengths.extend([0] * (accepted + 1 - len(lengths)))
        lengths[accepted] += 1
        sources = tree.sources[1 : tree.num_candidates].tolist()
        for source in set(sources):  # one or two of them: faster than arrays
            self._drafted_by_source[source] += sources.count(source)
            self._drafts_by_source[source] += 1

    def stepped(self, works: Sequence[Work], forward_s: float) -> None:
        """Counts a step, after what it gave each request.

        Args:
            works: of the step.
            forward_s: seconds that the forward and the verification took.
        """
        rows = computed = 0
        for work in works:
            span = work.end - work.start
            rows += span
            if work.tree is not None:
                rows += len(work.tree.tokens) - 1
            if work.tree is None or span > 1:
                computed += span
        self._steps += 1
        self._rows += rows
        self._forward_s += forward_s
        self._iteration.observe(computed + self._generation_tokens - self._seen_tokens)
        self._seen_tokens = self._generation_tokens

    def ended(self, request: Request) -> None:
        """Counts a request that has its finish reason. Lengths and times are those of requests that were served to their end, and
        times those of requests that were served here from their beginning."""
        reason, stats = request.finish_reason, request.stats
        assert reason is not None, request.request_id
        self._finished[reason.value] += 1
        for source, tokens in stats.accepted_by_source.items():
            self._accepted_by_source[source] = self._accepted_by_source.get(source, 0) + tokens
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._prompt.observe(request.num_prompt)
        self._generation.observe(request.num_output)
        self._max_tokens.observe(request.params.max_tokens)
        if request.num_given:
            return
        assert request.admitted_s is not None and request.first_token_s is not None, request.request_id
        last_s = request.first_token_s + stats.decode_s
        self._latency.observe(last_s - request.arrived_s)
        self._queue.observe(request.admitted_s - request.arrived_s)
        self._inference.observe(last_s - request.admitted_s)
        self._prefill.observe(stats.prefill_s)
        self._decode.observe(stats.decode_s)
        if request.num_output > 1:
            self._token_time.observe(stats.decode_s / (request.num_output - 1))

    def read(self, history_bytes: int | None = None, budget: BudgetCounts | None = None) -> MetricsCounts:
        """The counts of this moment; from any thread."""
        return MetricsCounts(
            engine=self._engine,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            rows=self._rows,
            forward_s=self._forward_s,
            draft_tokens=self._draft_tokens,
            accepted_lengths=tuple(self._accepted_lengths),
            accepted_by_source=dict(self._accepted_by_source),
            finished=dict(self._finished),
            histograms={name: histogram.read() for name, histogram in self._histograms.items()},
            history_bytes=history_bytes,
            drafts_by_source=_by_name(self._drafts_by_source),
            drafted_by_source=_by_name(self._drafted_by_source),
            budget=budget,
            resident_bytes=resident_bytes(),
        )


def _by_name(counts: Sequence[int]) -> dict[str, int]:
    """Counts in the order of ``SOURCES`` by name, those of 0 left out."""
    return {source: count for source, count in zip(SOURCES, counts, strict=True) if count}
