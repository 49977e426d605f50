"""Tree attention over KV slots as two Triton kernels for CUDA graphs: inputs that vary between steps are device tensors.

**Row invariance.** The bits of a row's output are a function of its query and of the keys and values at its logical positions ``0
.. position`` alone, not of ``start``, the tree's entries, other rows or the capacity. So everything is anchored at logical
positions: blocks of 64 keys are folded left to right by an online softmax (Milakov and Gimelshein, arXiv 1805.02867) within
splits of 256 positions, and the splits' states are merged left to right, all at the greatest of their scores. A row at position
300 of a sequence with start 140 is

    kernel 1: fold 0..63, 64..127                                                   unnormalised, in float32
    kernel 2: continue with 128..191, 192..255; fold 256..300; merge the two splits; divide

and with start 280 kernel 1 computes all of the first split: the same operations in the same order. Both kernels compute a block
by the same code, and the compiler must not fuse multiplications and additions, because it might do so in one kernel only.

Both launches are one torch operation, ``outrider::slot_attention``, which declares what it writes: a test double can replace it.
"""

from __future__ import annotations

import math
import subprocess
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.accelerator import accelerator
from outrider.engine.cuda.step_buffers import StepBuffers, StepRows
from outrider.engine.errors import one_line
from outrider.engine.forward.batch import AttentionCall, DummySequence, ScheduledDummy, pack
from outrider.engine.kv.kv_cache import KVShape, SlotCache

BLOCK_N = 64  # keys per block
SPLIT = 256  # positions per split; fixed in every configuration, because bits depend on it
_PROGRAMS = 32  # programs of kernel 1 that share the splits of a tile and KV head


class BlockSizes(NamedTuple):
    """Block of queries of one program, and compile options, for both kernels."""

    rows: int  # queries, a power of two, at least 16
    warps: int
    stages: int  # 2: load the next block of keys into shared memory during the current one
    registers: int | None  # maximum per thread; unbounded, the assembler may spill some to fit another program


# Sizes for head_dim up to 64, 128 and 256, chosen by compiling: no registers are spilled except as recorded in
# experiments/results/*-triton-compile.json. With more rows, the rows of a tree read their context fewer times.
_WIDE, _WIDE_HEADS = BlockSizes(64, 4, 2, 255), BlockSizes(32, 8, 1, 255)
_HALF = {  # bfloat16 and float16, by compute capability
    (8, 0): (_WIDE, _WIDE, _WIDE_HEADS),
    (9, 0): (_WIDE, _WIDE, BlockSizes(64, 8, 1, 255)),  # wgmma here, and tcgen05.mma of 10.0, compute 64 rows at once
    (10, 0): (_WIDE, _WIDE, BlockSizes(64, 8, 1, 255)),
}
_HALF_SMALL = (_WIDE, BlockSizes(32, 4, 2, 255), _WIDE_HEADS)  # 32 rows take less than half of 100 KB of shared memory
_SINGLE = (BlockSizes(16, 8, 1, None), BlockSizes(16, 8, 2, None), BlockSizes(16, 16, 2, None))  # float32: no tensor cores
_SINGLE_SMALL = (*_SINGLE[:2], BlockSizes(16, 8, 1, 255))
_AS_OTHERS = {(8, 7): (8, 0), (10, 3): (10, 0)}  # GPUs with the instructions and shared memory of another


def available(shape: KVShape) -> bool:
    """Return whether the kernels support slots of this shape."""
    return shape.device.type == "cuda" and accelerator().has_kernels(shape.dtype)


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a launch if the kernels cannot be compiled or do not fit the device."""
    from triton.errors import TritonError

    return RuntimeError, OSError, subprocess.SubprocessError, TritonError


def block_sizes(capability: tuple[int, int], head_dim: int, dtype: torch.dtype) -> BlockSizes:
    """Return the sizes of both kernels, which depend only on GPU and model, because a row's bits depend on them."""
    # (0, 0) is Triton's interpreter on a CPU.
    known = _AS_OTHERS.get(capability, capability)
    half, single = (_HALF[known], _SINGLE) if known in _HALF else (_HALF_SMALL, _SINGLE_SMALL)
    return (half if dtype.itemsize == 2 else single)[0 if head_dim <= 64 else 1 if head_dim <= 128 else 2]


