"""Pipeline parallelism: each rank has consecutive layers, and only hidden states are sent."""

# The leader has the embeddings, the first layers, the last norm and the output layer; the other ranks have the layers between. In
# each forward the hidden states visit the leader, rank 1, rank 2, ..., and return. torch.distributed.pipelining is not usable:
# its stages need a fixed input shape, and the rows of a step vary.

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel

from outrider.actors.ranks import GroupError
from outrider.actors.sharded.shard import ModelPart, ShardSpec
from outrider.engine.forward.runner import kv_shape


def bounds(layers: int, world_size: int) -> list[range]:
    """Return the layers of each rank: 10 layers on 4 ranks are 0-1, 2-3, 4-6 and 7-9. Raises GroupError for too few layers."""
    if layers < world_size:
        raise GroupError(f"{layers} layers cannot be partitioned among {world_size} ranks: lower world_size")
    few, more = divmod(layers, world_size)
    # In an uneven split the last ranks have one more: the leader also has the output layer.
    sizes = [few + (rank >= world_size - more) for rank in range(world_size)]
    return [range(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(world_size)]


def take_part(model: PreTrainedModel, shard: ShardSpec) -> ModelPart:
    """Reduce a whole model to a rank's layers, in place, and hook up communication, after ``rendezvous``. Raises GroupError."""
    whole = kv_shape(model)
    own = bounds(whole.layers, shard.world_size)[shard.rank]
    layers = _keep_layers(model, own)
    _keep_config(model, own)
    if shard.rank:
        model.set_output_embeddings(torch.nn.Identity())  # only the leader has it
    model.to(shard.device)
    ahead, behind = (shard.rank + 1) % shard.world_size, (shard.rank - 1) % shard.world_size
    if shard.rank == 0:
        # Hooks of the first and last layer suffice: the model's own forward runs unchanged between them.
        layers[-1].register_forward_hook(_round(ahead, behind))
    else:
        layers[0].register_forward_pre_hook(_arriving(behind))
        layers[-1].register_forward_hook(_leaving(ahead))
    shape = dataclasses.replace(whole, layers=len(own), first_layer=own.start, device=model.device)
    return ModelPart(shape, gives_logits=shard.rank == 0)


def _keep_layers(model: PreTrainedModel, own: range) -> torch.nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    attends = [any(hasattr(part, "layer_idx") for part in module.modules()) for _, module in lists]
    found = [pair for pair, of_layers in zip(lists, attends, strict=True) if of_layers and len(pair[1]) == count]
    if len(found) != 1:
        raise GroupError(f"{type(model).__name__} does not keep its {count} layers in one list: it cannot be a pipeline")
    name, layers = found[0]
    parent, _, child = name.rpartition(".")
    kept = torch.nn.ModuleList(list(layers)[own.start : own.stop])
    setattr(model.get_submodule(parent), child, kept)
    return kept


def _keep_config(model: PreTrainedModel, own: range) -> None:
    """Set the layer count and layer types of the model's configs to those of its remaining layers."""
    # Copies: the layers keep the configuration of the whole model.
    for module in list(model.modules()):
        if not isinstance(module, PreTrainedModel):
            continue
        config = copy.deepcopy(module.config)
        text = config.get_text_config()
        kinds = getattr(text, "layer_types", None)
        if kinds is not None:
            text.layer_types = kinds[own.start : own.stop]
        text.num_hidden_layers = len(own)
        module.config = config


def _round(ahead: int, behind: int) -> Callable[..., torch.Tensor]:
    """Return the leader's hook: send its last layer's output through the other ranks and return the result."""

    def hook(layer: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        assert isinstance(output, torch.Tensor), type(output)
        distributed.send(output.contiguous(), ahead)
        returned = torch.empty_like(output, memory_format=torch.contiguous_format)
        distributed.recv(returned, behind)
        return returned

    return hook


def _arriving(behind: int) -> Callable[..., tuple[Any, ...]]:
    """Return a follower's hook: replace its first layer's input with the received hidden states."""

    def hook(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        arrived = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        distributed.recv(arrived, behind)
        return (arrived, *inputs[1:])

    return hook


def _leaving(ahead: int) -> Callable[..., None]:
    """Return a follower's hook: send its last layer's output to the next rank."""

    def hook(layer: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        distributed.send(output.contiguous(), ahead)

    return hook
