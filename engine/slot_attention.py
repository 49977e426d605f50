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

import importlib.util
import math
import os
from typing import Any

import torch
from torch import Tensor

from engine.kv_cache import KVShape
from engine.step_rows import StepRows

TRITON = importlib.util.find_spec("triton") is not None  # without it this module can be imported, and nothing is ``available``
if TRITON:
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

BLOCK_N = 64  # keys of a block
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def available(device: torch.device) -> bool:
    """Whether the kernels run on a device: a CUDA device, or any one in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return TRITON and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


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


def _kernel(function: Any) -> Any:
    """A function for Triton to compile; as it is where there is no Triton."""
    return triton.jit(function) if TRITON else function


@_kernel
def _load_query(query, row, head, used, head_stride, row_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_M, BLOCK_D], with zeros where there is nothing."""
    dim = tl.arange(0, BLOCK_D)
    at = query + head[:, None] * head_stride + row[:, None] * row_stride + dim[None, :]
    return tl.load(at, mask=used[:, None] & (dim[None, :] < D), other=0.0)


@_kernel
def _load_state(states, number, used, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """What ``_store_state`` stored as ``number``; the state of no keys where not ``used``."""
    dim = tl.arange(0, BLOCK_D)
    at = states + number.to(tl.int64) * (D + 4)
    top, mass = tl.load(at + D, mask=used, other=float("-inf")), tl.load(at + D + 1, mask=used, other=0.0)
    return top, mass, tl.load(at[:, None] + dim[None, :], mask=used[:, None] & (dim[None, :] < D), other=0.0)


@_kernel
def _store_state(states, number, used, top, mass, acc, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """As it is, in float32: sum of values, greatest score and sum of weights (see ``_fold``), and two unused."""
    dim = tl.arange(0, BLOCK_D)
    at = states + number.to(tl.int64) * (D + 4)
    tl.store(at[:, None] + dim[None, :], acc, used[:, None] & (dim[None, :] < D))
    tl.store(at + D, top, used)
    tl.store(at + D + 1, mass, used)


@_kernel
def _store_new(new, row_stride, entries, entry, first, count, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Writes the new keys or values of the rows of a tile, of one head, to their entries."""
    dim, row = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    used = (row < count)[:, None] & (dim[None, :] < D)
    to = tl.load(entry + first + row, mask=row < count, other=0)
    rows = tl.load(new + (first + row)[:, None] * row_stride + dim[None, :], mask=used, other=0.0)
    tl.store(entries + to[:, None] * D + dim[None, :], rows, used)


@_kernel
def _fold(query, keys, values, entry, held, visible, top, mass, acc, scale, CAP, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state of the online softmax after one block more: top, mass and acc.

    Args:
        query: [BLOCK_M, BLOCK_D].
        keys: of the slot and head, at entry 0.
        values: as keys.
        entry: [BLOCK_N], of the block's positions.
        held: [BLOCK_N]; what lies at entries that are not held need not be numbers.
        visible: [BLOCK_M or 1, BLOCK_N].
        top: [BLOCK_M], greatest score, -inf before the first; in units of 1 / log2(e), as weights are powers of two.
        mass: [BLOCK_M], sum of exp2(score - top).
        acc: [BLOCK_M, BLOCK_D], sum of exp2(score - top) * value.
        scale: of the scores; with CAP, it makes of them twice the argument of tanh.
        CAP: bound of the scores, in their units; 0 for none.
    """
    dim = tl.arange(0, BLOCK_D)
    key = tl.load(keys + entry[None, :] * D + dim[:, None], mask=held[None, :] & (dim[:, None] < D), other=0.0)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if CAP > 0:
        scores = CAP - 2 * CAP / (tl.exp2(scores) + 1)
    scores = tl.where(visible, scores, float("-inf"))
    above = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(above == float("-inf"), 0.0, above)  # -inf - -inf is no number
    weight, kept = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    value = tl.load(values + entry[:, None] * D + dim[None, :], mask=held[:, None] & (dim[None, :] < D), other=0.0)
    mixed = tl.dot(weight.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return above, mass * kept + tl.sum(weight, 1), mixed


@_kernel
def _merge(states, number, used, begin, end, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr):
    """The output of the query heads ``number``, [BLOCK_G], from the states of their splits ``begin .. end - 1``, of which one has
    keys. As many splits as registers hold are loaded at once; which are summed together depends on nothing else."""
    AT_ONCE: tl.constexpr = 64 // BLOCK_G
    dim, every = tl.arange(0, BLOCK_D), tl.arange(0, triton.next_power_of_2(SPLITS))
    tops = states + (number[:, None] * SPLITS + every[None, :]).to(tl.int64) * (D + 4) + D
    top = tl.load(tops, mask=used[:, None] & ((every >= begin) & (every < end))[None, :], other=float("-inf"))
    above = tl.where(used, tl.max(top, 1), 0.0)
    mass, acc = tl.zeros([BLOCK_G], tl.float32), tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(begin // AT_ONCE * AT_ONCE, end, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        stored = used[:, None] & ((split >= begin) & (split < end))[None, :]
        at = states + (number[:, None] * SPLITS + split[None, :]).to(tl.int64) * (D + 4)
        accs = tl.load(at[:, :, None] + dim[None, None, :], mask=stored[:, :, None] & (dim < D)[None, None, :], other=0.0)
        share = tl.exp2(tl.load(at + D, mask=stored, other=float("-inf")) - above[:, None])
        mass += tl.sum(tl.load(at + D + 1, mask=stored, other=0.0) * share, 1)
        acc += tl.sum(accs * share[:, :, None], 1)
    return acc / tl.where(used, mass, 1.0)[:, None]


@_kernel
def _context(
    query, key, value, keys, values, slots, starts, positions, entry, tiles, states,
    query_head, query_row, key_head, key_row, value_head, value_row, capacity, scale,
    CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Kernel 1, a program per tile, KV head and split: new entries, and the states of the whole blocks before ``start``."""
    kv_head, kv_heads, split, lane = tl.program_id(1), tl.num_programs(1), tl.program_id(2), tl.arange(0, BLOCK_M)
    first, count = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    if count == 0:
        return
    base = (tl.load(slots + first).to(tl.int64) * kv_heads + kv_head) * capacity * D
    if split == 0:
        _store_new(key + kv_head * key_head, key_row, keys + base, entry, first, count, D, BLOCK_D, BLOCK_M)
        _store_new(value + kv_head * value_head, value_row, values + base, entry, first, count, D, BLOCK_D, BLOCK_M)
    begin, end = split * SPLIT, tl.load(starts + first) // BLOCK_N * BLOCK_N
    if begin >= end:
        return
    row, head, used = first + lane // GROUP, kv_head * GROUP + lane % GROUP, lane < count * GROUP
    position = tl.load(positions + row, mask=used, other=2147483647)
    if WINDOW > 0:
        begin = tl.maximum(begin, (tl.maximum(tl.min(position, 0), WINDOW - 1) - WINDOW + 1) // BLOCK_N * BLOCK_N)
    rows = _load_query(query, row, head, used, query_head, query_row, D, BLOCK_D)
    top, mass = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc, every = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_N], 1, tl.int1)
    for block in range(begin, tl.minimum(split * SPLIT + SPLIT, end), BLOCK_N):
        seen = block + tl.arange(0, BLOCK_N)
        visible = every[None, :]
        if WINDOW > 0:
            visible = seen[None, :] > position[:, None] - WINDOW
        top, mass, acc = _fold(rows, keys + base, values + base, seen, every, visible, top, mass, acc, scale, CAP, D, BLOCK_D)
    _store_state(states, (row * kv_heads * GROUP + head) * SPLITS + split, used, top, mass, acc, D, BLOCK_D)


@_kernel
def _path(
    query, keys, values, slots, starts, positions, path, states, output,
    query_head, query_row, path_row, capacity, scale,
    CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Kernel 2, a program per row and KV head: goes on from kernel 1's states along the row's path, and writes its output."""
    row, kv_head, kv_heads, dim = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.arange(0, BLOCK_D)
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    of_group = tl.arange(0, BLOCK_G)
    number = (row * kv_heads + kv_head) * GROUP + of_group  # of the row and head
    written = (of_group < GROUP)[:, None] & (dim[None, :] < D)
    output += number[:, None] * D + dim[None, :]
    position, start = tl.load(positions + row), tl.load(starts + row)
    if position < 0:
        tl.store(output, tl.zeros(output.shape, output.dtype.element_ty), written)
        return
    base = (tl.load(slots + row).to(tl.int64) * kv_heads + kv_head) * capacity * D
    begin, lowest = start // BLOCK_N * BLOCK_N, 0
    if WINDOW > 0:
        lowest = tl.maximum(position, WINDOW - 1) - WINDOW + 1
    lane = tl.arange(0, BLOCK_M)
    first_state, used = ((row * kv_heads + kv_head) * GROUP + lane) * SPLITS, lane < GROUP
    rows = _load_query(query, row + lane * 0, kv_head * GROUP + lane, used, query_head, query_row, D, BLOCK_D)
    top, mass, acc = _load_state(states, first_state + begin // SPLIT, used & (begin % SPLIT > 0), D, BLOCK_D)
    begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)  # a state before it has no keys
    for split in range(begin // SPLIT, position // SPLIT + 1):
        for block in range(tl.maximum(begin, split * SPLIT), tl.minimum(position + 1, split * SPLIT + SPLIT), BLOCK_N):
            seen = block + tl.arange(0, BLOCK_N)
            held = seen <= position
            on_path = tl.load(path + row * path_row + seen - start, mask=held & (seen >= start), other=0)
            visible, at = (held & (seen >= lowest))[None, :], tl.where(seen < start, seen, on_path)
            top, mass, acc = _fold(rows, keys + base, values + base, at, held, visible, top, mass, acc, scale, CAP, D, BLOCK_D)
        _store_state(states, first_state + split, used, top, mass, acc, D, BLOCK_D)
        top, mass = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    tl.debug_barrier()  # other threads read what these wrote
    merged = _merge(states, number, of_group < GROUP, lowest // SPLIT, position // SPLIT + 1, SPLITS, D, BLOCK_D, BLOCK_G)
    tl.store(output, merged.to(output.dtype.element_ty), written)


class SlotAttention:
    """Launches the kernels for the layers of one model, which share the memory for the states between them."""

    def __init__(self, shape: KVShape, heads: int, rows: int, capacity: int, block_rows: int = 64) -> None:
        """
        Args:
            shape: of the slots' entries.
            heads: query heads.
            rows: the most rows of a forward.
            capacity: entries of a slot. It fixes the splits: with another one, the last bits of outputs may differ.
            block_rows: queries of a block, a power of two from 16. Hopper takes 64 at once; before it, 16 need fewer registers.
        """
        assert shape.dtype in _DTYPES, shape
        self.rows_of_tile = rows_per_tile(heads, shape.kv_heads, block_rows)
        self.shape, self.heads, self.rows, self.capacity = shape, heads, rows, capacity
        self._sizes = launch_sizes(shape, heads, capacity, block_rows)
        taken = (rows, heads, int(self._sizes["SPLITS"]), shape.head_dim + 4)  # 4: rows stay aligned to 16 bytes
        self._states = torch.empty(taken, dtype=torch.float32, device=shape.device)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: StepRows,
        output: Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """Stores the new keys and values of a layer in its slots and writes what the rows see.

        The first call with arguments of a kind compiles for seconds, which a captured graph must not: run it once before.

        Args:
            query: [1, heads, rows, head_dim], the elements of a head side by side, as in key and value.
            key: [1, kv_heads, rows, head_dim].
            value: as key.
            keys: [slots, kv_heads, capacity, head_dim] of the layer, without gaps.
            values: as keys.
            rows: where they lie; no new entry lies before its row's ``start``.
            output: [1, rows, heads, head_dim], contiguous; zeros for rows that compute nothing.
            scale: of the scores; 1 / sqrt(head_dim) when None.
            window: a row sees only keys less than this many positions before it.
            softcap: scores are bounded by it, ``softcap * tanh(score / softcap)``.
        """
        self._check(query, (key, value), (keys, values), rows, output)
        assert (window is None or window > 0) and (softcap is None or softcap > 0), (window, softcap)
        log2e, kv_heads = math.log2(math.e), self.shape.kv_heads
        scale = self.shape.head_dim**-0.5 if scale is None else scale
        scale *= log2e if softcap is None else 2 * log2e / softcap
        limits = {"CAP": (softcap or 0.0) * log2e, "WINDOW": window or 0, **self._sizes}
        query_strides, new_strides = query.stride()[1:3], (*key.stride()[1:3], *value.stride()[1:3])
        where, tiles = (rows.slot, rows.start, rows.position), rows.tiles
        with torch.cuda.device_of(query):
            _context[tiles.shape[0], kv_heads, self._states.shape[2]](
                query, key, value, keys, values, *where, rows.entry, tiles, self._states,
                *query_strides, *new_strides, self.capacity, scale, **limits,
            )  # fmt: skip
            _path[query.shape[2], kv_heads](
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
