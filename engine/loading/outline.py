"""Outline of a model from its configuration alone: attention of its layers, and number of weights."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.decoding.jit import cache_folder
from outrider.decoding.private_files import read_sealed, save_sealed
from outrider.engine.cpu.mixers import bind_mixers
from outrider.engine.cpu.state_step import StateShape, Survey
from outrider.engine.environment import code_digest
from outrider.engine.errors import ModelLoadError, first_line
from outrider.engine.forward.attention import TREE_ATTENTION
from outrider.engine.forward.batch import AttentionCall
from outrider.engine.forward.patches import do_not_warn
from outrider.engine.kv.kv_cache import KVShape
from outrider.engine.kv.state_cache import StateCache, StateSite
from outrider.engine.library_imports import without_compiler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerOutline:
    """Attention parameters of one layer."""

    heads: int
    kv_heads: int
    head_dim: int  # size of a query and of a key
    value_dim: int  # size of a value
    window: int | None
    chunk: int | None
    sinks: bool


@dataclass(frozen=True, slots=True)
class Outline:
    """Shape of a model without its weights."""

    layers: tuple[LayerOutline, ...]  # layers with attention
    parameters: int
    states: Mapping[int, StateShape] = field(default_factory=dict)  # states of other layers, by number of the mixer
    widest: int = 0  # largest input or output width of a layer's matrix, times the experts per row
    routed: bool = False  # mixture of experts: the rows of an expert's product depend on the tokens
    embeddings: int = 0  # parameters of untied input embeddings, read by single rows
    expert_parameters: int = 0  # parameters of all experts
    expert_share: float = 1.0  # share of a layer's experts used per row

    def kv_shape(self, dtype: torch.dtype, device: torch.device) -> KVShape:
        """Return the shape of the KV of a token. If layers differ, each has as much room as the largest."""
        shapes = {(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in self.layers}
        kv_heads, head_dim, value_dim = (max(sizes) for sizes in zip(*shapes, strict=True))
        return KVShape(
            len(self.layers), kv_heads, head_dim, dtype, device,
            value_dim=None if value_dim == head_dim else value_dim, ragged=len(shapes) > 1,
        )  # fmt: skip

    def sites(self, dtype: torch.dtype) -> list[StateSite]:
        """Return the states of the layers for a model of a type, ordered by mixer number."""
        return [self.states[number].site(dtype) for number in sorted(self.states)]

    def state_bytes(self, dtype: torch.dtype, slots: int) -> int:
        """Return the bytes of states, their snapshots and kept rows for ``slots`` slots."""
        return StateCache.bytes_of(self.sites(dtype), slots) if self.states else 0

    @property
    def is_plain(self) -> bool:
        """Return whether the GPU kernels apply: uniform layers without sinks and chunks, and values as long as keys."""
        alike = len({(layer.heads, layer.kv_heads, layer.head_dim) for layer in self.layers}) == 1
        odd = any(layer.sinks or layer.chunk or layer.value_dim != layer.head_dim for layer in self.layers)
        return alike and not odd


def outline(config: PreTrainedConfig) -> Outline:
    """Return the outline of a model, kept in memory and on disk. Raises ``ModelLoadError`` if the model is not supported."""
    return _outline(_Key(config))


class _Key:
    def __init__(self, config: PreTrainedConfig) -> None:
        self.config, self._contents = config, (type(config), config.to_json_string(use_diff=False))

    @property
    def path(self) -> Path:
        """Return the file of the outline."""
        kind, text = self._contents
        return cache_folder() / f"outline-{hashlib.sha256(f'{kind.__qualname__} {text}'.encode()).hexdigest()[:32]}"

    def __hash__(self) -> int:
        return hash(self._contents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._contents == other._contents


class _Listener:
    """Step that records the attention calls of the layers and computes nothing."""

    def __init__(self) -> None:
        self.windows: dict[int, int | None] = {}
        self.calls: list[tuple[int, LayerOutline]] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See ``engine.forward.attention.Attending``."""
        found = _layer_of(call)
        self.calls.append((call.layer, found))
        return call.query.new_empty(1, call.query.shape[2], found.heads, found.value_dim)


def _layer_of(call: AttentionCall) -> LayerOutline:
    (_, heads, _, size), (_, kv_heads, _, value_dim) = call.query.shape, call.value.shape
    return LayerOutline(heads, kv_heads, size, value_dim, call.window, call.chunk, call.sinks is not None)


