"""Ranks that hold parts of one model, as Ray actors in the bundles of a placement group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, cast

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.heap import spare_collector
from actors.lookahead.link import Address
from actors.ranks import GroupError
from actors.sharded.group import ShardedGroup, device_of, whole_model
from actors.sharded.rank import ShardServer, load_whole
from actors.sharded.shard import Shard, ShardMode
from configs.slices import ModelOptions, ParallelismOptions
from engine.errors import one_line


class ShardActor:
    """A follower as an actor. It ends with its leader, by itself."""

    def load(
        self, model: ModelOptions, shard: Shard, secret: bytes, start_timeout_s: float, step_timeout_s: float
    ) -> tuple[Address, int]:
        """Loads the model and listens; returns where, and the process.

        Raises:
            ModelLoadError: the model cannot be used.
        """
        server = ShardServer(load_whole(model), shard, secret, start_timeout_s, step_timeout_s)
        spare_collector()
        server.start()
        return server.address, os.getpid()


class RankActors:
    """``Housing`` of actors: rank i in bundle i of the placement group whose bundle 0 is the leader's."""

    def __init__(
        self,
        shards: Sequence[Shard],
        secret: bytes,
        bundles: PlacementGroup,
        model: ModelOptions,
        start_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        """See ``ShardServer``; ``model`` is what each loads."""
        self._actors: list[Any] = []
        self._loading: list[ray.ObjectRef[Any]] = []
        self._processes: list[psutil.Process] = []
        for shard in shards:
            bundle = bundles.bundle_specs[shard.rank]
            placed = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=shard.rank)
            actor_class = ray.remote(ShardActor).options(
                num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), scheduling_strategy=placed
            )
            actor = cast(Any, actor_class.remote())
            self._actors.append(actor)
            self._loading.append(actor.load.remote(model, shard, secret, start_timeout_s, step_timeout_s))

    def addresses(self, timeout_s: float) -> list[Address]:
        """See ``Housing``."""
        try:
            told: list[tuple[Address, int]] = ray.get(self._loading, timeout=timeout_s)
        except GetTimeoutError:
            raise GroupError(f"not all ranks had loaded the model within {timeout_s:.0f} s") from None
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise GroupError(f"a rank could not be loaded: {one_line(cause)[:400]}") from error
        with contextlib.suppress(psutil.NoSuchProcess):  # gone already: its connection will tell
            self._processes = [psutil.Process(pid) for _, pid in told]
        return [address for address, _ in told]

    def close(self) -> None:
        """See ``Housing``. Ray takes five seconds for a process that is stopped, so it is not left to Ray alone."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._processes = []
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        self._actors = []


def actor_group(mode: ShardMode, model: ModelOptions, parallelism: ParallelismOptions, start_timeout_s: float) -> ShardedGroup:
    """A group of this actor and new ones in the other bundles of its placement group, all on one node.

    Args:
        mode: tensor or pipeline.
        model: what all load.
        parallelism: with a number for ``world_size``.
        start_timeout_s: until all ranks are ready.

    Raises:
        GroupError: there is no such placement group.
    """
    world_size, bundles = int(parallelism.world_size), get_current_placement_group()
    found = 0 if bundles is None else bundles.bundle_count
    if bundles is None or found < world_size:
        raise GroupError(f"{world_size} ranks need a placement group with a bundle for each, but there are {found} bundles")

    def house(shards: Sequence[Shard], secret: bytes) -> RankActors:
        return RankActors(shards, secret, bundles, whole_model(model), start_timeout_s, parallelism.step_timeout_s)

    return ShardedGroup(Shard(mode, 0, world_size, device_of(model)), house, parallelism, start_timeout_s)