def best_block_rows(shape: KVShape) -> int:
    """Return the number of queries of a block on the slots' device."""
    return block_sizes(_capability(shape.device), shape.head_dim, shape.dtype).rows


def _capability(device: torch.device) -> tuple[int, int]:
    return accelerator().capability(device) if device.type == "cuda" else (0, 0)


def rows_per_tile(heads: int, kv_heads: int, block_rows: int = 64) -> int:
    """Return the maximum rows of a tile of ``StepRows.tiles``: their query heads of a KV head fill ``block_rows``."""
    assert heads % kv_heads == 0 and heads // kv_heads <= block_rows, (heads, kv_heads, block_rows)
    return block_rows // (heads // kv_heads)


def num_splits(capacity: int) -> int:
    """Return the number of splits of a slot with ``capacity`` entries."""
    return -(-capacity // SPLIT)


def states_size(rows: int, heads: int, capacity: int, head_dim: int) -> tuple[int, int, int, int]:
    """Return the shape of the float32 states passed between the two kernels."""
    return rows, heads, num_splits(capacity), head_dim + 4  # 4: keeps rows aligned to 16 bytes


def launch_sizes(
    capability: tuple[int, int], head_dim: int, group: int, dtype: torch.dtype, block_rows: int | None = None
) -> dict[str, int | bool | None]:
    """Return constants and compile options, the same for both kernels, because both must round alike."""
    chosen = block_sizes(capability, head_dim, dtype)
    # ``tl.dot`` takes powers of two from 16 on. GROUP is the number of query heads per KV head.
    block_dim = max(16, 1 << (head_dim - 1).bit_length())
    constants = {"GROUP": group, "SPLIT": SPLIT, "D": head_dim}
    blocks = {"BLOCK_D": block_dim, "BLOCK_M": block_rows or chosen.rows, "BLOCK_N": BLOCK_N}
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages, "maxnreg": chosen.registers, "enable_fp_fusion": False}
    return {**constants, **blocks, **options}


torch.library.define(
    "outrider::slot_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) states, Tensor(d!) output, "
    "Tensor slot, Tensor start, Tensor position, Tensor entry, Tensor path, Tensor tiles, "
    "float scale, int window, float softcap, int block_rows) -> ()",
)


