"""Storage layouts of AWQ, GPTQ, compressed-tensors and FP8 matrices, with checks of their tensors.

The formats: AWQ's ``gemm`` (github.com/casper-hansen/AutoAWQ), GPTQ's versions 1 and 2 (github.com/ModelCloud/GPTQModel),
``pack-quantized``, ``float-quantized`` and ``int-quantized`` of github.com/vllm-project/compressed-tensors, and blocks of FP8
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_BITS = (4, 8)  # bits of a number packed into an int32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of eight columns in an int32, from the lowest bits
_SCALES = {"F16", "BF16", "F32", "F8_E8M0"}  # safetensors names
_BLOCK_ELEMENTS = 2**24  # elements dequantized at once, in float32


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensor in an open file."""

    name: str
    file: Any
    shape: tuple[int, ...]
    dtype: str  # safetensors name

    def read(self) -> torch.Tensor:
        tensor: torch.Tensor = self.file.get_tensor(self.name)
        return tensor


@dataclass(frozen=True, slots=True)
class Numbers:
    """Parts of a quantized weight: (value - zero) * scale by element, in float32, rounded once."""

    values: torch.Tensor  # [out, in]
    scales: torch.Tensor  # [rows, columns]
    zeros: torch.Tensor | None  # [rows, columns]
    row_of: torch.Tensor  # [out], row of scales
    column_of: torch.Tensor  # [in], column of scales

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight [out, in]."""
        count, width = self.values.shape
        size = width // self.scales.shape[1]
        even = torch.equal(self.column_of, torch.arange(width) // size)  # consecutive groups of equal size: no gather needed
        scales, zeros = (None if table is None else table.float().contiguous() for table in (self.scales, self.zeros))
        result = torch.empty(count, width, dtype=dtype)
        step = max(1, _BLOCK_ELEMENTS // width)
        for start in range(0, count, step):
            rows = slice(start, start + step)
            block = self.values[rows].float()
            for table, change in ((zeros, torch.Tensor.sub_), (scales, torch.Tensor.mul_)):
                if table is not None and even:
                    change(block.unflatten(1, (-1, size)), table[self.row_of[rows]].unsqueeze(2))
                elif table is not None:
                    change(block, table[self.row_of[rows]].index_select(1, self.column_of))
            result[rows] = block
        return result


class LayoutError(Exception):
    """Fault of a checkpoint; the message names the place."""


# Shape of a weight, name suffixes of its tensors, and its reader; None for a module that is not quantized.
Found = tuple[tuple[int, int], set[str], Callable[[], Numbers]] | None
Plan = Callable[[str, dict[str, Stored]], Found]


def _plan_awq(settings: dict[str, Any]) -> Plan:
    bits, group = _integer(settings, "bits", (4,)), _integer(settings, "group_size")
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise LayoutError(f"its version is {form}; only gemm is supported")

    def plan(module: str, parts: dict[str, Stored]) -> Found:
        if "qweight" not in parts:
            return None
        packed, zeros, scales = (_of(module, parts, end) for end in ("qweight", "qzeros", "scales"))
        width, out = _matrix(packed, "I32")[0], packed.shape[1] * 32 // bits
        groups = _groups(module, width, group, exact=True)
        _expect(zeros, (groups, packed.shape[1]), {"I32"}, settings)
        _expect(scales, (groups, out), _SCALES, settings)

        def columns(stored: Stored) -> torch.Tensor:
            return _unpack(stored.read(), bits).unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(1)  # [a, out]

        def numbers() -> Numbers:
            column_of = torch.arange(width) // (width // groups)
            values = columns(packed).T.contiguous()
            return Numbers(values, scales.read().T, columns(zeros).T, torch.arange(out), column_of)

        return (out, width), {"qweight", "qzeros", "scales"}, numbers

    return plan


def _plan_gptq(settings: dict[str, Any]) -> Plan:
    bits, group = _integer(settings, "bits", _BITS), _integer(settings, "group_size")
    form = str(settings.get("checkpoint_format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise LayoutError(f"its checkpoint_format is {form}; supported: gptq, gptq_v2")
    added = 1 if form == "gptq" else 0  # version 1 stores zeros minus one

    def plan(module: str, parts: dict[str, Stored]) -> Found:
        if "qweight" not in parts:
            return None
        packed, zeros, scales = (_of(module, parts, end) for end in ("qweight", "qzeros", "scales"))
        out = _matrix(packed, "I32")[1]
        width = packed.shape[0] * 32 // bits
        groups = _groups(module, width, group)
        _expect(zeros, (groups, math.ceil(out * bits / 32)), {"I32"}, settings)
        _expect(scales, (groups, out), _SCALES, settings)
        if "g_idx" not in parts and settings.get("desc_act"):
            raise LayoutError(f"{module}.g_idx is missing, which desc_act=true requires")
        order = _order(parts["g_idx"], width, groups, settings) if "g_idx" in parts else None

        def numbers() -> Numbers:
            column_of = torch.arange(width) // (width if group == -1 else group) if order is None else order
            values = _unpack(packed.read().T, bits)
            known = _unpack(zeros.read(), bits)[:, :out].short() + added
            return Numbers(values, scales.read().T, known.T, torch.arange(out), column_of)

        return (out, width), {"qweight", "qzeros", "scales", "g_idx"}, numbers

    return plan


def _plan_fp8(settings: dict[str, Any]) -> Plan:
    block, form = settings.get("weight_block_size"), settings.get("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        raise LayoutError(f"its fmt is {form}; only e4m3 is supported")
    blocks = [tuple(block)] if block else []

    def plan(module: str, parts: dict[str, Stored]) -> Found:
        if "weight" not in parts or parts["weight"].dtype != "F8_E4M3":
            return None
        return _scaled(module, parts, "weight_scale_inv", blocks, {"weight", "weight_scale_inv"}, settings)

    return plan


def _plan_compressed(settings: dict[str, Any]) -> Plan:
    """Plan as in ``compressed_tensors.compressors``. The shapes of a module show which scheme it uses."""
    schemes = list((settings.get("config_groups") or {}).values())
    if not schemes or not all(isinstance(scheme, dict) for scheme in schemes):
        raise LayoutError("its quantization_config has no config_groups")
    forms = {str(scheme.get("format") or settings.get("format")) for scheme in schemes}
    unknown = forms - {"pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "None"}
    if unknown:
        raise LayoutError(f"its format is {sorted(unknown)[0]}; supported: pack-, float-, int- and naive-quantized")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise LayoutError(f"its weights are also sparse, which is not supported ({settings['sparsity_config']['format']})")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise LayoutError("its transform_config rotates inputs at run time, which is not supported")
    weights = [scheme["weights"] for scheme in schemes if scheme.get("weights")]
    for scheme in weights:
        _integer(scheme, "num_bits", _BITS)
    blocks = [tuple(scheme["block_structure"]) for scheme in weights if scheme.get("block_structure")]
    blocks += [(1, int(scheme["group_size"])) for scheme in weights if (scheme.get("group_size") or -1) > 0]
    asymmetric = bool(weights) and not any(scheme.get("symmetric", True) for scheme in weights)

    def plan(module: str, parts: dict[str, Stored]) -> Found:
        if "weight_packed" in parts:
            return _packed(module, parts)
        if "weight" not in parts or parts["weight"].dtype not in ("F8_E4M3", "I8"):
            return None
        used = {"weight", "weight_scale", "weight_zero_point", "weight_g_idx"}
        return _scaled(module, parts, "weight_scale", blocks, used, settings)

    def _packed(module: str, parts: dict[str, Stored]) -> Found:
        packed, scales, written = (_of(module, parts, end) for end in ("weight_packed", "weight_scale", "weight_shape"))
        _expect(written, (2,), {"I64", "I32"}, settings)
        out, width = (int(size) for size in written.read().tolist())
        _matrix(packed, "I32")
        kinds = {int(scheme["num_bits"]) for scheme in weights if math.ceil(width * scheme["num_bits"] / 32) == packed.shape[1]}
        if packed.shape[0] != out or not kinds:
            said = f"{written.name} ({out}, {width})"
            raise LayoutError(f"{packed.name} has the shape {list(packed.shape)}, which {said} does not give")
        bits = max(kinds)
        rows, columns = _grid(scales, (out, width), blocks)
        shape = (math.ceil(out / rows), math.ceil(width / columns))
        if asymmetric:
            _of(module, parts, "weight_zero_point")
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            _expect(zeros, (math.ceil(out * bits / 32), shape[1]), {"I32"}, settings)
        order = _order(parts["weight_g_idx"], width, shape[1], settings) if "weight_g_idx" in parts else None

        def numbers() -> Numbers:
            half = 2 ** (bits - 1)  # added to numbers and zeros before packing
            known = torch.full(shape, half) if zeros is None else _unpack(zeros.read().T, bits)[:, :out].T
            column_of = torch.arange(width) // columns if order is None else order
            values = _unpack(packed.read(), bits)[:, :width]
            return Numbers(values, scales.read().reshape(shape), known, torch.arange(out) // rows, column_of)

        ends = {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}
        return (out, width), ends, numbers

    return plan


def _scaled(
    module: str, parts: dict[str, Stored], end: str, blocks: list[tuple[int, ...]], used: set[str], settings: dict[str, Any]
) -> Found:
    """Plan 8-bit numbers, each in a byte, with a scale per tensor, row or block."""
    weight, scales = parts["weight"], _of(module, parts, end)
    out, width = _matrix(weight, weight.dtype)
    rows, columns = _grid(scales, (out, width), blocks)
    shape = (math.ceil(out / rows), math.ceil(width / columns))
    zeros = parts.get("weight_zero_point")
    if zeros is not None and math.prod(zeros.shape) != math.prod(shape):
        _expect(zeros, shape, {zeros.dtype}, settings)
    order = _order(parts["weight_g_idx"], width, shape[1], settings) if "weight_g_idx" in parts else None

    def numbers() -> Numbers:
        known = None if zeros is None else zeros.read().reshape(shape)
        column_of = torch.arange(width) // columns if order is None else order
        return Numbers(weight.read(), scales.read().reshape(shape), known, torch.arange(out) // rows, column_of)

    return (out, width), used, numbers


PLANS: dict[str, Callable[[dict[str, Any]], Plan]] = {
    "awq": _plan_awq, "gptq": _plan_gptq, "compressed-tensors": _plan_compressed, "fp8": _plan_fp8,
}  # fmt: skip
# Name suffixes that ordinary weights do not have.
COMPANIONS = {
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape",
    "weight_zero_point", "weight_g_idx", "weight_global_scale",
}  # fmt: skip


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 [a, b] to uint8 [a, b * 32 / bits], the lowest bits first."""
    numbers = packed.contiguous().view(torch.uint8)  # little-endian
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)


