"""A forward of a model of a known family in one call of compiled code, on a CPU: see ``engine.forward.cpu.native_step``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.forward.batch import Batch, adapters_of
from engine.forward.cpu.products.low_rank import Adapters
from engine.forward.cpu.products.packed_weight import PackedWeight
from engine.forward.cpu.products.row_linear import DTYPES, PanelWeight, filled_up, has_kernels, unpacked_numbers, where_it_lies
from engine.forward.cpu.row_attention import ENTRY_STEP, request_rows
from engine.forward.cpu.threads import Kernel
from engine.forward.thin_modules import CompiledNorm
from engine.kv.kv_cache import SlotCache

if TYPE_CHECKING:  # it imports numba
    from engine.forward.cpu.native_step import Operation
    from engine.forward.cpu.products.native_linear import Linear

# Their layers are RMS norms, attention with whole rotated heads, and a product with a SiLU gate, each added to what was before.
_FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ANGLES = ("default", "linear", "llama3", "yarn")  # rotations that depend on the position alone
_ROWS = 512  # that there is room for at first


class RowModel:
    """The layers of a model over its slots. Weights and slots are used where they lie, and must stay there."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, windows: Mapping[int, int | None]) -> None:
        """See ``over``."""
        from engine.forward.cpu import native_step as step

        self._native, self._model, self._cache, self._windows = step, model, cache, windows
        kinds = {weight.kind for weight in model.parameters() if type(weight) is PackedWeight}
        self._kernel = Kernel(step.entry_point(DTYPES[model.dtype], tuple(sorted(kinds))).address)
        self._angles = _angles(model, cache.capacity)
        self._vocab = model.lm_head.weight.shape[0]
        self._adapters: Adapters | None = None
        self._make_room(_ROWS)

    @staticmethod
    def over(model: PreTrainedModel, cache: SlotCache, windows: Mapping[int, int | None]) -> RowModel | None:
        """For a whole model whose layers are all known, after ``row_linears`` and ``thin_modules``; None for others.

        The first time on a machine it compiles, which takes some seconds.
        """
        return RowModel(model, cache, windows) if _is_known(model, cache) else None

    def adapt(self, adapters: Adapters) -> None:
        """Has rows of segments that name an adapter computed with it. Forwards without such rows stay what they are."""
        self._adapters = adapters
        self._make_room(self._room)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Computes all rows, stores their KV and returns the wanted logits, [len(batch.logit_rows), vocab].

        Raises:
            IndexError: a token is none of the vocabulary, or a position none of a slot. Compiled code does not look again.
        """
        native, count, picked = self._native, len(batch.token_ids), len(batch.logit_rows)
        threads = torch.get_num_threads()
        if max(count, picked) > self._room or threads > self._threads:
            self._make_room(max(count, picked, self._room))
        tokens, positions, wanted = (
            np.ascontiguousarray(each, np.int64) for each in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            raise IndexError(f"token ids must be below {self._vocab}, got {tokens.min()} to {tokens.max()}")
        if positions.min() < 0 or positions.max() >= len(self._angles):
            raise IndexError(f"positions must be below {len(self._angles)}, got {positions.min()} to {positions.max()}")
        assert len(positions) == count and (wanted < count).all(), (positions, wanted)
        logits = torch.empty(picked, self._vocab, dtype=self._model.dtype)
        requests, kept = request_rows(self._cache, batch.segments, positions)
        adapters = None if self._adapters is None else adapters_of(batch, self._adapters.numbers)
        operations = self._operations_of(len(self._model.model.layers), adapters is not None)
        self._head.output = logits.data_ptr()
        counters = np.zeros(native.num_counters(len(operations), threads) * native.COUNTER, np.uint8)
        job = native.NativeStep(
            ctypes.addressof(operations), len(operations) - (0 if picked else 2), tokens.ctypes.data, positions.ctypes.data,
            count, wanted.ctypes.data, picked, ctypes.addressof(requests), len(requests), threads, counters.ctypes.data,
            0 if adapters is None else adapters.ctypes.data,
        )  # fmt: skip
        self._kernel(job, threads)
        del kept
        return logits

    def _make_room(self, rows: int) -> None:
        """Takes memory for what is between the layers of so many rows."""
        config, shape = self._model.config, self._cache.shape
        sizes = {
            "hidden": config.hidden_size, "normed": config.hidden_size, "gated": config.intermediate_size,
            "query": config.num_attention_heads * shape.head_dim, "key": shape.kv_heads * shape.head_dim,
            "value": shape.kv_heads * shape.head_dim, "mixed": config.num_attention_heads * shape.head_dim,
        }  # fmt: skip
        self._buffers = {name: torch.empty(rows, size, dtype=self._model.dtype) for name, size in sizes.items()}
        if self._adapters is not None:  # layers that adapters add to are computed apart from what follows them
            apart = {"projected": config.hidden_size, "up": config.intermediate_size}
            self._buffers |= {name: torch.empty(rows, size, dtype=self._model.dtype) for name, size in apart.items()}
            size = self._adapters.scratch_size()
            self._buffers |= {f"scratch {part}": torch.empty(rows, size) for part in range(3)}  # query, key and value at once
        self._room, self._threads, self._kept = rows, torch.get_num_threads(), list[object]()
        self._scratch: dict[int, torch.Tensor] = {}  # by the size of rows: threads may be in different operations
        self._prepared: dict[tuple[int, bool], ctypes.Array[Operation]] = {}
        self._head = self._linear(self._model.lm_head, "normed", "normed")  # its output is set in each forward

    def _operations_of(self, layers: int, adapted: bool = False) -> ctypes.Array[Operation]:
        """The operations of the first layers and what follows the last; all of them but for the check of exactness."""
        if (layers, adapted) not in self._prepared:
            found = [self._native.Operation(*each) for each in self._all_operations(layers, adapted)]
            self._prepared[layers, adapted] = (self._native.Operation * len(found))(*found)
        return self._prepared[layers, adapted]

    def _all_operations(self, layers: int, adapted: bool) -> Iterator[tuple[int, bool, int]]:
        """Their kinds, whether they wait, and the addresses of what they do; with what adapters add where ``adapted``."""
        native, model = self._native, self._model.model
        table = model.embed_tokens.weight
        (address, form), size = self._panels_of(table), table.shape[1]
        panels = isinstance(table, PanelWeight | PackedWeight)
        embed = native.Embed(address, panels, size, self._at("hidden"), form, self._scratch_of(size) if form else 0)
        yield native.EMBED, False, self._keep(embed)
        for number in range(layers):
            layer = model.layers[number]
            attention, mlp = layer.self_attn, layer.mlp
            yield native.NORM, True, self._norm(layer.input_layernorm, "hidden", "normed")
            yield native.LINEAR, True, self._product(attention.q_proj, "normed", "query")
            yield native.LINEAR, False, self._product(attention.k_proj, "normed", "key")
            yield native.LINEAR, False, self._product(attention.v_proj, "normed", "value")
            if adapted:
                parts = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
                yield from self._added(f"model.layers.{number}.self_attn", attention, "normed", *parts)
            yield native.ROTATE, True, self._rotate(attention, number)
            yield native.ATTEND, True, self._attention(attention, number)
            if adapted and self._adds(f"model.layers.{number}.self_attn.o_proj"):
                yield native.LINEAR, True, self._product(attention.o_proj, "mixed", "projected")
                yield from self._added(f"model.layers.{number}.self_attn", attention, "mixed", ("o_proj", "projected"))
                yield native.SUM, True, self._pairs("hidden", "projected")
            else:
                yield native.LINEAR, True, self._product(attention.o_proj, "mixed", "hidden", added="hidden")
            yield native.NORM, True, self._norm(layer.post_attention_layernorm, "hidden", "normed")
            name = f"model.layers.{number}.mlp"
            if adapted and (self._adds(f"{name}.gate_proj") or self._adds(f"{name}.up_proj")):
                yield native.LINEAR, True, self._product(mlp.gate_proj, "normed", "gated")
                yield native.LINEAR, False, self._product(mlp.up_proj, "normed", "up")
                yield from self._added(name, mlp, "normed", ("gate_proj", "gated"), ("up_proj", "up"))
                yield native.GATE, True, self._pairs("gated", "up")
            else:
                yield native.LINEAR, True, self._product(mlp.gate_proj, "normed", "gated", up=mlp.up_proj)
            if adapted and self._adds(f"{name}.down_proj"):
                yield native.LINEAR, True, self._product(mlp.down_proj, "gated", "projected")
                yield from self._added(name, mlp, "gated", ("down_proj", "projected"))
                yield native.SUM, True, self._pairs("hidden", "projected")
            else:
                yield native.LINEAR, True, self._product(mlp.down_proj, "gated", "hidden", added="hidden")
        yield native.PICKED_NORM, True, self._norm(model.norm, "hidden", "normed")
        yield native.PICKED_LINEAR, True, ctypes.addressof(self._head)

    def _adds(self, layer: str) -> bool:
        """Whether any adapter adds to a layer."""
        return self._adapters is not None and layer in self._adapters.layers

    def _added(self, parent: str, module: Any, source: str, *parts: tuple[str, str]) -> Iterator[tuple[int, bool, int]]:
        """What adapters add to layers of one input, each of which has a name in its module and a target. The first waits."""
        assert self._adapters is not None
        waits = True
        for part, (child, target) in enumerate(parts):
            if self._adds(f"{parent}.{child}"):
                at = self._at(source), self._at(target), self._at(f"scratch {part}")
                job = self._adapters.job(f"{parent}.{child}", getattr(module, child), *at)
                yield self._native.LOW_RANK, waits, self._keep(job)
                waits = False

    def _pairs(self, target: str, other: str) -> int:
        return self._keep(self._native.Pairs(self._at(target), self._at(other), self._buffers[target].shape[1]))

    def _at(self, buffer: str) -> int:
        return self._address_of(self._buffers[buffer])

    def _address_of(self, numbers: torch.Tensor | None) -> int:
        """Where they lie, and stay; 0 for none."""
        if numbers is None:
            return 0
        self._kept.append(numbers)
        return numbers.data_ptr()

    def _keep(self, job: ctypes.Structure) -> int:
        """Its address, which stays."""
        self._kept.append(job)
        return ctypes.addressof(job)

    def _norm(self, norm: Any, source: str, target: str) -> int:
        size, epsilon = norm.weight.shape[0], norm.variance_epsilon
        return self._keep(self._native.Norm(self._at(source), self._address_of(norm.weight), self._at(target), 0, size, epsilon))

    def _product(
        self, layer: torch.nn.Linear, source: str, target: str, up: torch.nn.Linear | None = None, added: str = ""
    ) -> int:
        return self._keep(self._linear(layer, source, target, up, added))

    def _linear(
        self, layer: torch.nn.Linear, source: str, target: str, up: torch.nn.Linear | None = None, added: str = ""
    ) -> Linear:
        from engine.forward.cpu.products.native_linear import Linear

        outputs, size = layer.weight.shape
        wide = layer.weight.element_size()
        bias, up_bias = (None if each is None or each.bias is None else filled_up(each.bias) for each in (layer, up))
        (address, form), (up_address, up_form) = (self._panels_of(None if one is None else one.weight) for one in (layer, up))
        scratch = self._scratch_of(size) if form or up_form else 0
        return Linear(
            self._at(source), size * wide, address, self._address_of(bias), up_address, self._address_of(up_bias),
            self._at(added) if added else 0, self._at(target), outputs * wide, 0, size, outputs, 0, 0, form, up_form, scratch,
        )  # fmt: skip

    def _scratch_of(self, size: int) -> int:
        """Where threads unpack panels of rows of a size."""
        if size not in self._scratch:
            self._scratch[size] = torch.empty(unpacked_numbers(size, self._threads), dtype=self._model.dtype)
        return self._scratch[size].data_ptr()

    def _panels_of(self, weight: torch.Tensor | None) -> tuple[int, int]:
        """See ``where_it_lies``; they stay there."""
        self._kept.append(weight)
        return (0, 0) if weight is None else where_it_lies(weight)

    def _rotate(self, attention: Any, layer: int) -> int:
        shape, kinds = self._cache.shape, ("q_norm", "k_norm")
        query_norm, key_norm = (getattr(attention, kind, None) for kind in kinds)
        weights = (self._address_of(None if norm is None else norm.weight) for norm in (query_norm, key_norm))
        return self._keep(self._native.Rotate(
            self._at("query"), self._at("key"), self._at("value"), self._model.config.num_attention_heads, shape.kv_heads,
            shape.head_dim, *weights, 0.0 if query_norm is None else query_norm.variance_epsilon, self._angles.data_ptr(),
            *self._cache.addresses(layer), self._cache.room,
        ))  # fmt: skip

    def _attention(self, attention: Any, layer: int) -> int:
        from engine.forward.cpu.native_attention import Layer

        shape, heads = self._cache.shape, self._model.config.num_attention_heads
        size = shape.head_dim * self._model.dtype.itemsize
        job = Layer(query=self._at("query"), query_head=size, query_row=heads * size, output=self._at("mixed"))
        job.keys, job.values = self._cache.addresses(layer)
        job.capacity, job.head_dim, job.value_dim = self._cache.room, shape.head_dim, shape.head_dim
        job.kv_heads = job.slot_heads = shape.kv_heads
        job.group = heads // shape.kv_heads
        job.window, job.scale = self._windows[layer] or 0, attention.scaling
        return self._keep(job)


def _is_known(model: PreTrainedModel, cache: SlotCache) -> bool:
    """Whether all of a model is here and is what ``RowModel`` computes."""
    config, shape = model.config, cache.shape
    if type(model).__name__ not in _FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return False
    if not has_kernels(model.device, model.dtype) or config.hidden_act != "silu":
        return False
    angles = getattr(config, "rope_parameters", None) or {}
    if angles.get("rope_type", "default") not in _ANGLES or angles.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    whole = (config.num_hidden_layers, config.num_key_value_heads, 0) == (shape.layers, shape.kv_heads, shape.first_layer)
    whole = whole and shape.values == shape.head_dim and not shape.ragged
    if not whole or shape.head_dim % (2 * ENTRY_STEP) or config.hidden_size % ENTRY_STEP:
        return False
    norms, linears = [model.model.norm], [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm")) if norm is not None]
        linears += [getattr(attention, f"{name}_proj") for name in "qkvo"]
        linears += [getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")]
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):  # somebody changes what they say
        return False
    known = all(type(each) is CompiledNorm for each in norms)
    return known and all(type(each) is torch.nn.Linear and _lies_whole(each.weight) for each in linears)


def _lies_whole(weight: torch.Tensor) -> bool:
    return type(weight) is PackedWeight or (type(weight) is PanelWeight and weight.stride(0) == weight.shape[1])


def _angles(model: PreTrainedModel, positions: int) -> torch.Tensor:
    """[positions, 2, head_dim]: cosines and sines, as the model itself computes them."""
    with torch.inference_mode():
        like = torch.empty(1, dtype=model.dtype)
        found = model.model.rotary_emb(like, torch.arange(positions)[None])
        return torch.stack([each[0] for each in found], dim=1).contiguous()
