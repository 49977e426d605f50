"""The two Triton kernels of ``engine.cuda.slot_attention`` and their shared steps."""

from __future__ import annotations

import importlib.util
from typing import Any

TRITON = importlib.util.find_spec("triton") is not None  # False: this module can be imported but not used
if TRITON:
    import triton
    import triton.language as tl


def _kernel(function: Any) -> Any:
    return triton.jit(function) if TRITON else function


@_kernel
def _load_query(query, row, head, used, head_stride, row_stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dim = tl.arange(0, BLOCK_D)
    at = query + head[:, None] * head_stride + row[:, None] * row_stride + dim[None, :]
    return tl.load(at, mask=used[:, None] & (dim[None, :] < D), other=0.0)


@_kernel
def _load_state(states, number, used, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the state stored as ``number``, or the state of no keys if not ``used``."""
    dim = tl.arange(0, BLOCK_D)
    at = states + number.to(tl.int64) * (D + 4)
    top, mass = tl.load(at + D, mask=used, other=float("-inf")), tl.load(at + D + 1, mask=used, other=0.0)
    return top, mass, tl.load(at[:, None] + dim[None, :], mask=used[:, None] & (dim[None, :] < D), other=0.0)


@_kernel
def _store_state(states, number, used, top, mass, acc, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a softmax state in float32: value sum, greatest score, weight sum (see ``_fold``) and two unused numbers."""
    dim = tl.arange(0, BLOCK_D)
    at = states + number.to(tl.int64) * (D + 4)
    tl.store(at[:, None] + dim[None, :], acc, used[:, None] & (dim[None, :] < D))
    tl.store(at + D, top, used)
    tl.store(at + D + 1, mass, used)


@_kernel
def _store_new(new, row_stride, entries, entry, first, count, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    dim, row = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    used = (row < count)[:, None] & (dim[None, :] < D)
    to = tl.load(entry + first + row, mask=row < count, other=0)
    rows = tl.load(new + (first + row)[:, None] * row_stride + dim[None, :], mask=used, other=0.0)
    tl.store(entries + to[:, None] * D + dim[None, :], rows, used)


@_kernel
def _fold(query, keys, values, entry, held, visible, top, mass, acc, scale, CAP, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the online-softmax state (top, mass, acc) after one more block of keys.

    Args:
        keys: address of entry 0 of the slot and head; ``values`` likewise.
        entry: [BLOCK_N] entry of each position of the block.
        held: [BLOCK_N] whether an entry may be read; others may contain NaN.
        visible: [BLOCK_M or 1, BLOCK_N].
        top: [BLOCK_M] greatest score, -inf at first; in units of 1 / log2(e), because weights are powers of two.
        mass: [BLOCK_M] sum of exp2(score - top).
        acc: [BLOCK_M, BLOCK_D] sum of exp2(score - top) * value.
        scale: of the scores; with CAP (softcap, 0: none), the scaled score is twice the argument of tanh.
    """
    dim = tl.arange(0, BLOCK_D)
    key = tl.load(keys + entry[None, :] * D + dim[:, None], mask=held[None, :] & (dim[:, None] < D), other=0.0)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if CAP > 0:
        scores = CAP - 2 * CAP / (tl.exp2(scores) + 1)
    scores = tl.where(visible, scores, float("-inf"))
    above = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(above == float("-inf"), 0.0, above)  # -inf - -inf is NaN
    weight, kept = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
    value = tl.load(values + entry[:, None] * D + dim[None, :], mask=held[:, None] & (dim[None, :] < D), other=0.0)
    mixed = tl.dot(weight.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return above, mass * kept + tl.sum(weight, 1), mixed


@_kernel
def _merge(states, number, used, begin, end, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return the output of the query heads ``number``, [BLOCK_G], from the states of their splits ``begin .. end - 1``."""
    AT_ONCE: tl.constexpr = 64 // BLOCK_G  # groups start at multiples of it: the order of additions depends on nothing else
    dim, above = tl.arange(0, BLOCK_D), tl.full([BLOCK_G], float("-inf"), tl.float32)
    for first in range(begin // AT_ONCE * AT_ONCE, end, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        stored = used[:, None] & ((split >= begin) & (split < end))[None, :]
        tops = states + (number[:, None] * splits + split[None, :]).to(tl.int64) * (D + 4) + D
        above = tl.maximum(above, tl.max(tl.load(tops, mask=stored, other=float("-inf")), 1))
    above = tl.where(used, above, 0.0)
    mass, acc = tl.zeros([BLOCK_G], tl.float32), tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(begin // AT_ONCE * AT_ONCE, end, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        stored = used[:, None] & ((split >= begin) & (split < end))[None, :]
        at = states + (number[:, None] * splits + split[None, :]).to(tl.int64) * (D + 4)
        accs = tl.load(at[:, :, None] + dim[None, None, :], mask=stored[:, :, None] & (dim < D)[None, None, :], other=0.0)
        share = tl.exp2(tl.load(at + D, mask=stored, other=float("-inf")) - above[:, None])
        mass += tl.sum(tl.load(at + D + 1, mask=stored, other=0.0) * share, 1)
        acc += tl.sum(accs * share[:, :, None], 1)
    return acc / tl.where(used, mass, 1.0)[:, None]


@_kernel
def context_kernel(
    query, key, value, keys, values, slots, starts, positions, entry, tiles, states,
    query_head, query_row, key_head, key_row, value_head, value_row, capacity, splits, scale,
    CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store new entries and, by tile, KV head and every n-th split, the states of whole blocks before ``start`` (kernel 1)."""
    kv_head, kv_heads, program, lane = tl.program_id(1), tl.num_programs(1), tl.program_id(2), tl.arange(0, BLOCK_M)
    first_row, count = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    if count == 0:
        return
    base = (tl.load(slots + first_row).to(tl.int64) * kv_heads + kv_head) * capacity * D
    if program == 0:
        _store_new(key + kv_head * key_head, key_row, keys + base, entry, first_row, count, D, BLOCK_D, BLOCK_M)
        _store_new(value + kv_head * value_head, value_row, values + base, entry, first_row, count, D, BLOCK_D, BLOCK_M)
    end, lowest = tl.load(starts + first_row) // BLOCK_N * BLOCK_N, 0
    if end == 0:
        return
    row, head, used = first_row + lane // GROUP, kv_head * GROUP + lane % GROUP, lane < count * GROUP
    position = tl.load(positions + row, mask=used, other=2147483647)
    if WINDOW > 0:
        lowest = (tl.maximum(tl.min(position, 0), WINDOW - 1) - WINDOW + 1) // BLOCK_N * BLOCK_N
    rows = _load_query(query, row, head, used, query_head, query_row, D, BLOCK_D)
    # The last split has a state even if the window leaves it no keys: kernel 2 continues from it.
    for split in range(tl.minimum(lowest, end - BLOCK_N) // SPLIT + program, tl.cdiv(end, SPLIT), tl.num_programs(2)):
        top, mass = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        acc, every = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_N], 1, tl.int1)
        first, last = tl.maximum(split * SPLIT, lowest), tl.minimum(split * SPLIT + SPLIT, end)
        for block in tl.range(first, last, BLOCK_N, disable_licm=True):  # otherwise heads of 256 spill registers on Hopper
            seen = block + tl.arange(0, BLOCK_N)
            visible = every[None, :]
            if WINDOW > 0:
                visible = seen[None, :] > position[:, None] - WINDOW
            top, mass, acc = _fold(rows, keys + base, values + base, seen, every, visible, top, mass, acc, scale, CAP, D, BLOCK_D)
        _store_state(states, (row * kv_heads * GROUP + head) * splits + split, used, top, mass, acc, D, BLOCK_D)


@_kernel
def path_kernel(
    query, keys, values, slots, starts, positions, path, states, output,
    query_head, query_row, path_row, capacity, splits, scale,
    CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Continue from kernel 1's states along the row's path and write its output (kernel 2, one program per row and KV head)."""
    row, kv_head, kv_heads, dim = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.arange(0, BLOCK_D)
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    of_group = tl.arange(0, BLOCK_G)
    number = (row * kv_heads + kv_head) * GROUP + of_group  # state index of the row and head
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
    first_state, used = ((row * kv_heads + kv_head) * GROUP + lane) * splits, lane < GROUP
    rows = _load_query(query, row + lane * 0, kv_head * GROUP + lane, used, query_head, query_row, D, BLOCK_D)
    top, mass, acc = _load_state(states, first_state + begin // SPLIT, used & (begin % SPLIT > 0), D, BLOCK_D)
    begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)  # blocks before the window contribute no keys
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
    merged = _merge(states, number, of_group < GROUP, lowest // SPLIT, position // SPLIT + 1, splits, D, BLOCK_D, BLOCK_G)
    tl.store(output, merged.to(output.dtype.element_ty), written)
