"""Weights in blocks of 4 to 8 bits: kept as in a GGUF file, or quantized at load."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.configs.slices import Weights
from outrider.engine.cpu.block_formats import FORMATS, Blocks, Codes, quantized, taken_apart
from outrider.engine.cpu.linear import has_kernels
from outrider.engine.cpu.packed_weight import PART_ROWS, PackedWeight
from outrider.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

ROUNDED = {"int8": "Q8_0", "int4": "Q4_1"}  # formats of quantization at load
_LEAST = 0.5  # least share of a model's weights that must be quantized


def refuse_unpackable(weights: Weights, device: torch.device, dtype: torch.dtype | Literal["auto"]) -> None:
    """Raise ``ModelLoadError`` if weights are to be quantized and there are no kernels for the device and type."""
    known = torch.bfloat16 if dtype == "auto" else dtype
    if weights in ROUNDED and not has_kernels(device, known):
        given = f"model.device={device.type} and model.dtype={str(known).removeprefix('torch.')}"
        raise ModelLoadError(
            f"model.weights={weights} does not support {given}: "
            "it needs a CPU, numba, and bfloat16, float16 or float32; leave it out"
        )


def round_model(model: PreTrainedModel, weights: Weights) -> None:
    """Quantize the matrices of a CPU model in place. Raises ``ModelLoadError`` if they have less than half of its weights."""
    kind = ROUNDED[weights]  # rounded to nearest, with a scale for each 32 numbers
    block, done = FORMATS[kind].block, 0
    for parameter, places in _matrices(model):
        if parameter.shape[1] % block == 0:
            parts = (quantized(part.float().numpy(), kind) for part in parameter.detach().split(PART_ROWS))
            outputs, size = parameter.shape
            done += parameter.numel()
            _put(places, PackedWeight.of(parts, kind, outputs, size, parameter.dtype))
    if done < _LEAST * model.num_parameters():
        raise ModelLoadError(
            f"model.weights={weights} does not support this {type(model).__name__}: only {done} of its "
            f"{model.num_parameters()} weights are matrices of linear layers with rows of whole blocks of {block}; leave it out"
        )
    logger.warning("weights are quantized to %s: outputs differ from those of the original weights", weights)


def keep_blocks(model: PreTrainedModel, raw: dict[str, tuple[str, Codes, np.ndarray]]) -> None:
    """Replace matrices of a CPU model by the blocks of a GGUF file. Raises ``ModelLoadError`` if scales are not finite."""
    # ``raw``, which is emptied, has format, data [rows, bytes of a row] and order of the rows by parameter name.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, places in list(_matrices(model)):
        if names[id(parameter)] in raw:
            kind, data, order = raw.pop(names[id(parameter)])
            outputs, size = parameter.shape
            parts = _checked(names[id(parameter)], kind, data, order)
            _put(places, PackedWeight.of(parts, kind, outputs, size, parameter.dtype))
    assert not raw, raw.keys()


def packable(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that can be kept in blocks."""
    matrices = {id(parameter) for parameter, _ in _matrices(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in matrices}


def _checked(name: str, kind: str, data: Codes, order: np.ndarray) -> Iterator[Blocks]:
    for first in range(0, len(order), PART_ROWS):
        blocks = taken_apart(data[order[first : first + PART_ROWS]], kind)
        if not all(np.isfinite(each).all() for each in (blocks.scales, blocks.minima) if each is not None):
            raise ModelLoadError(f"{name} is corrupt: it contains scales that are not finite; download the file again")
        yield blocks


def _matrices(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Parameter, list[torch.nn.Module]]]:
    holders: dict[int, list[torch.nn.Module]] = {}
    others = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and name == "weight" and (type(module) is torch.nn.Linear or _is_embedding(module)):
                holders.setdefault(id(parameter), []).append(module)
            elif parameter is not None:
                others.add(id(parameter))
    for key, modules in holders.items():  # no weight is referenced here, so a replaced one is freed at once
        weight = modules[0].weight
        if key not in others and type(weight) is torch.nn.Parameter and weight.dim() == 2 and weight.dtype == model.dtype:
            yield weight, modules


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding) and module.max_norm is None


def _put(places: list[torch.nn.Module], weight: PackedWeight) -> None:
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    for module in places:
        module.weight = parameter


def described(model: PreTrainedModel, weights: Weights) -> str:
    """Return a readable description of the weights: block formats, the most common first, or else the type."""
    held = Counter[str]()
    for parameter in model.parameters():
        held[packed_kind(parameter) or str(parameter.dtype).removeprefix("torch.")] += math.prod(parameter.shape)
    kinds = [kind for kind, _ in held.most_common() if kind in FORMATS]
    if not kinds:
        return held.most_common(1)[0][0]
    return f"{weights} (quantized at load as {kinds[0]})" if weights in ROUNDED else ", ".join(kinds)


def packed_kind(weight: torch.Tensor) -> str | None:
    """Return the format of weights in blocks; None for others."""
    return weight.kind if type(weight) is PackedWeight else None
