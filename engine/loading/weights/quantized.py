"""Checkpoints whose weights are quantized, as ``quantization_config`` in config.json says: AWQ, GPTQ, compressed-tensors and FP8.

On a GPU transformers loads them with a package for each format, whose kernels compute with the small numbers. On a CPU there are
no such kernels: the weights are dequantized while they are read, so that what runs is an ordinary model in 16 bits. All that can
be wrong with a checkpoint shows in the headers of its files, which are read first.

The formats: AWQ's ``gemm`` (github.com/casper-hansen/AutoAWQ), GPTQ's versions 1 and 2 (github.com/ModelCloud/GPTQModel),
``pack-quantized``, ``float-quantized`` and ``int-quantized`` of github.com/vllm-project/compressed-tensors, and blocks of FP8
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from engine.errors import ModelLoadError, first_line

# By which transformers computes with a format on a GPU: what Python imports, and what pip calls it.
_PACKAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "awq": (("gptqmodel", "gptqmodel"),),
    "gptq": (("optimum", "optimum"), ("gptqmodel", "gptqmodel")),
    "compressed-tensors": (("compressed_tensors", "compressed-tensors"),),
    "fp8": (("kernels", "kernels"),),
}
_BITS = (4, 8)  # of a number that lies in an int32 with others
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight columns in an int32, the lowest bits first
_FLOATS, _SCALES = {"F16", "BF16", "F32", "F64"}, {"F16", "BF16", "F32", "F8_E8M0"}  # by the names of safetensors
_UNKNOWN = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I16", "U16", "I32", "U32"}  # that no ordinary weight has
# Of inputs, outputs and KV, which are not rounded where weights are dequantized.
_LEFT_OUT = {
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "activation_scale", "q_scale",
    "k_scale", "v_scale", "k_zero_point", "v_zero_point",
}  # fmt: skip
_BLOCK_ELEMENTS = 2**24  # that are computed with at once, in float32


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file that is open."""

    name: str
    file: Any
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it

    def read(self) -> torch.Tensor:
        tensor: torch.Tensor = self.file.get_tensor(self.name)
        return tensor


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a weight is made of: (value - zero) * scale, by element, in float32, rounded once."""

    values: torch.Tensor  # [out, in]
    scales: torch.Tensor  # [rows, columns]
    zeros: torch.Tensor | None  # as scales
    row_of: torch.Tensor  # [out], which row of scales
    column_of: torch.Tensor  # [in], which column

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in]"""
        count, width = self.values.shape
        size = width // self.scales.shape[1]
        even = torch.equal(self.column_of, torch.arange(width) // size)  # groups of one size, in turn: nothing has to be gathered
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


@dataclass(frozen=True, slots=True)
class _Packed:
    """A weight that is dequantized when it is read, in place of a slice of a file."""

    shape: tuple[int, int]
    numbers: Callable[[], _Numbers]
    dtype: torch.dtype

    def __getitem__(self, index: object) -> torch.Tensor:
        """All of it, which is what transformers asks for."""
        return self.numbers().weight(self.dtype)[index]  # type: ignore[index]


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What a configuration says of quantized weights; None for an ordinary model."""
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):  # the second is what older files have
            found = getattr(part, name, None)
            if found:
                return dict(found if isinstance(found, dict) else found.to_dict())
    return None


def refuse_unusable(path: str, settings: dict[str, Any], on_cpu: bool) -> None:
    """Refuses a format that cannot be used on a device, before any weight is read.

    Args:
        path: what the model is called.
        settings: of ``quantization_of``.
        on_cpu: the device is one.

    Raises:
        ModelLoadError: it is not known, cannot be dequantized, or a package is missing.
    """
    method = _method(settings)
    if on_cpu:
        if method not in _PLANS:
            known = ", ".join(_PLANS)
            raise ModelLoadError(
                f"model {path!r} is quantized with {method}, which is not dequantized on a CPU ({known} are): give the model in "
                "16 bits, or run it on a GPU"
            )
    elif method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelLoadError(
            f"model {path!r} is quantized with {method}, which transformers does not know, so that other texts would come out: "
            "give the model in 16 bits, or quantized otherwise"
        )
    else:
        for module, package in _PACKAGES.get(method, ()):
            if importlib.util.find_spec(module) is None:
                raise ModelLoadError(
                    f"model {path!r} is quantized with {method}, to compute with which {package} is missing: pip install "
                    "'outrider[quantized]'"
                )


def _method(settings: dict[str, Any]) -> str:
    named = settings.get("quant_method")
    if named is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        named = "bitsandbytes"
    if named is None and "config_groups" in settings:
        named = "compressed-tensors"
    if named == "bitsandbytes":
        named += "_8bit" if settings.get("load_in_8bit") else "_4bit"
    return str(getattr(named, "value", named))


class QuantizedCheckpoint:
    """A checkpoint whose headers were read and found whole, to be loaded in 16 bits."""

    def __init__(self, path: str, files: str, config: PreTrainedConfig, dtype: torch.dtype | None) -> None:
        """
        Args:
            path: what the model is called.
            files: a folder or a name on the hub.
            config: of the model, with ``quantization_config``.
            dtype: of the weights in memory; when absent, what the configuration says.

        Raises:
            ModelLoadError: a format that cannot be dequantized, or a file that is not as its format says.
        """
        settings = quantization_of(config)
        assert settings is not None, path
        refuse_unusable(path, settings, on_cpu=True)
        self._path, self._files, self._config = path, files, config
        self.method = _method(settings)
        said = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        self.dtype = said if dtype is None else dtype
        try:
            stored = {tensor.name: tensor for part in _parts(path, files) for tensor in _tensors(part)}
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"model {path!r} could not be loaded: {first_line(error)}") from error
        modules = defaultdict[str, dict[str, _Stored]](dict)
        for name, tensor in stored.items():
            module, _, end = name.rpartition(".")
            modules[module][end] = tensor
        try:
            plan = _PLANS[self.method](settings)
            self._tensors = {
                name: weight for module, parts in modules.items() for name, weight in self._read(module, parts, plan).items()
            }
        except _FaultError as fault:
            raise ModelLoadError(f"model {path!r}, quantized with {self.method}, cannot be dequantized: {fault}") from fault
        if not any(isinstance(weight, _Packed) for weight in self._tensors.values()):
            raise ModelLoadError(
                f"model {path!r} has no quantized weight in it, where config.json says {self.method}: take quantization_config "
                "out of config.json, or give the files that belong to it"
            )
        self.stored_bytes = sum(math.prod(tensor.shape) * _width(tensor.dtype) for tensor in stored.values())
        self.bytes = sum(math.prod(weight.shape) for weight in self._tensors.values()) * self.dtype.itemsize

    def _read(self, module: str, parts: dict[str, _Stored], plan: _Plan) -> dict[str, _Stored | _Packed]:
        """The tensors that a module's are loaded as, by name."""
        found = plan(module, dict(parts))
        if found is None:
            tensors = {end: tensor for end, tensor in parts.items() if end not in _LEFT_OUT}
        else:
            shape, used, numbers = found
            tensors = {end: tensor for end, tensor in parts.items() if end not in used | _LEFT_OUT}
        for end, tensor in tensors.items():
            if tensor.dtype in _UNKNOWN or end in _COMPANIONS:
                raise _FaultError(f"nothing is known of {tensor.name}, of type {tensor.dtype}, beside {_ends(parts)}")
        read: dict[str, _Stored | _Packed] = {tensor.name: tensor for tensor in tensors.values()}
        if found is not None:
            read[f"{module}.weight"] = _Packed(shape, numbers, self.dtype)
        return read

    def load(self, attention: str) -> PreTrainedModel:
        """The model, as ``transformers`` would load its weights in 16 bits.

        Args:
            attention: transformers' ``attn_implementation``.

        Raises:
            ModelLoadError: weights are missing, or have other shapes than the configuration says.
        """
        config = self._config
        for part in (config, config.get_text_config()):
            for name in ("quantization_config", "compression_config"):
                if hasattr(part, name):
                    delattr(part, name)
        weights = {
            name: weight if isinstance(weight, _Packed) else weight.file.get_slice(name) if weight.shape else weight.read()
            for name, weight in self._tensors.items()
        }
        model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None, config=config, state_dict=weights, dtype=self.dtype, attn_implementation=attention, output_loading_info=True
        )
        refuse_missing(self._path, found, stated=True)
        with contextlib.suppress(OSError):  # it need not have one
            model.generation_config = GenerationConfig.from_pretrained(self._files)
        return model


