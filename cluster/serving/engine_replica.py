"""An engine as a Serve deployment. Its module is imported wherever the application is known, what it computes with is not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from actors.description import Description
from cluster.cli.launch.preflight import group_size
from cluster.serving.autoscaling import REQUESTS, TOKENS, Pace
from cluster.serving.cache_actor import CachePlace
from cluster.serving.generation import Job, OtherVersionError
from cluster.serving.handle_engine import BEAT_S, Item, is_last
from cluster.serving.membership import MembershipClient, MembershipOptions
from cluster.serving.secrets import node_secret
from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from decoding.tree import Int32Array
from engine.measures.progress import tell

if TYPE_CHECKING:
    from actors.ranks import Ranks

logger = logging.getLogger(__name__)

LEAVE_S = 2.0  # for streams to end that were told that the device failed, at most; then this process ends
FLUSH_S = 0.25  # from the end of the last stream until all of it has left the process


class EngineReplica:
    """A ``Replica`` as an actor. What the engine refuses is sent as a value: a refusal is no failure of the actor.

    Likewise that its device failed, before the process ends: who hears of it knows that no request is to blame.
    """

    def __init__(
        self,
        model: ModelOptions,
        engine: EngineOptions,
        speculation: SpeculationOptions,
        parallelism: ParallelismOptions,
        cache: CachePlace | None,
        start_timeout_s: float,
        membership: MembershipOptions | None = None,
        metered: bool = True,
        version: str = "",
    ) -> None:
        self._version = version
        tell("importing torch and transformers")
        # Here and not above: torch and the model library are this process's alone.
        from actors.heap import spare_collector
        from actors.lookahead.elastic import Elastic
        from actors.replica import Replica
        from actors.sharded.group import ShardedGroup, whole_model
        from cluster.cli.doctor import lacks
        from engine.measures.energy import open_meter

        elastic = None if membership is None else Elastic(parallelism, node_secret(), membership.world_size)
        ranks = elastic or _ranks(model, engine, speculation, parallelism, start_timeout_s)
        if isinstance(ranks, ShardedGroup):
            model = whole_model(model)
        self._streams = 0  # calls of ``generate`` that have not ended
        access, meter = None if cache is None else cache.access(), open_meter if metered else None
        self._replica = Replica(model, engine, speculation, access, ranks, meter, self._leave)
        self._pace = Pace()
        self._references: WeakValueDictionary[tuple[str, int], Int32Array] = WeakValueDictionary()  # by answer and place
        missing = lacks(self._replica.describe().info.device, parallelism.mode)
        if missing:
            logger.warning("this environment lacks %s", missing)
        spare_collector()
        if membership is not None and elastic is not None:
            # Who has slots of another length cannot follow: those do not meet.
            alike = f"{version} {self._replica.describe().info.max_model_len}"
            self._membership_client = MembershipClient(membership.actor, alike, elastic.address, elastic.meet)

    async def generate(self, jobs: Sequence[Job]) -> AsyncIterator[list[tuple[int, Item]]]:
        """The outputs of some jobs, each with the job's place, all at once that have come; nothing comes as a beat.

        Instead of a job's outputs comes the one reason why it is not taken. Where the device fails, the last item
        of each job is ``DeviceLostError``.
        """
        items: asyncio.Queue[tuple[int, Item | Exception]] = asyncio.Queue()
        readers = [asyncio.create_task(self._read(place, job, items)) for place, job in enumerate(jobs)]
        self._streams += 1
        try:
            left = len(jobs)
            while left:
                batch = await _waiting(items)
                left -= sum(is_last(item) for _, item in batch)
                yield batch
        finally:
            self._streams -= 1
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, place: int, job: Job, items: asyncio.Queue[tuple[int, Item | Exception]]) -> None:
        """Puts what comes of a job, or why nothing does, where the others' goes."""
        if job.version not in ("", self._version):
            items.put_nowait((place, OtherVersionError()))
            return
        try:
            stream = self._replica.generate(job.request(self._shared(job)), job.resumed, job.announced)
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    items.put_nowait((place, output))
        except Exception as error:
            items.put_nowait((place, error))
            raise

    def _shared(self, job: Job) -> tuple[Int32Array, ...]:
        """The texts that an answer may repeat, in one copy for all its choices that are here: each came with its own."""
        answer = job.request_id.rpartition("/")[0]
        return tuple(self._references.setdefault((answer, place), text) for place, text in enumerate(job.references))

    async def describe(self) -> Description:
        """The model and the counts; raises ``ReplicaError`` when the engine does not serve."""
        return dataclasses.replace(self._replica.describe(), version=self._version)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What it has to do, by the names that ``LoadPolicy`` knows; Serve asks where there may be more or fewer replicas."""
        description = self._replica.describe()
        counts, metrics = description.counts, description.metrics
        tokens = 0 if metrics is None else metrics.generation_tokens
        return {REQUESTS: float(counts.running + counts.waiting), TOKENS: self._pace.since(tokens)}

    def check_health(self) -> None:
        """Raises ``ReplicaError`` when Serve has to replace this actor."""
        self._replica.check_health()

    def _leave(self) -> None:
        """End this process, once all streams have reported that its device failed. Called in the engine's thread."""
        deadline_s = time.monotonic() + LEAVE_S
        while self._streams and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(FLUSH_S)
        end_process()

    def __del__(self) -> None:
        if hasattr(self, "_membership_client"):
            self._membership_client.close()
        if hasattr(self, "_replica"):  # else the model did not load
            self._replica.stop()


def end_process() -> None:
    """End this process at once: a clean-up would need the device, which does not answer."""
    os._exit(1)


async def _waiting(items: asyncio.Queue[tuple[int, Item | Exception]]) -> list[tuple[int, Item]]:
    """All that waits; nothing, when nothing has come for ``BEAT_S``. Raises what is no ``Item``."""
    try:
        async with asyncio.timeout(BEAT_S):
            found = [await items.get()]
    except TimeoutError:
        return []
    while not items.empty():
        found.append(items.get_nowait())
    batch: list[tuple[int, Item]] = []
    for place, item in found:
        if isinstance(item, Exception) and not isinstance(item, Item):
            raise item
        batch.append((place, item))
    return batch


def _ranks(
    model: ModelOptions,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    parallelism: ParallelismOptions,
    start_timeout_s: float,
) -> Ranks | None:
    """Who shares the steps of the replica in this actor; None where it computes alone."""
    from actors.lookahead.group import Group
    from actors.sharded.actors import actor_group

    if parallelism.mode == "tensor" or parallelism.mode == "pipeline":
        return actor_group(parallelism.mode, model, parallelism, start_timeout_s)
    if group_size(parallelism) > 1:
        return Group(model, engine, speculation, parallelism, start_timeout_s=start_timeout_s)
    return None
