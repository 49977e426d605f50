"""Modules of stock models of known families, mapped to the parts that ``fused_forward`` computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.engine.cpu.attention import ENTRY_STEP
from outrider.engine.cpu.linear import PanelWeight, has_kernels
from outrider.engine.cpu.mixers import CONVOLUTION_ALONE, DELTA_RULE, SPACE_RULE, FilledRows
from outrider.engine.cpu.packed_weight import PackedWeight
from outrider.engine.forward.patches import CompiledNorm
from outrider.engine.kv.kv_cache import SlotCache

_ANGLES = ("default", "linear", "llama3", "yarn")  # RoPE types whose angles depend on the position alone
_HALVES = 2 * ENTRY_STEP  # rotated elements of a head are a multiple of this


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Attention module whose heads are whole and partly or fully rotated by RoPE."""

    module: Any
    query: torch.nn.Linear
    key: torch.nn.Linear
    value: torch.nn.Linear
    output: torch.nn.Linear
    query_norm: Any = None  # per head
    key_norm: Any = None
    gated: bool = False  # each query head is followed by the elements of its output gate


@dataclass(frozen=True, slots=True)
class MixerParts:
    """Layer with a recurrent state, see ``engine.cpu.mixers``."""

    module: Any
    rule: str


# A layer is a norm, attention or a recurrent layer, another norm, and a SiLU-gated MLP; both outputs are added to the residual.
@dataclass(frozen=True, slots=True)
class LayerParts:
    """Parts of one layer."""

    mixing: AttentionParts | MixerParts
    norms: tuple[Any, Any]  # before attention or recurrence, and before the MLP
    gate: torch.nn.Linear
    up: torch.nn.Linear | None  # None: second half of ``gate``
    down: torch.nn.Linear
    products: Any  # the MLP module


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts of a whole model."""

    layers: tuple[LayerParts, ...]
    last_norm: Any
    turned: int  # rotated elements of a head; 0: none
    embedding_factor: float = 0.0  # 0: no factor, here and below
    added_factor: float = 0.0  # of both residual branches of a layer
    divisor: float = 1.0  # of the logits

    def norms(self) -> Iterator[Any]:
        """Yield all norms, including those of heads."""
        yield self.last_norm
        for layer in self.layers:
            yield from layer.norms
            if isinstance(layer.mixing, AttentionParts):
                yield from (norm for norm in (layer.mixing.query_norm, layer.mixing.key_norm) if norm is not None)

    def linears(self) -> Iterator[Any]:
        """Yield all linear layers of the model's layers."""
        for layer in self.layers:
            mixing = layer.mixing
            yield from (each for each in (layer.gate, layer.up, layer.down) if each is not None)
            if isinstance(mixing, AttentionParts):
                yield from (mixing.query, mixing.key, mixing.value, mixing.output)
            else:
                own = (child.linear if type(child) is FilledRows else child for child in mixing.module.children())
                yield from (child for child in own if isinstance(child, torch.nn.Linear))


def model_parts(model: PreTrainedModel, cache: SlotCache) -> ModelParts | None:
    """Return the parts of a whole model after ``row_linears`` and ``patch_modules``; None if the model is not supported."""
    family = _FAMILIES.get(type(model).__name__)
    if family is None or not type(model).__module__.startswith("transformers.models."):
        return None
    config, shape = model.config, cache.shape
    if not has_kernels(model.device, model.dtype) or not _turns_by_position(config):
        return None
    if getattr(config, "hidden_act", "silu") != "silu":
        return None
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):  # hooks could change outputs
        return None
    parts = family(model)
    if parts is None or len(parts.layers) != config.num_hidden_layers:
        return None
    attending = [layer.mixing for layer in parts.layers if isinstance(layer.mixing, AttentionParts)]
    whole = (len(attending), config.num_key_value_heads, 0) == (shape.layers, shape.kv_heads, shape.first_layer)
    whole = whole and shape.values == shape.head_dim and not shape.ragged
    if not whole or shape.head_dim % ENTRY_STEP or parts.turned % _HALVES or config.hidden_size % ENTRY_STEP:
        return None
    if not all(type(each) is CompiledNorm for each in parts.norms()):
        return None
    linears = (*parts.linears(), model.lm_head)
    if not all(type(each) is torch.nn.Linear and _lies_whole(each.weight) for each in linears):
        return None
    return parts