def refuse_missing(path: str, found: dict[str, Any], stated: bool) -> None:
    """Raises ``ModelLoadError`` where weights of a model were not in its files: transformers would have them random.

    Args:
        path: what the model is called.
        found: transformers' ``output_loading_info``.
        stated: config.json says that they are quantized.
    """
    missing = sorted(found["missing_keys"])
    if missing:
        advice = "give whole files"
        if any(name.rpartition(".")[2] in _COMPANIONS for name in found["unexpected_keys"]):
            told = "says otherwise how in its" if stated else "has no"
            advice = f"its weights are quantized, and config.json {told} quantization_config"
        raise ModelLoadError(f"model {path!r} lacks {len(missing)} of its weights, {missing[0]} among them: {advice}")


def _parts(path: str, files: str) -> list[Path]:
    """The safetensors files of a model, fetched if need be."""
    index, one = (
        cached_file(files, name, _raise_exceptions_for_missing_entries=False)
        for name in ("model.safetensors.index.json", "model.safetensors")
    )
    if index is not None:
        return [Path(part) for part in get_checkpoint_shard_files(files, index)[0]]
    if one is None:
        raise ModelLoadError(f"model {path!r} is quantized and has no model.safetensors: dequantizing reads no other files")
    return [Path(one)]


def _tensors(part: Path) -> Iterable[_Stored]:
    file = safe_open(part, "pt")
    for name in file.keys():  # noqa: SIM118 - it is no dict
        header = file.get_slice(name)
        yield _Stored(name, file, tuple(header.get_shape()), header.get_dtype())


