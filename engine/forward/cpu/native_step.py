"""The layers of a model as one list of operations, which all threads go through together in one call.

A forward of a few rows takes some milliseconds, and each of its operations some microseconds: to call them one by one, from
Python, costs as much again. Here threads take parts of an operation until none is left, and wait for each other only where the
next one needs all of its results.

Results are rounded where the modules of Llama round; see ``engine.forward.cpu.row_model`` for the models that are computed so.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from decoding.jit import compiled, compiled_callback
from engine.forward.cpu.lanes import (
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
    silu,
    store,
    stored,
    subtract,
    wait_for,
)
from engine.forward.cpu.native_attention import LAYER, ROWS, attend_blocks, blocks_of, keep_key
from engine.forward.cpu.native_norm import Norm, normalise
from engine.forward.cpu.products.native_blocks import Forms, packed_bytes, unpack
from engine.forward.cpu.products.native_linear import Linear, multiply_rows, panels, piece_of
from engine.forward.cpu.products.native_low_rank import LowRank, add_low_rank
from engine.forward.cpu.products.row_linear import COUNTER, PANEL

EMBED, NORM, PICKED_NORM, LINEAR, PICKED_LINEAR, ROTATE, ATTEND, LOW_RANK, SUM, GATE = range(10)  # the last two of ``Pairs``


class Embed(ctypes.Structure):
    """Looks up the rows' tokens."""

    _fields_ = (
        ("weight", ctypes.c_int64),  # [vocab, size], or its panels
        ("panels", ctypes.c_int64),  # whether it is panels
        ("size", ctypes.c_int64),
        ("output", ctypes.c_int64),  # [rows, size]
        ("form", ctypes.c_int64),  # as ``Linear``, and the next one
        ("scratch", ctypes.c_int64),
    )


