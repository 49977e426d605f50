"""Low-rank adapters (LoRA, arXiv 2106.09685) from folders in PEFT's format: ``scale * B (A x)`` added to linear layers."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.configs.slices import ModelOptions
from outrider.engine.errors import ModelLoadError, first_line
from outrider.engine.loading.model_files import ADAPTER_CONFIG as CONFIG

# Adapters that requests name are computed beside the model; one given as the model itself is merged into its weights.

WEIGHTS = "adapter_model.safetensors"
_LANES = 16  # ranks and outputs are padded to multiples of it for compiled code
_PREFIX = "base_model.model."  # prefix of module names in adapter files
_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_COMPUTED = {"r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"}
_WITHOUT_EFFECT = {  # fields that do not change the result, given the tensors
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version",
    "lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "loftq_config", "eva_config",
    "megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "lora_ga")  # values of ``init_lora_weights`` that change the model's weights


@dataclass(frozen=True, slots=True)
class Factors:
    """Low-rank factors of one layer: ``x @ down @ up`` is added, with the scale in ``up``."""

    down: torch.Tensor  # [inputs, rank] float32, rank zero-padded to a multiple of 16
    up: torch.Tensor  # [rank, outputs] float32, both zero-padded


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter in memory, ready for use."""

    name: str
    path: str
    factors: Mapping[str, Factors]  # by module name
    revision: str  # 32 hexadecimal digits of the contents


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """Adapter that fits its model, with unread tensors."""

    name: str  # empty if it is merged into the model
    path: str
    tensors: Mapping[str, tuple[str, str]]  # names of A and B by module
    scales: Mapping[str, float]  # by module
    nbytes: int  # size in memory

    def read(self) -> Adapter:
        """Read the tensors. Raises ``ModelLoadError`` if they cannot be read."""
        factors, digest = {}, hashlib.blake2b(digest_size=16)
        for module, down, up in self._pairs():
            pair = _factors(down, up, self.scales[module])
            factors[module] = pair
            for each in (pair.down, pair.up):
                digest.update(f"{module} {list(each.shape)}\n".encode())
                digest.update(each.numpy().data)
        return Adapter(self.name, self.path, factors, digest.hexdigest())

    @torch.no_grad()
    def merge(self, model: PreTrainedModel, wide: PreTrainedModel) -> None:
        """Merge the adapter into ``model``: ``W + scale * (B @ A)`` in float32 on the CPU. Raises ``ModelLoadError``."""
        for module, down, up in self._pairs():
            # ``wide`` is the model with the weights W, a separate object if ``model`` has fewer bits than the files: the sum is
            # rounded once.
            place, source = model.get_submodule(module), wide.get_submodule(module)
            added = self.scales[module] * (up.float() @ down.float())
            place.weight.copy_(source.weight.float().cpu() + (added.t() if isinstance(place, Conv1D) else added))

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield modules by name, with A [rank, inputs] and B [outputs, rank]. Raises ``ModelLoadError``."""
        try:
            with safe_open(Path(self.path) / WEIGHTS, "pt") as tensors:
                for module, (down, up) in sorted(self.tensors.items()):
                    yield module, tensors.get_tensor(down), tensors.get_tensor(up)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{_where(self.name, self.path)}: {WEIGHTS} cannot be read: {first_line(error)}") from error


def find_adapters(options: ModelOptions, config: PreTrainedConfig) -> tuple[AdapterFile, ...]:
    """Return the adapters of ``model.adapters``, reading headers of tensors only. Raises ``ModelLoadError``."""
    if not options.adapters:
        return ()
    layers = _linear_layers(config)
    return tuple(_found(name, path, layers) for name, path in options.adapters.items())


def find_merged(path: str, config: PreTrainedConfig) -> AdapterFile:
    """Return the adapter in a folder given as the model, for the base model's ``config``. Raises as ``find_adapters``."""
    return _found("", path, _linear_layers(config))


