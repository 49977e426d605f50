"""Layers of a model as one list of operations, executed by all threads together and rounded as the modules of its family."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from outrider.decoding.jit import compiled, compiled_callback
from outrider.engine.cpu.attention_kernel import LAYER, ROWS, attend_blocks, blocks_of, keep_key
from outrider.engine.cpu.block_kernel import Forms, packed_bytes, unpack
from outrider.engine.cpu.convolution_kernel import CONVOLUTION, channel_parts, convolve_channels
from outrider.engine.cpu.gate_kernels import Decays, GatedNorm, norm_and_gate, set_decays
from outrider.engine.cpu.linear import COUNTER, PANEL
from outrider.engine.cpu.linear_kernel import Linear, multiply_rows, panels, piece_of
from outrider.engine.cpu.lora_kernel import LowRank, add_low_rank
from outrider.engine.cpu.norm_kernel import Norm, normalise
from outrider.engine.cpu.recurrence_kernel import RULE, keep_rows, kept_rows, walk_heads
from outrider.engine.cpu.simd import (
    TYPES,
    WIDTH,
    add,
    address_of,
    bytes_of,
    claim,
    copy_bytes,
    count_on,
    int_at,
    load,
    multiply,
    sigmoid,
    silu,
    splat,
    store,
    stored,
    subtract,
    wait_for,
)
from outrider.engine.cpu.walk_kernel import WALK

EMBED, NORM, PICKED_NORM, LINEAR, PICKED_LINEAR, ROTATE, ATTEND, LOW_RANK = range(8)
SUM, GATE, PRODUCT, SIGMOID = range(8, 12)  # kinds of ``Pairs``
DECAYS, GATED_NORM, CONVOLVE, DELTA_RULE, SPACE_RULE, KEEP = range(12, 18)  # of recurrent layers; ``KEEP`` follows its rule


class Embed(ctypes.Structure):
    """Job of the embedding lookup."""

    _fields_ = (
        ("weight", ctypes.c_int64),  # [vocab, size], or its panels
        ("panels", ctypes.c_int64),  # whether the weight is in panels
        ("size", ctypes.c_int64),
        ("output", ctypes.c_int64),  # [rows, size]
        ("form", ctypes.c_int64),  # see ``Linear``, also for ``scratch``
        ("scratch", ctypes.c_int64),
        ("factor", ctypes.c_double),  # multiplier of the embeddings; 0: none
    )


class Rotate(ctypes.Structure):
    """Job that applies RoPE to queries and keys and stores keys and values in the slots."""

    _fields_ = (
        ("query", ctypes.c_int64),  # [rows, heads, head_dim], rotated in place
        ("query_head", ctypes.c_int64),  # bytes from one head to the next
        ("key", ctypes.c_int64),  # [rows, kv_heads, head_dim]
        ("value", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("turned", ctypes.c_int64),  # leading elements of a head that are rotated, a multiple of 2 * ``WIDTH``; 0: none
        ("query_norm", ctypes.c_int64),  # weight of a norm of each head before RoPE; 0: none
        ("key_norm", ctypes.c_int64),
        ("epsilon", ctypes.c_double),
        ("wide", ctypes.c_int64),  # of the norms, see ``Norm``
        ("angles", ctypes.c_int64),  # [positions, 2, turned]: cosines and sines
        ("keys", ctypes.c_int64),  # see ``attention_kernel.Layer``, also for the next two
        ("values", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
    )


class Pairs(ctypes.Structure):
    """Job of ``target + other``, ``silu(target) * other``, ``target * other`` or ``target * sigmoid(other)``; byte strides."""

    _fields_ = (
        ("target", ctypes.c_int64),  # [rows, parts * size]
        ("target_row", ctypes.c_int64),
        ("other", ctypes.c_int64),  # [rows, parts, size]
        ("other_row", ctypes.c_int64),
        ("other_part", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("size", ctypes.c_int64),
    )


class Operation(ctypes.Structure):
    """Entry of the list of operations."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("waits", ctypes.c_int64),  # whether all earlier operations must be done
        ("job", ctypes.c_int64),  # address of ``Embed``, ``Norm``, ``Linear``, ``Rotate``, ``Layer``, ``LowRank``, ``Pairs``, ...
    )


