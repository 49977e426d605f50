"""Closed and open loops of requests, the journey of each request, and throughput and latencies of a load."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.decoding.request import Request

if TYPE_CHECKING:  # the simulation uses this module without loading transformers
    from outrider.engine.engine import Engine
    from outrider.experiments.bench.engines.contestants import Prompt


def full_load_s(journeys: Sequence[Journey]) -> float:
    """Return the duration in which a closed loop had all its clients, until the first one had nothing left to ask.

    The rest has an ever lower concurrency, the same for all servers, and would make a run at 32 clients look like one at 16.
    """
    last_sent_s = max(journey.sent_s for journey in journeys)
    return min(journey.last_s for journey in journeys if journey.last_s > last_sent_s)


def measured(journeys: Sequence[Journey], counts: ServerCounts, closed: bool) -> dict[str, Any]:
    """Return the numbers of one server under one load of finished requests.

    Throughput of a ``closed`` loop is that of the time with all clients (``full_load_s``), else of the whole run. Latencies are
    percentiles in ms from the arrival. Draft counts are None if the server does not tell them.
    """
    assert journeys and all(journey.finished and journey.moments for journey in journeys), "a request did not end"
    wall_s = max(journey.last_s for journey in journeys)
    span_s = full_load_s(journeys) if closed else wall_s
    inside = sum(tokens for journey in journeys for at_s, tokens, _ in journey.moments if at_s <= span_s)
    tokens = sum(len(journey.output) for journey in journeys)
    turns = sum(len(journey.moments) for journey in journeys)
    drafted = sum(rows for journey in journeys for _, _, rows in journey.moments)
    return {
        "requests": len(journeys),
        "output_tokens": tokens,
        "wall_s": round(wall_s, 3),
        "span_s": round(span_s, 3),
        "decode_s": round(sum(journey.last_s - journey.first_s for journey in journeys), 3),
        "tokens_per_s": round(inside / span_s, 2),
        "requests_per_s": round(inside / span_s / (tokens / len(journeys)), 3),
        "ttft_ms": _percentiles([journey.ttft_s for journey in journeys]),
        "tpot_ms": _percentiles([journey.tpot_s for journey in journeys if journey.tpot_s is not None]),
        "e2e_ms": _percentiles([journey.e2e_s for journey in journeys]),
        "steps": counts.steps,
        "tokens_per_step": round(tokens / turns, 3),
        "drafted_per_step": round(drafted / counts.steps, 2) if counts.tells_drafts and counts.steps else None,
        "drafted_per_request_step": round(drafted / turns, 2) if counts.tells_drafts else None,
        "accepted_by_source": counts.accepted_by_source,
        "cached_tokens": counts.cached_tokens,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p99 and mean in ms; None without a value."""
    if not seconds:
        return {"p50": None, "p99": None, "mean": None}
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    return {"p50": round(1e3 * p50, 2), "p99": round(1e3 * p99, 2), "mean": round(1e3 * statistics.fmean(seconds), 2)}


def rows_of_a_cell(repeats: Mapping[str, Sequence[dict[str, Any]]], baseline: str) -> dict[str, dict[str, Any]]:
    """Return a row per server from its repeats (``measured``): medians, and ratios to the baseline of the same repeat.

    ``ratio`` compares tokens per second, ``e2e_ratio`` the mean time from arrival to end, and ``decode_ratio`` the time after the
    first token; more is faster. A server may have fewer repeats than the baseline.
    """
    rows = {}
    for name, own in repeats.items():
        pairs = list(zip(repeats[baseline], own, strict=False))
        ratio = [round(run["tokens_per_s"] / base["tokens_per_s"], 3) for base, run in pairs]
        row: dict[str, Any] = {"ratio": ratio, "ratio_median": round(statistics.median(ratio), 3)}
        row["e2e_ratio"] = [round(base["e2e_ms"]["mean"] / run["e2e_ms"]["mean"], 3) for base, run in pairs]
        if all(base["decode_s"] and run["decode_s"] for base, run in pairs):  # not where every output is one token
            row["decode_ratio"] = [round(base["decode_s"] / run["decode_s"], 3) for base, run in pairs]
        for key in ("tokens_per_s", "requests_per_s", "tokens_per_step", "drafted_per_step", "drafted_per_request_step"):
            row[key] = _median([run[key] for run in own])
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            row[key] = {part: _median([run[key][part] for run in own]) for part in own[0][key]}
        rows[name] = row | {"cached_tokens": _median([run["cached_tokens"] for run in own]), "repeats": list(own)}
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


_WAIT_S = 1.0  # longest wait for a token while nothing else is due


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of one request that arrived at one moment."""

    key: str  # id of its prompt
    at_s: float  # by ``time.perf_counter``
    tokens: tuple[int, ...]
    drafted: int = 0  # rows that were drafted for them
    finished: bool = False


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Counters of a server since it began; None if unknown."""

    steps: int | None = None  # target forwards, each for all requests of its step
    tells_drafts: bool = False  # whether ``Progress.drafted`` is known
    cached_tokens: int | None = None  # prompt tokens whose KV was reused
    accepted_by_source: dict[str, int] = field(default_factory=dict)


class Server(Protocol):
    """Server of many requests at a time."""

    name: str

    def begin(self) -> None:
        """Start without requests, history and reusable KV."""
        ...

    def submit(self, prompt: Prompt) -> None:
        """Add a request, keyed by the id of its prompt, which no live request has."""
        ...

    def poll(self, wait_s: float) -> list[Progress]:
        """Work, or wait for at most ``wait_s``; return the new tokens."""
        ...

    def end(self) -> ServerCounts:
        """Release the resources of ``begin`` and drop live requests."""
        ...


