"""CPU attention over KV slots: one call computes a layer for all requests, in decoding and prefill.

A row's result depends bit for bit only on what it sees.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from outrider.decoding.jit import compiled, compiled_callback
from outrider.engine.cpu.linear import PANEL
from outrider.engine.cpu.linear_kernel import piece_of, products, release_tiles, rows_at_once, shape_tiles
from outrider.engine.cpu.simd import (
    AHEAD,
    FLOATS,
    LIKE,
    LONG,
    TILE_ROWS,
    TYPES,
    WIDTH,
    absolute,
    add,
    address_of,
    by_count,
    byte_at,
    bytes_of,
    claim,
    copy_bytes,
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
    prefetch,
    primitive,
    sign_of,
    splat,
    store,
    subtract,
    wait_for,
)

BLOCK = 16  # rows that go through the keys together
_ONE, _MINUS_TWO = np.float32(1), np.float32(-2)
_FLOAT = np.float32(0)  # stands for its type
_HIDDEN = np.float32(-3e38)
_PARTS = np.float32(2.0**40)  # fixed-point units of a weight of one


class NativeRows(ctypes.Structure):
    """Rows of one request: they see its first ``start`` entries and, of those behind, the ones in ``mask``."""

    _fields_ = (
        ("slot", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("offset", ctypes.c_int64),  # first row in the batch
        ("rows", ctypes.c_int64),
        ("before", ctypes.c_int64),  # entries between ``start`` and the rows' own, computed by earlier forward passes
        ("mask", ctypes.c_int64),  # address of [rows, before + rows] bytes; 0: plain causality, with nothing before
        ("positions", ctypes.c_int64),  # address of [before + rows] int64
    )


class Layer(ctypes.Structure):
    """Job of one layer; addresses are of the first element, strides in bytes; elements of a head are contiguous."""

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
        ("output", ctypes.c_int64),  # [rows, heads, value_dim], contiguous
        ("keys", ctypes.c_int64),  # per slot and KV head, panels as in ``linear``, with entries as outputs
        ("values", ctypes.c_int64),  # [slots, slot_heads, capacity, value_dim], contiguous
        ("capacity", ctypes.c_int64),  # a multiple of ``PANEL``
        ("kv_heads", ctypes.c_int64),
        ("slot_heads", ctypes.c_int64),  # KV heads that a slot has room for, at least ``kv_heads``
        ("group", ctypes.c_int64),  # query heads per KV head
        ("head_dim", ctypes.c_int64),  # of queries and keys, a multiple of ``WIDTH``
        ("value_dim", ctypes.c_int64),  # of values and outputs, likewise
        ("window", ctypes.c_int64),  # 0: none
        ("chunk", ctypes.c_int64),  # a row sees only keys in its own chunk of this many positions; 0: none
        ("sinks", ctypes.c_int64),  # address of [heads] float32: scores of keys without a value; 0: none
        ("requests", ctypes.c_int64),  # address of ``NativeRows``
        ("num_requests", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),  # bound of the scores; 0: none
        ("taken", ctypes.c_int64),  # keys and values that threads have claimed to store; starts at 0, as the next two
        ("stored", ctypes.c_int64),  # keys and values that are stored
        ("blocks", ctypes.c_int64),  # blocks of rows that threads have claimed
    )


LAYER, ROWS = np.dtype(Layer), np.dtype(NativeRows)
_TAKEN, _STORED, _BLOCKS = Layer.taken.offset, Layer.stored.offset, Layer.blocks.offset
_SIGNATURE = types.void(types.CPointer(from_dtype(LAYER)))


_MIX_ROWS, _MIX_WIDE = (4, 4 * WIDTH) if TILE_ROWS > 2 else (2, 2 * WIDTH)  # rows and elements whose sums are in registers
_MIX_KEYS = 64  # keys whose values fit into the L1 cache


def _emit_mixed(
    b: Any, rows: int, weights: Any, weights_stride: Any, values: Any, stride: Any, count: Any, mixed: Any, mixed_stride: Any,
    ahead: Any, ahead_step: Any, like: Any,
) -> None:  # fmt: skip
    parts, wide = _MIX_WIDE // WIDTH, 4 if like == types.float32 else 2
    before, head, loop, after = b.block, b.append_basic_block("head"), b.append_basic_block("mix"), b.append_basic_block("after")
    places = [(row, part) for row in range(rows) for part in range(parts)]

    def pointer(row: int, part: int) -> Any:
        address = b.add(b.add(mixed, b.mul(mixed_stride, LONG(row))), LONG(part * WIDTH * 4))
        return b.inttoptr(address, FLOATS.as_pointer())

    begun = [b.load(pointer(*place), align=4) for place in places]
    b.branch(head)
    b.position_at_end(head)
    key, sums = b.phi(LONG), [b.phi(FLOATS) for _ in places]
    b.cbranch(b.icmp_signed("<", key, count), loop, after)
    b.position_at_end(loop)
    value, later = b.add(values, b.mul(key, stride)), b.add(ahead, b.mul(key, ahead_step))
    for line in range(0, _MIX_WIDE * 2, 64):  # of float32 the first half
        prefetch(b, b.add(later, LONG(line)))
    loaded = [load.emit(b, b.add(value, LONG(part * WIDTH * wide)), like) for part in range(parts)]
    added = []
    for row in range(rows):
        weight = load_splat.emit(b, b.add(b.add(weights, b.mul(weights_stride, LONG(row))), b.mul(key, LONG(4))))
        added += [multiply_add.emit(b, weight, loaded[part], sums[row * parts + part]) for part in range(parts)]
    key.add_incoming(LONG(0), before)
    key.add_incoming(b.add(key, LONG(1)), loop)
    for one, first, new in zip(sums, begun, added, strict=True):
        one.add_incoming(first, before)
        one.add_incoming(new, loop)
    b.branch(head)
    b.position_at_end(after)
    for place, total_ in zip(places, sums, strict=True):
        b.store(total_, pointer(*place), align=4)


@primitive(types.void, *[types.int64] * 10, LIKE)
def _mixed(
    builder: Any, rows: Any, weights: Any, weights_stride: Any, values: Any, stride: Any, count: Any, mixed: Any,
    mixed_stride: Any, ahead: Any, ahead_step: Any, like: Any,
) -> None:  # fmt: skip
    """Add ``count`` weighted values, in order, to ``_MIX_WIDE`` elements of up to ``_MIX_ROWS`` rows; prefetch ``ahead``."""
    by_count(
        builder, rows, _MIX_ROWS,
        lambda number: _emit_mixed(
            builder, number, weights, weights_stride, values, stride, count, mixed, mixed_stride, ahead, ahead_step, like
        ),
    )  # fmt: skip


@compiled
def _mix_one(weights: int, values: int, stride: int, count: int, mixed: int, like: Any) -> None:
    numbers = load(mixed, _FLOAT)
    for key in range(count):
        numbers = multiply_add(load_splat(weights + key * 4), load(values + key * stride, like), numbers)
    store(mixed, numbers, _FLOAT)


@compiled
def _room(size: int) -> Any:
    """Return uninitialised float32 memory aligned to a cache line, because a vector across two lines is read twice."""
    return _from_line(np.empty(size + WIDTH, np.float32), size)


@compiled
def _from_line(made: Any, size: int) -> Any:
    return made[(-made.ctypes.data >> 2) % WIDTH :][:size]


@compiled
def _mix_all(scores: Any, values: int, num_keys: int, mixed: Any, like: Any) -> None:
    """Add the weighted values of each row; with many rows, values are converted to float32 once per chunk of keys."""
    count, size = mixed.shape
    if count > _MIX_ROWS:
        _mix_parts(scores, values, num_keys, mixed, _room(_MIX_KEYS * size), like)
    else:
        stride = size * bytes_of(like)
        _mix_some(scores.ctypes.data, scores.shape[1] * 4, values, num_keys, mixed, values + AHEAD, stride, like)


@compiled
def _mix_parts(scores: Any, values: int, num_keys: int, mixed: Any, numbers: Any, like: Any) -> None:
    size, into = mixed.shape[1], numbers.ctypes.data
    stride = size * bytes_of(like)
    for first in range(0, num_keys, _MIX_KEYS):
        here, source = min(_MIX_KEYS, num_keys - first), values + first * stride
        for number in range(0, here * size, WIDTH):
            store(into + number * 4, load(source + number * bytes_of(like), like), _FLOAT)
        weights, ahead = scores.ctypes.data + first * 4, source + _MIX_KEYS * stride
        _mix_some(weights, scores.shape[1] * 4, into, here, mixed, ahead, stride, _FLOAT)


@compiled
def _mix_some(weights: int, wide: int, values: int, num_keys: int, mixed: Any, ahead: int, ahead_step: int, like: Any) -> None:
    count, size = mixed.shape
    stride = size * bytes_of(like)
    for first in range(0, size // _MIX_WIDE * _MIX_WIDE, _MIX_WIDE):
        for place in range(0, count, _MIX_ROWS):
            _mixed(
                min(_MIX_ROWS, count - place), weights + place * wide, wide, values + first * bytes_of(like), stride,
                num_keys, mixed.ctypes.data + (place * size + first) * 4, size * 4,
                ahead + first * ahead_step // size, ahead_step, like,
            )  # fmt: skip
    for first in range(size // _MIX_WIDE * _MIX_WIDE, size, WIDTH):
        for place in range(count):
            into = mixed.ctypes.data + (place * size + first) * 4
            _mix_one(weights + place * wide, values + first * bytes_of(like), stride, num_keys, into, like)


@compiled
def _first_seen(position: int, layer: Any) -> int:
    """Return the least position that a row may see; it may be negative."""
    first = position - layer.window + 1 if layer.window else 0
    return max(first, position // layer.chunk * layer.chunk) if layer.chunk else first


@compiled
def _hide(scores: Any, row: int, low: int, count: int, rows: Any, layer: Any) -> None:
    """Hide the keys that one row must not see, among those from ``low`` on and ``count`` behind ``start``."""
    start = rows.start
    first = row + 1  # causality: rows behind it
    if rows.mask:
        mask, own, hidden = rows.mask + row * count, scores.ctypes.data + (start - low) * 4, splat(_HIDDEN)
        first = count // WIDTH * WIDTH
        for other in range(0, first, WIDTH):
            store(own + other * 4, keep(load(own + other * 4, _FLOAT), mask + other, hidden), _FLOAT)
    for other in range(first, count):
        if rows.mask == 0 or byte_at(rows.mask + row * count + other) == 0:
            scores[start + other - low] = _HIDDEN
    if layer.window or layer.chunk:
        seen = _first_seen(int_at(rows.positions + (rows.before + row) * 8), layer)
        for key in range(low, min(start, seen)):
            scores[key - low] = _HIDDEN
        for other in range(count):
            if int_at(rows.positions + other * 8) < seen:
                scores[start + other - low] = _HIDDEN


@compiled
def _weigh(row: Any) -> np.float32:
    """Replace scores by weights, not yet divided by their sum; return one over the sum. Needs whole vectors of scores."""
    scores = row.ctypes.data
    top = load(scores, _FLOAT)
    for first in range(WIDTH, len(row), WIDTH):
        top = maximum(top, load(scores + first * 4, _FLOAT))
    down = splat(-largest(top))
    for first in range(0, len(row), WIDTH):
        store(scores + first * 4, exponential(add(load(scores + first * 4, _FLOAT), down)), _FLOAT)
    # Weights are at most 1, and one is 1. They are truncated to multiples of 2 ** -40 and added as integers.
    # The sum of integers does not depend on their order.
    parts = np.int64(0)
    for key in range(len(row)):
        parts += np.int64(row[key] * _PARTS)
    return np.float32(np.float64(_PARTS) / parts)


@compiled
def _lowest(rows: Any, layer: Any) -> int:
    """Return the first key that any row of a request sees, rounded down so that blocks of keys are the same with any window."""
    if not layer.window and not layer.chunk:
        return 0
    low = rows.start
    for row in range(rows.before, rows.before + rows.rows):
        low = min(low, _first_seen(int_at(rows.positions + row * 8), layer))
    return max(low, 0) // PANEL * PANEL


@compiled
def _read(queries: Any, count: int, layer: Any, rows: Any, head: int, first: int, like: Any) -> None:
    size = layer.head_dim * bytes_of(like)
    for place in range(count):
        source = layer.query + (head * layer.group + (first + place) // rows.rows) * layer.query_head
        source += (rows.offset + (first + place) % rows.rows) * layer.query_row
        copy_bytes(source, queries.ctypes.data + place * size, size)


@compiled
def _score_all(queries: Any, keys: int, num_keys: int, scores: Any, scale: np.float32, like: Any) -> None:
    count, size, scales = scores.shape[0], queries.shape[1], splat(scale)
    stride, wide, panels = size * bytes_of(like), scores.shape[1] * 4, (num_keys + PANEL - 1) // PANEL
    ahead_step = PANEL * piece_of(like)
    for place in range(0, count, rows_at_once(like)):
        here, into = min(rows_at_once(like), count - place), scores.ctypes.data + place * wide
        shape_tiles(here, like)
        products(
            here, queries.ctypes.data + place * stride, stride, keys, panels, size, into, wide, keys + AHEAD, ahead_step, like
        )
        for row in range(here):
            for at in range(into + row * wide, into + row * wide + panels * PANEL * 4, WIDTH * 4):
                store(at, multiply(load(at, _FLOAT), scales), _FLOAT)
    release_tiles(like)


@compiled
def _write(mixed: Any, shares: Any, layer: Any, rows: Any, head: int, first: int, like: Any) -> None:
    count, size = mixed.shape
    for place in range(count):
        row = rows.offset + (first + place) % rows.rows
        row = row * layer.kv_heads * layer.group + head * layer.group + (first + place) // rows.rows
        for at in range(0, size, WIDTH):
            numbers = multiply(load(mixed.ctypes.data + (place * size + at) * 4, _FLOAT), splat(shares[place]))
            store(layer.output + (row * size + at) * bytes_of(like), numbers, like)


@compiled
def _bound(scores: Any, softcap: np.float32) -> None:
    """Replace each score by ``softcap * tanh(score / softcap)``."""
    one, cap, down = splat(_ONE), splat(softcap), splat(_MINUS_TWO)
    for first in range(0, scores.size, WIDTH):
        at = scores.ctypes.data + first * 4
        x = divide(load(at, _FLOAT), cap)
        # With e = exp(-2 |x|), tanh |x| is (1 - e) / (1 + e).
        power = exponential(multiply(absolute(x), down))
        store(at, multiply(sign_of(divide(subtract(one, power), add(one, power)), x), cap), _FLOAT)


@compiled
def _attend(layer: Any, rows: Any, head: int, first: int, count: int, scratch: Any, like: Any) -> None:
    """Attend from places to one KV head; place p is row ``p % rows`` of head ``p // rows`` of the group."""
    low = _lowest(rows, layer)
    own = rows.before + rows.rows
    if rows.mask == 0 and first % rows.rows + count <= rows.rows:  # rows of one head: none sees entries behind the last of them
        own = first % rows.rows + count
    entry = ((rows.slot * layer.slot_heads + head) * layer.capacity + low) * bytes_of(like)
    num_keys = rows.start + own - low
    padded = (num_keys + PANEL - 1) // PANEL * PANEL
    wide = padded + WIDTH if layer.sinks else padded  # a sink is one more score
    queries, mixed = _room(count * layer.head_dim), _room(count * layer.value_dim)
    queries, mixed = queries.reshape((count, layer.head_dim)), mixed.reshape((count, layer.value_dim))
    mixed[:] = 0.0
    scores, shares = scratch[: count * wide].reshape((count, wide)), np.empty(count, np.float32)
    _read(queries, count, layer, rows, head, first, like)
    _score_all(queries, layer.keys + entry * layer.head_dim, num_keys, scores, np.float32(layer.scale), like)
    if layer.softcap:
        _bound(scores, np.float32(layer.softcap))
    for place in range(count):
        scores[place, num_keys:] = _HIDDEN
        if layer.sinks:
            at = layer.sinks + (head * layer.group + (first + place) // rows.rows) * 4
            scores[place, padded] = largest(load_splat(at))
        if own > 1 or layer.window or layer.chunk:
            _hide(scores[place], (first + place) % rows.rows, low, own, rows, layer)
        shares[place] = _weigh(scores[place])
    # Values are added in text order, and hidden ones add zeros.
    _mix_all(scores, layer.values + entry * layer.value_dim, num_keys, mixed, like)
    _write(mixed, shares, layer, rows, head, first, like)


@compiled
def keep_key(source: int, keys: int, entry: int, size: int, like: Any) -> None:
    """Store a key in the panel of its entry, in one head's panels of a slot."""
    piece, wide = piece_of(like), size * bytes_of(like)
    target = keys + entry // PANEL * PANEL * wide + entry % PANEL * piece
    for at in range(0, wide, piece):
        copy_bytes(source + at, target + at * PANEL, piece)


@compiled
def _keep(layer: Any, rows: Any, head: int, like: Any) -> None:
    wide, first = layer.value_dim * bytes_of(like), rows.start + rows.before
    entry = (rows.slot * layer.slot_heads + head) * layer.capacity
    keys, values = layer.keys + entry * layer.head_dim * bytes_of(like), layer.values + entry * wide
    for row in range(rows.rows):
        source = layer.key + head * layer.key_head + (rows.offset + row) * layer.key_row
        keep_key(source, keys, first + row, layer.head_dim, like)
        source = layer.value + head * layer.value_head + (rows.offset + row) * layer.value_row
        copy_bytes(source, values + (first + row) * wide, wide)


@compiled
def move_entries(keys: int, values: int, slots: Any, start: int, rows: Any) -> None:
    """Copy entry ``start + rows[i]`` of a slot to ``start + i``, in all layers and heads; rows increase."""
    # ``keys`` and ``values`` are addresses of the slot in the first layer, ``slots`` is a ``SlotLayout``, ``rows`` are [n] int64.
    wide, value_wide, panel, piece = slots.wide, slots.value_wide, slots.panel, slots.piece
    for part in range(slots.layers * slots.heads):
        entries = part // slots.heads * slots.layer_entries + part % slots.heads * slots.room
        own_keys, own_values = keys + entries * wide, values + entries * value_wide
        # In increasing order: an entry is copied before another takes its place.
        for row in range(len(rows)):
            entry, to = start + rows[row], start + row
            copy_bytes(own_values + entry * value_wide, own_values + to * value_wide, value_wide)
            source = own_keys + entry // panel * panel * wide + entry % panel * piece
            target = own_keys + to // panel * panel * wide + to % panel * piece
            for at in range(0, wide * panel, piece * panel):
                copy_bytes(source + at, target + at, piece)


@compiled
def blocks_of(requests: Any, layer: Any) -> int:
    """Return the number of blocks of rows of a layer."""
    count = 0
    for request in range(len(requests)):
        count += (layer.group * requests[request].rows + BLOCK - 1) // BLOCK * layer.kv_heads
    return count


@compiled
def attend_blocks(layer: Any, requests: Any, taken: int, like: Any) -> int:
    """Compute blocks of rows until none is left; return the number computed here. All keys and values must be stored."""
    longest, done = 0, 0
    for request in range(len(requests)):
        rows = requests[request]
        longest = max(longest, rows.start + rows.before + rows.rows)
    # The longest row of scores, padded to whole panels, with a vector for the sink.
    scratch = _room(BLOCK * (longest + 2 * PANEL))
    block, request, begun = claim(taken), 0, 0  # number of blocks before those of ``request``
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
    layers = carray(job, 1)
    layer, at = layers[0], layers.ctypes.data
    requests = carray(address_of(layer.requests), layer.num_requests, ROWS)
    heads = layer.num_requests * layer.kv_heads
    # Threads first store the new keys and values, then take blocks of sixteen rows that share a KV head.
    while True:
        item = claim(at + _TAKEN)
        if item >= heads:
            break
        _keep(layer, requests[item // layer.kv_heads], item % layer.kv_heads, like)
        claim(at + _STORED)
    wait_for(at + _STORED, heads)
    attend_blocks(layer, requests, at + _BLOCKS, like)


@cache
def entry_point(dtype: str) -> Any:
    """Return the C function ``void (Layer *)`` of a dtype in ``TYPES``, with its ``address``."""
    like = TYPES[dtype]

    def run(job: Any) -> None:
        _run(job, like)

    run.__qualname__ = f"run_{dtype}"  # key of the cache on disk
    return compiled_callback(_SIGNATURE)(run)  # takes seconds, once per machine