@torch.library.impl("outrider::slot_attention", "CompositeExplicitAutograd")
def _launch(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, states: Tensor, output: Tensor,
    slot: Tensor, start: Tensor, position: Tensor, entry: Tensor, path: Tensor, tiles: Tensor,
    scale: float, window: int, softcap: float, block_rows: int,
) -> None:  # fmt: skip
    """Launch both kernels; ``window`` or ``softcap`` 0 means none."""
    from outrider.engine.cuda.slot_kernels import context_kernel, path_kernel  # imports triton, which is slow

    kv_heads, capacity, splits = keys.shape[1], keys.shape[2], states.shape[2]
    log2e = math.log2(math.e)
    # ``_fold`` computes powers of two; with a softcap, the scaled score is twice the argument of tanh.
    scale *= log2e if softcap == 0 else 2 * log2e / softcap
    sizes = launch_sizes(_capability(query.device), query.shape[3], query.shape[1] // kv_heads, query.dtype, block_rows)
    limits = {"CAP": softcap * log2e, "WINDOW": window, **sizes}
    query_strides, new_strides = query.stride()[1:3], (*key.stride()[1:3], *value.stride()[1:3])
    with accelerator().current(query.device):
        context_kernel[tiles.shape[0], kv_heads, min(splits, _PROGRAMS)](
            query, key, value, keys, values, slot, start, position, entry, tiles, states,
            *query_strides, *new_strides, capacity, splits, scale, **limits,
        )  # fmt: skip
        path_kernel[query.shape[2], kv_heads](
            query, keys, values, slot, start, position, path, states, output,
            *query_strides, path.stride(0), capacity, splits, scale, **limits,
        )  # fmt: skip


class SlotAttention:
    """Attention for all layers of one model, which share the states between the two kernels."""

    def __init__(self, shape: KVShape, heads: int, rows: int, capacity: int, block_rows: int = 64) -> None:
        """Allocate states for at most ``rows`` rows per forward pass; for ``block_rows`` see ``best_block_rows``."""
        self.rows_of_tile = rows_per_tile(heads, shape.kv_heads, block_rows)
        self.shape, self.heads, self.rows, self.capacity = shape, heads, rows, capacity
        self._block_rows = block_rows
        taken = states_size(rows, heads, capacity, shape.head_dim)
        self._states = torch.empty(taken, dtype=torch.float32, device=shape.device)

    def attend(self, call: AttentionCall, keys: Tensor, values: Tensor, rows: StepRows, output: Tensor) -> None:
        """Store a layer's new keys and values and write the attention output; call it once before a graph is captured.

        Args:
            call: of the layer; the elements of a head are contiguous.
            keys: [slots, kv_heads, capacity, head_dim] of the layer, contiguous; ``values`` likewise.
            rows: layout of the rows; no new entry precedes its row's ``start``.
            output: [1, rows, heads, head_dim], contiguous; zeros for padding rows.
        """
        self._check(call.query, (call.key, call.value), (keys, values), rows, output)
        window, softcap = call.window, call.softcap
        assert (window is None or window > 0) and (softcap is None or softcap > 0), (window, softcap)
        torch.ops.outrider.slot_attention(
            call.query, call.key, call.value, keys, values, self._states, output,
            rows.slot, rows.start, rows.position, rows.entry, rows.path, rows.tiles,
            call.scale, window or 0, softcap or 0.0, self._block_rows,
        )  # fmt: skip

    def _check(self, query: Tensor, new: tuple[Tensor, ...], cached: tuple[Tensor, ...], rows: StepRows, output: Tensor) -> None:
        """Check shapes and strides: the kernels would silently read or write outside the tensors."""
        count, heads, size = query.shape[2], self.shape.kv_heads, self.shape.head_dim
        assert count <= self.rows and query.shape == (1, self.heads, count, size), (query.shape, self.rows)
        assert all(each.shape == (1, heads, count, size) for each in new), [each.shape for each in new]
        assert all(each.shape[1:] == (heads, self.capacity, size) for each in cached), [each.shape for each in cached]
        assert output.shape == (1, count, self.heads, size), output.shape
        assert {each.dtype for each in (query, *new, *cached, output)} == {self.shape.dtype}, query.dtype
        assert all(each.stride(3) == 1 for each in (query, *new)), [each.stride() for each in (query, *new)]
        per_row = (rows.slot, rows.start, rows.position, rows.entry)
        assert all(each.shape == (count,) for each in per_row) and rows.path.shape[0] == count and rows.tiles.shape[1] == 2
        assert all(each.is_contiguous() for each in (*cached, output, *per_row, rows.tiles)) and rows.path.stride(1) == 1
        assert {each.dtype for each in (*per_row, rows.path, rows.tiles)} == {torch.int32}, rows


@torch.inference_mode()
def graph_fault(device: torch.device) -> str | None:
    """Capture attention over a few rows as a CUDA graph, replay it and return the failure in one line, or None."""
    rows, heads, head_dim = 16, 4, 64
    shape = KVShape(1, heads, head_dim, torch.float32, device)
    if not available(shape):
        return "the attention kernels need Triton"
    with accelerator().current(device):
        try:
            cache = SlotCache(shape, 1, rows)
            attention = SlotAttention(shape, heads, rows, rows, best_block_rows(shape))
            buffers = StepBuffers(rows, attention.rows_of_tile, 1, rows, device)
            buffers.fill(pack([ScheduledDummy(DummySequence(0, np.arange(rows, dtype=np.int32)), 0, rows, None)]))
            numbers = torch.arange(heads * rows * head_dim, dtype=torch.float32, device=device).sin()
            numbers = numbers.view(1, heads, rows, head_dim)

            def attend() -> torch.Tensor:
                output = numbers.new_empty(1, rows, heads, head_dim)
                attention.attend(AttentionCall(0, numbers, numbers, numbers), *cache.layer(0), buffers.step_rows, output)
                return output

            expected = attend().cpu()
            graph, output = accelerator().capture(device, accelerator().graph_pool(), attend)
            graph.replay()
            return None if torch.equal(output.cpu(), expected) else "the replay of a CUDA graph differs from the captured run"
        except kernel_errors() as error:
            return one_line(error)
