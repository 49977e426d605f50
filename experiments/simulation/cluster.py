"""Discrete-event simulation of replicas, a router and arrivals."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import simpy

from outrider.decoding.replay import KnownText
from outrider.experiments.bench.engines.traffic import Journey, ServerCounts, measured
from outrider.experiments.bench.workloads import interleaved
from outrider.experiments.simulation.replica import TENANT, Piece, SimulatedReplica


class SimulatedCluster:
    """Replicas behind a router that picks the least loaded one, as ``cluster.serving.replica_chooser`` for new prompts.

    The tokens of a replica are drafted from by the others ``lag_s`` after the end of its step. A step is computed when it begins;
    requests that arrive during it wait for the next one. A client that sends its next request at the end of a step, without a
    router, is in the next step.

    Example: one replica with steps of 10 ms, and two requests of one token each, at 0 and at 4 ms. The first has its token at 10
    ms; the second waits 6 ms and has its own at 20.
    """

    def __init__(
        self, replicas: Sequence[SimulatedReplica], lag_s: float | None, router_s: float, seed: int, api_s: float = 0.0
    ) -> None:
        """
        Args:
            replicas: new ones.
            lag_s: from the end of a step to the others' memory; None without sharing.
            router_s: from the arrival of a request to its replica.
            seed: of the router.
            api_s: of the API's process for a request, before the router; it serves one after another.
        """
        self._replicas, self._lag_s, self._router_s, self._api_s = replicas, lag_s, router_s, api_s
        self._random = random.Random(seed)
        self._env = simpy.Environment()
        self._api = simpy.Resource(self._env)
        self._idle: dict[int, simpy.Event] = {}  # number of a replica without work -> its wake-up
        self._queued = [0] * len(replicas)  # requests between the router and each replica
        self.journeys: dict[str, Journey] = {}
        self._ended: Callable[[], None] = lambda: None
        self._left = 0

    def open_loop(self, texts: Sequence[tuple[str, KnownText]], times_s: Sequence[float]) -> dict[str, Any]:
        """Run requests that arrive at given ascending times. See ``closed_loop``."""

        def arrive() -> Generator[simpy.Event, object, None]:
            for (key, text), at in zip(texts, times_s, strict=True):
                yield self._env.timeout(at - self._env.now)
                self._env.process(self._send(key, text))

        self._env.process(arrive())
        return self._run(len(texts), closed=False)

    def closed_loop(self, texts: Sequence[tuple[str, KnownText]], clients: int) -> dict[str, Any]:
        """Run clients with one request at a time, each followed by the next at once.

        Returns:
            ``experiments.bench.engines.traffic.measured``: throughput, percentiles of TTFT, TPOT and end to end, tokens per
            step; and ``busy``, the share of the time in which a replica computes.
        """
        waiting = iter(texts)

        def ask() -> None:
            found = next(waiting, None)
            if found is not None:
                self._env.process(self._send(*found))

        self._ended = ask
        for _ in range(min(clients, len(texts))):
            ask()
        return self._run(len(texts), closed=True)

    def _run(self, count: int, closed: bool) -> dict[str, Any]:
        self._left = count
        for number in range(len(self._replicas)):
            self._env.process(self._serve(number))
        self._env.run()
        assert not self._left, f"{self._left} requests did not end"
        counts = ServerCounts(sum(replica.steps for replica in self._replicas), True)
        results = measured(list(self.journeys.values()), counts, closed)
        busy_s = sum(replica.busy_s for replica in self._replicas)
        return results | {"busy": round(busy_s / (results["wall_s"] * len(self._replicas)), 3)}

    def _send(self, key: str, text: KnownText) -> Generator[simpy.Event, object, None]:
        """Route one request from its arrival to its replica."""
        now = self._env.now
        self.journeys[key] = Journey(key, now, now)
        if self._api_s:
            with self._api.request() as turn:
                yield turn
                yield self._env.timeout(self._api_s)
        number = self._pick()
        if self._router_s:
            self._queued[number] += 1
            yield self._env.timeout(self._router_s)
            self._queued[number] -= 1
        self._replicas[number].add(key, text, self._env.now)
        if number in self._idle:
            self._idle.pop(number).succeed()

    def _pick(self) -> int:
        """Return the least loaded replica; of equals a random one."""
        drawn = self._random.sample(range(len(self._replicas)), len(self._replicas))
        return min(drawn, key=lambda number: self._replicas[number].load + self._queued[number])

    def _serve(self, number: int) -> Generator[simpy.Event, object, None]:
        """Run the steps of a replica, and wait without work."""
        replica = self._replicas[number]
        while True:
            step = replica.step(self._env.now)
            if step is None:
                self._idle[number] = self._env.event()
                yield self._idle[number]
                continue
            yield self._env.timeout(step.seconds)
            for piece in step.pieces:
                self._note(piece, number)
            yield self._env.timeout(0)  # requests sent now are in the next step

    def _note(self, piece: Piece, number: int) -> None:
        """Record the tokens of a request, and send them to the other replicas."""
        now, journey = self._env.now, self.journeys[piece.key]
        journey.moments.append((now, len(piece.tokens), piece.drafted))
        journey.output.extend(piece.tokens)
        if self._lag_s is not None:
            for other, replica in enumerate(self._replicas):
                if other != number:
                    replica.told.append((now + self._lag_s, TENANT, piece))
        if piece.finished:
            journey.finished = True
            self._left -= 1
            self._ended()


def keyed(texts: Mapping[str, Sequence[KnownText]], count: int) -> list[tuple[str, KnownText]]:
    """Return the first texts of workloads in turns, with unique keys.

    Raises:
        ValueError: there are fewer than ``count``; none is repeated, since a repeated answer would be drafted as a whole.
    """
    found = list(interleaved([[(f"{name}-{at}", text) for at, text in enumerate(known)] for name, known in texts.items()]))
    if len(found) < count:
        raise ValueError(f"the workloads have {len(found)} records, but {count} requests are to come: lower --requests")
    return found[:count]
