"""Shards of a model: which one a rank holds, and how the ranks form a process group."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
from torch import distributed

from actors.ranks import GroupError
from engine.kv.kv_cache import KVShape

ShardMode = Literal["tensor", "pipeline"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the parts of a model, and the rank that holds it."""

    mode: ShardMode
    rank: int  # 0 is the leader
    world_size: int
    device: Literal["cpu", "cuda"]  # what the parts compute on

    @property
    def others(self) -> list[Shard]:
        """Those of the leader's followers."""
        return [dataclasses.replace(self, rank=rank) for rank in range(1, self.world_size)]


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks of a group are told alike."""

    secret: bytes = field(repr=False)  # by which they know each other
    start_timeout_s: float  # for the leader to come, and for all ranks to be ready
    step_timeout_s: float  # a forward that takes longer waits for a rank that hangs


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a rank keeps of a model, once it has loaded it."""

    shape: KVShape  # of its heads, or its layers
    gives_logits: bool  # it takes part in computing them


def meet(shard: Shard, host: str, port: int, timeout_s: float) -> None:
    """Makes the process one of a group of ``torch.distributed``, for the rest of its life: gloo on CPUs, NCCL on GPUs.

    The environment is set as well, since DeepSpeed reads it. ``LOCAL_SIZE`` is what its shared-memory reduction goes by: where
    that is not the number of ranks, its first use is a segmentation fault.

    Raises:
        GroupError: the process is in a group already.
        RuntimeError: the others do not come, or go away.
    """
    if distributed.is_initialized():
        raise GroupError("this process has been a rank of another group: a rank needs a process of its own")
    local = shard.rank % max(1, torch.cuda.device_count()) if shard.device == "cuda" else shard.rank
    named = {
        "RANK": shard.rank, "WORLD_SIZE": shard.world_size, "LOCAL_RANK": local, "LOCAL_SIZE": shard.world_size,
        "MASTER_ADDR": host, "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in named.items()})
    if shard.device == "cuda":
        torch.cuda.set_device(local)
    timeout = timedelta(seconds=timeout_s)
    store = distributed.TCPStore(host, port, shard.world_size, is_master=False, timeout=timeout)
    backend = "nccl" if shard.device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.world_size, timeout=timeout)