class Rotate(ctypes.Structure):
    """Turns queries and keys to their positions, and stores keys and values in the slots."""

    _fields_ = (
        ("query", ctypes.c_int64),  # [rows, heads, head_dim], turned in place
        ("key", ctypes.c_int64),  # [rows, kv_heads, head_dim]
        ("value", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),  # a multiple of 2 * ``WIDTH``
        ("query_norm", ctypes.c_int64),  # weight of a norm of each head before it is turned; 0 without one
        ("key_norm", ctypes.c_int64),
        ("epsilon", ctypes.c_double),
        ("angles", ctypes.c_int64),  # [positions, 2, head_dim]: cosines and sines
        ("keys", ctypes.c_int64),  # as those of ``attention.Layer``, and the next two
        ("values", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
    )


class Pairs(ctypes.Structure):
    """Numbers of two buffers that become one: ``target + other``, or ``silu(target) * other``.

    A product with a layer does so itself. Where adapters add to the layer, it has to be done behind them.
    """

    _fields_ = (
        ("target", ctypes.c_int64),  # [rows, size]
        ("other", ctypes.c_int64),  # [rows, size]
        ("size", ctypes.c_int64),
    )


class Operation(ctypes.Structure):
    """What is done next."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("waits", ctypes.c_int64),  # whether all before it must be done
        ("job", ctypes.c_int64),  # address of ``Embed``, ``Norm``, ``Linear``, ``Rotate``, ``Layer``, ``LowRank`` or ``Pairs``
    )


class NativeStep(ctypes.Structure):
    """One forward."""

    _fields_ = (
        ("operations", ctypes.c_int64),  # address of ``Operation``
        ("count", ctypes.c_int64),
        ("tokens", ctypes.c_int64),  # [rows] int64
        ("positions", ctypes.c_int64),  # [rows] int64
        ("rows", ctypes.c_int64),
        ("picked", ctypes.c_int64),  # [num_picked] int64: rows whose logits are wanted
        ("num_picked", ctypes.c_int64),
        ("requests", ctypes.c_int64),  # address of ``native_attention.NativeRows``
        ("num_requests", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("counters", ctypes.c_int64),  # ``num_counters`` of them, all 0
        ("adapters", ctypes.c_int64),  # [rows] int64: the adapter of each row, -1 for none; 0 where no operation asks
    )


def num_counters(operations: int, threads: int) -> int:
    """How many counters, of ``COUNTER`` bytes each, so many operations take: two of all, then those of each."""
    return 2 + operations * threads


_EMBED, _NORM, _LINEAR, _ROTATE, _LOW_RANK, _PAIRS = (np.dtype(each) for each in (Embed, Norm, Linear, Rotate, LowRank, Pairs))
_OPERATION = np.dtype(Operation)


@compiled
def _embed(job: Any, token: int, row: int, thread: int, forms: Any, like: Any) -> None:
    """A token's row of the table; in panels its numbers, or pairs of them, lie a panel's width apart."""
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
def _turn(head: int, norm: int, epsilon: float, angles: int, size: int, like: Any) -> None:
    """One head, in place: ``x * cos + (-x2, x1) * sin`` with x1 and x2 its halves, each product rounded."""
    wide, half = bytes_of(like), size // 2
    if norm:
        normalise(head, norm, head, size, epsilon, like)
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
    """All heads of a row."""
    wide = job.head_dim * bytes_of(like)
    angles = job.angles + position * 2 * wide
    for head in range(job.heads):
        at = job.query + (row * job.heads + head) * wide
        _turn(at, job.query_norm, job.epsilon, angles, job.head_dim, like)
    for head in range(job.kv_heads):
        at, kept = (row * job.kv_heads + head) * wide, (slot * job.kv_heads + head) * job.capacity * wide
        _turn(job.key + at, job.key_norm, job.epsilon, angles, job.head_dim, like)
        keep_key(job.key + at, job.keys + kept, entry, job.head_dim, like)
        copy_bytes(job.value + at, job.values + kept + entry * wide, wide)


@compiled
def _rotate_rows(step: Any, job: Any, first: int, last: int, requests: Any, like: Any) -> None:
    """Some rows of the batch."""
    for request in range(len(requests)):
        own = requests[request]
        for row in range(max(first, own.offset), min(last, own.offset + own.rows)):
            entry = own.start + own.before + row - own.offset
            _rotate(job, row, int_at(step.positions + row * 8), own.slot, entry, like)


@compiled
def _join(target: int, other: int, size: int, gate: bool, like: Any) -> None:
    """A row of ``Pairs``, rounded as in ``native_linear``."""
    wide = bytes_of(like)
    for first in range(0, size, WIDTH):
        place = first * wide
        if first + WIDTH <= size:
            store(target + place, _joined(target + place, other + place, gate, like), like)
        else:  # the last ones of a row that is no multiple: what is behind them belongs to others
            _join_last(target + place, other + place, (size - first) * wide, gate, np.zeros(2 * WIDTH, np.float32), like)


@compiled
def _join_last(target: int, other: int, left: int, gate: bool, spare: Any, like: Any) -> None:
    """So many bytes; see ``native_linear`` for why the array is an argument."""
    one, two = spare.ctypes.data, spare.ctypes.data + WIDTH * 4
    copy_bytes(target, one, left)
    copy_bytes(other, two, left)
    store(one, _joined(one, two, gate, like), like)
    copy_bytes(one, target, left)


@compiled
def _joined(target: int, other: int, gate: bool, like: Any) -> Any:
    numbers = load(target, like)
    if gate:
        return multiply(stored(silu(numbers), like), load(other, like))
    return add(numbers, load(other, like))


@compiled
def _by_rows(step: Any, operation: Any, first: int, last: int, requests: Any, thread: int, forms: Any, like: Any) -> None:
    """Some rows of an operation that computes each row by itself."""
    kind, wide = operation.kind, bytes_of(like)
    if kind == EMBED:
        embed = carray(address_of(operation.job), 1, _EMBED)[0]
        for row in range(first, last):
            _embed(embed, int_at(step.tokens + row * 8), row, thread, forms, like)
    elif kind == ROTATE:
        _rotate_rows(step, carray(address_of(operation.job), 1, _ROTATE)[0], first, last, requests, like)
    elif kind == LOW_RANK:
        low_rank = carray(address_of(operation.job), 1, _LOW_RANK)[0]
        for row in range(first, last):
            add_low_rank(low_rank, row, int_at(step.adapters + row * 8), like)
    elif kind >= SUM:
        pairs = carray(address_of(operation.job), 1, _PAIRS)[0]
        size = pairs.size * wide
        for row in range(first, last):
            _join(pairs.target + row * size, pairs.other + row * size, pairs.size, kind == GATE, like)
    else:
        norm = carray(address_of(operation.job), 1, _NORM)[0]
        for row in range(first, last):
            source = int_at(step.picked + row * 8) if kind == PICKED_NORM else row
            size = norm.size * wide
            normalise(norm.input + source * size, norm.weight, norm.output + row * size, norm.size, norm.epsilon, like)


@compiled
def _take_rows(step: Any, operation: Any, rows: int, taken: int, requests: Any, thread: int, forms: Any, like: Any) -> int:
    """What every thread does of an operation by rows, some rows at a time; returns how many it has computed."""
    together, done = rows // (4 * step.threads) + 1, 0
    while True:
        first = claim(taken) * together
        if first >= rows:
            return done
        last = min(first + together, rows)
        _by_rows(step, operation, first, last, requests, thread, forms, like)
        done += last - first


@compiled
def _run(steps: Any, forms: Any, like: Any) -> None:
    """What every thread does. ``expected`` parts are done once all operations up to here are."""
    step = carray(steps, 1)[0]
    operations = carray(address_of(step.operations), step.count, _OPERATION)
    requests = carray(address_of(step.requests), step.num_requests, ROWS)
    thread, finished, expected = claim(step.counters), step.counters + COUNTER, 0
    for number in range(step.count):
        operation, done = operations[number], 0
        taken = step.counters + COUNTER * (2 + number * step.threads)
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
        else:
            expected += rows
            done = _take_rows(step, operation, rows, taken, requests, thread, forms, like)
        if done:
            count_on(finished, done)


_SIGNATURE = types.void(types.CPointer(from_dtype(np.dtype(NativeStep))))


@cache
def entry_point(dtype: str, names: tuple[str, ...] = ()) -> Any:
    """The C function ``void (NativeStep *)`` that every thread calls, for weights of a type and in some formats; see
    ``native_attention.entry_point``."""
    like, forms = TYPES[dtype], Forms(names)

    def run(job: Any) -> None:
        _run(job, forms, like)

    run.__qualname__ = f"run_{dtype}_{forms}"  # by which it is kept on disk
    return compiled_callback(_SIGNATURE)(run)