class _FaultError(Exception):
    """What is wrong with a checkpoint; the message says where."""


# The shape of the weight, the ends of the names that it takes, and how it is read; None for a module that is not quantized.
_Found = tuple[tuple[int, int], set[str], Callable[[], _Numbers]] | None
_Plan = Callable[[str, dict[str, _Stored]], _Found]


def _plan_awq(settings: dict[str, Any]) -> _Plan:
    bits, group = _integer(settings, "bits", (4,)), _integer(settings, "group_size")
    form = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise _FaultError(f"its version is {form}, and gemm alone is known")

    def plan(module: str, parts: dict[str, _Stored]) -> _Found:
        if "qweight" not in parts:
            return None
        packed, zeros, scales = (_of(module, parts, end) for end in ("qweight", "qzeros", "scales"))
        width, out = _matrix(packed, "I32")[0], packed.shape[1] * 32 // bits
        groups = _groups(module, width, group, exact=True)
        _expect(zeros, (groups, packed.shape[1]), {"I32"}, settings)
        _expect(scales, (groups, out), _SCALES, settings)

        def columns(stored: _Stored) -> torch.Tensor:
            """[a, out] of [a, out / 8]"""
            return _unpack(stored.read(), bits).unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(1)

        def numbers() -> _Numbers:
            column_of = torch.arange(width) // (width // groups)
            values = columns(packed).T.contiguous()
            return _Numbers(values, scales.read().T, columns(zeros).T, torch.arange(out), column_of)

        return (out, width), {"qweight", "qzeros", "scales"}, numbers

    return plan