def _linear_layers(config: PreTrainedConfig) -> dict[str, tuple[int, int] | None]:
    """Return (outputs, inputs) of linear layers by name; None for modules that cannot have an adapter."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found: dict[str, tuple[int, int] | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            found[name] = outputs, inputs
        elif isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            found[name] = module.out_features, module.in_features
        else:
            found[name] = None
    return found


def _found(name: str, path: str, layers: Mapping[str, tuple[int, int] | None]) -> AdapterFile:
    where, folder = _where(name, path), Path(path).expanduser()
    config = _config(where, folder)
    shapes = _shapes(where, folder)
    tensors: dict[str, dict[str, str]] = {}
    for tensor in shapes:
        match = _FACTOR.fullmatch(tensor.removeprefix(_PREFIX))
        if match is None:
            raise ModelLoadError(f"{where}: {WEIGHTS} has {tensor}, which is not supported: only lora_A and lora_B are")
        tensors.setdefault(match[1], {})[match[2]] = tensor
    scales, nbytes = {}, 0
    for module, pair in tensors.items():
        if module not in layers:
            raise ModelLoadError(
                f"{where} has tensors for {module}, which the model does not have: the adapter is for another model"
            )
        shape = layers[module]
        if shape is None:
            raise ModelLoadError(f"{where} has tensors for {module}, which is not supported: embeddings cannot be adapted here")
        if len(pair) < 2:
            raise ModelLoadError(f"{where}: {WEIGHTS} has only one of lora_A and lora_B of {module}")
        rank, scales[module] = _rank_and_scale(where, config, module)
        outputs, inputs = shape
        given, expected = (shapes[pair["A"]], shapes[pair["B"]]), ([rank, inputs], [outputs, rank])
        if given != expected:
            raise ModelLoadError(
                f"{where}: lora_A and lora_B of {module} are {given[0]} and {given[1]}; the model and the rank {rank} want "
                f"{expected[0]} and {expected[1]}"
            )
        nbytes += 4 * _filled(rank) * (inputs + _filled(outputs))
    _check_targets(where, config.get("target_modules"), layers, tensors)
    return AdapterFile(name, str(folder), {module: (pair["A"], pair["B"]) for module, pair in tensors.items()}, scales, nbytes)


def _where(name: str, path: str) -> str:
    return f"model.adapters.{name} ({path})" if name else f"model {path!r}"


def _config(where: str, folder: Path) -> dict[str, Any]:
    """Return ``adapter_config.json``. Raises ``ModelLoadError`` if a field is not supported."""
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise ModelLoadError(f"{where} has no {file}: give a folder with an adapter as PEFT saves it")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{where}: {CONFIG} cannot be read: {first_line(error)}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise ModelLoadError(f"{where}: peft_type is {kind!r} in {CONFIG}; only LORA is supported")
    for field, value in config.items():
        if field == "bias" and value == "none":
            continue
        if field == "init_lora_weights" and not str(value).lower().startswith(_CHANGES_THE_MODEL):
            continue
        if value and field not in _COMPUTED | _WITHOUT_EFFECT:
            raise ModelLoadError(f"{where}: {field} is {value!r} in {CONFIG}, which is not supported")
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise ModelLoadError(f"{where}: {field} is {config[field]!r} in {CONFIG}, not ranks or alphas by module")
    return config


def _shapes(where: str, folder: Path) -> dict[str, list[int]]:
    try:
        with safe_open(folder / WEIGHTS, "pt") as tensors:
            found = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{where}: {WEIGHTS} cannot be read: {first_line(error)}") from error
    if not found:
        raise ModelLoadError(f"{where}: {WEIGHTS} has no tensors")
    return found


def _rank_and_scale(where: str, config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return the rank of a module and its scale: ``alpha / rank``, or ``alpha / sqrt(rank)`` for rsLoRA (arXiv 2312.03732)."""
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)  # PEFT's defaults; patterns match suffixes
    rank = next((value for name, value in (config.get("rank_pattern") or {}).items() if _ends(where, module, name)), rank)
    alpha = next((value for name, value in (config.get("alpha_pattern") or {}).items() if _ends(where, module, name)), alpha)
    if type(rank) is not int or rank < 1:
        raise ModelLoadError(f"{where}: the rank of {module} is {rank!r} in {CONFIG}; it must be at least 1")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelLoadError(f"{where}: lora_alpha of {module} is {alpha!r} in {CONFIG}; it must be a number")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _ends(where: str, module: str, pattern: str) -> bool:
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error as error:
        raise ModelLoadError(f"{where}: {pattern!r} in {CONFIG} is not a valid regular expression: {error}") from error


def _check_targets(where: str, targets: Any, layers: Mapping[str, tuple[int, int] | None], tensors: Mapping[str, Any]) -> None:
    """Raise ``ModelLoadError`` for a listed target that is missing in the model or in the tensors."""
    for target in _listed(targets):
        named = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not named:
            raise ModelLoadError(f"{where}: target_modules has {target!r} in {CONFIG}, which the model does not have")
        if not any(name in tensors for name in named):
            raise ModelLoadError(f"{where}: target_modules has {target!r} in {CONFIG}, of which {WEIGHTS} has no tensors")


def _listed(targets: Any) -> Iterator[str]:
    """Yield listed target modules. A single text is a pattern, or stands for all linear layers: then the tensors decide."""
    if isinstance(targets, list):
        yield from map(str, targets)


def _factors(down: torch.Tensor, up: torch.Tensor, scale: float) -> Factors:
    (rank, inputs), outputs = down.shape, up.shape[0]  # A [rank, inputs], B [outputs, rank]
    filled_down, filled_up = torch.zeros(inputs, _filled(rank)), torch.zeros(_filled(rank), _filled(outputs))
    filled_down[:, :rank] = down.float().t()
    filled_up[:rank, :outputs] = up.float().t() * scale
    return Factors(filled_down, filled_up)


def _filled(number: int) -> int:
    return -(-number // _LANES) * _LANES
