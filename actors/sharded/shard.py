"""Shards of a model: the part that a rank holds, and the process group of the ranks."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
from torch import distributed

from outrider.actors.ranks import GroupError
from outrider.engine.kv.kv_cache import KVShape

ShardMode = Literal["tensor", "pipeline"]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One of the parts of a model, and the rank that holds it."""

    mode: ShardMode
    rank: int  # 0: leader
    world_size: int
    device: Literal["cpu", "cuda"]  # on which the parts compute

    @property
    def others(self) -> list[ShardSpec]:
        """Return the shards of the followers."""
        return [dataclasses.replace(self, rank=rank) for rank in range(1, self.world_size)]


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings shared by all ranks of a group."""

    secret: bytes = field(repr=False)  # authenticates the ranks to each other
    start_timeout_s: float  # until the leader connects and all ranks are ready
    step_timeout_s: float  # a longer forward means that a rank hangs


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Part of a model that a rank keeps."""

    shape: KVShape  # the rank's heads or layers
    gives_logits: bool  # whether it takes part in computing them


def rendezvous(shard: ShardSpec, host: str, port: int, timeout_s: float) -> None:
    """Join a ``torch.distributed`` group for good: gloo on CPUs, NCCL on GPUs. Raises GroupError if in a group, RuntimeError."""
    if distributed.is_initialized():
        raise GroupError("this process was already a rank of another group: start each rank in a new process")
    local = shard.rank % max(1, torch.cuda.device_count()) if shard.device == "cuda" else shard.rank
    # DeepSpeed reads the environment. Its shared-memory reduction needs LOCAL_SIZE: if that is not the number of ranks, its first
    # use is a segmentation fault.
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
