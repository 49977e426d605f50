"""Attention over KV slots: one call computes a layer for all requests, decoding steps and prompts alike.

torch's kernels are made for many rows, and their sums follow the shape of what they are given. Here threads first store the new
keys and values, then take blocks of sixteen rows that share a KV head; a block goes through the keys that its rows see.

A row's result depends on what it sees alone, to the last bit: not on the other rows or requests of the step, nor on where in the
slot its ancestors lie. Values are added up in the order of the text, and what is hidden adds zeros; the weights are added up as
whole numbers, whose sum has no order.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from decoding.jit import compiled, compiled_callback
from engine.native.lanes import (
    WIDTH,
    absolute,
    add,
    address_of,
    byte_at,
    bytes_of,
    claim,
    divide,
    exponential,
    int_at,
    keep,
    largest,
    load,
    load_splat,
    maximum,
    multiply,
    multiply_add,
    sign_of,
    splat,
    store,
    subtract,
    total,
    totals,
    wait_for,
)

BLOCK = 16  # rows that go through the keys together
_ONE, _MINUS_TWO = np.float32(1), np.float32(-2)
_FLOAT = np.float32(0)  # names the type
_HIDDEN = np.float32(-3e38)
_PARTS = np.float32(2.0**40)  # that a weight of one is cut into


class Rows(ctypes.Structure):
    """The rows of one request. They see its first ``start`` entries and, of those behind them, what ``mask`` says."""

    _fields_ = (
        ("slot", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("offset", ctypes.c_int64),  # first row in the batch
        ("rows", ctypes.c_int64),
        ("before", ctypes.c_int64),  # entries between ``start`` and those of the rows: rows of earlier forwards
        ("mask", ctypes.c_int64),  # address of [rows, before + rows] bytes; 0 for plain causality, with nothing before
        ("positions", ctypes.c_int64),  # address of [before + rows] int64
    )


class Layer(ctypes.Structure):
    """A layer's work. Addresses are those of the first element, strides count bytes; elements of one head lie side by side."""

    _fields_ = (
        ("query", ctypes.c_int64),  # [heads, rows, head_dim]
        ("query_head", ctypes.c_int64),
        ("query_row", ctypes.c_int64),
        ("key", ctypes.c_int64),  # [kv_heads, rows, head_dim]
        ("key_head", ctypes.c_int64),
        ("key_row", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("value_head", ctypes.c_int64),
        ("value_row", ctypes.c_int64),
        ("output", ctypes.c_int64),  # [rows, heads, head_dim], contiguous
        ("keys", ctypes.c_int64),  # [slots, kv_heads, capacity, head_dim], contiguous
        ("values", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),  # heads that share a KV head
        ("head_dim", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("window", ctypes.c_int64),  # 0 without one
        ("requests", ctypes.c_int64),  # address of ``Rows``
        ("num_requests", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),  # bound of the scores; 0 without one
        ("taken", ctypes.c_int64),  # keys and values that threads have taken to store: 0 at the start, as the next two
        ("stored", ctypes.c_int64),  # and have stored
        ("blocks", ctypes.c_int64),  # of rows that threads have taken
    )


LAYER, ROWS = np.dtype(Layer), np.dtype(Rows)
_TAKEN, _STORED, _BLOCKS = Layer.taken.offset, Layer.stored.offset, Layer.blocks.offset
_SIGNATURE = types.void(types.CPointer(from_dtype(LAYER)))


@compiled
def _copy(source: int, source_stride: int, target: int, target_stride: int, rows: int, size: int, like: Any, into: Any) -> None:
    """Copies rows of ``size`` numbers, from one type to another."""
    for row in range(rows):
        for first in range(0, size, WIDTH):
            numbers = load(source + row * source_stride + first * bytes_of(like), like)
            store(target + row * target_stride + first * bytes_of(into), numbers, into)


@compiled
def _score(query: int, keys: int, stride: int, size: int, scores: int, like: Any) -> None:
    """Products of a row with sixteen keys. The sums stay in sixteen registers and are added up together."""
    zero = splat(_FLOAT)
    s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    s8, s9, s10, s11, s12, s13, s14, s15 = zero, zero, zero, zero, zero, zero, zero, zero
    for first in range(0, size, WIDTH):
        row, key = load(query + first * 4, _FLOAT), keys + first * bytes_of(like)
        s0 = multiply_add(row, load(key, like), s0)
        s1 = multiply_add(row, load(key + stride, like), s1)
        s2 = multiply_add(row, load(key + 2 * stride, like), s2)
        s3 = multiply_add(row, load(key + 3 * stride, like), s3)
        s4 = multiply_add(row, load(key + 4 * stride, like), s4)
        s5 = multiply_add(row, load(key + 5 * stride, like), s5)
        s6 = multiply_add(row, load(key + 6 * stride, like), s6)
        s7 = multiply_add(row, load(key + 7 * stride, like), s7)
        s8 = multiply_add(row, load(key + 8 * stride, like), s8)
        s9 = multiply_add(row, load(key + 9 * stride, like), s9)
        s10 = multiply_add(row, load(key + 10 * stride, like), s10)
        s11 = multiply_add(row, load(key + 11 * stride, like), s11)
        s12 = multiply_add(row, load(key + 12 * stride, like), s12)
        s13 = multiply_add(row, load(key + 13 * stride, like), s13)
        s14 = multiply_add(row, load(key + 14 * stride, like), s14)
        s15 = multiply_add(row, load(key + 15 * stride, like), s15)
    store(scores, totals(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15), _FLOAT)


@compiled
def _score_one(query: int, key: int, size: int, like: Any) -> np.float32:
    """The product of a row with one key, added up in the order of ``_score``."""
    products = splat(_FLOAT)
    for first in range(0, size, WIDTH):
        products = multiply_add(load(query + first * 4, _FLOAT), load(key + first * bytes_of(like), like), products)
    return total(products)


@compiled
def _mix(weights: int, values: int, stride: int, count: int, size: int, mixed: int, like: Any) -> None:
    """Adds ``count`` weighted values to what is mixed already, in their order; four registers at a time hold the sums."""
    first = 0
    while first + 4 * WIDTH <= size:
        at, value = mixed + first * 4, values + first * bytes_of(like)
        step = WIDTH * bytes_of(like)
        a, b, c, d = load(at, _FLOAT), load(at + 64, _FLOAT), load(at + 128, _FLOAT), load(at + 192, _FLOAT)
        for key in range(count):
            weight = load_splat(weights + key * 4)
            a = multiply_add(weight, load(value, like), a)
            b = multiply_add(weight, load(value + step, like), b)
            c = multiply_add(weight, load(value + 2 * step, like), c)
            d = multiply_add(weight, load(value + 3 * step, like), d)
            value += stride
        store(at, a, _FLOAT)
        store(at + 64, b, _FLOAT)
        store(at + 128, c, _FLOAT)
        store(at + 192, d, _FLOAT)
        first += 4 * WIDTH
    while first < size:
        at, value = mixed + first * 4, values + first * bytes_of(like)
        a = load(at, _FLOAT)
        for key in range(count):
            a = multiply_add(load_splat(weights + key * 4), load(value, like), a)
            value += stride
        store(at, a, _FLOAT)
        first += WIDTH


@compiled
def _hide(scores: Any, row: int, low: int, count: int, rows: Any, layer: Any) -> None:
    """Hides from one row what it must not see; there are the keys from ``low`` on and ``count`` behind ``start``."""
    start = rows.start
    first = row + 1  # causality: the rows behind it
    if rows.mask:
        mask, own, hidden = rows.mask + row * count, scores.ctypes.data + (start - low) * 4, splat(_HIDDEN)
        first = count // WIDTH * WIDTH
        for other in range(0, first, WIDTH):
            store(own + other * 4, keep(load(own + other * 4, _FLOAT), mask + other, hidden), _FLOAT)
    for other in range(first, count):
        if rows.mask == 0 or byte_at(rows.mask + row * count + other) == 0:
            scores[start + other - low] = _HIDDEN
    if layer.window:
        position = int_at(rows.positions + (rows.before + row) * 8)
        for key in range(low, min(start, position - layer.window + 1)):
            scores[key - low] = _HIDDEN
        for other in range(count):
            if position - int_at(rows.positions + other * 8) >= layer.window:
                scores[start + other - low] = _HIDDEN


@compiled
def _weigh(row: Any) -> np.float32:
    """Makes scores weights, not yet divided by their sum, and returns one over the sum. They are a multiple of ``WIDTH``.

    The weights are at most 1, and one of them is: they are cut to multiples of 2 ** -40 and added up as whole numbers.
    """
    scores = row.ctypes.data
    top = load(scores, _FLOAT)
    for first in range(WIDTH, len(row), WIDTH):
        top = maximum(top, load(scores + first * 4, _FLOAT))
    down = splat(-largest(top))
    for first in range(0, len(row), WIDTH):
        store(scores + first * 4, exponential(add(load(scores + first * 4, _FLOAT), down)), _FLOAT)
    parts = np.int64(0)
    for key in range(len(row)):
        parts += np.int64(row[key] * _PARTS)
    return np.float32(np.float64(_PARTS) / parts)


@compiled
def _lowest(rows: Any, layer: Any) -> int:
    """The first key that any row of a request sees, rounded down so that blocks of keys lie alike whatever the window."""
    if not layer.window:
        return 0
    low = rows.start
    for row in range(rows.before, rows.before + rows.rows):
        low = min(low, int_at(rows.positions + row * 8) - layer.window + 1)
    return max(low, 0) // WIDTH * WIDTH


@compiled
def _read(queries: Any, layer: Any, rows: Any, head: int, first: int, like: Any) -> None:
    """Scaled queries of the places from ``first`` on."""
    scale, step = splat(np.float32(layer.scale)), bytes_of(like)
    for place in range(queries.shape[0]):
        source = layer.query + (head * layer.group + (first + place) // rows.rows) * layer.query_head
        source += (rows.offset + (first + place) % rows.rows) * layer.query_row
        for at in range(0, queries.shape[1], WIDTH):
            store(
                queries.ctypes.data + (place * queries.shape[1] + at) * 4, multiply(load(source + at * step, like), scale), _FLOAT
            )


@compiled
def _score_all(queries: Any, keys: int, num_keys: int, scores: Any, block: Any, like: Any) -> None:
    """Products of each query with each key."""
    count, size = queries.shape
    stride, wide = size * bytes_of(like), count > 1 and bytes_of(like) == 2  # widened once for all rows
    for key in range(0, num_keys - WIDTH + 1, WIDTH):
        if wide:
            _copy(keys + key * stride, stride, block.ctypes.data, size * 4, WIDTH, size, like, _FLOAT)
        for place in range(count):
            query, into = queries.ctypes.data + place * size * 4, scores.ctypes.data + (place * scores.shape[1] + key) * 4
            if wide:
                _score(query, block.ctypes.data, size * 4, size, into, _FLOAT)
            else:
                _score(query, keys + key * stride, stride, size, into, like)
    for place in range(count):
        for key in range(num_keys // WIDTH * WIDTH, num_keys):
            scores[place, key] = _score_one(queries.ctypes.data + place * size * 4, keys + key * stride, size, like)


@compiled
def _mix_all(scores: Any, values: int, num_keys: int, mixed: Any, block: Any, like: Any) -> None:
    """Adds up the weighted values of each row."""
    count, size = mixed.shape
    stride, wide = size * bytes_of(like), count > 1 and bytes_of(like) == 2
    for key in range(0, num_keys, WIDTH):
        here = min(WIDTH, num_keys - key)
        if wide:
            _copy(values + key * stride, stride, block.ctypes.data, size * 4, here, size, like, _FLOAT)
        for place in range(count):
            weights, into = scores.ctypes.data + (place * scores.shape[1] + key) * 4, mixed.ctypes.data + place * size * 4
            if wide:
                _mix(weights, block.ctypes.data, size * 4, here, size, into, _FLOAT)
            else:
                _mix(weights, values + key * stride, stride, here, size, into, like)


@compiled
def _write(mixed: Any, shares: Any, layer: Any, rows: Any, head: int, first: int, like: Any) -> None:
    """Divides by the sums of the weights and writes the outputs of the places from ``first`` on."""
    count, size = mixed.shape
    for place in range(count):
        row = rows.offset + (first + place) % rows.rows
        row = row * layer.kv_heads * layer.group + head * layer.group + (first + place) // rows.rows
        for at in range(0, size, WIDTH):
            numbers = multiply(load(mixed.ctypes.data + (place * size + at) * 4, _FLOAT), splat(shares[place]))
            store(layer.output + (row * size + at) * bytes_of(like), numbers, like)


@compiled
def _bound(scores: Any, softcap: np.float32) -> None:
    """Makes each score ``softcap * tanh(score / softcap)``; with e the exponential of -2 |x|, tanh |x| is (1 - e) / (1 + e)."""
    one, cap, down = splat(_ONE), splat(softcap), splat(_MINUS_TWO)
    for first in range(0, scores.size, WIDTH):
        at = scores.ctypes.data + first * 4
        x = divide(load(at, _FLOAT), cap)
        power = exponential(multiply(absolute(x), down))
        store(at, multiply(sign_of(divide(subtract(one, power), add(one, power)), x), cap), _FLOAT)


@compiled
def _attend(layer: Any, rows: Any, head: int, first: int, count: int, scratch: Any, like: Any) -> None:
    """``count`` rows from ``first`` on, of the group's heads one after another, over the keys of one KV head that they see.

    Place ``p`` is row ``p % rows`` of head ``p // rows`` of the group.
    """
    size, low = layer.head_dim, _lowest(rows, layer)
    own = rows.before + rows.rows
    if rows.mask == 0 and first % rows.rows + count <= rows.rows:  # rows of one head: none sees what is behind the last of them
        own = first % rows.rows + count
    entry = ((rows.slot * layer.kv_heads + head) * layer.capacity + low) * size * bytes_of(like)
    num_keys = rows.start + own - low
    padded = (num_keys + WIDTH - 1) // WIDTH * WIDTH
    queries, mixed = np.empty((count, size), np.float32), np.zeros((count, size), np.float32)
    scores, shares = scratch[: count * padded].reshape((count, padded)), np.empty(count, np.float32)
    block = np.empty((WIDTH, size), np.float32)
    _read(queries, layer, rows, head, first, like)
    _score_all(queries, layer.keys + entry, num_keys, scores, block, like)
    if layer.softcap:
        _bound(scores, np.float32(layer.softcap))
    for place in range(count):
        scores[place, num_keys:] = _HIDDEN
        if own > 1 or layer.window:
            _hide(scores[place], (first + place) % rows.rows, low, own, rows, layer)
        shares[place] = _weigh(scores[place])
    _mix_all(scores, layer.values + entry, num_keys, mixed, block, like)
    _write(mixed, shares, layer, rows, head, first, like)


@compiled
def _keep(layer: Any, rows: Any, head: int, like: Any) -> None:
    """Stores the new keys and values of one KV head of a request."""
    size = layer.head_dim
    stride = size * bytes_of(like)
    entry = ((rows.slot * layer.kv_heads + head) * layer.capacity + rows.start + rows.before) * stride
    source = layer.key + head * layer.key_head + rows.offset * layer.key_row
    _copy(source, layer.key_row, layer.keys + entry, stride, rows.rows, size, like, like)
    source = layer.value + head * layer.value_head + rows.offset * layer.value_row
    _copy(source, layer.value_row, layer.values + entry, stride, rows.rows, size, like, like)


@compiled
def blocks_of(requests: Any, layer: Any) -> int:
    """How many blocks of rows a layer has."""
    count = 0
    for request in range(len(requests)):
        count += (layer.group * requests[request].rows + BLOCK - 1) // BLOCK * layer.kv_heads
    return count


@compiled
def attend_blocks(layer: Any, requests: Any, taken: int, like: Any) -> int:
    """What every thread does once all keys and values are stored: takes blocks of rows until none is left; returns how many."""
    longest, done = 0, 0
    for request in range(len(requests)):
        rows = requests[request]
        longest = max(longest, rows.start + rows.before + rows.rows)
    scratch = np.empty(BLOCK * (longest + 2 * WIDTH), np.float32)
    block, request, begun = claim(taken), 0, 0  # the blocks before those of ``request``
    while request < len(requests):
        rows = requests[request]
        places = layer.group * rows.rows
        blocks = (places + BLOCK - 1) // BLOCK
        if block - begun < blocks * layer.kv_heads:
            head, first = (block - begun) // blocks, (block - begun) % blocks * BLOCK
            _attend(layer, rows, head, first, min(BLOCK, places - first), scratch, like)
            block, done = claim(taken), done + 1
        else:
            begun += blocks * layer.kv_heads
            request += 1
    return done


@compiled
def _run(job: Any, like: Any) -> None:
    """What every thread does: stores keys and values, waits until all are stored, and computes."""
    layers = carray(job, 1)
    layer, at = layers[0], layers.ctypes.data
    requests = carray(address_of(layer.requests), layer.num_requests, ROWS)
    heads = layer.num_requests * layer.kv_heads
    while True:
        item = claim(at + _TAKEN)
        if item >= heads:
            break
        _keep(layer, requests[item // layer.kv_heads], item % layer.kv_heads, like)
        claim(at + _STORED)
    wait_for(at + _STORED, heads)
    attend_blocks(layer, requests, at + _BLOCKS, like)


def _bfloat16(job: Any) -> None:
    _run(job, np.uint16(0))


def _float16(job: Any) -> None:
    _run(job, np.int16(0))


def _float32(job: Any) -> None:
    _run(job, _FLOAT)


_FUNCTIONS = {"bfloat16": _bfloat16, "float16": _float16, "float32": _float32}


@cache
def entry_point(dtype: str) -> Any:
    """The C function ``void (Layer *)`` that computes a layer, with its ``address``.

    Compiled at the first call, which takes some seconds, and kept on disk.

    Args:
        dtype: of queries, keys, values and outputs: bfloat16, float16 or float32.
    """
    return compiled_callback(_SIGNATURE)(_FUNCTIONS[dtype])
