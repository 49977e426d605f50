"""Tree attention over KV slots as two Triton kernels, for CUDA graphs: what varies from step to step is read from device tensors.

**Row invariance.** The bits of a row's output are a function of its query and of the keys and values at its logical positions
``0 .. position`` alone: not of ``start``, of where the tree lies in the slot, of the other rows, or of its place among them. So
everything is anchored at logical positions: blocks of 64 keys are folded left to right by an online softmax (Milakov and
Gimelshein, arXiv 1805.02867) within splits of the slot, and the splits' states are merged left to right, all at the greatest of
their scores. A block or a split of which a row sees nothing leaves its bits as they are. With splits of 128 keys, a row at
position 150 of a sequence with start 70 is

    kernel 1: fold 0..63                                          unnormalised, in float32
    kernel 2: go on with 64..127; fold 128..150; merge the two; divide

and with start 140 kernel 1 does both blocks of the first split: the same operations in the same order. Both kernels compute a
block by the same code, with operands of the same shapes, and the compiler must not contract multiplications and additions, as it
might do so in one and not in the other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.forward.batch import AttentionCall
from engine.forward.cuda.slot_kernels import TRITON, context_kernel, path_kernel
from engine.forward.cuda.step_buffers import StepRows
from engine.kv.kv_cache import KVShape

BLOCK_N = 64  # keys of a block
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def available(shape: KVShape) -> bool:
    """Whether the kernels run over such slots: of a CUDA device, in no wider type than float32."""
    return TRITON and shape.dtype in DTYPES and shape.device.type == "cuda"


def best_block_rows(shape: KVShape) -> int:
    """Queries of a block: 64 for Hopper's products, and 16 before it and in float32, where more have no room in registers."""
    hopper = shape.device.type == "cuda" and torch.cuda.get_device_capability(shape.device) >= (9, 0)
    return 64 if hopper and shape.dtype.itemsize == 2 else 16


def rows_per_tile(heads: int, kv_heads: int, block_rows: int = 64) -> int:
    """The most rows of a tile of ``StepRows.tiles``, whose query heads of one KV head together fill a block of ``block_rows``."""
    assert heads % kv_heads == 0 and heads // kv_heads <= block_rows, (heads, kv_heads, block_rows)
    return block_rows // (heads // kv_heads)


def launch_sizes(shape: KVShape, heads: int, capacity: int, block_rows: int = 64) -> dict[str, int | bool]:
    """What the kernels of a model are compiled for: constants and options that both share, as both must round alike.

    Four warps are one warpgroup of Hopper's, with 16 whole rows of a block each; heads of 256 take eight for their accumulators.
    Two stages load one block ahead of the one computed, in 80 KB of shared memory with heads of 128, which leaves room for a
    second program beside it; wider heads have room for one stage.
    """
    split = max(128, -(-capacity // (32 * BLOCK_N)) * BLOCK_N)  # keys; at most 32 splits
    block_dim = max(16, 1 << (shape.head_dim - 1).bit_length())
    constants = {"GROUP": heads // shape.kv_heads, "SPLIT": split, "SPLITS": -(-capacity // split), "D": shape.head_dim}
    blocks = {"BLOCK_D": block_dim, "BLOCK_M": block_rows, "BLOCK_N": BLOCK_N}
    stages = 2 if block_dim * shape.dtype.itemsize <= 256 else 1
    options = {"num_warps": 8 if block_dim > 128 else 4, "num_stages": stages, "enable_fp_fusion": False}
    return {**constants, **blocks, **options}


class SlotAttention:
    """Launches the kernels for the layers of one model, which share the memory for the states between them."""

    def __init__(self, shape: KVShape, heads: int, rows: int, capacity: int, block_rows: int = 64) -> None:
        """For so many query heads, and at most so many rows of a forward.

        Args:
            capacity: entries of a slot. It fixes the splits: with another one, the last bits of outputs may differ.
            block_rows: queries of a block, a power of two from 16. Hopper takes 64 at once; before it, 16 need fewer registers.
        """
        assert shape.dtype in DTYPES, shape
        self.rows_of_tile = rows_per_tile(heads, shape.kv_heads, block_rows)
        self.shape, self.heads, self.rows, self.capacity = shape, heads, rows, capacity
        self._sizes = launch_sizes(shape, heads, capacity, block_rows)
        taken = (rows, heads, int(self._sizes["SPLITS"]), shape.head_dim + 4)  # 4: rows stay aligned to 16 bytes
        self._states = torch.empty(taken, dtype=torch.float32, device=shape.device)

    def attend(self, call: AttentionCall, keys: Tensor, values: Tensor, rows: StepRows, output: Tensor) -> None:
        """Stores the new keys and values of a layer in its slots and writes what the rows see.

        The first call with arguments of a kind compiles for seconds, which a captured graph must not: run it once before.

        Args:
            call: of the layer; the elements of a head lie side by side.
            keys: [slots, kv_heads, capacity, head_dim] of the layer, without gaps.
            values: as keys.
            rows: where they lie; no new entry lies before its row's ``start``.
            output: [1, rows, heads, head_dim], contiguous; zeros for rows that compute nothing.
        """
        query, key, value, window, softcap = call.query, call.key, call.value, call.window, call.softcap
        self._check(query, (key, value), (keys, values), rows, output)
        assert (window is None or window > 0) and (softcap is None or softcap > 0), (window, softcap)
        log2e, kv_heads = math.log2(math.e), self.shape.kv_heads
        scale = call.scale * (log2e if softcap is None else 2 * log2e / softcap)
        limits = {"CAP": (softcap or 0.0) * log2e, "WINDOW": window or 0, **self._sizes}
        query_strides, new_strides = query.stride()[1:3], (*key.stride()[1:3], *value.stride()[1:3])
        where, tiles = (rows.slot, rows.start, rows.position), rows.tiles
        with torch.cuda.device_of(query):
            context_kernel[tiles.shape[0], kv_heads, self._states.shape[2]](
                query, key, value, keys, values, *where, rows.entry, tiles, self._states,
                *query_strides, *new_strides, self.capacity, scale, **limits,
            )  # fmt: skip
            path_kernel[query.shape[2], kv_heads](
                query, keys, values, *where, rows.path, self._states, output,
                *query_strides, rows.path.stride(0), self.capacity, scale, **limits,
            )  # fmt: skip

    def _check(self, query: Tensor, new: tuple[Tensor, ...], cached: tuple[Tensor, ...], rows: StepRows, output: Tensor) -> None:
        """Asserts what a kernel would not notice: it would read or write beside the tensors."""
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
