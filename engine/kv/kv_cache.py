"""Keys and values of the running requests: one preallocated slot each, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from outrider.decoding.arrays import Int32Array
from outrider.engine.kv.prefix_cache import PrefixCache
from outrider.engine.kv.state_cache import StateCache


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape and memory format of the KV entries of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    first_layer: int = 0  # index of the first layer, if another process has those before it
    padding: int = 0  # unused numbers per key and head, so that entries are whole SIMD vectors
    panel: int = 1  # entries with interleaved keys, for compiled code; 1: not interleaved
    value_dim: int | None = None  # numbers per value and head, if different from those of a key
    value_padding: int = 0  # unused numbers per value and head
    ragged: bool = False  # some layers have fewer or smaller heads: the remaining numbers stay zero

    @property
    def entry_size(self) -> int:
        """Return the numbers per key and head, including padding."""
        return self.head_dim + self.padding

    @property
    def values(self) -> int:
        """Return the numbers per value and head, without padding."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def value_size(self) -> int:
        """Return the numbers per value and head, including padding."""
        return self.values + self.value_padding

    def bytes_per_token(self) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        return self.layers * self.kv_heads * (self.entry_size + self.value_size) * self.dtype.itemsize


class SlotLayout(NamedTuple):
    """Memory layout of the entries of all slots, for compiled code."""

    layers: int
    layer_entries: int  # entries per layer, counted per head
    heads: int  # KV heads
    room: int  # entries of a slot
    wide: int  # bytes of a key of one head
    value_wide: int  # bytes of a value of one head
    panel: int  # entries with interleaved keys
    piece: int  # bytes of a key that are contiguous within a panel


