"""Requests that come while others run: closed and open loops, and what became of each request."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from decoding.request import Request

if TYPE_CHECKING:  # a simulation, which uses the rest, loads no library of models
    from engine.engine import Engine
    from experiments.bench.engines.contestants import Prompt

_WAIT_S = 1.0  # longest wait for a token, while nothing else is due


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens that a request was given at one moment."""

    key: str  # id of its prompt
    at_s: float  # by time.perf_counter
    tokens: tuple[int, ...]
    drafted: int = 0  # rows that were drafted for them
    finished: bool = False


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What a server counted since it began; None where it cannot tell."""

    steps: int | None = None  # target forwards, each for all requests of its step
    tells_drafts: bool = False  # whether ``Progress.drafted`` is known
    cached_tokens: int | None = None  # prompt tokens whose KV was there already
    accepted_by_source: dict[str, int] = field(default_factory=dict)


class Server(Protocol):
    """What answers requests, many at a time."""

    name: str

    def begin(self) -> None:
        """Starts without requests, history and reusable KV."""
        ...

    def submit(self, prompt: Prompt) -> None:
        """Takes a request in; the id of its prompt is its key, in use by no other live one."""
        ...

    def poll(self, wait_s: float) -> list[Progress]:
        """Works, or waits for at most so long, and tells what came."""
        ...

    def end(self) -> ServerCounts:
        """Gives back what ``begin`` took; requests that live are dropped."""
        ...


class EngineServer:
    """Our engine with one strategy, stepped by who asks for progress."""

    def __init__(self, name: str, make_engine: Callable[[], Engine], make_request: Callable[[Prompt], Request]) -> None:
        """
        Args:
            name: of the strategy, with its options.
            make_engine: makes an engine without requests; one that has seen none, where history and KV are to begin anew.
            make_request: makes the request for a prompt, with its id.
        """
        self.name = name
        self._make_engine, self._make_request = make_engine, make_request
        self._engine: Engine | None = None
        self._requests: dict[str, Request] = {}
        self._drafted: dict[str, int] = {}  # rows drafted for each live request so far
        self._steps = 0

    def begin(self) -> None:
        """See ``Server``."""
        self._engine, self._requests, self._drafted, self._steps = self._make_engine(), {}, {}, 0

    def submit(self, prompt: Prompt) -> None:
        """See ``Server``."""
        assert self._engine is not None, "not begun"
        request = self._make_request(prompt)
        self._engine.add(request)
        self._requests[prompt.id], self._drafted[prompt.id] = request, 0

    def poll(self, wait_s: float) -> list[Progress]:
        """See ``Server``: one step; without requests it sleeps."""
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
        """See ``Server``."""
        accepted: Counter[str] = Counter()
        for request in self._requests.values():
            accepted.update(request.stats.accepted_by_source)
        cached = sum(request.stats.cached_tokens for request in self._requests.values())
        self._engine = None
        return ServerCounts(self._steps, True, cached, dict(sorted(accepted.items())))


@dataclass(slots=True)
class Journey:
    """One request. Times are seconds since the loop began."""

    key: str
    arrival_s: float  # when it was due: what it waits until it is sent counts too
    sent_s: float
    moments: list[tuple[float, int, int]] = field(default_factory=list)  # when tokens came, how many, rows drafted for them
    output: list[int] = field(default_factory=list)
    finished: bool = False

    def note(self, progress: Progress, began: float) -> None:
        """Takes in what came, in a loop that began at a time of ``time.perf_counter``."""
        if progress.tokens:
            self.moments.append((progress.at_s - began, len(progress.tokens), progress.drafted))
            self.output.extend(progress.tokens)
        self.finished = self.finished or progress.finished

    @property
    def first_s(self) -> float:
        """When the first token came."""
        return self.moments[0][0]

    @property
    def last_s(self) -> float:
        """When the last token came."""
        return self.moments[-1][0]

    @property
    def ttft_s(self) -> float:
        """Time to the first token, from the arrival."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of a single token."""
        return (self.last_s - self.first_s) / (len(self.output) - 1) if len(self.output) > 1 else None

    @property
    def e2e_s(self) -> float:
        """Time to the last token, from the arrival."""
        return self.last_s - self.arrival_s


class Arrivals(Protocol):
    """When requests come."""

    def due(self, sent: int, in_flight: int, now_s: float) -> Sequence[float]:
        """The arrival times of the requests to send now.

        Args:
            sent: requests so far.
            in_flight: of these, those that have not ended.
            now_s: since the loop began.
        """
        ...

    def wait_s(self, sent: int, now_s: float) -> float:
        """How long to wait for a token at most."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each with one request at a time and the next one at once."""

    concurrency: int

    def due(self, sent: int, in_flight: int, now_s: float) -> Sequence[float]:
        """See ``Arrivals``."""
        return [now_s] * (self.concurrency - in_flight)

    def wait_s(self, sent: int, now_s: float) -> float:
        """See ``Arrivals``."""
        return _WAIT_S


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come when they come, however many are still under way."""

    times_s: tuple[float, ...]  # ascending

    def due(self, sent: int, in_flight: int, now_s: float) -> Sequence[float]:
        """See ``Arrivals``."""
        return self.times_s[sent : bisect_right(self.times_s, now_s)]

    def wait_s(self, sent: int, now_s: float) -> float:
        """See ``Arrivals``."""
        return max(0.0, self.times_s[sent] - now_s) if sent < len(self.times_s) else _WAIT_S


def poisson(rate: float, count: int, seed: int) -> OpenLoop:
    """A Poisson process of ``rate`` requests a second: same seed, same times, stretched by the rate."""
    gaps = np.random.default_rng(seed).exponential(1.0, count) / rate
    return OpenLoop(tuple(np.cumsum(gaps).tolist()))


def drive(server: Server, prompts: Sequence[Prompt], arrivals: Arrivals) -> tuple[list[Journey], ServerCounts]:
    """Sends all prompts as they become due, and follows each to its end.

    Args:
        server: not begun.
        prompts: in the order in which they come, with ids of their own.
        arrivals: when they come.

    Returns:
        The journeys in the order of the prompts, and what the server counted.
    """
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
