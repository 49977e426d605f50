"""Plan of a start on a GPU, from a model's configuration and a card's data sheet, by the functions of a real start."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from outrider.configs.slices import EngineOptions, ModelOptions, ParallelismOptions, SpeculationOptions
from outrider.engine.cuda.static_runner import ROWS, lacks_exactness, lacks_graphs
from outrider.engine.errors import ModelLoadError
from outrider.engine.forward.runners import refuse_form
from outrider.engine.loading.cards import Card, planned
from outrider.engine.loading.footprint import Footprint, footprint
from outrider.engine.loading.memory import refuse_more_than_free
from outrider.engine.loading.model import served_config
from outrider.engine.loading.outline import Outline, outline
from outrider.engine.loading.slot_memory import STRICT_ROWS, Reserved, SlotMemory, refuse_unfitting, reserved

STEP_ROWS = (1, STRICT_ROWS)
STEP_CONTEXT = 2048  # tokens before a step's rows, or less in a shorter context
PROMPTS = (2048, 8192)  # lengths in tokens
# Bytes of weights, KV slots, states and buffers are those that the engine allocates; activations, graphs and libraries are
# estimates, and times are computed by the roofline.
ALLOWED = ("activations", "graphs_and_libraries")  # estimates in ``Plan.memory``, see ``engine.loading.slot_memory``

# Shares of the peaks that engines with graphs and fused kernels reach: reading weights, and with matrices of some hundred rows.
BANDWIDTH_SHARE, FLOPS_SHARE = 0.75, 0.6


def seconds_of(read_bytes: float, operations: float, bandwidth: float, flops: float) -> float:
    """Return the longer of reading and computing, at rates per second."""
    return max(read_bytes / bandwidth, operations / flops)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline of a model on a card, without launches and host time between forwards."""

    card: Card
    found: Outline
    dtype: torch.dtype
    entry_bytes: int  # KV of one token in all layers
    weight_bytes: int  # bytes of all weights

    def forward_s(self, rows: int, context: int) -> float:
        """Return the seconds of one forward of ``rows`` that each attend to ``context`` entries of one sequence."""
        found = self.found
        used = 1 - (1 - found.expert_share) ** rows  # share of experts that some row uses
        others = found.parameters - found.embeddings - found.expert_parameters
        wide = self.weight_bytes / found.parameters
        # Weights are read once, experts in proportion to the rows routed to them evenly; KV is read once.
        read = wide * (others + used * found.expert_parameters) + context * self.entry_bytes
        # A row takes 2 operations per weight, and 4 per KV entry and query element.
        products = 2 * rows * (others + found.expert_share * found.expert_parameters)
        attended = 4 * rows * context * sum(layer.heads * layer.head_dim for layer in found.layers)
        rates = self.card.bandwidth * BANDWIDTH_SHARE, self.card.flops(self.dtype) * FLOPS_SHARE
        return seconds_of(read, products + attended, *rates)

    def prefill_s(self, tokens: int, piece: int) -> float:
        """Return the seconds of a prompt in forwards of ``piece`` rows."""
        return sum(self.forward_s(piece, start + piece // 2) for start in range(0, tokens, piece))


@dataclass(frozen=True, slots=True)
class Plan:
    """Start of a model on a card. Sizes are in bytes."""

    card: Card
    footprint: Footprint
    exact: bool  # expected; the check at the start decides
    not_exact: str  # short reason; empty if exact
    graphs: tuple[int, ...]  # row counts of captured steps
    no_graphs: str  # short reason; empty if steps are captured
    reserved: Reserved
    context: int  # tokens before the rows of timed steps
    step_ms: dict[int, float]  # by rows
    prefill_ms: dict[int, float]  # by prompt length, for prompts that fit the context

    @property
    def memory(self) -> dict[str, int]:
        """Return bytes by purpose. ``beyond`` is outside of ``engine.gpu_memory_utilization``."""
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
        """Return all values as JSON."""
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
    """Return the plan of one rank on a card. Raises ``ModelLoadError`` with the message of a real start if that fails."""
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
