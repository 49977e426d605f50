"""What a start on a GPU comes to, from a model's configuration and a card's data sheet: without weights, and without a GPU.

It asks the functions that a start asks. Bytes of weights, KV slots, attention states and step buffers are those that the engine
allocates; activations, graphs and libraries are an allowance, and times are computed by the roofline, not measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from engine.errors import ModelLoadError
from engine.forward.cuda.static_runner import ROWS, lacks_exactness, lacks_graphs
from engine.forward.runners import refuse_form
from engine.loading.cards import Card, planned
from engine.loading.footprint import Footprint, footprint
from engine.loading.memory import refuse_more_than_free
from engine.loading.model import served_config
from engine.loading.outline import outline
from engine.loading.roofline import Roofline
from engine.loading.slot_memory import STRICT_ROWS, Reserved, SlotMemory, refuse_unfitting, reserved

STEP_ROWS = (1, STRICT_ROWS)
STEP_CONTEXT = 2048  # tokens before a step's rows, where the context is as long
PROMPTS = (2048, 8192)  # tokens
ALLOWED = ("activations", "graphs_and_libraries")  # of ``Plan.memory``: see ``engine.loading.slot_memory.reserved``


@dataclass(frozen=True, slots=True)
class Plan:
    """A model that starts on a card. Sizes are in bytes."""

    card: Card
    footprint: Footprint
    exact: bool  # but for the check at the start, which decides
    not_exact: str  # why, in a few words; empty where it is
    graphs: tuple[int, ...]  # rows of the steps that are captured
    no_graphs: str  # why, in a few words; empty where there are some
    reserved: Reserved
    context: int  # of the steps that are timed
    step_ms: dict[int, float]  # by rows
    prefill_ms: dict[int, float]  # by tokens of the prompt, those that fit the context

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose. ``beyond`` is left to others by ``engine.gpu_memory_utilization``."""
        found, kept = self.footprint, self.reserved
        kv = found.kv_slots * found.slot_bytes
        parts = {
            "weights": found.weight_bytes, "kv_slots": kv, "attention_states": kept.states, "step_buffers": kept.buffers,
            "activations": kept.activations, "graphs_and_libraries": kept.graph_logits + kept.libraries,
            "draft_model": found.reserved_bytes - kept.total,
        }  # fmt: skip
        free = found.free_bytes - sum(parts.values())
        return parts | {"free": free, "beyond": self.card.memory_bytes - found.free_bytes}

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        parts = {name: getattr(self, name) for name in ("exact", "not_exact", "graphs", "no_graphs", "context", "memory")}
        times = {"computed_step_ms": self.step_ms, "computed_prefill_ms": self.prefill_ms}
        return self.footprint.to_json() | {"card": asdict(self.card)} | parts | times


def plan(
    model: ModelOptions,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    parallelism: ParallelismOptions,
    card: Card,
) -> Plan:
    """Return what a start of one rank on a card comes to.

    Raises:
        ModelLoadError: it does not start; the message is that of the start.
    """
    if parallelism.mode in ("tensor", "pipeline"):
        raise ModelLoadError(f"--gpu is for models on one GPU, and parallelism.mode is {parallelism.mode}: leave one of them out")
    with planned(card):
        found = footprint(replace(model, device="cuda"), engine, speculation, parallelism)
        config, device, dtype = served_config(model.path), torch.device(found.device), getattr(torch, found.dtype)
        refuse_more_than_free(model.path, found.weight_bytes, 0, device, engine.gpu_memory_utilization)
        room = found.free_bytes - found.weight_bytes
        slots = SlotMemory(found.max_model_len, found.kv_slots, found.slot_bytes, found.reserved_bytes, room)
        refuse_unfitting(slots, engine, found.draft_rows, device)
        shape = outline(config).kv_shape(dtype, device)
        refuse_form(found.architecture, config, shape, engine)
        capacity = found.max_model_len + found.draft_rows
        kept = reserved(config, dtype, device, engine, capacity, 1 + found.draft_rows)
        no_graphs, strict = lacks_graphs(config, shape) or "", engine.exact == "strict"
        not_exact = "" if strict else "engine.exact is rounding: near-ties may fall either way"
        if not strict and (why := lacks_exactness(config, shape)) is not None:
            not_exact = why
    graphs: tuple[int, ...] = () if no_graphs else (STRICT_ROWS,) if strict else ROWS
    roof = Roofline(card, outline(config), dtype, found.kv_bytes_per_token, found.weight_bytes)
    context, piece = min(STEP_CONTEXT, found.max_model_len), STRICT_ROWS if strict else engine.max_step_tokens
    step = {rows: 1e3 * roof.forward_s(STRICT_ROWS if strict else rows, context) for rows in STEP_ROWS}
    prompts = {tokens: 1e3 * roof.prefill_s(tokens, piece) for tokens in PROMPTS if tokens <= found.max_model_len}
    return Plan(card, found, strict, not_exact, graphs, no_graphs, kept, context, step, prompts)
