"""Which part of a model a rank holds, and how the ranks that hold the parts meet."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch import distributed
from transformers import PreTrainedModel

from actors.ranks import GroupError
from engine.kv_cache import KVShape

ShardMode = Literal["tensor", "pipeline"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place among those that hold parts of one model."""

    mode: ShardMode
    rank: int  # 0 is the leader
    world_size: int
    device: Literal["cpu", "cuda"]  # what the parts compute on


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a model."""

    shape: KVShape  # of its heads, or its layers
    gives_logits: bool  # it takes part in computing them


TakePart = Callable[[PreTrainedModel, Seat], Part]  # keeps a seat's part of a whole model, in place, on the seat's device


def meet(seat: Seat, host: str, port: int, timeout_s: float) -> None:
    """Makes the process one of a group of ``torch.distributed``, for the rest of its life: gloo on CPUs, NCCL on GPUs.

    The environment is set as well, since DeepSpeed reads it. ``LOCAL_SIZE`` is what its shared-memory reduction goes by: where
    that is not the number of ranks, its first use is a segmentation fault.

    Args:
        seat: of this process.
        host: of the store at which the ranks meet.
        port: likewise.
        timeout_s: of meeting, and of each exchange.

    Raises:
        GroupError: the process is in a group already.
        RuntimeError: the others do not come, or go away.
    """
    if distributed.is_initialized():
        raise GroupError("this process has been a rank of another group: a rank needs a process of its own")
    local = seat.rank % max(1, torch.cuda.device_count()) if seat.device == "cuda" else seat.rank
    named = {
        "RANK": seat.rank, "WORLD_SIZE": seat.world_size, "LOCAL_RANK": local, "LOCAL_SIZE": seat.world_size,
        "MASTER_ADDR": host, "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in named.items()})
    if seat.device == "cuda":
        torch.cuda.set_device(local)
    timeout = timedelta(seconds=timeout_s)
    store = distributed.TCPStore(host, port, seat.world_size, is_master=False, timeout=timeout)
    backend = "nccl" if seat.device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout)