def _integer(settings: dict[str, Any], name: str, known: tuple[int, ...] = ()) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or (known and value not in known):
        wanted = f"{' and '.join(map(str, known))} {'is' if len(known) == 1 else 'are'} known" if known else "a number is needed"
        raise LayoutError(f"its {name} is {value}, and {wanted}")
    if name == "group_size" and value != -1 and value < 1:
        raise LayoutError(f"its {name} is {value}: a number of columns, or -1 for all, is needed")
    return value


def _of(module: str, parts: dict[str, Stored], end: str) -> Stored:
    if end not in parts:
        raise LayoutError(f"{module}.{end} is missing beside {ends(parts)}: give whole files")
    return parts[end]


def ends(parts: dict[str, Stored]) -> str:
    return ", ".join(sorted(parts))


def _matrix(tensor: Stored, dtype: str) -> tuple[int, int]:
    if len(tensor.shape) != 2 or tensor.dtype != dtype:
        raise LayoutError(f"{tensor.name} is of type {tensor.dtype} and shape {list(tensor.shape)}, not a matrix of {dtype}")
    return tensor.shape[0], tensor.shape[1]


def _expect(tensor: Stored, shape: tuple[int, ...], dtypes: set[str], settings: dict[str, Any]) -> None:
    if tensor.shape != shape:
        said = ", ".join(f"{name} {settings[name]}" for name in ("bits", "group_size") if name in settings)
        raise LayoutError(f"{tensor.name} has the shape {list(tensor.shape)}, not {list(shape)}" + (f" ({said})" if said else ""))
    if tensor.dtype not in dtypes:
        raise LayoutError(f"{tensor.name} is of type {tensor.dtype}, not {' or '.join(sorted(dtypes))}")


