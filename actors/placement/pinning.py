"""Pinning of ranks' threads to separate cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from outrider.actors.ranks import GroupError


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that the calling thread may use, ascending. Raises GroupError where threads have no affinity."""
    if sys.platform != "linux":
        raise GroupError("parallelism.pin_threads needs Linux: set it to false")
    return tuple(sorted(os.sched_getaffinity(0)))


def own_cores(index: int, threads: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return the ``index``-th group of ``threads`` cores, so 1 of 2 in (0, 1, 4, 5) is (4, 5). Raises GroupError for too few."""
    run = tuple(cores[index * threads : (index + 1) * threads])
    if len(run) < threads:
        raise GroupError(
            f"parallelism.pin_threads: {index + 1} ranks with {threads} threads each need {(index + 1) * threads} cores on their "
            f"node, which has {len(cores)}; lower parallelism.world_size or model.threads, or set pin_threads to false"
        )
    return run


def pin_thread(cores: Sequence[int]) -> None:
    """Pin the calling thread, and threads that it starts later, to these cores."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)  # 0: the calling thread, not its process
