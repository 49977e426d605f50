"""Attention of a forward pass by compiled code, where supported, see ``engine.cpu.attention_kernel``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.cpu.linear import DTYPES, PANEL, has_kernels
from outrider.engine.cpu.threads import Kernel
from outrider.engine.forward.batch import AttentionCall, SequenceRows
from outrider.engine.kv.kv_cache import KVShape, SlotCache

if TYPE_CHECKING:  # it imports numba
    from outrider.engine.cpu.attention_kernel import Layer, NativeRows

ENTRY_STEP = 16  # elements of a vector
_WORTH_THREADS = 4096  # query rows times keys of a layer: about 20 us, several times the cost of waking a thread


def laid_out(shape: KVShape) -> KVShape:
    """Return the slot layout for compiled code; unchanged if the device or dtype has no kernels."""
    if not has_kernels(shape.device, shape.dtype):
        return shape
    return replace(shape, padding=-shape.head_dim % ENTRY_STEP, value_padding=-shape.values % ENTRY_STEP, panel=PANEL)


class RowAttention:
    """Compiled attention over the slots of one model."""

    def __init__(self, cache: SlotCache, kernel: Kernel) -> None:
        self.cache, self.kernel = cache, kernel

    @staticmethod
    def over(cache: SlotCache) -> RowAttention | None:
        """Return attention over slots that are ``laid_out`` for compiled code; None for others."""
        shape = cache.shape
        if shape.panel != PANEL:
            return None
        from outrider.engine.cpu.attention_kernel import entry_point, move_entries

        move_entries(0, 0, cache.layout, 0, np.zeros(0, np.int64))  # compile now, so that no request waits for it
        return RowAttention(cache, Kernel(entry_point(DTYPES[shape.dtype]).address))

    def fits(self, call: AttentionCall) -> bool:
        """Return whether a layer's inputs have the slots' dtype and fit into them."""
        shape, query, key, value = self.cache.shape, call.query, call.key, call.value
        sizes = key.shape[3] == query.shape[3] <= shape.head_dim and value.shape[3] <= shape.values
        same = key.shape[:3] == value.shape[:3] == (1, key.shape[1], query.shape[2]) and key.shape[1] <= shape.kv_heads
        return same and sizes and query.dtype == key.dtype == value.dtype == shape.dtype


def request_rows(
    cache: SlotCache, segments: Sequence[SequenceRows], positions: npt.NDArray[np.int64]
) -> tuple[ctypes.Array[NativeRows], list[object]]:
    """Return the rows of a forward pass for compiled code, and the objects that must outlive their use."""
    from outrider.engine.cpu.attention_kernel import NativeRows

    kept: list[object] = [positions, *segments]  # their addresses are used
    found = (NativeRows * len(segments))()
    for entry, segment in zip(found, segments, strict=True):
        mask, before = segment.mask, len(segment.before)  # compiled code does not check these
        assert 0 <= segment.slot < cache.slots and 0 < segment.rows <= cache.capacity - segment.start - before, segment
        seen = segment.rows, before + segment.rows
        assert mask is None or (mask.shape == seen and mask.flags.c_contiguous and mask.itemsize == 1), mask
        assert mask is not None or not before, segment
        entry.slot, entry.start, entry.offset, entry.rows = segment.slot, segment.start, segment.offset, segment.rows
        entry.mask, entry.before = 0 if mask is None else mask.ctypes.data, before
        entry.positions = positions.ctypes.data + segment.offset * 8  # contiguous
        if before:
            own = positions[segment.offset : segment.offset + segment.rows]
            all_positions = np.concatenate((np.array(segment.before, np.int64), own))
            kept.append(all_positions)
            entry.positions = all_positions.ctypes.data
    return found, kept


class RowStep:
    """Segments of one forward pass, prepared for compiled attention."""

    def __init__(self, attention: RowAttention, segments: Sequence[SequenceRows], positions: torch.Tensor) -> None:
        from outrider.engine.cpu.attention_kernel import Layer

        self._attention = attention
        self._rows, self._kept = request_rows(attention.cache, segments, positions.numpy())
        shape = attention.cache.shape
        self._layer: Layer = Layer(capacity=attention.cache.room, slot_heads=shape.kv_heads)
        self._layer.head_dim, self._layer.value_dim = shape.entry_size, shape.value_size
        self._layer.requests = ctypes.addressof(self._rows)
        self._layer.num_requests = len(segments)
        self._count = sum(segment.rows for segment in segments)
        self._pairs = sum(segment.rows * segment.end for segment in segments)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Compute a layer, see ``engine.forward.attention.Attending``; rows outside all segments are zeros."""
        query, key, value = call.query, call.key, call.value
        job, size = self._layer, value.shape[3]
        job.scale = call.scale
        query, key, value = _wide(query, job.head_dim), _wide(key, job.head_dim), _wide(value, job.value_dim)
        _, heads, rows, _ = query.shape
        output = query.new_empty(1, rows, heads, job.value_dim)
        if rows > self._count:
            output[:, self._count :] = 0
        wide = query.element_size()
        of_query, of_key, of_value = query.stride(), key.stride(), value.stride()
        job.query, job.query_head, job.query_row = query.data_ptr(), of_query[1] * wide, of_query[2] * wide
        job.key, job.key_head, job.key_row = key.data_ptr(), of_key[1] * wide, of_key[2] * wide
        job.value, job.value_head, job.value_row = value.data_ptr(), of_value[1] * wide, of_value[2] * wide
        job.kv_heads = key.shape[1]
        job.output, job.group = output.data_ptr(), heads // job.kv_heads
        job.window, job.chunk, job.softcap = call.window or 0, call.chunk or 0, call.softcap or 0.0
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        assert sinks is None or sinks.shape == (heads,), sinks
        job.sinks = 0 if sinks is None else sinks.data_ptr()
        job.keys, job.values = self._attention.cache.addresses(call.layer)
        job.taken = job.stored = job.blocks = 0
        threads = torch.get_num_threads() if self._pairs * heads >= _WORTH_THREADS else 1
        self._attention.kernel(job, threads)
        return output[..., :size]


def _wide(numbers: torch.Tensor, size: int) -> torch.Tensor:
    if numbers.shape[3] < size:
        return torch.nn.functional.pad(numbers, (0, size - numbers.shape[3]))
    return numbers if numbers.stride(3) == 1 else numbers.contiguous()