def _turns_by_position(config: Any) -> bool:
    angles = getattr(config, "rope_parameters", None) or {}
    return angles.get("rope_type", "default") in _ANGLES


def _lies_whole(weight: torch.Tensor) -> bool:
    return type(weight) is PackedWeight or (type(weight) is PanelWeight and weight.stride(0) == weight.shape[1])


def _turned(config: Any, head_dim: int) -> int:
    angles = getattr(config, "rope_parameters", None) or {}
    return int(head_dim * angles.get("partial_rotary_factor", 1.0))


def _usual(layer: Any, mixing: AttentionParts | MixerParts) -> LayerParts:
    mlp = layer.mlp
    return LayerParts(
        mixing, (layer.input_layernorm, layer.post_attention_layernorm), mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp
    )


def _attention(module: Any, gated: bool = False) -> AttentionParts:
    query_norm, key_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    return AttentionParts(module, module.q_proj, module.k_proj, module.v_proj, module.o_proj, query_norm, key_norm, gated)


def _llama(model: Any) -> ModelParts | None:
    if ((model.config.rope_parameters or {}).get("partial_rotary_factor") or 1.0) != 1.0:
        return None
    layers = tuple(_usual(layer, _attention(layer.self_attn)) for layer in model.model.layers)
    return ModelParts(layers, model.model.norm, layers[0].mixing.module.head_dim)


def _qwen3_5(model: Any) -> ModelParts:
    layers, turned = [], _HALVES
    for layer in model.model.layers:
        if layer.block_type == "full_attention":
            layers.append(_usual(layer, _attention(layer.self_attn, gated=True)))
            turned = _turned(model.config, layer.self_attn.head_dim)
        else:
            layers.append(_usual(layer, MixerParts(layer.linear_attn, DELTA_RULE)))
    return ModelParts(tuple(layers), model.model.norm, turned)


def _lfm2(model: Any) -> ModelParts:
    layers, turned = [], _HALVES
    for layer in model.model.layers:
        mixing: AttentionParts | MixerParts
        if layer.is_attention_layer:
            own = layer.self_attn
            norms = own.q_layernorm, own.k_layernorm
            mixing = AttentionParts(own, own.q_proj, own.k_proj, own.v_proj, own.out_proj, *norms)
            turned = own.head_dim
        else:
            mixing = MixerParts(layer.conv, CONVOLUTION_ALONE)
        mlp = layer.feed_forward
        layers.append(LayerParts(mixing, (layer.operator_norm, layer.ffn_norm), mlp.w1, mlp.w3, mlp.w2, mlp))
    return ModelParts(tuple(layers), model.model.embedding_norm, turned)


def _granite(model: Any) -> ModelParts | None:
    config, layers = model.config, []
    if config.num_local_experts:
        return None
    for layer in model.model.layers:
        mixing = _attention(layer.self_attn) if layer.mamba is None else MixerParts(layer.mamba, SPACE_RULE)
        mlp, norms = layer.shared_mlp, (layer.input_layernorm, layer.post_attention_layernorm)
        layers.append(LayerParts(mixing, norms, mlp.input_linear, None, mlp.output_linear, mlp))
    if config.shared_intermediate_size % _HALVES:
        return None
    turned = 0
    if model.model.rotary_emb is not None:
        turned = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    embedded, added = (
        0.0 if factor == 1 else float(factor) for factor in (config.embedding_multiplier, config.residual_multiplier)
    )
    return ModelParts(tuple(layers), model.model.norm, turned, embedded, added, float(config.logits_scaling))


_FAMILIES: dict[str, Callable[[Any], ModelParts | None]] = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), _llama),
    "Lfm2ForCausalLM": _lfm2, "Qwen3_5ForCausalLM": _qwen3_5, "GraniteMoeHybridForCausalLM": _granite,
}  # fmt: skip
