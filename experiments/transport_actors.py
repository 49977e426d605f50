"""Ranks that measure transports as Ray actors, and the two transports that are Ray's own."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.dag import InputNode, MultiOutputNode

from experiments.transports import ANSWER, COMMAND, ExchangeRank, Step, Transport

TRANSPORTS = ("tcp", "unix", "calls", "gloo", "graph")
_PAUSE_S = 0.5  # in which processor time is read, whose unit is 10 ms


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured in one go."""

    world: int
    work: str  # "none", "unpinned", "pinned"; "model" for the group
    transport: str  # one of ``TRANSPORTS``, or "group"


class ActorCalls:
    """A call to each rank's actor, gathered on an event loop."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors, self._loop = actors, asyncio.new_event_loop()

    def step(self, products: int, compute: Callable[[int], float]) -> Step:
        """See ``Transport``."""
        started = time.perf_counter()
        answers, own = self._loop.run_until_complete(self._gather(COMMAND.pack(products), products, compute))
        return time.perf_counter() - started, max(own, *(ANSWER.unpack(answer)[0] for answer in answers))

    async def _gather(self, command: bytes, products: int, compute: Callable[[int], float]) -> tuple[list[bytes], float]:
        references = [actor.answer.remote(command) for actor in self._actors]
        own = compute(products)
        return await asyncio.gather(*references), own

    def close(self) -> None:
        """See ``Transport``."""
        self._loop.close()


class CompiledGraph:
    """Ray's compiled graph over the ranks' actors."""

    def __init__(self, actors: Sequence[Any]) -> None:
        with InputNode() as command:
            graph = MultiOutputNode([actor.answer.bind(command) for actor in actors])
        self._graph = graph.experimental_compile()

    def step(self, products: int, compute: Callable[[int], float]) -> Step:
        """See ``Transport``."""
        started = time.perf_counter()
        pending = self._graph.execute(COMMAND.pack(products))
        own = compute(products)
        answers = ray.get(pending)
        return time.perf_counter() - started, max(own, *(ANSWER.unpack(answer)[0] for answer in answers))

    def close(self) -> None:
        """See ``Transport``."""
        self._graph.teardown()


class RayRank(ExchangeRank):
    """A rank that can lead over Ray's transports, too."""

    def open(self, name: str, followers: Sequence[Any], addresses: Sequence[Any]) -> Transport:
        """See ``ExchangeRank``."""
        if name == "calls":
            return ActorCalls(followers)
        return CompiledGraph(followers) if name == "graph" else super().open(name, followers, addresses)


class Ranks:
    """The actors of the largest group."""

    def __init__(self, worlds: Sequence[int], transports: Sequence[str]) -> None:
        """
        Args:
            worlds: sizes of the groups.
            transports: that will be measured.
        """
        remote = ray.remote(num_cpus=0)(RayRank)
        self._actors: list[Any] = [remote.remote(rank) for rank in range(max(worlds))]
        self._processes = ray.get([actor.process_id.remote() for actor in self._actors])
        self._addresses = ray.get([actor.listen.remote() for actor in self._actors[1:]])
        if "gloo" in transports:
            with tempfile.TemporaryDirectory(prefix="exchange-") as folder:
                ray.get([actor.join.remote(f"{folder}/store", worlds) for actor in self._actors])

    def products_for(self, seconds: float) -> int:
        """How many products take so long on one thread, nothing else running."""
        return int(ray.get(self._actors[0].products_for.remote(seconds)))

    def pin(self, pinned: bool) -> None:
        """Each rank on a core of its own, as far as there are cores; or all on all."""
        cores = sorted(os.sched_getaffinity(0))
        ray.get([
            actor.pin.remote({cores[rank % len(cores)]} if pinned else set(cores)) for rank, actor in enumerate(self._actors)
        ])  # fmt: skip

    def measure(self, case: Case, products: int, steps: int) -> tuple[list[Step], float | None]:
        """Steps of one case, and, where there is no work, the cores that a rank keeps busy while the leader pauses."""
        followers = self._actors[1 : case.world]
        self.pin(case.work == "pinned")
        taking_part = [actor.take_part.remote(case.world) for actor in followers if case.transport == "gloo"]
        pause_s = _PAUSE_S if case.work == "none" else 0.0
        arguments = (case.transport, 0 if case.work == "none" else products, steps, pause_s, followers)
        answer = ray.get(
            self._actors[0].measure.remote(*arguments, self._addresses[: case.world - 1], self._processes[1 : case.world])
        )
        ray.get(taking_part)
        return answer