def _groups(module: str, width: int, group: int, exact: bool = False) -> int:
    if exact and group != -1 and width % group:
        raise LayoutError(f"its group_size is {group}, which does not divide the {width} columns of {module}")
    return 1 if group == -1 else math.ceil(width / group)


def _order(tensor: Stored, width: int, groups: int, settings: dict[str, Any]) -> torch.Tensor:
    """Return the group of each column, [in]."""
    _expect(tensor, (width,), {"I32", "I64"}, settings)
    order = tensor.read().long()
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise LayoutError(f"{tensor.name} names group {int(order.max())}, and there are {groups} (0 to {groups - 1})")
    return order


def _grid(scales: Stored, shape: tuple[int, int], blocks: list[tuple[int, ...]]) -> tuple[int, int]:
    """Return the rows and columns of a weight that share a scale, by the shape of the scales."""
    out, width = shape
    if scales.dtype not in _SCALES:
        raise LayoutError(f"{scales.name} is of type {scales.dtype}, not {' or '.join(sorted(_SCALES))}")
    if math.prod(scales.shape) == 1:
        return out, width
    if scales.shape in ((out,), (out, 1)):
        return 1, width
    for rows, columns in blocks:
        if scales.shape == (math.ceil(out / rows), math.ceil(width / columns)):
            return rows, columns
    said = f"{', '.join(f'{rows} x {columns}' for rows, columns in blocks) or 'none'}"
    raise LayoutError(f"{scales.name} has the shape {list(scales.shape)}, which no blocks ({said}) of a weight {[*shape]} give")
