"""GPU memory beside the weights: what forwards take, and the length and number of the KV slots that fit into the rest."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from outrider.configs.slices import SELF, EngineOptions, SpeculationOptions
from outrider.engine.accelerator import accelerator
from outrider.engine.cuda.slot_attention import best_block_rows, rows_per_tile, states_size
from outrider.engine.cuda.static_runner import ROWS, TREE_ROWS, lacks_graphs, step_kinds, step_room
from outrider.engine.cuda.step_buffers import buffer_sizes
from outrider.engine.errors import ModelLoadError
from outrider.engine.loading.memory import default_slots, left_bytes
from outrider.engine.loading.model import LoadedModel, load_config
from outrider.engine.loading.outline import outline

logger = logging.getLogger(__name__)

LENGTHS = (131072, 65536, 32768, 16384, 8192, 4096)  # shorter contexts to try, in tokens
_NO_ROOM = "stop other processes that use it, set parallelism.mode=tensor or pipeline, or give a smaller model"
STRICT_ROWS = 64  # rows of every forward with ``engine.exact=strict``, see ``engine.forward.runners``
# Allowance for the CUDA context with kernel code, 0.39 GiB in vLLM's issue 11251; graph executables, 0.36 GiB for 16 of vLLM's
# (gpustack/runner, pull request 251); workspaces of cuBLAS and cuBLASLt, 32 MiB each on Hopper (PyTorch, pull request 120925) in
# the two streams of a warm-up; and a model's buffers, less than 1 MiB.
_LIBRARIES = 1 << 30


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """KV slots on a GPU, and the memory reserved beside them. Sizes are in bytes."""

    max_model_len: int
    slots: int
    slot_bytes: int
    reserved_bytes: int
    room_bytes: int  # memory that the weights leave

    @property
    def need_bytes(self) -> int:
        """Return the bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def free_bytes(self) -> int:
        """Return the bytes that slots may take."""
        return max(0, self.room_bytes - self.reserved_bytes)

    @property
    def fits(self) -> bool:
        """Return whether all slots fit."""
        return self.need_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True)
class Reserved:
    """GPU bytes that KV slots never take: ``states`` and ``buffers`` as the engine allocates them, the rest estimated."""

    activations: int
    graph_logits: int
    states: int = 0  # attention states between the two kernels
    buffers: int = 0  # inputs of captured steps
    libraries: int = _LIBRARIES

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return self.activations + self.graph_logits + self.states + self.buffers + self.libraries


def reserved(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    options: EngineOptions,
    capacity: int,
    tree_rows: int = TREE_ROWS,
) -> Reserved:
    """Return the GPU memory to reserve beside weights and KV slots.

    A forward holds per row, in addition to short-lived tensors of a layer:

        logits               2 x vocabulary in the model's type (a bound of scores makes a copy), 1 x in float32
        an MLP or attention  4 x the widest product: gate, up, activation and their product, or queries and what is rotated
        residual and norm    4 x hidden in the model's type, 3 x in float32

    Args:
        capacity: entries of a slot.
        tree_rows: most rows of a request's tree, with its root.
    """
    text, found = config.get_text_config(), outline(config)
    vocab, hidden, wide = int(text.vocab_size), int(getattr(text, "hidden_size", found.widest)), dtype.itemsize
    of_row = vocab * (2 * wide + 4) + 4 * wide * found.widest + hidden * (4 * wide + 12)
    strict, shape = options.exact == "strict", found.kv_shape(dtype, device)
    # The largest forward without a graph has STRICT_ROWS rows, or ``max_step_tokens`` in rounding mode; the largest graph has as
    # many rows as the largest captured step.
    fixed, rows = (STRICT_ROWS, STRICT_ROWS) if strict else (None, max(options.max_step_tokens, ROWS[-1]))
    if lacks_graphs(config, shape) is not None:
        return Reserved(rows * of_row, 0)
    sizes = ROWS if fixed is None else (fixed,)
    heads, buffers = int(text.num_attention_heads), 0
    per_tile = rows_per_tile(heads, shape.kv_heads, best_block_rows(shape))
    for size in sizes:
        inputs = sum(buffer_sizes(size, per_tile, *step_room(size, options.max_running, tree_rows))) * torch.int32.itemsize
        for logits in step_kinds(fixed):
            buffers += inputs + (size * torch.int64.itemsize if logits else 0)  # indices of the rows with logits
    # Attention keeps one buffer of the largest graph between its two kernels: a state per row, head and split.
    states = math.prod(states_size(sizes[-1], heads, capacity, shape.head_dim)) * torch.float32.itemsize
    # Graphs share the memory of their layers, and each keeps its logits.
    return Reserved((rows + sizes[-1]) * of_row, sum(sizes[:-1]) * vocab * wide, states, buffers)