class NativeStep(ctypes.Structure):
    """Job of one forward pass."""

    _fields_ = (
        ("operations", ctypes.c_int64),  # address of ``Operation``
        ("count", ctypes.c_int64),
        ("tokens", ctypes.c_int64),  # [rows] int64
        ("positions", ctypes.c_int64),  # [rows] int64
        ("rows", ctypes.c_int64),
        ("picked", ctypes.c_int64),  # [num_picked] int64: rows whose logits are computed
        ("num_picked", ctypes.c_int64),
        ("requests", ctypes.c_int64),  # address of ``attention_kernel.NativeRows``
        ("num_requests", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("counters", ctypes.c_int64),  # ``num_counters`` of them, all 0
        ("adapters", ctypes.c_int64),  # [rows] int64: adapter of each row, -1: none; 0 if no operation needs it
        ("walks", ctypes.c_int64),  # address of ``NativeWalk``, for models with states
        ("num_walks", ctypes.c_int64),
    )


def num_counters(operations: int, threads: int) -> int:
    """Return the number of counters, of ``COUNTER`` bytes each: two shared, then ``threads`` per operation."""
    return 2 + operations * threads


_EMBED, _NORM, _LINEAR, _ROTATE, _LOW_RANK, _PAIRS = (np.dtype(each) for each in (Embed, Norm, Linear, Rotate, LowRank, Pairs))
_OPERATION, _DECAYS, _GATED_NORM = np.dtype(Operation), np.dtype(Decays), np.dtype(GatedNorm)
_FLOAT = np.float32(0)  # stands for its type


@compiled
def _embed(job: Any, token: int, row: int, thread: int, forms: Any, like: Any) -> None:
    """Copy a token's row of the table; in panels, its elements or pairs of them are a panel's width apart."""
    wide = job.size * bytes_of(like)
    target = job.output + row * wide
    if not job.panels:
        copy_bytes(job.weight + token * wide, target, wide)
        return
    piece = piece_of(like)
    source = job.weight + token // PANEL * PANEL * wide
    if job.form:
        packed = job.weight + token // PANEL * packed_bytes(forms, job.form, job.size)
        source = job.scratch + 2 * thread * PANEL * wide
        unpack(forms, job.form, packed, source, job.size, like)
    source += token % PANEL * piece
    for at in range(0, wide, piece):
        copy_bytes(source + at * PANEL, target + at, piece)


@compiled
def _scale(target: int, size: int, factor: float, like: Any) -> None:
    wide, factors = bytes_of(like), splat(np.float32(factor))
    for first in range(0, size, WIDTH):
        store(target + first * wide, multiply(load(target + first * wide, like), factors), like)


@compiled
def _turn(head: int, job: Any, norm: int, angles: int, like: Any) -> None:
    """Rotate one head in place: ``x * cos + (-x2, x1) * sin`` with x1 and x2 the rotated halves, each product rounded."""
    wide, size, half = bytes_of(like), job.turned, job.turned // 2
    if norm:
        normalise(head, norm, head, job.head_dim, job.epsilon, job.wide, like)
    for first in range(0, half, WIDTH):
        low, high = first * wide, (half + first) * wide
        one, other = load(head + low, like), load(head + high, like)
        a = stored(multiply(one, load(angles + low, like)), like)
        b = stored(multiply(other, load(angles + size * wide + low, like)), like)
        c = stored(multiply(other, load(angles + high, like)), like)
        d = stored(multiply(one, load(angles + size * wide + high, like)), like)
        store(head + low, subtract(a, b), like)
        store(head + high, add(c, d), like)


@compiled
def _rotate(job: Any, row: int, position: int, slot: int, entry: int, like: Any) -> None:
    wide = job.head_dim * bytes_of(like)
    angles = job.angles + position * 2 * job.turned * bytes_of(like)
    for head in range(job.heads):
        _turn(job.query + (row * job.heads + head) * job.query_head, job, job.query_norm, angles, like)
    for head in range(job.kv_heads):
        at, kept = (row * job.kv_heads + head) * wide, (slot * job.kv_heads + head) * job.capacity * wide
        _turn(job.key + at, job, job.key_norm, angles, like)
        keep_key(job.key + at, job.keys + kept, entry, job.head_dim, like)
        copy_bytes(job.value + at, job.values + kept + entry * wide, wide)


@compiled
def _rotate_rows(step: Any, job: Any, first: int, last: int, requests: Any, like: Any) -> None:
    for request in range(len(requests)):
        own = requests[request]
        for row in range(max(first, own.offset), min(last, own.offset + own.rows)):
            entry = own.start + own.before + row - own.offset
            _rotate(job, row, int_at(step.positions + row * 8), own.slot, entry, like)


@compiled
def _join(target: int, other: int, size: int, kind: int, like: Any) -> None:
    """Combine a part of a row of ``Pairs``, rounded as in ``linear_kernel``."""
    wide = bytes_of(like)
    for first in range(0, size, WIDTH):
        place = first * wide
        if first + WIDTH <= size:
            store(target + place, _joined(target + place, other + place, kind, like), like)
        else:  # incomplete vector: memory behind it belongs to others
            _join_last(target + place, other + place, (size - first) * wide, kind, np.zeros(2 * WIDTH, np.float32), like)


@compiled
def _join_last(target: int, other: int, left: int, kind: int, spare: Any, like: Any) -> None:
    """Combine the last ``left`` bytes; see ``linear_kernel`` for why ``spare`` is an argument."""
    one, two = spare.ctypes.data, spare.ctypes.data + WIDTH * 4
    copy_bytes(target, one, left)
    copy_bytes(other, two, left)
    store(one, _joined(one, two, kind, like), like)
    copy_bytes(one, target, left)


@compiled
def _joined(target: int, other: int, kind: int, like: Any) -> Any:
    numbers, others = load(target, like), load(other, like)
    if kind == SUM:
        return add(numbers, others)
    if kind == GATE:
        numbers = stored(silu(numbers), like)
    elif kind == SIGMOID:
        others = stored(sigmoid(others), like)
    return multiply(numbers, others)


@compiled
def _by_rows(step: Any, operation: Any, first: int, last: int, requests: Any, thread: int, forms: Any, like: Any) -> None:
    kind, wide = operation.kind, bytes_of(like)
    if kind == EMBED:
        embed = carray(address_of(operation.job), 1, _EMBED)[0]
        for row in range(first, last):
            _embed(embed, int_at(step.tokens + row * 8), row, thread, forms, like)
            if embed.factor:
                _scale(embed.output + row * embed.size * wide, embed.size, embed.factor, like)
    elif kind == ROTATE:
        _rotate_rows(step, carray(address_of(operation.job), 1, _ROTATE)[0], first, last, requests, like)
    elif kind == LOW_RANK:
        low_rank = carray(address_of(operation.job), 1, _LOW_RANK)[0]
        for row in range(first, last):
            add_low_rank(low_rank, row, int_at(step.adapters + row * 8), like)
    elif SUM <= kind <= SIGMOID:
        pairs = carray(address_of(operation.job), 1, _PAIRS)[0]
        for row in range(first, last):
            target, other = pairs.target + row * pairs.target_row, pairs.other + row * pairs.other_row
            for part in range(pairs.parts):
                _join(target + part * pairs.size * wide, other + part * pairs.other_part, pairs.size, kind, like)
    elif kind == DECAYS:
        for row in range(first, last):
            set_decays(carray(address_of(operation.job), 1, _DECAYS)[0], row, like)
    elif kind == GATED_NORM:
        for row in range(first, last):
            norm_and_gate(carray(address_of(operation.job), 1, _GATED_NORM)[0], row, like)
    else:
        norm = carray(address_of(operation.job), 1, _NORM)[0]
        for row in range(first, last):
            source = int_at(step.picked + row * 8) if kind == PICKED_NORM else row
            size = norm.size * wide
            normalise(norm.input + source * size, norm.weight, norm.output + row * size, norm.size, norm.epsilon, norm.wide, like)


@compiled
def _take_rows(step: Any, operation: Any, rows: int, taken: int, requests: Any, thread: int, forms: Any, like: Any) -> int:
    # About four parts per thread, so that a slow thread leaves rows to the others.
    together, done = rows // (4 * step.threads) + 1, 0
    while True:
        first = claim(taken) * together
        if first >= rows:
            return done
        last = min(first + together, rows)
        _by_rows(step, operation, first, last, requests, thread, forms, like)
        done += last - first


@compiled
def _take_states(step: Any, operation: Any, taken: int, states: Any, like: Any) -> tuple[int, int]:
    """Compute parts of a recurrent layer's operation; return its total number of parts and the number computed by this thread."""
    if states is None:  # no code is compiled for states
        return 0, 0
    walks = carray(address_of(step.walks), step.num_walks, WALK)
    if operation.kind == CONVOLVE:
        convolution = carray(address_of(operation.job), 1, CONVOLUTION)[0]
        return channel_parts(convolution) * len(walks), convolve_channels(convolution, walks, taken, like)
    rule = carray(address_of(operation.job), 1, RULE)[0]
    if operation.kind == KEEP:
        return kept_rows(walks), keep_rows(rule, walks, taken, like)
    if operation.kind == DELTA_RULE:
        return rule.heads * len(walks), walk_heads(rule, walks, taken, like, like)
    return rule.heads * len(walks), walk_heads(rule, walks, taken, like, _FLOAT)


@compiled
def _run(steps: Any, forms: Any, states: Any, like: Any) -> None:
    step = carray(steps, 1)[0]
    operations = carray(address_of(step.operations), step.count, _OPERATION)
    requests = carray(address_of(step.requests), step.num_requests, ROWS)
    # ``expected`` counts the parts of all operations up to the current one.
    thread, finished, expected = claim(step.counters), step.counters + COUNTER, 0
    for number in range(step.count):
        operation, done = operations[number], 0
        taken = step.counters + COUNTER * (2 + number * step.threads)
        # Threads take parts of an operation until none is left, and wait only if the next operation needs all results.
        if operation.waits:
            wait_for(finished, expected)
        picked = operation.kind == PICKED_LINEAR or operation.kind == PICKED_NORM
        rows = step.num_picked if picked else step.rows
        if operation.kind == LINEAR or operation.kind == PICKED_LINEAR:
            linear = carray(address_of(operation.job), 1, _LINEAR)[0]
            expected += panels(linear)
            done = multiply_rows(linear, rows, thread, step.threads, taken, forms, like)
        elif operation.kind == ATTEND:
            layer = carray(address_of(operation.job), 1, LAYER)[0]
            expected += blocks_of(requests, layer)
            done = attend_blocks(layer, requests, taken, like)
        elif operation.kind >= CONVOLVE:
            parts, done = _take_states(step, operation, taken, states, like)
            expected += parts
        else:
            expected += rows
            done = _take_rows(step, operation, rows, taken, requests, thread, forms, like)
        if done:
            count_on(finished, done)


_SIGNATURE = types.void(types.CPointer(from_dtype(np.dtype(NativeStep))))


@cache
def entry_point(dtype: str, names: tuple[str, ...] = (), states: bool = False) -> Any:
    """Return the C function ``void (NativeStep *)`` for a dtype and packed formats; see ``attention_kernel.entry_point``."""
    like, forms, kept = TYPES[dtype], Forms(names), 1 if states else None

    def run(job: Any) -> None:
        _run(job, forms, kept, like)

    run.__qualname__ = f"run_{dtype}_{forms}_{states}"  # key of the cache on disk
    return compiled_callback(_SIGNATURE)(run)
