"""Quantized checkpoints in the formats of transformers, packed here by each format's published layout.

Beside each checkpoint the weights that it stands for are known, as an ordinary checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # columns of eight whose numbers follow one another in an int32, the lowest bits first
_E4M3 = torch.finfo(torch.float8_e4m3fn).max

Parts = dict[str, torch.Tensor]  # tensors of one weight in a file, by the ends of their names


@dataclass(frozen=True, slots=True)
class Packing:
    """A format, and the function that packs a weight."""

    settings: dict[str, Any]  # ``quantization_config`` of config.json
    pack: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]  # of [out, in]: the parts, and the weight that they stand for
    dtype: torch.dtype  # of all other tensors in the file


def _pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack [a, b] below 2^bits to int32 [a, ceil(b * bits / 32)], the first number in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).unflatten(1, (-1, each))
    words = torch.stack([padded[..., at] << (bits * at) for at in range(each)]).sum(0)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _in_groups(
    weight: torch.Tensor, group: int, bits: int, zeros: bool, dtype: torch.dtype, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight [out, in] to integers.

    Args:
        group: columns of a group.
        zeros: each group has its zero, from 1 to 2^bits - 1; otherwise it is 2^(bits-1).
        dtype: of the scales.
        order: [in], the group of each column; in turn when absent.

    Returns:
        Numbers [out, in], zeros and scales [out, groups], and the weight that they stand for.
    """
    most, wide = 2**bits - 1, weight.float()
    order = torch.arange(weight.shape[1]) // group if order is None else order
    members = [wide[:, order == at] for at in range(-(-weight.shape[1] // group))]
    low = torch.stack([part.amin(1).clamp(max=0) for part in members], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in members], 1)
    if zeros:
        scales = ((high - low) / most).clamp(min=1e-6).to(dtype)
        zero = (-low / scales.float()).round().clamp(1, most)
    else:
        scales = (2 * torch.maximum(high, -low) / most).clamp(min=1e-6).to(dtype)
        zero = torch.full_like(low, 2 ** (bits - 1))
    numbers = (wide / scales.float()[:, order] + zero[:, order]).round().clamp(0, most)
    return numbers, zero, scales, ((numbers - zero[:, order]) * scales.float()[:, order]).to(dtype)


def _awq(group: int) -> Packing:
    def packed(table: torch.Tensor) -> torch.Tensor:
        return _pack_bits(table.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 4)

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        numbers, zero, scales, known = _in_groups(weight, group, 4, True, torch.float16)
        return {"qweight": packed(numbers), "qzeros": packed(zero), "scales": scales.T}, known

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Packing({**settings, "modules_to_not_convert": None}, pack, torch.float16)


def _gptq(group: int, bits: int = 4, act_order: bool = False, version: int = 1, zeros: bool = True) -> Packing:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        width = weight.shape[1]
        columns = torch.randperm(width, generator=torch.Generator().manual_seed(width)) if act_order else torch.arange(width)
        order = columns // group
        numbers, zero, scales, known = _in_groups(weight, group, bits, zeros, torch.float16, order)
        stored = zero.T - (1 if version == 1 else 0)
        parts = {"qweight": _pack_bits(numbers, bits).T, "qzeros": _pack_bits(stored, bits), "scales": scales.T}
        return {**parts, "g_idx": order.to(torch.int32)}, known

    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": not zeros,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return Packing(settings, pack, torch.float16)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }  # fmt: skip


def _packed(bits: int, group: int | None, zeros: bool = False) -> Packing:
    """Return weights of few bits with inputs of 16."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        numbers, zero, scales, known = _in_groups(weight, group or weight.shape[1], bits, zeros, torch.bfloat16)
        parts = {"weight_packed": _pack_bits(numbers, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        return parts | ({"weight_zero_point": _pack_bits(zero.T, bits).T} if zeros else {}), known

    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "strategy": "group" if group else "channel"}
    return Packing(_compressed("pack-quantized", weights | {"group_size": group}), pack, torch.bfloat16)


def _eight_bits(kind: str, strategy: str) -> Packing:
    """Return weights and inputs of 8 bits, ``float`` or ``int``; a scale per weight (``tensor``) or per row (``channel``)."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        wide = weight.float()
        peak = wide.abs().amax().reshape(1) if strategy == "tensor" else wide.abs().amax(1, keepdim=True)
        scales = (peak / (127 if kind == "int" else _E4M3)).to(torch.bfloat16)
        exact = wide / scales.float()
        if kind == "int":
            numbers = exact.round().clamp(-128, 127).to(torch.int8)
        else:
            numbers = exact.clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scales}, (numbers.float() * scales.float()).to(torch.bfloat16)

    shared = {"num_bits": 8, "type": kind, "symmetric": True}
    inputs = {**shared, "strategy": "token", "dynamic": True}
    return Packing(_compressed(f"{kind}-quantized", {**shared, "strategy": strategy}, inputs), pack, torch.bfloat16)


def _blocks(rows: int, columns: int) -> Packing:
    """Return the format of DeepSeek-V3 and Qwen3-FP8: a float32 scale per block; blocks at the edges may be smaller."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        wide, (out, width) = weight.float(), weight.shape
        padded = torch.nn.functional.pad(wide, (0, -width % columns, 0, -out % rows))
        peaks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3))
        scales = (peaks / _E4M3).clamp(min=1e-12)
        each = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :width]
        numbers = (wide / each).clamp(-_E4M3, _E4M3).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale_inv": scales}, (numbers.float() * each).to(torch.bfloat16)

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    return Packing(settings, pack, torch.bfloat16)


def packings(group: int) -> dict[str, Packing]:
    """Return the formats, with ``group`` columns in a group, and as many rows and columns in a block."""
    return {
        "awq": _awq(group),
        "gptq": _gptq(group),
        "gptq-symmetric": _gptq(group, zeros=False),
        "gptq-act-order": _gptq(group, act_order=True),
        "gptq-8-bits": _gptq(group, bits=8),
        "gptq-v2": _gptq(group, version=2),
        "w4a16": _packed(4, group),
        "w4a16-zeros": _packed(4, group, zeros=True),
        "w8a16": _packed(8, None),
        "w8a16-zeros": _packed(8, group, zeros=True),
        "fp8-tensor": _eight_bits("float", "tensor"),
        "fp8-channel": _eight_bits("float", "channel"),
        "w8a8": _eight_bits("int", "channel"),
        "fp8-blocks": _blocks(group, group),
    }


def save_checkpoints(
    quantized: Path, plain: Path, config: PreTrainedConfig, tensors: dict[str, torch.Tensor], packing: Packing
) -> None:
    """Write a model to two folders: quantized, and as an ordinary checkpoint of the weights that this stands for.

    Args:
        tensors: weights by name; the matrices of layers are quantized.
    """
    stored, known = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and ".layers." in name:
            parts, known[name] = packing.pack(tensor.cpu())
            stored |= {f"{name.removesuffix('.weight')}.{end}": part.contiguous() for end, part in parts.items()}
        else:
            stored[name] = known[name] = tensor.to("cpu", packing.dtype).contiguous()
    described = config.to_dict() | {"dtype": str(packing.dtype).removeprefix("torch.")}
    for folder, content, extra in ((quantized, stored, {"quantization_config": packing.settings}), (plain, known, {})):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(described | extra, indent=1) + "\n", encoding="utf-8")
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
