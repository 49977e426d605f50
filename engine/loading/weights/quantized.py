"""Checkpoints with quantized weights (``quantization_config`` in config.json): AWQ, GPTQ, compressed-tensors and FP8."""

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

from outrider.engine.errors import ModelLoadError, first_line
from outrider.engine.loading.weights.quantized_layouts import COMPANIONS, PLANS, LayoutError, Numbers, Plan, Stored, ends

# On a GPU transformers loads them with a package per format. On a CPU, without such kernels, the weights are dequantized while
# they are read, to an ordinary model in 16 bits.

# Packages that transformers needs for a format on a GPU: (module, name for pip).
_PACKAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "awq": (("gptqmodel", "gptqmodel"),),
    "gptq": (("optimum", "optimum"), ("gptqmodel", "gptqmodel")),
    "compressed-tensors": (("compressed_tensors", "compressed-tensors"),),
    "fp8": (("kernels", "kernels"),),
}
_UNKNOWN = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I16", "U16", "I32", "U32"}  # not in ordinary weights
# Scales of inputs, outputs and KV, which are not quantized here.
_LEFT_OUT = {
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "activation_scale", "q_scale",
    "k_scale", "v_scale", "k_zero_point", "v_zero_point",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Packed:
    """Weight that is dequantized when it is read, with the interface of a file's slice."""

    shape: tuple[int, int]
    numbers: Callable[[], Numbers]
    dtype: torch.dtype

    def __getitem__(self, index: object) -> torch.Tensor:
        """Return the whole weight, which is all that transformers reads."""
        return self.numbers().weight(self.dtype)[index]  # type: ignore[index]


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantization settings of a configuration; None for an ordinary model."""
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):  # the second in older files
            found = getattr(part, name, None)
            if found:
                return dict(found if isinstance(found, dict) else found.to_dict())
    return None


def refuse_unusable(path: str, settings: dict[str, Any], on_cpu: bool) -> None:
    """Raise ``ModelLoadError`` if a device cannot use the format in ``settings`` (of ``quantization_of``)."""
    method = _method(settings)
    if on_cpu:
        if method not in PLANS:
            known = ", ".join(PLANS)
            raise ModelLoadError(
                f"model {path!r} is quantized with {method}, which is not supported on a CPU (supported: {known}): give the "
                "model in 16 bits, or run it on a GPU"
            )
    elif method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelLoadError(
            f"model {path!r} is quantized with {method}, which transformers does not support: give the model in 16 bits, or "
            "quantized by another method"
        )
    else:
        for module, package in _PACKAGES.get(method, ()):
            if importlib.util.find_spec(module) is None:
                raise ModelLoadError(
                    f"model {path!r} is quantized with {method}, which requires {package}: pip install 'outrider[quantized]'"
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
    """Checkpoint with checked headers, to be loaded in 16 bits."""

    def __init__(self, path: str, files: str, config: PreTrainedConfig, dtype: torch.dtype | None) -> None:
        """Read and check the headers of ``files``, a folder or a name on the hub, of ``path``. Raises ``ModelLoadError``."""
        settings = quantization_of(config)
        assert settings is not None, path
        refuse_unusable(path, settings, on_cpu=True)
        self._path, self._files, self._config = path, files, config
        self.method = _method(settings)
        # ``dtype`` is that of the weights in memory, by default the configuration's.
        said = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        self.dtype = said if dtype is None else dtype
        try:
            stored = {tensor.name: tensor for part in _parts(path, files) for tensor in _tensors(part)}
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"model {path!r} could not be loaded: {first_line(error)}") from error
        modules = defaultdict[str, dict[str, Stored]](dict)
        for name, tensor in stored.items():
            module, _, end = name.rpartition(".")
            modules[module][end] = tensor
        try:
            plan = PLANS[self.method](settings)
            self._tensors = {
                name: weight for module, parts in modules.items() for name, weight in self._read(module, parts, plan).items()
            }
        except LayoutError as fault:
            raise ModelLoadError(f"model {path!r}, quantized with {self.method}, cannot be dequantized: {fault}") from fault
        if not any(isinstance(weight, _Packed) for weight in self._tensors.values()):
            raise ModelLoadError(
                f"model {path!r} has no quantized weights, but its config.json declares {self.method}: remove "
                "quantization_config from config.json, or give the matching weight files"
            )
        self.stored_bytes = sum(math.prod(tensor.shape) * _width(tensor.dtype) for tensor in stored.values())
        self.bytes = sum(math.prod(weight.shape) for weight in self._tensors.values()) * self.dtype.itemsize

    def _read(self, module: str, parts: dict[str, Stored], plan: Plan) -> dict[str, Stored | _Packed]:
        """Return the tensors that a module's stored ones are loaded as, by name."""
        found = plan(module, dict(parts))
        if found is None:
            tensors = {end: tensor for end, tensor in parts.items() if end not in _LEFT_OUT}
        else:
            shape, used, numbers = found
            tensors = {end: tensor for end, tensor in parts.items() if end not in used | _LEFT_OUT}
        for end, tensor in tensors.items():
            if tensor.dtype in _UNKNOWN or end in COMPANIONS:
                raise LayoutError(f"unexpected tensor {tensor.name} of type {tensor.dtype} beside {ends(parts)}")
        read: dict[str, Stored | _Packed] = {tensor.name: tensor for tensor in tensors.values()}
        if found is not None:
            read[f"{module}.weight"] = _Packed(shape, numbers, self.dtype)
        return read

    def load(self, attention: str) -> PreTrainedModel:
        """Load the model in 16 bits. Raises ``ModelLoadError`` if weights are missing or do not have the configured shapes."""
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
        with contextlib.suppress(OSError):  # the file is optional
            model.generation_config = GenerationConfig.from_pretrained(self._files)
        return model


def refuse_missing(path: str, found: dict[str, Any], stated: bool) -> None:
    """Raise ``ModelLoadError`` if ``found``, transformers' ``output_loading_info``, has missing (so random) weights."""
    missing = sorted(found["missing_keys"])
    if missing:
        advice = "download all of its files"
        if any(name.rpartition(".")[2] in COMPANIONS for name in found["unexpected_keys"]):
            verb = "has a different" if stated else "has no"
            advice = f"its weights are quantized, and config.json {verb} quantization_config"
        raise ModelLoadError(f"model {path!r} lacks {len(missing)} of its weights, {missing[0]} among them: {advice}")


def _parts(path: str, files: str) -> list[Path]:
    """Return the safetensors files of a model, downloaded if need be."""
    index, one = (
        cached_file(files, name, _raise_exceptions_for_missing_entries=False)
        for name in ("model.safetensors.index.json", "model.safetensors")
    )
    if index is not None:
        return [Path(part) for part in get_checkpoint_shard_files(files, index)[0]]
    if one is None:
        raise ModelLoadError(f"model {path!r} is quantized and has no model.safetensors: dequantizing reads no other files")
    return [Path(one)]


def _tensors(part: Path) -> Iterable[Stored]:
    file = safe_open(part, "pt")
    for name in file.keys():  # noqa: SIM118 - it is no dict
        header = file.get_slice(name)
        yield Stored(name, file, tuple(header.get_shape()), header.get_dtype())


def _width(dtype: str) -> int:
    return 1 if dtype[:2] in ("F8", "I8", "U8", "BO") else 8 if dtype.endswith("64") else 4 if dtype.endswith("32") else 2
