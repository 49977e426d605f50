"""Requests that arrive while others run, in closed and open loops, and the journey of each request."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from outrider.decoding.request import Request

if TYPE_CHECKING:  # the simulation uses this module without loading transformers
    from outrider.engine.engine import Engine
    from outrider.experiments.bench.engines.contestants import Prompt

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
