"""Attention of the segments with few rows by compiled code, where that can be: see ``engine.native.few_rows``."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from decoding.jit import NATIVE
from engine.batch import Segment
from engine.kv_cache import SlotCache
from engine.native.threads import on_threads

if TYPE_CHECKING:  # it imports numba
    from engine.native.few_rows import Layer

MOST_ROWS = 128  # query rows of one KV head; with more, torch's kernels, which see that a prefill is causal, are as fast
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_WORTH_THREADS = 4096  # query rows times keys of a layer: some 20 microseconds, several times what it takes to wake a thread


class RowAttention:
    """Compiled attention over the slots of one model."""

    def __init__(self, cache: SlotCache, kernel: Callable[[int], None], address: int, most_rows: float) -> None:
        """See ``over``."""
        self.cache, self.kernel, self.address, self.most_rows = cache, kernel, address, most_rows

    @staticmethod
    def over(cache: SlotCache, most_rows: int | None = MOST_ROWS) -> RowAttention | None:
        """For the slots of a model on a CPU, in bfloat16 or float32, with heads of whole vectors; None for others.

        The first time on a machine it compiles, which takes some seconds.

        Args:
            cache: the slots.
            most_rows: of one KV head that are computed here, heads that share it counted each; None: any number.
        """
        shape = cache.shape
        if not NATIVE or shape.device.type != "cpu" or shape.dtype not in _DTYPES:
            return None
        from engine.native.few_rows import entry_point
        from engine.native.lanes import WIDTH

        if shape.head_dim % WIDTH:
            return None
        address: int = entry_point(_DTYPES[shape.dtype]).address
        kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        return RowAttention(cache, kernel, address, math.inf if most_rows is None else most_rows)

    def fits(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a layer's inputs are of the type and the shape of the slots."""
        shape = self.cache.shape
        entry = (1, shape.kv_heads, query.shape[2], shape.head_dim)
        sizes = key.shape == entry and value.shape == entry and query.shape[3] == shape.head_dim
        return sizes and query.dtype == key.dtype == value.dtype == shape.dtype


class RowStep:
    """The few-row segments of one forward."""

    def __init__(self, attention: RowAttention, segments: Sequence[Segment], positions: torch.Tensor) -> None:
        """
        Args:
            attention: over the slots of the segments.
            segments: some of the batch, none with more rows than ``MOST_ROWS`` by heads to a KV head.
            positions: [rows of the batch] int64.
        """
        from engine.native.few_rows import Layer, Rows

        self._attention = attention
        self._kept: list[object] = [positions, *segments]  # whose addresses are used
        self._rows = (Rows * len(segments))()
        slots, capacity = attention.cache.slots, attention.cache.capacity
        for entry, segment in zip(self._rows, segments, strict=True):
            mask, before = segment.mask, len(segment.before)  # what compiled code would not notice is checked here
            assert 0 <= segment.slot < slots and 0 < segment.rows <= capacity - segment.start - before, segment
            seen = segment.rows, before + segment.rows
            assert mask is None or (mask.shape == seen and mask.flags.c_contiguous and mask.itemsize == 1), mask
            assert mask is not None or not before, segment
            entry.slot, entry.start, entry.offset, entry.rows = segment.slot, segment.start, segment.offset, segment.rows
            entry.mask, entry.before = 0 if mask is None else mask.ctypes.data, before
            entry.positions = positions.data_ptr() + segment.offset * 8
            if before:
                own = positions[segment.offset : segment.offset + segment.rows]
                all_positions = np.concatenate((np.array(segment.before, np.int64), own.numpy()))
                self._kept.append(all_positions)
                entry.positions = all_positions.ctypes.data
        shape = attention.cache.shape
        self._layer: Layer = Layer(capacity=capacity, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self._layer.requests = ctypes.addressof(self._rows)
        self._layer.num_requests = len(segments)
        self._pairs = sum(segment.rows * segment.end for segment in segments)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> None:
        """Stores the new keys and values of the segments and writes what their rows see.

        Args:
            layer: index of the layer.
            query: [1, heads, rows, head_dim], of all rows of the batch.
            key: [1, kv_heads, rows, head_dim].
            value: as key.
            output: [1, rows, heads, head_dim], contiguous; rows of other segments are left as they are.
            scaling: of the scores; 1 / sqrt(head_dim) when None.
            window: see ``StepContext.mask``.
        """
        heads, job, size = query.shape[1], self._layer, query.element_size()
        strides = query.stride(), key.stride(), value.stride()
        if any(stride[3] != 1 for stride in strides):  # the elements of a head do not lie side by side
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
            strides = query.stride(), key.stride(), value.stride()
        of_query, of_key, of_value = strides
        job.query, job.query_head, job.query_row = query.data_ptr(), of_query[1] * size, of_query[2] * size
        job.key, job.key_head, job.key_row = key.data_ptr(), of_key[1] * size, of_key[2] * size
        job.value, job.value_head, job.value_row = value.data_ptr(), of_value[1] * size, of_value[2] * size
        job.output, job.group, job.window = output.data_ptr(), heads // job.kv_heads, window or 0
        job.keys, job.values = self._attention.cache.addresses(layer)
        job.scale = job.head_dim**-0.5 if scaling is None else scaling
        job.taken = 0
        threads = torch.get_num_threads()
        worth = threads > 1 and self._pairs * heads >= _WORTH_THREADS
        if not (worth and on_threads(self._attention.address, ctypes.addressof(job), threads)):
            self._attention.kernel(ctypes.addressof(job))
