"""Ranks with parts of one model, as Ray actors in the bundles of a placement group."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup

from outrider.actors.heap import spare_collector
from outrider.actors.lookahead.link import Address
from outrider.actors.placement.bundles import BundleActor, bundles_for, reason
from outrider.actors.ranks import GroupError
from outrider.actors.sharded.emulated import EmulatedShards, EmulatedShardServer
from outrider.actors.sharded.group import ShardedGroup, device_of, whole_model
from outrider.actors.sharded.rank import ShardServer, load_whole
from outrider.actors.sharded.shard import GroupSettings, ShardMode, ShardSpec
from outrider.configs.slices import EmulationOptions, ModelOptions, ParallelismOptions


class ShardActor:
    """Follower as an actor. Ends by itself when its leader ends."""

    def load(
        self, model: ModelOptions, shard: ShardSpec, terms: GroupSettings, emulation: EmulationOptions | None
    ) -> tuple[Address, int]:
        """Load the model, unless the device is emulated, and listen. Return the address and the process id.

        Raises ``ModelLoadError``.
        """
        server = (
            ShardServer(load_whole(model), shard, terms) if emulation is None else EmulatedShardServer(shard, terms, emulation)
        )
        spare_collector()
        server.start()
        return server.address, os.getpid()


class RankActors:
    """``RankHost`` of actors: rank i in bundle i of the placement group whose bundle 0 is the leader's."""

    def __init__(
        self, shards: Sequence[ShardSpec], terms: GroupSettings, bundles: PlacementGroup, model: ModelOptions,
        emulation: EmulationOptions | None,
    ) -> None:  # fmt: skip
        """Start the actors, which load ``model``, unless their devices are emulated. See ``ShardServer``."""
        self._actors = [BundleActor(ShardActor, bundles, shard.rank) for shard in shards]
        pairs = zip(self._actors, shards, strict=True)
        self._loading = [actor.handle.load.remote(model, shard, terms, emulation) for actor, shard in pairs]

    def addresses(self, timeout_s: float) -> list[Address]:
        """See ``RankHost``."""
        try:
            started: list[tuple[Address, int]] = ray.get(self._loading, timeout=timeout_s)
        except GetTimeoutError:
            raise GroupError(f"not all ranks had loaded the model within {timeout_s:.0f} s") from None
        except RayError as error:
            raise GroupError(f"a rank could not be loaded: {reason(error)}") from error
        for actor, (_, pid) in zip(self._actors, started, strict=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # already gone: the connection will report it
                actor.process = psutil.Process(pid)
        return [address for address, _ in started]

    def close(self) -> None:
        """See ``RankHost``."""
        for actor in self._actors:
            actor.kill()
        self._actors = []


def actor_group(
    mode: ShardMode, model: ModelOptions, parallelism: ParallelismOptions, start_timeout_s: float,
    emulation: EmulationOptions | None = None,
) -> ShardedGroup | EmulatedShards:  # fmt: skip
    """Return a group of this actor and new ones in its placement group. Raises GroupError without a bundle for each rank."""
    leader = ShardSpec(mode, 0, int(parallelism.world_size), device_of(model))
    terms = GroupSettings(secrets.token_bytes(32), start_timeout_s, parallelism.step_timeout_s)
    model = whole_model(model) if emulation is None else model
    housing = RankActors(leader.others, terms, bundles_for(leader.world_size), model, emulation)
    return ShardedGroup(leader, housing, terms) if emulation is None else EmulatedShards(leader, housing, terms)