@lru_cache(16)
def _outline(key: _Key) -> Outline:
    """Return the outline in the file, or determine and keep it, which takes seconds."""
    versions = [torch.__version__, transformers.__version__, code_digest()]
    try:
        found = json.loads(read_sealed(key.path))
        if found.pop("versions", None) == versions:
            layers = tuple(LayerOutline(**layer) for layer in found.pop("layers"))
            states = {int(number): StateShape(**state) for number, state in found.pop("states").items()}
            return Outline(layers, states=states, **found)
    except FileNotFoundError:
        logger.debug("no outline at %s yet", key.path)
    except (OSError, ValueError) as error:
        logger.warning("the outline of the model at %s cannot be used, and it is determined again: %s", key.path, error)
    outline = _determined(key.config)
    try:
        save_sealed(key.path, json.dumps(asdict(outline) | {"versions": versions}).encode())
    except OSError as error:
        logger.warning("the outline of the model could not be saved, it is determined again at the next start: %s", error)
    return outline


def _determined(given: PreTrainedConfig) -> Outline:
    config, listener, survey = _still(given), _Listener(), Survey()
    name = _architecture(config).__name__
    row = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        # The stock model computes one row on torch's meta device: the arguments of its attention calls are recorded.
        with without_compiler(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=TREE_ATTENTION).eval()
        do_not_warn(model)
        model.set_experts_implementation("batched_mm")  # its shapes do not depend on the router
        has_states = bool(bind_mixers(model))
        step = survey if has_states else listener
        with without_compiler(), torch.inference_mode():
            model(input_ids=row, position_ids=row, use_cache=False, logits_to_keep=row[0], tree_step=step)
        if has_states:
            survey.check()
            attending = tuple(map(_layer_of, survey.calls))
            return Outline(attending, model.num_parameters(), survey.shapes, _widest(model), _routed(model), **_parts(model))
    except ModelLoadError:
        raise
    except Exception as error:  # model code may raise anything
        elsewhere = (isinstance(error, KeyError) and TREE_ATTENTION in str(error)) or (
            not listener.calls and not getattr(_architecture(config), "_supports_attention_backend", False)
        )
        why = _NOT_THROUGH if elsewhere else f"a first forward failed: {first_line(error)}"
        raise ModelLoadError(f"{name} cannot be served: {why}") from error
    if not listener.calls:
        raise ModelLoadError(f"{name} cannot be served: {_NOT_THROUGH}")
    count = config.get_text_config().num_hidden_layers
    times = Counter(layer for layer, _ in listener.calls)
    skipped = sorted(set(range(count)) - set(times))
    if skipped:
        raise ModelLoadError(f"{name} cannot be served: layers {skipped} do not use attention that can be rolled back")
    several = sorted(layer for layer, calls in times.items() if calls > 1 or layer >= count)
    if several:
        kept = "and one pair of keys and values is kept"
        raise ModelLoadError(f"{name} cannot be served: layers {several} attend more than once, {kept}")
    layers = dict(listener.calls)
    ordered = tuple(layers[layer] for layer in range(count))
    return Outline(ordered, model.num_parameters(), widest=_widest(model), routed=_routed(model), **_parts(model))


def _routed(model: PreTrainedModel) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())


def _parts(model: PreTrainedModel) -> dict[str, Any]:
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight is embeddings.weight
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    count = max((weight.shape[0] for module in experts for weight in module.parameters() if weight.ndim == 3), default=0)
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or count
    return {
        "embeddings": 0 if tied else embeddings.weight.numel(),
        "expert_parameters": sum(weight.numel() for module in experts for weight in module.parameters()),
        "expert_share": chosen / count if count else 1.0,
    }


def _widest(model: PreTrainedModel) -> int:
    experts = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1  # expert weights are [experts, .., ..]
    ends = (*(one for one in model.modules() if isinstance(one, torch.nn.Embedding)), model.get_output_embeddings())
    layers = [one for one in model.modules() if all(one is not end for end in ends)]
    weights = [weight for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim > 1]
    return max((max(weight.shape[-2:]) * (experts if weight.ndim == 3 else 1) for weight in weights), default=0)


_NOT_THROUGH = "its attention does not go through transformers' AttentionInterface"


def _architecture(config: PreTrainedConfig) -> Any:
    return AutoModelForCausalLM._model_mapping[type(config)]


def _still(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy a configuration with default rotary embeddings: others read positions, which have no values on the meta device."""
    copied = deepcopy(config)
    if hasattr(copied, "quantization_config"):
        del copied.quantization_config
    rope = getattr(copied.get_text_config(), "rope_parameters", None)
    for each in (rope, *(rope or {}).values()):
        if isinstance(each, dict) and each.get("rope_type") in ("dynamic", "longrope"):
            each["rope_type"] = "default"
    return copied
