"""Keys and values of the running requests: one preallocated slot each, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model stores per token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    first_layer: int = 0  # index of the first of the layers, where another process has those before it
    padding: int = 0  # numbers behind those of a head in each entry, which compiled code wants to be whole vectors

    @property
    def entry_size(self) -> int:
        """Numbers of an entry of one head."""
        return self.head_dim + self.padding

    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.entry_size * self.dtype.itemsize


class SlotCache:
    """KV of ``slots`` sequences. Entry i of a slot belongs to token i of its sequence; draft rows lie behind the committed ones.

    Memory is taken once. A slot needs no clearing: entries are written before they are read.
    """

    def __init__(self, shape: KVShape, slots: int, capacity: int) -> None:
        """
        Args:
            shape: per-token sizes.
            slots: sequences held at once.
            capacity: entries of one slot; the longest sequence and the draft rows behind it.
        """
        size = (shape.layers, slots, shape.kv_heads, capacity, shape.entry_size)
        empty = torch.zeros if shape.padding else torch.empty  # what is behind a head's numbers is read
        self._keys = empty(size, dtype=shape.dtype, device=shape.device)
        self._values = empty(size, dtype=shape.dtype, device=shape.device)
        self.shape, self.slots, self.capacity = shape, slots, capacity
        self._first = shape.first_layer
        self.prefixes = PrefixCache(slots)

    def write(
        self, layer: int, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new rows behind ``start`` entries and returns all entries up to and including them.

        Args:
            layer: index of the layer.
            slot: of the sequence.
            start: entries that are valid.
            keys: [kv_heads, rows, head_dim].
            values: as keys.

        Returns:
            Views of keys and values, [kv_heads, start + rows, head_dim].
        """
        end = start + keys.shape[1]
        at = layer - self._first
        size = self.shape.head_dim
        slot_keys, slot_values = self._keys[at, slot, ..., :size], self._values[at, slot, ..., :size]
        slot_keys[:, start:end] = keys
        slot_values[:, start:end] = values
        return slot_keys[:, :end], slot_values[:, :end]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, [slots, kv_heads, capacity, head_dim] each."""
        return self._keys[layer - self._first], self._values[layer - self._first]

    def addresses(self, layer: int) -> tuple[int, int]:
        """Of a layer's keys and values, [slots, kv_heads, capacity, head_dim] each, without gaps."""
        behind = (layer - self._first) * self._keys.stride(0) * self._keys.element_size()
        return self._keys.data_ptr() + behind, self._values.data_ptr() + behind

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Moves accepted rows together: entry ``start + rows[i]`` becomes entry ``start + i``, in all layers.

        Rows increase. Nothing is copied when they already lie at ``start``.
        """
        if rows[-1] == len(rows) - 1:
            return
        source = torch.tensor([start + row for row in rows]).to(self._keys.device, non_blocking=True)
        for entries in (self._keys[:, slot], self._values[:, slot]):
            entries[:, :, start : start + len(rows)] = entries.index_select(2, source)

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copies the entries ``start:length`` of one slot to the same place in another, in all layers."""
        for entries in (self._keys, self._values):
            entries[:, target, :, start:length] = entries[:, source, :, start:length]

    def entries(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of a slot's first entries, [layers, kv_heads, length, head_dim] each: for tests and inspection."""
        return self._keys[:, slot, :, :length].clone(), self._values[:, slot, :, :length].clone()
