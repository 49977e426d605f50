"""Engine counters for dashboards: plain numbers and histograms with fixed bounds."""

from __future__ import annotations

import os
import uuid
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.decoding.drafters.registry import LOSSLESS, setting_of
from outrider.decoding.request import PLAIN, FinishReason, Request
from outrider.decoding.tree import SOURCES, DraftTree

if TYPE_CHECKING:
    from outrider.decoding.request import BudgetCounts
    from outrider.engine.forward.batch import ScheduledRequest

_STATM = Path("/proc/self/statm")

# Seconds. vLLM's bounds, for its dashboards, and finer ones below them: its first bound for a whole request is 0.3 s.
FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def one_two_five(most: int) -> tuple[int, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50 and so on up to ``most``: ``one_two_five(30) == (1, 2, 5, 10, 20)``."""
    bounds = []
    power = 1
    while power <= most:
        bounds += [power * factor for factor in (1, 2, 5) if power * factor <= most]
        power *= 10
    return tuple(bounds)


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram at one moment.

    Example: bounds 1 and 5 with the values 0.5, 1, 3 and 9 have the counts 2, 1, 1 and the total 13.5.
    """

    bounds: tuple[float, ...]  # upper bounds, inclusive
    counts: tuple[int, ...]  # values above the previous bound and up to each one; the last entry: above all bounds
    total: float  # sum of the values


class Histogram:
    """Histogram with fixed increasing upper bounds, which are inclusive."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> HistogramCounts:
        """Return the current counts; callable from any thread."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if the system has no ``/proc``."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Current numbers of requests and slots."""

    running: int
    waiting: int
    free_slots: int
    prefix_queries: int = 0  # tokens looked up in the prefix cache, since the start
    prefix_hits: int = 0  # tokens found there
    preemptions: int = 0  # since the start


@dataclass(frozen=True, slots=True)
class EmulatedCounts:
    """Counters of an emulated device since its start."""

    device: str
    model: str
    dilation: float
    forwards: int
    device_s: float  # emulated seconds of all forwards by the roofline
    late: int  # forwards whose computation on the processor took longer than the device time
    late_s: float  # emulated seconds beyond it, which count as the host's
    ratio: float  # median of taken over roofline seconds, of the latest forwards; 0.0 before the first
    hidden_s: float  # wall seconds of all ended requests that are no emulated seconds
    exchange_bytes: float  # between the devices of a tensor-parallel or pipeline group


@dataclass(frozen=True, slots=True)
class MetricsCounts:
    """Serialisable counters of an engine since its start."""

    engine: str  # unique name, so that counters of one name never decrease
    prompt_tokens: int  # prompt tokens of requests with their first token from this engine
    generation_tokens: int  # tokens emitted by this engine
    steps: int  # forwards of the target
    rows: int  # computed token and draft rows
    forward_s: float  # seconds of the steps, including verification
    draft_tokens: int
    accepted_lengths: tuple[int, ...]  # [n] trees with draft tokens, by number of accepted ones
    accepted_by_source: dict[str, int]  # accepted draft tokens of ended requests, by drafter
    finished: dict[str, int]  # ended requests, by ``FinishReason``
    histograms: dict[str, HistogramCounts]  # by vLLM's name without its prefix
    history_bytes: int | None = None  # memory of past outputs; None for a strategy without them
    drafts_by_source: dict[str, int] = field(default_factory=dict)  # trees with draft tokens of each drafter
    drafted_by_source: dict[str, int] = field(default_factory=dict)  # draft tokens of each drafter
    budget: BudgetCounts | None = None  # None for a strategy without a draft budget
    out_of_memory_steps: int = 0  # steps that emitted nothing and were followed by smaller ones
    # Resident memory of the process; None if unknown.
    resident_bytes: int | None = field(default=None, compare=False)

    @property
    def drafts(self) -> int:
        """Return the number of trees with draft tokens, one per request and step."""
        return sum(self.accepted_lengths)

    @property
    def accepted_tokens(self) -> int:
        """Return the accepted draft tokens."""
        return sum(self.accepted_per_position)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Return the accepted draft tokens by depth in their tree, the first draft token first, [n].

        Example: lengths 2, 1, 1 (two trees of which nothing was accepted, one each of one token and of two) are 2 and 1.
        """
        lengths = self.accepted_lengths
        return tuple(sum(lengths[depth:]) for depth in range(1, len(lengths)))


class EngineMetrics:
    """Counters of one engine; only ``read`` may be called from other threads. ``max_model_len`` bounds the histograms."""

    def __init__(self, max_model_len: int) -> None:
        # The engine's thread counts and any thread reads, without a lock: an increment is visible now or at the next reading.
        self._engine = uuid.uuid4().hex[:8]
        self._prompt_tokens = self._generation_tokens = self._steps = self._rows = self._draft_tokens = 0
        self._seen_tokens = 0  # generation tokens at the end of the previous step
        self._forward_s = 0.0
        self._out_of_memory_steps = 0
        self._accepted_lengths = [0]
        self._accepted_by_source: dict[str, int] = {}
        self._drafts_by_source, self._drafted_by_source = [0] * len(SOURCES), [0] * len(SOURCES)
        self._finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        lengths = one_two_five(max_model_len)
        bounds: dict[str, Sequence[float]] = {
            "time_to_first_token_seconds": FIRST_TOKEN_S, "inter_token_latency_seconds": TOKEN_S,
            "request_time_per_output_token_seconds": TOKEN_S, "e2e_request_latency_seconds": REQUEST_S,
            "request_queue_time_seconds": REQUEST_S, "request_inference_time_seconds": REQUEST_S,
            "request_prefill_time_seconds": REQUEST_S, "request_decode_time_seconds": REQUEST_S,
            "request_prompt_tokens": lengths, "request_generation_tokens": lengths, "request_params_max_tokens": lengths,
            "iteration_tokens_total": STEP_TOKENS,
        }  # fmt: skip
        self._histograms = {name: Histogram(each) for name, each in bounds.items()}

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def record_output(self, request: Request, tree: DraftTree, tokens: int, accepted: int, now_s: float) -> None:
        """Count tokens emitted for a request, ``accepted`` of them draft tokens, before the request's times are updated."""
        self._generation_tokens += tokens
        began = request.first_token_s
        if began is not None:
            self._observe("inter_token_latency_seconds", now_s - began - request.stats.decode_s)
        # A request that began elsewhere had its first token there.
        elif not request.num_given:
            self._prompt_tokens += request.num_prompt
            self._observe("time_to_first_token_seconds", now_s - request.arrived_s)
        if tree.num_candidates > 1:
            self._drafted(tree, accepted)

    def _drafted(self, tree: DraftTree, accepted: int) -> None:
        self._draft_tokens += tree.num_candidates - 1
        lengths = self._accepted_lengths
        if accepted >= len(lengths):
            lengths.extend([0] * (accepted + 1 - len(lengths)))
        lengths[accepted] += 1
        sources = tree.sources[1 : tree.num_candidates].tolist()
        for source in set(sources):  # usually one or two: faster than arrays
            self._drafted_by_source[source] += sources.count(source)
            self._drafts_by_source[source] += 1

    def record_step(self, works: Sequence[ScheduledRequest], forward_s: float) -> None:
        """Count a step after its ``record_output`` calls; ``forward_s`` includes verification."""
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
        self._observe("iteration_tokens_total", computed + self._generation_tokens - self._seen_tokens)
        self._seen_tokens = self._generation_tokens

    def record_out_of_memory(self) -> None:
        """Count a step that ran out of device memory."""
        self._out_of_memory_steps += 1

    def record_end(self, request: Request) -> None:
        """Count a request with a finish reason."""
        reason, stats = request.finish_reason, request.stats
        assert reason is not None, request.request_id
        self._finished[reason.value] += 1
        for source, tokens in stats.accepted_by_source.items():
            self._accepted_by_source[source] = self._accepted_by_source.get(source, 0) + tokens
        # Lengths are counted for completed requests only, times only if the request also began in this engine.
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._observe("request_prompt_tokens", request.num_prompt)
        self._observe("request_generation_tokens", request.num_output)
        self._observe("request_params_max_tokens", request.params.max_tokens)
        if request.num_given:
            return
        assert request.admitted_s is not None and request.first_token_s is not None, request.request_id
        last_s = request.first_token_s + stats.decode_s
        self._observe("e2e_request_latency_seconds", last_s - request.arrived_s)
        self._observe("request_queue_time_seconds", request.admitted_s - request.arrived_s)
        self._observe("request_inference_time_seconds", last_s - request.admitted_s)
        self._observe("request_prefill_time_seconds", stats.prefill_s)
        self._observe("request_decode_time_seconds", stats.decode_s)
        if request.num_output > 1:
            self._observe("request_time_per_output_token_seconds", stats.decode_s / (request.num_output - 1))

    def read(self, history_bytes: int | None = None, budget: BudgetCounts | None = None) -> MetricsCounts:
        """Return the current counts; callable from any thread."""
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
            out_of_memory_steps=self._out_of_memory_steps,
            resident_bytes=resident_bytes(),
        )