def slot_memory(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    room: int,
    length: int,
    may_shorten: bool,
    options: EngineOptions,
    speculation: SpeculationOptions,
    world_size: int,
) -> SlotMemory:
    """Return the KV slots of a model on a GPU that fit, or the shortest that were tried if none fit.

    Args:
        room: bytes beside the weights.
        length: tokens of prompt and output.
        may_shorten: use the longest of ``LENGTHS`` that fits if ``length`` does not.
        options: without ``kv_slots``, further slots beyond those of running requests are added as far as they fit.
        speculation: a draft model takes memory for weights, and in each slot.
    """
    per_token, beside, drafts = _per_token(config, dtype, device), 0, speculation.most_draft_tokens * world_size
    if speculation.draft_model is not None and speculation.draft_model not in SELF:
        small = load_config(speculation.draft_model)
        per_token += _per_token(small, dtype, device)
        beside = outline(small).parameters * dtype.itemsize
    least = options.max_running + (options.kept_slots or 0)
    lengths = (length, *(one for one in LENGTHS if one < length)) if may_shorten else (length,)
    for tried in lengths:
        kept = beside + reserved(config, dtype, device, options, tried + drafts, 1 + drafts).total
        made = SlotMemory(tried, least, per_token * (tried + drafts), kept, room)
        if made.fits:
            break
    if options.kept_slots is None:
        kept = default_slots(options.max_running, made.slot_bytes, made.free_bytes, 1.0)
        made = dataclasses.replace(made, slots=least + kept)
    return made


def _per_token(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    return outline(config).kv_shape(dtype, device).bytes_per_token()


def fitted(
    loaded: LoadedModel, options: EngineOptions, speculation: SpeculationOptions, world_size: int
) -> tuple[LoadedModel, EngineOptions]:
    """Return a model with the context that KV slots of its GPU have room for, and options. Raises ``ModelLoadError``."""
    model, length = loaded.model, loaded.max_model_len
    accelerator().empty_cache()  # left by loading
    room = left_bytes(model.device, options.gpu_memory_utilization)
    found = slot_memory(
        model.config, model.dtype, model.device, room, length, loaded.may_shorten, options, speculation, world_size
    )
    refuse_unfitting(found, options, speculation.most_draft_tokens * world_size, model.device)
    if found.max_model_len != length:
        drafts = speculation.most_draft_tokens * world_size
        whole = options.max_running * found.slot_bytes // (found.max_model_len + drafts) * (length + drafts)
        logger.warning(
            "model.max_model_len is %d: %d requests of the model's %d tokens need %.1f GiB for keys and values, and %.1f GiB are "
            "free on %s", found.max_model_len, options.max_running, length, whole / 2**30, found.free_bytes / 2**30, model.device,
        )  # fmt: skip
    return dataclasses.replace(loaded, max_model_len=found.max_model_len), dataclasses.replace(options, kv_slots=found.slots)


def refuse_unfitting(found: SlotMemory, options: EngineOptions, draft_rows: int, device: torch.device) -> None:
    """Raise ``ModelLoadError`` if slots do not fit."""
    if found.fits:
        return
    shorter = " or ".join(fewer_or_shorter(found, options, draft_rows))
    raise ModelLoadError(
        f"{found.slots} KV slots of {found.max_model_len} tokens need {found.need_bytes / 2**30:.1f} GiB, and "
        f"{found.free_bytes / 2**30:.1f} GiB are free on {device} beside the weights: "
        f"{f'set {shorter}' if shorter else _NO_ROOM}"
    )


def fewer_or_shorter(found: SlotMemory, options: EngineOptions, draft_rows: int) -> list[str]:
    """Return settings that would each make the slots fit; empty if the memory is too small for any."""
    advice = []
    name = "engine.max_running" if found.slots == options.max_running else "engine.kv_slots"
    slots = found.free_bytes // found.slot_bytes
    if slots >= (1 if name == "engine.max_running" else options.max_running):
        advice.append(f"{name}={slots}")
    per_token = found.slot_bytes // (found.max_model_len + draft_rows)
    tokens = found.free_bytes // (found.slots * per_token) - draft_rows
    if tokens >= 2:
        advice.append(f"model.max_model_len={tokens}")
    return advice