def _plan_gptq(settings: dict[str, Any]) -> _Plan:
    bits, group = _integer(settings, "bits", _BITS), _integer(settings, "group_size")
    form = str(settings.get("checkpoint_format") or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise _FaultError(f"its checkpoint_format is {form}, and gptq and gptq_v2 are known")
    added = 1 if form == "gptq" else 0  # version 1 stores zeros less one

    def plan(module: str, parts: dict[str, _Stored]) -> _Found:
        if "qweight" not in parts:
            return None
        packed, zeros, scales = (_of(module, parts, end) for end in ("qweight", "qzeros", "scales"))
        out = _matrix(packed, "I32")[1]
        width = packed.shape[0] * 32 // bits
        groups = _groups(module, width, group)
        _expect(zeros, (groups, math.ceil(out * bits / 32)), {"I32"}, settings)
        _expect(scales, (groups, out), _SCALES, settings)
        if "g_idx" not in parts and settings.get("desc_act"):
            raise _FaultError(f"{module}.g_idx is missing, which says the groups where desc_act is true")
        order = _order(parts["g_idx"], width, groups, settings) if "g_idx" in parts else None

        def numbers() -> _Numbers:
            column_of = torch.arange(width) // (width if group == -1 else group) if order is None else order
            values = _unpack(packed.read().T, bits)
            known = _unpack(zeros.read(), bits)[:, :out].short() + added
            return _Numbers(values, scales.read().T, known.T, torch.arange(out), column_of)

        return (out, width), {"qweight", "qzeros", "scales", "g_idx"}, numbers

    return plan


def _plan_fp8(settings: dict[str, Any]) -> _Plan:
    block, form = settings.get("weight_block_size"), settings.get("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        raise _FaultError(f"its fmt is {form}, and e4m3 alone is known")
    blocks = [tuple(block)] if block else []

    def plan(module: str, parts: dict[str, _Stored]) -> _Found:
        if "weight" not in parts or parts["weight"].dtype != "F8_E4M3":
            return None
        return _scaled(module, parts, "weight_scale_inv", blocks, {"weight", "weight_scale_inv"}, settings)

    return plan


def _plan_compressed(settings: dict[str, Any]) -> _Plan:
    """See ``compressed_tensors.compressors``. A module's shapes say which of the schemes is its own."""
    schemes = list((settings.get("config_groups") or {}).values())
    if not schemes or not all(isinstance(scheme, dict) for scheme in schemes):
        raise _FaultError("its quantization_config has no config_groups")
    forms = {str(scheme.get("format") or settings.get("format")) for scheme in schemes}
    unknown = forms - {"pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "None"}
    if unknown:
        raise _FaultError(f"its format is {sorted(unknown)[0]}, and pack-, float-, int- and naive-quantized are known")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _FaultError(f"its weights are sparse as well ({settings['sparsity_config']['format']})")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _FaultError("its inputs are rotated while it runs (transform_config)")
    weights = [scheme["weights"] for scheme in schemes if scheme.get("weights")]
    for scheme in weights:
        _integer(scheme, "num_bits", _BITS)
    blocks = [tuple(scheme["block_structure"]) for scheme in weights if scheme.get("block_structure")]
    blocks += [(1, int(scheme["group_size"])) for scheme in weights if (scheme.get("group_size") or -1) > 0]
    asymmetric = bool(weights) and not any(scheme.get("symmetric", True) for scheme in weights)

    def plan(module: str, parts: dict[str, _Stored]) -> _Found:
        if "weight_packed" in parts:
            return _packed(module, parts)
        if "weight" not in parts or parts["weight"].dtype not in ("F8_E4M3", "I8"):
            return None
        used = {"weight", "weight_scale", "weight_zero_point", "weight_g_idx"}
        return _scaled(module, parts, "weight_scale", blocks, used, settings)

    def _packed(module: str, parts: dict[str, _Stored]) -> _Found:
        packed, scales, written = (_of(module, parts, end) for end in ("weight_packed", "weight_scale", "weight_shape"))
        _expect(written, (2,), {"I64", "I32"}, settings)
        out, width = (int(size) for size in written.read().tolist())
        _matrix(packed, "I32")
        kinds = {int(scheme["num_bits"]) for scheme in weights if math.ceil(width * scheme["num_bits"] / 32) == packed.shape[1]}
        if packed.shape[0] != out or not kinds:
            said = f"{written.name} ({out}, {width})"
            raise _FaultError(f"{packed.name} has the shape {list(packed.shape)}, which {said} does not give")
        bits = max(kinds)
        rows, columns = _grid(scales, (out, width), blocks)
        shape = (math.ceil(out / rows), math.ceil(width / columns))
        if asymmetric:
            _of(module, parts, "weight_zero_point")
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            _expect(zeros, (math.ceil(out * bits / 32), shape[1]), {"I32"}, settings)
        order = _order(parts["weight_g_idx"], width, shape[1], settings) if "weight_g_idx" in parts else None

        def numbers() -> _Numbers:
            half = 2 ** (bits - 1)  # which is added to numbers and zeros before they are packed
            known = torch.full(shape, half) if zeros is None else _unpack(zeros.read().T, bits)[:, :out].T
            column_of = torch.arange(width) // columns if order is None else order
            values = _unpack(packed.read(), bits)[:, :width]
            return _Numbers(values, scales.read().reshape(shape), known, torch.arange(out) // rows, column_of)

        ends = {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}
        return (out, width), ends, numbers

    return plan


def _scaled(
    module: str, parts: dict[str, _Stored], end: str, blocks: list[tuple[int, ...]], used: set[str], settings: dict[str, Any]
) -> _Found:
    """Numbers of eight bits, each in a byte of its own, with a scale for all, for each row, or for each block."""
    weight, scales = parts["weight"], _of(module, parts, end)
    out, width = _matrix(weight, weight.dtype)
    rows, columns = _grid(scales, (out, width), blocks)
    shape = (math.ceil(out / rows), math.ceil(width / columns))
    zeros = parts.get("weight_zero_point")
    if zeros is not None and math.prod(zeros.shape) != math.prod(shape):
        _expect(zeros, shape, {zeros.dtype}, settings)
    order = _order(parts["weight_g_idx"], width, shape[1], settings) if "weight_g_idx" in parts else None

    def numbers() -> _Numbers:
        known = None if zeros is None else zeros.read().reshape(shape)
        column_of = torch.arange(width) // columns if order is None else order
        return _Numbers(weight.read(), scales.read().reshape(shape), known, torch.arange(out) // rows, column_of)

    return (out, width), used, numbers


_PLANS: dict[str, Callable[[dict[str, Any]], _Plan]] = {
    "awq": _plan_awq, "gptq": _plan_gptq, "compressed-tensors": _plan_compressed, "fp8": _plan_fp8,
}  # fmt: skip
# Ends of names that no ordinary weight has.
_COMPANIONS = {
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_shape",
    "weight_zero_point", "weight_g_idx", "weight_global_scale",
}  # fmt: skip


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[a, b] of int32 to uint8 [a, b * 32 / bits], the lowest bits first."""
    numbers = packed.contiguous().view(torch.uint8)  # as this machine has them, the lowest byte first
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)


def _integer(settings: dict[str, Any], name: str, known: tuple[int, ...] = ()) -> int:
    value = settings.get(name)
    if not isinstance(value, int) or (known and value not in known):
        wanted = f"{' and '.join(map(str, known))} {'is' if len(known) == 1 else 'are'} known" if known else "a number is needed"
        raise _FaultError(f"its {name} is {value}, and {wanted}")
    if name == "group_size" and value != -1 and value < 1:
        raise _FaultError(f"its {name} is {value}: a number of columns, or -1 for all, is needed")
    return value


def _of(module: str, parts: dict[str, _Stored], end: str) -> _Stored:
    if end not in parts:
        raise _FaultError(f"{module}.{end} is missing beside {_ends(parts)}: give whole files")
    return parts[end]


def _ends(parts: dict[str, _Stored]) -> str:
    return ", ".join(sorted(parts))


def _matrix(tensor: _Stored, dtype: str) -> tuple[int, int]:
    if len(tensor.shape) != 2 or tensor.dtype != dtype:
        raise _FaultError(f"{tensor.name} is of type {tensor.dtype} and shape {list(tensor.shape)}, not a matrix of {dtype}")
    return tensor.shape[0], tensor.shape[1]


def _expect(tensor: _Stored, shape: tuple[int, ...], dtypes: set[str], settings: dict[str, Any]) -> None:
    if tensor.shape != shape:
        said = ", ".join(f"{name} {settings[name]}" for name in ("bits", "group_size") if name in settings)
        raise _FaultError(f"{tensor.name} has the shape {list(tensor.shape)}, not {list(shape)}" + (f" ({said})" if said else ""))
    if tensor.dtype not in dtypes:
        raise _FaultError(f"{tensor.name} is of type {tensor.dtype}, not {' or '.join(sorted(dtypes))}")


def _groups(module: str, width: int, group: int, exact: bool = False) -> int:
    if exact and group != -1 and width % group:
        raise _FaultError(f"its group_size is {group}, into which the {width} columns of {module} do not go")
    return 1 if group == -1 else math.ceil(width / group)


def _order(tensor: _Stored, width: int, groups: int, settings: dict[str, Any]) -> torch.Tensor:
    """[in], the group of each column, read at once."""
    _expect(tensor, (width,), {"I32", "I64"}, settings)
    order = tensor.read().long()
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise _FaultError(f"{tensor.name} names group {int(order.max())}, and there are {groups} (0 to {groups - 1})")
    return order


def _grid(scales: _Stored, shape: tuple[int, int], blocks: list[tuple[int, ...]]) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale, by the shape of the scales."""
    out, width = shape
    if scales.dtype not in _SCALES:
        raise _FaultError(f"{scales.name} is of type {scales.dtype}, not {' or '.join(sorted(_SCALES))}")
    if math.prod(scales.shape) == 1:
        return out, width
    if scales.shape in ((out,), (out, 1)):
        return 1, width
    for rows, columns in blocks:
        if scales.shape == (math.ceil(out / rows), math.ceil(width / columns)):
            return rows, columns
    said = f"{', '.join(f'{rows} x {columns}' for rows, columns in blocks) or 'none'}"
    raise _FaultError(f"{scales.name} has the shape {list(scales.shape)}, which no blocks ({said}) of a weight {[*shape]} give")


def _width(dtype: str) -> int:
    return 1 if dtype[:2] in ("F8", "I8", "U8", "BO") else 8 if dtype.endswith("64") else 4 if dtype.endswith("32") else 2
