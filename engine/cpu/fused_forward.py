"""CPU forward pass of a model of a known family in one call of compiled code, see ``engine.cpu.forward_kernel``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.decoding.arrays import SignedArray
from outrider.decoding.sources.ranked.contexts import signs_of
from outrider.engine.cpu.attention import request_rows
from outrider.engine.cpu.buffers import RowBuffers
from outrider.engine.cpu.linear import DTYPES, PanelWeight
from outrider.engine.cpu.lora import Adapters
from outrider.engine.cpu.mixer_operations import MixerOperations
from outrider.engine.cpu.mixers import mixers
from outrider.engine.cpu.model_families import AttentionParts, LayerParts, MixerParts, ModelParts, model_parts
from outrider.engine.cpu.packed_weight import PackedWeight
from outrider.engine.cpu.state_step import States
from outrider.engine.cpu.threads import Kernel
from outrider.engine.forward.batch import Batch, adapters_of
from outrider.engine.kv.kv_cache import SlotCache

if TYPE_CHECKING:  # it imports numba
    from outrider.engine.cpu.forward_kernel import Operation

_ROWS = 512  # initial capacity


class FusedForward:
    """Compiled forward pass over a model's weights and KV slots, which are used in place and must not move."""

    def __init__(
        self, model: PreTrainedModel, parts: ModelParts, cache: SlotCache, windows: Mapping[int, int | None],
        states: States | None,
    ) -> None:  # fmt: skip
        from outrider.engine.cpu import forward_kernel as step

        self._native, self._model, self._parts, self._cache, self._windows = step, model, parts, cache, windows
        self._states = states
        kinds = {weight.kind for weight in model.parameters() if type(weight) is PackedWeight}
        entry = step.entry_point(DTYPES[model.dtype], tuple(sorted(kinds)), states is not None)
        self._kernel = Kernel(entry.address)
        self._positions = cache.capacity
        self._angles = _angles(model, cache.capacity) if parts.turned else None
        self._mixers = {id(module): number for number, module in enumerate(mixers(model))}
        self._vocab = model.lm_head.weight.shape[0]
        self._tokens = model.get_input_embeddings().weight.shape[0]
        self._adapters: Adapters | None = None
        self._asked: dict[int, tuple[int, list[int]]] = {}  # by the number of layers
        self._make_room(_ROWS)
        signs_of(self.hidden, 0, 1)  # compile now, so that no step waits for it

    @staticmethod
    def over(
        model: PreTrainedModel, cache: SlotCache, windows: Mapping[int, int | None], states: States | None = None
    ) -> FusedForward | None:
        """Return a compiled forward pass of a model, compiled once per machine in seconds; None if the model is not supported."""
        parts = model_parts(model, cache)
        return None if parts is None else FusedForward(model, parts, cache, windows, states)

    @property
    def asked(self) -> tuple[int, list[int]]:
        """Return the number of attention layers among the present layers, and the state sites of the others (see ``States``)."""
        layers = self._layers()
        if len(layers) not in self._asked:
            numbers = [self._mixers[id(each.mixing.module)] for each in layers if isinstance(each.mixing, MixerParts)]
            places = {} if self._states is None else self._states.places
            sites = [places[site] for number in numbers for site in (2 * number, 2 * number + 1) if site in places]
            self._asked[len(layers)] = len(layers) - len(numbers), sites
        return self._asked[len(layers)]

    # Fewer than all only in the exactness self-check, which shortens the model.
    def _layers(self) -> tuple[LayerParts, ...]:
        return self._parts.layers[: len(self._model.model.layers)]

    def adapt(self, adapters: Adapters) -> None:
        """Add LoRA adapters to the layers; forward passes without adapted rows stay the same."""
        self._adapters = adapters
        self._make_room(self._buffers.rows)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute all rows and return the logits of ``logit_rows``. Raises ``IndexError`` for a wrong token or position."""
        native, count, picked = self._native, len(batch.token_ids), len(batch.logit_rows)
        threads, room = torch.get_num_threads(), self._buffers.rows
        if max(count, picked) > room or threads > self._buffers.threads:
            self._make_room(max(count, picked, room))
        tokens, positions, wanted = (
            np.ascontiguousarray(each, np.int64) for each in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        if tokens.min() < 0 or tokens.max() >= self._tokens:
            raise IndexError(f"token ids must be below {self._tokens}, got {tokens.min()} to {tokens.max()}")
        if positions.min() < 0 or positions.max() >= self._positions:
            raise IndexError(f"positions must be below {self._positions}, got {positions.min()} to {positions.max()}")
        assert len(positions) == count and (wanted < count).all(), (positions, wanted)
        logits = torch.empty(picked, self._vocab, dtype=self._model.dtype)
        requests, kept = request_rows(self._cache, batch.segments, positions)
        adapters = None if self._adapters is None else adapters_of(batch, self._adapters.numbers)
        states = None if self._states is None else self._states.begin(batch.segments)
        operations = self._operations_of(len(self._layers()), adapters is not None)
        self._head.output = logits.data_ptr()
        counters = np.zeros(native.num_counters(len(operations), threads) * native.COUNTER, np.uint8)
        # Without picked rows the last norm and the logits are left out.
        job = native.NativeStep(
            ctypes.addressof(operations), len(operations) - (0 if picked else 2), tokens.ctypes.data, positions.ctypes.data,
            count, wanted.ctypes.data, picked, ctypes.addressof(requests), len(requests), threads, counters.ctypes.data,
            0 if adapters is None else adapters.ctypes.data, *((0, 0) if states is None else states.walks),
        )  # fmt: skip
        self._kernel(job, threads)
        # Until here the job referred to these by address.
        del kept
        if states is not None:
            states.finish()
        return logits if self._parts.divisor == 1 else logits.div_(self._parts.divisor)

    def _make_room(self, rows: int) -> None:
        config, shape, model = self._model.config, self._cache.shape, self._model
        attending = [layer.mixing for layer in self._parts.layers if isinstance(layer.mixing, AttentionParts)]
        heads, inner = config.num_attention_heads * shape.head_dim, self._parts.layers[0].down.weight.shape[1]
        sizes = {
            "hidden": config.hidden_size, "normed": config.hidden_size, "gated": inner,
            "query": heads * (1 + attending[0].gated), "key": shape.kv_heads * shape.head_dim,
            "value": shape.kv_heads * shape.head_dim, "mixed": heads,
        }  # fmt: skip
        if self._adapters is not None:  # adapted layers are computed separately from what follows them
            sizes |= {"projected": config.hidden_size, "up": inner}
        self._buffers = RowBuffers(rows, torch.get_num_threads(), model.dtype)
        for name, size in sizes.items():
            self._buffers.make(name, size)
        if self._adapters is not None:
            for part in range(3):  # query, key and value at once
                self._buffers.make(f"scratch {part}", self._adapters.scratch_size(), torch.float32)
        # Bits of the final hidden states, valid until the next forward pass.
        self.hidden: SignedArray = self._buffers.bits("normed")
        self._prepared: dict[tuple[int, bool, int], ctypes.Array[Operation]] = {}
        self._head = self._buffers.linear(model.lm_head, "normed", "normed")  # its output address is set in each forward pass
        self._head.output_stride = self._vocab * model.dtype.itemsize

    def _operations_of(self, layers: int, adapted: bool = False) -> ctypes.Array[Operation]:
        kept_rows = 0 if self._states is None else self._states.cache.kept_rows  # the address of kept rows changes with it
        key = layers, adapted, kept_rows
        if key not in self._prepared:
            found = [self._native.Operation(*each) for each in self._all_operations(layers, adapted)]
            self._prepared[key] = (self._native.Operation * len(found))(*found)
        return self._prepared[key]

    def _all_operations(self, layers: int, adapted: bool) -> Iterator[tuple[int, bool, int]]:
        """Yield kind, whether to wait, and job address of each operation; with the adapters' if ``adapted``."""
        native, model, buffers, factor = self._native, self._model.model, self._buffers, self._parts.added_factor
        table = model.embed_tokens.weight
        (address, form), size = buffers.panels_of(table), table.shape[1]
        panels = isinstance(table, PanelWeight | PackedWeight)
        scratch = buffers.scratch(size) if form else 0
        embed = native.Embed(address, panels, size, buffers.at("hidden"), form, scratch, self._parts.embedding_factor)
        yield native.EMBED, False, buffers.keep(embed)
        mixed = None if self._states is None else MixerOperations(self._states, buffers, factor)
        attending = 0
        for number, layer in enumerate(self._parts.layers[:layers]):
            yield native.NORM, True, self._norm(layer.norms[0], "hidden", "normed")
            if isinstance(layer.mixing, AttentionParts):
                yield from self._attention(layer.mixing, attending, f"model.layers.{number}.self_attn", adapted)
                attending += 1
            else:
                assert mixed is not None, layer
                module = layer.mixing.module
                yield from mixed.of(layer.mixing.rule, module, self._mixers[id(module)])
            yield native.NORM, True, self._norm(layer.norms[1], "hidden", "normed")
            name = f"model.layers.{number}.mlp"
            if adapted and (self._adds(f"{name}.gate_proj") or self._adds(f"{name}.up_proj")):
                assert layer.up is not None, layer
                yield native.LINEAR, True, buffers.product(layer.gate, "normed", "gated")
                yield native.LINEAR, False, buffers.product(layer.up, "normed", "up")
                yield from self._added(name, layer.products, "normed", ("gate_proj", "gated"), ("up_proj", "up"))
                yield native.GATE, True, buffers.pairs("gated", "up")
            else:
                halves = layer.up is None
                yield native.LINEAR, True, buffers.product(layer.gate, "normed", "gated", up=layer.up, halves=halves)
            if adapted and self._adds(f"{name}.down_proj"):
                yield native.LINEAR, True, buffers.product(layer.down, "gated", "projected")
                yield from self._added(name, layer.products, "gated", ("down_proj", "projected"))
                yield native.SUM, True, buffers.pairs("hidden", "projected")
            else:
                yield native.LINEAR, True, buffers.product(layer.down, "gated", "hidden", added="hidden", factor=factor)
        yield native.PICKED_NORM, True, self._norm(self._parts.last_norm, "hidden", "normed")
        yield native.PICKED_LINEAR, True, ctypes.addressof(self._head)

    def _attention(self, parts: AttentionParts, number: int, name: str, adapted: bool) -> Iterator[tuple[int, bool, int]]:
        native, buffers, factor = self._native, self._buffers, self._parts.added_factor
        yield native.LINEAR, True, buffers.product(parts.query, "normed", "query")
        yield native.LINEAR, False, buffers.product(parts.key, "normed", "key")
        yield native.LINEAR, False, buffers.product(parts.value, "normed", "value")
        if adapted:
            children = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
            yield from self._added(name, parts.module, "normed", *children)
        yield native.ROTATE, True, self._rotate(parts, number)
        yield native.ATTEND, True, self._attend(parts, number)
        if parts.gated:
            yield native.SIGMOID, True, self._gate()
        if adapted and self._adds(f"{name}.o_proj"):
            yield native.LINEAR, True, buffers.product(parts.output, "mixed", "projected")
            yield from self._added(name, parts.module, "mixed", ("o_proj", "projected"))
            yield native.SUM, True, buffers.pairs("hidden", "projected")
        else:
            yield native.LINEAR, True, buffers.product(parts.output, "mixed", "hidden", added="hidden", factor=factor)

    def _adds(self, layer: str) -> bool:
        return self._adapters is not None and layer in self._adapters.layers

    def _added(self, parent: str, module: Any, source: str, *parts: tuple[str, str]) -> Iterator[tuple[int, bool, int]]:
        """Yield the adapters' operations for layers of one input, given as (child, target); only the first waits."""
        assert self._adapters is not None
        waits = True
        for part, (child, target) in enumerate(parts):
            if self._adds(f"{parent}.{child}"):
                at = (self._buffers.at(each) for each in (source, target, f"scratch {part}"))
                job = self._adapters.job(f"{parent}.{child}", getattr(module, child), *at)
                yield self._native.LOW_RANK, waits, self._buffers.keep(job)
                waits = False

    def _norm(self, norm: Any, source: str, target: str) -> int:
        buffers, size = self._buffers, norm.weight.shape[0]
        return buffers.keep(self._native.Norm(
            buffers.at(source), buffers.address_of(norm.factors), buffers.at(target), 0, size, norm.variance_epsilon, norm.wide
        ))  # fmt: skip

    def _head_bytes(self, parts: AttentionParts) -> int:
        return self._cache.shape.head_dim * self._model.dtype.itemsize * (1 + parts.gated)

    def _rotate(self, parts: AttentionParts, layer: int) -> int:
        shape, buffers, norms = self._cache.shape, self._buffers, (parts.query_norm, parts.key_norm)
        weights = (buffers.address_of(None if norm is None else norm.factors) for norm in norms)
        epsilon, wide = (0.0, False) if norms[0] is None else (norms[0].variance_epsilon, norms[0].wide)
        return buffers.keep(self._native.Rotate(
            buffers.at("query"), self._head_bytes(parts), buffers.at("key"), buffers.at("value"),
            self._model.config.num_attention_heads, shape.kv_heads, shape.head_dim, self._parts.turned, *weights, epsilon, wide,
            buffers.address_of(self._angles), *self._cache.addresses(layer), self._cache.room,
        ))  # fmt: skip

    def _attend(self, parts: AttentionParts, layer: int) -> int:
        from outrider.engine.cpu.attention_kernel import Layer

        shape, buffers, heads = self._cache.shape, self._buffers, self._model.config.num_attention_heads
        job = Layer(query=buffers.at("query"), query_head=self._head_bytes(parts), output=buffers.at("mixed"))
        job.query_row = buffers.stride("query")
        job.keys, job.values = self._cache.addresses(layer)
        job.capacity, job.head_dim, job.value_dim = self._cache.room, shape.head_dim, shape.head_dim
        job.kv_heads = job.slot_heads = shape.kv_heads
        job.group = heads // shape.kv_heads
        job.window, job.scale = self._windows[layer] or 0, parts.module.scaling
        return buffers.keep(job)

    def _gate(self) -> int:
        """Return the job that gates each head's output by the elements behind its query."""
        buffers, size, wide = self._buffers, self._cache.shape.head_dim, self._model.dtype.itemsize
        return buffers.keep(self._native.Pairs(
            buffers.at("mixed"), buffers.stride("mixed"), buffers.at("query", size), buffers.stride("query"), 2 * size * wide,
            self._model.config.num_attention_heads, size,
        ))  # fmt: skip


def _angles(model: PreTrainedModel, positions: int) -> torch.Tensor:
    """Return cosines and sines as the model computes them, [positions, 2, turned]."""
    with torch.inference_mode():
        like = torch.empty(1, dtype=model.dtype)
        found = model.model.rotary_emb(like, torch.arange(positions)[None])
        return torch.stack([each[0] for each in found], dim=1).contiguous()