def _by_name(counts: Sequence[int]) -> dict[str, int]:
    return {source: count for source, count in zip(SOURCES, counts, strict=True) if count}


@dataclass(slots=True)
class StrategyCounts:
    """Counters of the ended requests of one strategy."""

    strategy: str
    lossless: bool  # whether outputs have the distribution of plain decoding
    requests: int = 0
    tokens: int = 0  # tokens emitted by this engine
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    energy_j: float | None = None  # energy of the metered requests; None if none was metered

    def add(self, request: Request) -> None:
        """Count an ended request."""
        stats = request.stats
        self.requests += 1
        self.tokens += request.num_output - request.num_given
        self.steps += stats.steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        if stats.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + stats.energy_j

    def merge(self, other: StrategyCounts) -> None:
        """Add the counts of another engine."""
        for name in ("requests", "tokens", "steps", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + other.energy_j


class CountsByStrategy:
    """Counters of all allowed strategies, the default one first; requests without drafts count as plain decoding.

    Requests with options of their own count for the setting that they are based on. ``lossless``: those of the strategies whose
    outputs have the distribution of plain decoding.
    """

    def __init__(self, strategies: Iterable[str], lossless: Collection[str] = LOSSLESS) -> None:
        names = dict.fromkeys((*strategies, PLAIN))
        self._default = next(iter(names))
        self._counts = {name: StrategyCounts(name, name in lossless) for name in names}  # fixed keys: threads may read it

    def add(self, request: Request) -> None:
        """Count an ended request."""
        name = PLAIN if request.plain else request.strategy or self._default
        self._counts[name if name in self._counts else setting_of(name)].add(request)

    def read(self) -> tuple[StrategyCounts, ...]:
        """Return the current counts; callable from any thread."""
        return tuple(map(replace, self._counts.values()))


def sum_counts(engines: Iterable[Iterable[StrategyCounts]]) -> list[StrategyCounts]:
    """Sum the counts of several engines by strategy, in order of first appearance."""
    total: dict[str, StrategyCounts] = {}
    for counts in engines:
        for one in counts:
            if one.strategy in total:
                total[one.strategy].merge(one)
            else:
                total[one.strategy] = replace(one)
    return list(total.values())
