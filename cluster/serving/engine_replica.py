"""An engine as a Serve deployment. This module is imported with the application; torch is only imported in the actor."""

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

from outrider.actors.description import Description
from outrider.cluster.cli.launch.preflight import group_size
from outrider.cluster.serving.autoscaling import REQUESTS, TOKENS, Pace
from outrider.cluster.serving.cache_actor import CacheSettings
from outrider.cluster.serving.generation import GenerationJob, OtherVersionError
from outrider.cluster.serving.handle_engine import BEAT_S, Item, is_last
from outrider.cluster.serving.membership import MembershipClient, MembershipOptions
from outrider.cluster.serving.secrets import node_secret
from outrider.configs.slices import EmulationOptions, EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.decoding.arrays import Int32Array
from outrider.engine.child_process import report_progress

if TYPE_CHECKING:
    from outrider.actors.ranks import Ranks

logger = logging.getLogger(__name__)

LEAVE_S = 2.0  # most seconds for streams to report the device failure before this process ends
FLUSH_S = 0.25  # seconds until the last stream's data has left the process


class EngineReplica:
    """``Replica`` as an actor. Refusals and a device failure are sent as values, so that no request is blamed."""

    def __init__(
        self,
        model: ModelOptions,
        engine: EngineOptions,
        speculation: SpeculationOptions,
        parallelism: ParallelismOptions,
        cache: CacheSettings | None,
        start_timeout_s: float,
        membership: MembershipOptions | None = None,
        metered: bool = True,
        version: str = "",
        emulation: EmulationOptions | None = None,
    ) -> None:
        self._version = version
        report_progress("importing torch and transformers")
        # Imported here, because only this process needs torch and the model library.
        from outrider.actors.heap import paused_collector, spare_collector

        with paused_collector():
            from outrider.engine.library_imports import import_transformers

            import_transformers()
        from outrider.actors.lookahead.elastic import ElasticGroup
        from outrider.actors.replica import Replica
        from outrider.actors.sharded.group import ShardedGroup, whole_model
        from outrider.cluster.cli.doctor import missing_optional_deps
        from outrider.engine.measures.energy import open_meter

        elastic = None if membership is None else ElasticGroup(parallelism, node_secret(), membership.world_size)
        ranks = elastic or _ranks(model, engine, speculation, parallelism, start_timeout_s, emulation)
        if isinstance(ranks, ShardedGroup):
            model = whole_model(model)
        self._streams = 0  # calls of ``generate`` that have not ended
        access, meter = None if cache is None else cache.access(), open_meter if metered else None
        self._replica = Replica(model, engine, speculation, access, ranks, meter, self._leave, emulation)
        self._pace = Pace()
        self._references: WeakValueDictionary[tuple[str, int], Int32Array] = WeakValueDictionary()  # by answer and index
        missing = missing_optional_deps(self._replica.describe().info.device, parallelism.mode)
        if missing:
            logger.warning("this environment lacks %s", missing)
        spare_collector()
        if membership is not None and elastic is not None:
            # Replicas with another slot length cannot be ranks of one group, so they do not meet.
            alike = f"{version} {self._replica.describe().info.max_model_len}"
            self._membership_client = MembershipClient(membership.actor, alike, elastic.address, elastic.update_peers)

    async def generate(self, jobs: Sequence[GenerationJob]) -> AsyncIterator[list[tuple[int, Item]]]:
        """Yield batches of outputs, each with its job's index; an empty one is a heartbeat, the last item may be an error."""
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

    async def _read(self, place: int, job: GenerationJob, items: asyncio.Queue[tuple[int, Item | Exception]]) -> None:
        """Put the outputs of a job, or the error, into the queue."""
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

    def _shared(self, job: GenerationJob) -> tuple[Int32Array, ...]:
        """Return the job's reference texts, in one copy for all choices of an answer on this replica."""
        answer = job.request_id.rpartition("/")[0]
        return tuple(self._references.setdefault((answer, place), text) for place, text in enumerate(job.references))

    async def describe(self) -> Description:
        """Return the model and the counts. Raise ``ReplicaError`` if the engine does not serve."""
        return dataclasses.replace(self._replica.describe(), version=self._version)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load by the names of ``LoadPolicy``; Serve calls this if autoscaling is on."""
        description = self._replica.describe()
        counts, metrics = description.counts, description.metrics
        tokens = 0 if metrics is None else metrics.generation_tokens
        return {REQUESTS: float(counts.running + counts.waiting), TOKENS: self._pace.since(tokens)}

    def check_health(self) -> None:
        """Raise ``ReplicaError`` if Serve has to replace this actor."""
        self._replica.check_health()

    def _leave(self) -> None:
        """End this process once all streams have reported the device failure. Called in the engine's thread."""
        deadline_s = time.monotonic() + LEAVE_S
        while self._streams and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(FLUSH_S)
        end_process()

    def __del__(self) -> None:
        if hasattr(self, "_membership_client"):
            self._membership_client.close()
        if hasattr(self, "_replica"):  # otherwise the model did not load
            self._replica.stop()


def end_process() -> None:
    """End this process at once: a clean-up would need the device, which does not answer."""
    os._exit(1)


async def _waiting(items: asyncio.Queue[tuple[int, Item | Exception]]) -> list[tuple[int, Item]]:
    """Return all waiting items, or none after ``BEAT_S``. Raise an exception that is no ``Item``."""
    try:
        async with asyncio.timeout(BEAT_S):
            found = [await items.get()]
    except TimeoutError:
        # An empty batch is the heartbeat: without it, the API would take a long step for a hang.
        return []
    # All waiting items in one batch: each event of a call costs the API time.
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
    emulation: EmulationOptions | None,
) -> Ranks | None:
    from outrider.actors.lookahead.group import Group
    from outrider.actors.sharded.actors import actor_group

    if parallelism.mode == "tensor" or parallelism.mode == "pipeline":
        return actor_group(parallelism.mode, model, parallelism, start_timeout_s, emulation)
    if group_size(parallelism) > 1:
        return Group(model, engine, speculation, parallelism, start_timeout_s=start_timeout_s, emulation=emulation)
    return None