class SlotCache:
    """KV of ``slots`` sequences; entry i of a slot belongs to token i, and draft rows follow the committed ones."""

    def __init__(self, shape: KVShape, slots: int, capacity: int) -> None:
        self.room = -(-capacity // shape.panel) * shape.panel  # allocated entries per slot
        size = (shape.layers, slots, shape.kv_heads, self.room)
        # Padding is read by compiled code, so it must be initialised.
        empty = torch.zeros if shape.padding or shape.value_padding or shape.ragged else torch.empty
        # Other memory is not cleared: entries are written before they are read. Keys in panels form a [room, entry_size] matrix
        # per layer, slot and head, in the layout of ``linear`` weights.
        self._keys = empty((*size, shape.entry_size), dtype=shape.dtype, device=shape.device)
        self._values = empty((*size, shape.value_size), dtype=shape.dtype, device=shape.device)
        self.shape, self.slots, self.capacity = shape, slots, capacity
        self._first = shape.first_layer
        self.prefixes = PrefixCache(slots)
        self.states: StateCache | None = None  # recurrent states of layers without KV, if any
        # [layers, slots, kv_heads, panels, panel, numbers] view of the keys; pairs of numbers in bfloat16
        of_pairs = self._keys.view(torch.int32) if shape.dtype == torch.bfloat16 else self._keys
        self._in_panels = of_pairs.view(*size[:3], -1, of_pairs.shape[-1], shape.panel).transpose(-1, -2)
        wide, value_wide = (each * shape.dtype.itemsize for each in (shape.entry_size, shape.value_size))
        entries, piece = slots * shape.kv_heads * self.room, self._in_panels.element_size()
        self.layout = SlotLayout(shape.layers, entries, shape.kv_heads, self.room, wide, value_wide, shape.panel, piece)

    def add_states(self, states: StateCache) -> None:
        """Attach the recurrent states of the same slots."""
        self.states = self.prefixes.states = states

    def write(
        self, layer: int, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new rows behind the first ``start`` entries; return views of all entries, [kv_heads, start + rows, head_dim]."""
        # ``keys`` are [kv_heads, rows, head_dim], and may have fewer and smaller heads than other layers; so may ``values``.
        heads, rows, size = keys.shape
        end, at = start + rows, layer - self._first
        slot_values = self._values[at, slot, :heads, :, : values.shape[2]]
        slot_values[:, start:end] = values
        if self.shape.panel == 1:
            slot_keys = self._keys[at, slot, :heads, :, :size]
            slot_keys[:, start:end] = keys
            return slot_keys[:, :end], slot_values[:, :end]
        entries = torch.nn.functional.pad(keys, (0, self.shape.entry_size - size)).contiguous()
        panels = self._in_panels[at, slot, :heads]
        panels[:, *self._places(start, end)] = entries.view(self._in_panels.dtype)
        return self._panel_entries(panels, end)[..., :size], slot_values[:, :end]

    def _places(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        entries = torch.arange(start, end, device=self._keys.device)
        return entries // self.shape.panel, entries % self.shape.panel

    def _panel_entries(self, panels: torch.Tensor, end: int) -> torch.Tensor:
        """Return the first ``end`` keys, [..., end, head_dim], from [..., panels, panel, numbers]."""
        keys = panels[..., *self._places(0, end), :].view(self.shape.dtype)
        return keys[..., : self.shape.head_dim]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values of a layer, [slots, kv_heads, room, size] each."""
        return self._keys[layer - self._first], self._values[layer - self._first]

    def addresses(self, layer: int) -> tuple[int, int]:
        """Return the addresses of a layer's keys, [slots, kv_heads, room, entry_size] numbers, and of its values."""
        return self._keys[layer - self._first].data_ptr(), self._values[layer - self._first].data_ptr()

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Move accepted rows together: entry ``start + rows[i]``, in ascending order, becomes ``start + i`` in all layers."""
        if self.states is not None:
            self.states.accept(slot, rows)
        # The accepted rows are the first ones.
        if rows[-1] == len(rows) - 1:
            return
        if self.shape.panel == 1:
            source = torch.tensor([start + row for row in rows]).to(self._keys.device, non_blocking=True)
            for entries in (self._keys, self._values):
                # The rows are gathered into a copy first, because source and target overlap.
                entries[:, slot, :, start : start + len(rows)] = entries[:, slot].index_select(2, source)
            return
        from outrider.engine.cpu.attention_kernel import move_entries  # needs numba, like panels

        keys, values = (entries[:, slot].data_ptr() for entries in (self._keys, self._values))
        move_entries(keys, values, self.layout, start, np.array(rows, np.int64))

    def place(self, tokens: Int32Array, scope: str | None, free: Sequence[int]) -> tuple[int, int]:
        """Return the slot for a request and how many of its first tokens it holds, after copying (``PrefixCache.place``)."""
        found = self.prefixes.place(tokens, scope, free)
        if found.source is not None:
            self.copy(found.source, found.slot, found.length, found.start)
        if self.states is not None:
            self.states.restore(found.slot, found.state, found.length)
        return found.slot, found.length

    def zero(self, slot: int, length: int) -> None:
        """Zero the first entries of a slot, because unwritten memory may hold numbers that are slow to compute with."""
        self._in_panels[:, slot][:, :, *self._places(0, length)] = 0
        self._values[:, slot, :, :length] = 0
        if self.states is not None:
            self.states.forget(slot)

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy the entries ``start:length`` of one slot to the same positions of another, in all layers."""
        self._values[:, target, :, start:length] = self._values[:, source, :, start:length]
        panel, keys = self.shape.panel, self._in_panels
        first, last = -(-start // panel), length // panel  # whole panels are copied without indexing
        if first >= last:
            parts = [(start, length)]
        else:
            keys[:, target, :, first:last] = keys[:, source, :, first:last]
            parts = [(start, first * panel), (last * panel, length)]
        for begin, end in parts:
            if begin < end:
                places = self._places(begin, end)
                keys[:, target][:, :, *places] = keys[:, source][:, :, *places]

    def entries(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a slot's first entries, [layers, kv_heads, length, head_dim] each; for tests and inspection."""
        values = self._values[:, slot, :, :length, : self.shape.values].clone()
        return self._panel_entries(self._in_panels[:, slot], length).clone(), values
