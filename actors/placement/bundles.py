"""Actors in the bundles of a placement group, one per rank."""

from __future__ import annotations

import contextlib
from typing import Any

import psutil
import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.actors.ranks import GroupError


def bundles_for(world_size: int, placement_group: PlacementGroup | None = None) -> PlacementGroup:
    """Return the placement group, by default the calling actor's. Raises GroupError without one that has a bundle per rank."""
    bundles = placement_group or get_current_placement_group()
    found = 0 if bundles is None else bundles.bundle_count
    if bundles is None or found < world_size:
        raise GroupError(f"{world_size} ranks need a placement group with a bundle for each, but there are {found} bundles")
    return bundles


class BundleActor:
    """Actor in a bundle, and its process if that is known."""

    def __init__(self, actor_class: type, bundles: PlacementGroup, rank: int, *arguments: object) -> None:
        """Start the actor in its rank's bundle."""
        bundle = bundles.bundle_specs[rank]
        placed = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank)
        remote: Any = ray.remote(actor_class).options(
            # A bundle belongs to one rank, so its actor takes all of it.
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=placed,
        )
        self.handle: Any = remote.remote(*arguments)
        self.process: psutil.Process | None = None  # set only if the process runs on this node

    def kill(self) -> None:
        """Kill the actor."""
        # Ray takes five seconds to end a stopped process, so kill it directly on this node.
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.process.kill()
        if ray.is_initialized():
            ray.kill(self.handle)


def reason(error: Exception) -> str:
    """Return an actor's error as one line."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return " ".join(str(cause).split("\n\n")[0].split())[:400] or type(cause).__name__
