"""Tensor parallelism with DeepSpeed AutoTP: each rank has a slice of every linear layer; two all-reduces per layer."""

# Facts of DeepSpeed 0.19 are handled here and in `shared_sums`. A rank that waits for a dead one spins forever:
# `actors.sharded.group` monitors the ranks.

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.actors.ranks import GroupError
from outrider.actors.sharded.shard import ModelPart, ShardSpec
from outrider.actors.sharded.shared_sums import choose_transport
from outrider.engine.cpu.linear import has_kernels
from outrider.engine.errors import one_line
from outrider.engine.forward.runner import kv_shape

logger = logging.getLogger(__name__)

MISSING = "tensor parallelism needs DeepSpeed, which is not installed: pip install -e '.[baselines]'"


def take_part(model: PreTrainedModel, shard: ShardSpec) -> ModelPart:
    """Reduce a whole model to a rank's slices, in place. All ranks call it at the same time, after ``rendezvous``.

    Example: a Llama with 32 heads, 8 KV heads and an MLP of 14,336 on 4 ranks: each has 8 heads, 2 KV heads and 3,584 of the
    MLP, and sums [rows, hidden] after the attention's and the MLP's last layer; the logits are summed, too. Raises GroupError.
    """
    whole = kv_shape(model)
    name = type(model).__name__
    if whole.kv_heads % shard.world_size:
        heads = f"the {whole.kv_heads} KV heads of {name}"
        raise GroupError(f"{heads} cannot be partitioned among {shard.world_size} ranks evenly: change parallelism.world_size")
    # DeepSpeed silently skips all-reduces of float64.
    if model.dtype == torch.float64:
        raise GroupError("DeepSpeed's all-reduce does not support float64: set model.dtype to float32, bfloat16 or float16")
    deepspeed = _deepspeed(shard.device)
    printed = io.StringIO()
    try:
        # DeepSpeed prints to stdout, which is reserved for the command's output.
        with contextlib.redirect_stdout(printed):
            if shard.device == "cpu":
                choose_transport(deepspeed, shard.rank, shard.world_size)
            # Kernels are not injected, because they do not support tree masks: between the all-reduces the stock model runs with
            # tree attention over the rank's own heads.
            deepspeed.init_inference(
                model,
                tensor_parallel={"tp_size": shard.world_size},
                dtype=model.dtype,
                replace_with_kernel_inject=False,
            )
    except (AssertionError, ValueError, TypeError, AttributeError, NotImplementedError) as error:  # unsupported model
        raise GroupError(
            f"DeepSpeed cannot split {name} ({one_line(error)}): choose parallelism.mode pipeline or lookahead"
        ) from error
    logger.debug("DeepSpeed output: %s", printed.getvalue())
    row_parts(model)
    here = dataclasses.replace(kv_shape(model), kv_heads=whole.kv_heads // shard.world_size)
    return ModelPart(here, gives_logits=True)


def _deepspeed(device: str) -> Any:
    """Import DeepSpeed for a device; by default it would choose one itself."""
    os.environ["DS_ACCELERATOR"] = device
    try:
        import deepspeed
    except ImportError as error:
        raise GroupError(f"{MISSING} ({error})") from error
    said = logging.getLogger("DeepSpeed")
    said.setLevel(logging.WARNING)
    for handler in said.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)  # stdout is reserved for the command's output
    return deepspeed


class _RowSum(torch.nn.Module):
    """Slice of a linear layer along its input, followed by an all-reduce."""

    def __init__(self, linear: torch.nn.Linear, bias: torch.nn.Parameter | None, group: Any, columns: slice | None) -> None:
        """Store the slice without its bias. ``columns`` are the slice's columns if ``forward`` gets the whole input."""
        super().__init__()
        from deepspeed import comm

        self.linear, self.bias = linear, bias
        self._sum, self._group, self._columns = comm.inference_all_reduce, group, columns

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features of the slice, or of the whole layer] to [..., out_features]."""
        own = input if self._columns is None else input[..., self._columns]
        output = self.linear(own)
        self._sum(output, group=self._group)
        return output if self.bias is None else output + self.bias


@torch.inference_mode()
def row_parts(model: PreTrainedModel) -> int:
    """Replace DeepSpeed's linear layers with torch's in place, where compiled kernels exist. Return their number."""
    # The kernels of ``engine.cpu.linear`` apply to torch's layers only. The all-reduces stay DeepSpeed's.
    if not has_kernels(model.device, model.dtype):
        return 0
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, LmHeadLinearAllreduce

    kinds = (LinearLayer, LinearAllreduce, LmHeadLinearAllreduce)
    parts = [(name, module) for name, module in model.named_modules() if type(module) in kinds]
    for name, module in parts:
        parent, _, child = name.rpartition(".")
        replaced: torch.nn.Module
        if type(module) is LinearLayer:
            # DeepSpeed's layers call torch's matmul; a plain layer is computed as in a whole model.
            replaced = _linear(module.weight, module.bias)
        else:
            columns = None
            if type(module) is LmHeadLinearAllreduce:
                sizes = module._partition_sizes
                first = sum(sizes[: module.tp_index])
                columns = slice(first, first + sizes[module.tp_index])
            replaced = _RowSum(_linear(module.weight, None), module.bias, module.mp_group, columns)
        setattr(model.get_submodule(parent), child, replaced)
    return len(parts)


def _linear(weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    return linear