class EngineServer:
    """This project's engine with one strategy; ``poll`` makes its steps."""

    def __init__(self, name: str, make_engine: Callable[[], Engine], make_request: Callable[[Prompt], Request]) -> None:
        """Use engines without requests, and new ones if history and KV should begin anew; requests keep their prompts' ids."""
        self.name = name
        self._make_engine, self._make_request = make_engine, make_request
        self._engine: Engine | None = None
        self._requests: dict[str, Request] = {}
        self._drafted: dict[str, int] = {}  # rows drafted for each live request so far
        self._steps = 0

    def begin(self) -> None:
        """Make an engine."""
        self._engine, self._requests, self._drafted, self._steps = self._make_engine(), {}, {}, 0

    def submit(self, prompt: Prompt) -> None:
        """Add a request."""
        assert self._engine is not None, "not begun"
        request = self._make_request(prompt)
        self._engine.add(request)
        self._requests[prompt.id], self._drafted[prompt.id] = request, 0

    def poll(self, wait_s: float) -> list[Progress]:
        """Make one step; sleep if there are no requests."""
        assert self._engine is not None, "not begun"
        if not self._engine.has_work:
            time.sleep(wait_s)
            return []
        outputs = self._engine.step()
        at_s = time.perf_counter()
        self._steps += 1
        told = []
        for output in outputs:
            key = output.request_id
            drafted = self._requests[key].stats.drafted
            finished = output.finish_reason is not None
            told.append(Progress(key, at_s, output.token_ids, drafted - self._drafted[key], finished))
            self._drafted[key] = drafted
        return told

    def end(self) -> ServerCounts:
        """Drop the engine and return its counters."""
        accepted: Counter[str] = Counter()
        for request in self._requests.values():
            accepted.update(request.stats.accepted_by_source)
        cached = sum(request.stats.cached_tokens for request in self._requests.values())
        self._engine = None
        return ServerCounts(self._steps, True, cached, dict(sorted(accepted.items())))


@dataclass(slots=True)
class Journey:
    """Times of one request in seconds since the loop began."""

    key: str
    arrival_s: float  # when it was due, so that waiting to be sent counts
    sent_s: float
    moments: list[tuple[float, int, int]] = field(default_factory=list)  # arrival of tokens, their number, rows drafted
    output: list[int] = field(default_factory=list)
    finished: bool = False

    def note(self, progress: Progress, began: float) -> None:
        """Add tokens, in a loop that began at a time of ``time.perf_counter``."""
        if progress.tokens:
            self.moments.append((progress.at_s - began, len(progress.tokens), progress.drafted))
            self.output.extend(progress.tokens)
        self.finished = self.finished or progress.finished

    @property
    def first_s(self) -> float:
        """Return when the first token came."""
        return self.moments[0][0]

    @property
    def last_s(self) -> float:
        """Return when the last token came."""
        return self.moments[-1][0]

    @property
    def ttft_s(self) -> float:
        """Return the time from the arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first; None for a single token."""
        return (self.last_s - self.first_s) / (len(self.output) - 1) if len(self.output) > 1 else None

    @property
    def e2e_s(self) -> float:
        """Return the time from the arrival to the last token."""
        return self.last_s - self.arrival_s


class Arrivals(Protocol):
    """Schedule of arrivals; times are seconds since the loop began."""

    def due(self, sent: int, in_flight: int, now_s: float) -> Sequence[float]:
        """Return the arrival times of the requests to send now, after ``sent`` requests of which ``in_flight`` still run."""
        ...

    def wait_s(self, sent: int, now_s: float) -> float:
        """Return the longest time to wait for a token."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of clients that each send the next request when the last one has ended."""

    concurrency: int

    def due(self, sent: int, in_flight: int, now_s: float) -> Sequence[float]:
        """Return an arrival for each idle client."""
        return [now_s] * (self.concurrency - in_flight)

    def wait_s(self, sent: int, now_s: float) -> float:
        """Return the longest time to wait for a token."""
        return _WAIT_S


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Arrivals at fixed times, regardless of running requests."""

    times_s: tuple[float, ...]  # ascending

    def due(self, sent: int, in_flight: int, now_s: float) -> Sequence[float]:
        """Return the arrivals until now."""
        return self.times_s[sent : bisect_right(self.times_s, now_s)]

    def wait_s(self, sent: int, now_s: float) -> float:
        """Return the time to the next arrival."""
        return max(0.0, self.times_s[sent] - now_s) if sent < len(self.times_s) else _WAIT_S


def poisson(rate: float, count: int, seed: int) -> OpenLoop:
    """Return a Poisson process of ``rate`` requests per second; one seed gives the same times for every rate, stretched by it."""
    gaps = np.random.default_rng(seed).exponential(1.0, count) / rate
    return OpenLoop(tuple(np.cumsum(gaps).tolist()))


def drive(server: Server, prompts: Sequence[Prompt], arrivals: Arrivals) -> tuple[list[Journey], ServerCounts]:
    """Send all prompts (distinct ids) when they are due; return their journeys in order, and the server's counters."""
    server.begin()
    journeys: dict[str, Journey] = {}
    in_flight, began = 0, time.perf_counter()
    try:
        while in_flight or len(journeys) < len(prompts):
            now = time.perf_counter() - began
            for arrival in arrivals.due(len(journeys), in_flight, now)[: len(prompts) - len(journeys)]:
                prompt = prompts[len(journeys)]
                journeys[prompt.id] = Journey(prompt.id, arrival, now)
                server.submit(prompt)
                in_flight += 1
            for progress in server.poll(arrivals.wait_s(len(journeys), now)):
                journeys[progress.key].note(progress, began)
                in_flight -= progress.finished
    finally:
        counts = server.end()
    return list(journeys.values()), counts
