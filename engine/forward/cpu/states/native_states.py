"""Recurrent rules and short convolutions in compiled code: one form for prompts, decoding steps and trees.

A row's state is that of its parent, advanced by one step. So a head walks the rows of a request one after another, wherever a
text is cut: over committed rows in the slot itself, then down the tree, depth first, with a copy of the state for each branch
that is still to be gone down. A chunk form would read the weights of many rows at once, and would add up in an order that follows
the cut. What a row is given depends on the tokens before it alone, to the last bit.

Two rules are computed, both in float32 whatever the model's type, over a state S of [key_dim, value_dim] for each head:

- the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464): ``S <- d S + k (b (v - (d S)^T k))^T``, and ``S^T q``;
- the state space rule of Mamba-2 (Dao and Gu, arXiv 2405.21060), with B, C, x and dt as k, q, v and b: ``S <- d S + k (b v)^T``.

Values of a head lie in blocks, so that a block's state stays in the nearest cache while several rows go through it.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from decoding.jit import compiled, compiled_callback
from engine.forward.cpu.lanes import (
    TYPES,
    WIDTH,
    address_of,
    bytes_of,
    claim,
    copy_bytes,
    int_at,
    load,
    load_splat,
    multiply,
    multiply_add,
    silu,
    splat,
    store,
    stored,
    subtract,
    total,
    wait_for,
)

BLOCK = 4 * WIDTH  # values of a head whose states are in the nearest cache together, where there are so many
_CHANNELS = 8 * WIDTH  # of a convolution that a thread takes at once
_TILE = 16  # steps of a walk that go through one block before the next one
_FLOAT = np.float32(0)  # names the type
_ONE = np.float32(1)
ADVANCE, COMPUTE, SAVE = 0, 1, 2  # kinds of steps: over a kept row, over a row of the batch, to another place


class NativeWalk(ctypes.Structure):
    """What is done with the state of one slot. Addresses are those of the first element."""

    _fields_ = (
        ("slot", ctypes.c_int64),
        ("fresh", ctypes.c_int64),  # whether it begins from zeros
        ("offset", ctypes.c_int64),  # first row in the batch
        ("rows", ctypes.c_int64),
        ("steps", ctypes.c_int64),  # [num_steps, 4] int64: kind, row or place, buffer from which, buffer to which; -1: to none
        ("num_steps", ctypes.c_int64),
        ("buffers", ctypes.c_int64),  # the slot's own, number 0, counts
        ("taps", ctypes.c_int64),  # [rows, most_taps] int64: the rows before each, the nearest first; see ``_column``
        ("most_taps", ctypes.c_int64),
        ("windows", ctypes.c_int64),  # [num_windows, 1 + most_taps] int64: a place, and what its window will hold, as ``taps``
        ("num_windows", ctypes.c_int64),
        ("keep_first", ctypes.c_int64),  # of the rows whose inputs are kept
        ("keep_count", ctypes.c_int64),
    )


class NativeRule(ctypes.Structure):
    """A rule's work. Addresses are those of the first element, strides count bytes; the numbers of a row lie side by side."""

    _fields_ = (
        ("query", ctypes.c_int64),  # [rows, key_heads, key_dim]
        ("query_row", ctypes.c_int64),
        ("key", ctypes.c_int64),  # [rows, key_heads, key_dim]
        ("key_row", ctypes.c_int64),
        ("value", ctypes.c_int64),  # [rows, heads, value_dim]
        ("value_row", ctypes.c_int64),
        ("decay", ctypes.c_int64),  # [rows, heads] float32: logarithms of d; with ``delta`` 0 the steps dt, before ``bias``
        ("rate", ctypes.c_int64),  # [rows, heads] float32: b; with ``delta`` 0 as ``decay``
        ("output", ctypes.c_int64),  # [rows, heads, value_dim], with ``delta`` 0 float32
        ("states", ctypes.c_int64),  # of each place, [heads, value_dim / block, key_dim, block] float32
        ("place_bytes", ctypes.c_int64),
        ("kept", ctypes.c_int64),  # [slots, kept_rows, row_bytes]: key, value, decay and rate of rows
        ("kept_rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("group", ctypes.c_int64),  # heads that share a key
        ("key_dim", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("value_dim", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("delta", ctypes.c_int64),  # 1: the gated delta rule; 0: the state space rule
        ("normalise", ctypes.c_int64),  # whether queries and keys are divided by their length
        ("scale", ctypes.c_double),  # of the queries
        ("bias", ctypes.c_int64),  # with ``delta`` 0, [heads] float32: of the steps; so are the next two
        ("rates", ctypes.c_int64),  # A
        ("skip", ctypes.c_int64),  # D
        ("least", ctypes.c_double),  # bounds of the steps
        ("most", ctypes.c_double),
        ("walks", ctypes.c_int64),  # address of ``NativeWalk``
        ("num_walks", ctypes.c_int64),
        ("taken", ctypes.c_int64),  # heads that threads have taken: 0 at the start, as the next two
        ("done", ctypes.c_int64),  # and have computed
        ("copied", ctypes.c_int64),  # rows whose inputs threads have taken to keep
    )


class NativeConvolution(ctypes.Structure):
    """A convolution's work, as ``NativeRule``."""

    _fields_ = (
        ("input", ctypes.c_int64),  # [rows, channels]
        ("input_row", ctypes.c_int64),
        ("weight", ctypes.c_int64),  # [taps + 1, channels] float32, that of the row itself last
        ("bias", ctypes.c_int64),  # [channels] float32; 0 without one
        ("output", ctypes.c_int64),  # [rows, channels]
        ("channels", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("taps", ctypes.c_int64),  # rows before each that count
        ("silu", ctypes.c_int64),  # whether the outputs go through it
        ("states", ctypes.c_int64),  # of each place, [taps, channels]: the last rows, the nearest first
        ("place_bytes", ctypes.c_int64),
        ("kept", ctypes.c_int64),  # [slots, kept_rows, channels]
        ("kept_rows", ctypes.c_int64),
        ("walks", ctypes.c_int64),
        ("num_walks", ctypes.c_int64),
        ("taken", ctypes.c_int64),  # parts that threads have taken: 0 at the start
    )


RULE, CONVOLUTION, WALK = np.dtype(NativeRule), np.dtype(NativeConvolution), np.dtype(NativeWalk)
_TAKEN, _DONE, _COPIED = NativeRule.taken.offset, NativeRule.done.offset, NativeRule.copied.offset
_CONV_TAKEN = NativeConvolution.taken.offset


# ---- what a forward does with a slot -------------------------------------------------------------------------------------------


@compiled
def walk_steps(parents: Any, spine: int, path: Any, saves: Any, steps: Any) -> tuple[int, int]:
    """Fills the steps of a walk: over kept rows, over the spine, and down the tree.

    A branch that is the last one below its row takes over the state of that row; a row without branches leaves none behind.

    Args:
        parents: [n] int32 of the tree's rows, parents first; -1: below the spine.
        spine: rows before the tree.
        path: [m] int64, kept rows to begin with.
        saves: [s, 2] int64: after how many rows of the spine the state is copied, and to which place; in order.
        steps: [m + spine + s + n, 4] int64.

    Returns:
        The number of steps and of buffers.
    """
    count = 0
    for row in path:
        steps[count] = (ADVANCE, row, 0, 0)
        count += 1
    save = 0
    for row in range(spine):
        steps[count] = (COMPUTE, row, 0, 0)
        count += 1
        while save < len(saves) and saves[save, 0] == row + 1:
            steps[count] = (SAVE, saves[save, 1], 0, 0)
            count, save = count + 1, save + 1
    nodes = len(parents)
    below, waiting = np.zeros(nodes, np.int64), np.empty(nodes, np.int64)
    for node in range(nodes):
        if parents[node] >= 0:
            below[parents[node]] += 1
    left, held, free = below.copy(), np.zeros(nodes, np.int64), np.empty(nodes + 1, np.int64)
    # The rows below each, linked.
    first, following = np.full(nodes, -1, np.int64), np.full(nodes, -1, np.int64)
    num_waiting = num_free = 0
    for node in range(nodes - 1, -1, -1):
        parent = parents[node]
        if parent < 0:
            waiting[num_waiting] = node
            num_waiting += 1
        else:
            following[node], first[parent] = first[parent], node
    buffers = 1
    while num_waiting:
        num_waiting -= 1
        node = waiting[num_waiting]
        parent = parents[node]
        source, last = 0, False
        if parent >= 0:
            left[parent] -= 1
            source, last = held[parent], left[parent] == 0
        target = -1
        if below[node]:
            if last:
                target = source
            elif num_free:
                num_free -= 1
                target = free[num_free]
            else:
                target = buffers
                buffers += 1
            held[node] = target
        elif last:
            free[num_free] = source
            num_free += 1
        steps[count] = (COMPUTE, spine + node, source, target)
        count += 1
        begin, child = num_waiting, first[node]
        while child >= 0:
            waiting[num_waiting] = child
            num_waiting, child = num_waiting + 1, following[child]
        waiting[begin:num_waiting] = waiting[begin:num_waiting][::-1].copy()
    return count, buffers


@compiled
def walk_taps(parents: Any, spine: int, path: Any, taps: Any, saves: Any, windows: Any) -> None:
    """Fills the rows before each row, and what the windows of the slot and of other places will hold.

    Codes: a row of the request in this forward, or below 0: -1 and what ``_column`` says.

    Args:
        parents: as in ``walk_steps``; so are ``spine``, ``path`` and ``saves``.
        taps: [rows, k] int64 to be filled, the nearest row first.
        windows: [s + 1, 1 + k] int64 to be filled but for the last place, which is set.
    """
    rows, reach = taps.shape
    for row in range(rows):
        before = row - 1
        if row >= spine:
            parent = parents[row - spine]
            before = spine - 1 if parent < 0 else spine + parent
        if reach:
            taps[row, 0] = before if before >= 0 else _past(0, path, reach)
            for tap in range(1, reach):
                taps[row, tap] = taps[before, tap - 1] if before >= 0 else _past(tap, path, reach)
    for at in range(len(windows)):
        end = spine
        if at < len(saves):
            end = saves[at, 0]
            windows[at, 0] = saves[at, 1]
        for tap in range(reach):
            row = end - 1 - tap
            windows[at, 1 + tap] = row if row >= 0 else _past(-1 - row, path, reach)


@compiled
def _past(back: int, path: Any, reach: int) -> int:
    """The code of what is so many rows before the last one that was committed before this forward."""
    if back < len(path):
        return -1 - (reach + path[len(path) - 1 - back])
    return -1 - (back - len(path))


# ---- rules ---------------------------------------------------------------------------------------------------------------------


@compiled
def _prepare(source: int, target: int, size: int, normalise: int, scale: np.float32, like: Any) -> None:
    """Writes a query or a key as float32, divided by its length or not, and scaled."""
    wide, factor = bytes_of(like), scale
    if normalise:
        squares = splat(_FLOAT)
        for first in range(0, size, WIDTH):
            numbers = load(source + first * wide, like)
            squares = multiply_add(numbers, numbers, squares)
        factor = scale * (_ONE / np.sqrt(total(squares) + np.float32(1e-6)))
    for first in range(0, size, WIDTH):
        store(target + first * 4, multiply(load(source + first * wide, like), splat(factor)), _FLOAT)


@compiled
def _four(
    source: int, target: int, key_dim: int, key: int, query: int, decay: Any, rate: Any, value: int, delta: int, skip: Any,
    output: int, like: Any, written: Any,
) -> None:  # fmt: skip
    """A row's step through a block of four vectors. Without a target no state is written, without an output nothing else is."""
    wide, step = bytes_of(like), BLOCK * 4
    v0, v1 = load(value, like), load(value + WIDTH * wide, like)
    v2, v3 = load(value + 2 * WIDTH * wide, like), load(value + 3 * WIDTH * wide, like)
    w0, w1, w2, w3 = v0, v1, v2, v3
    if delta:
        m0 = m1 = m2 = m3 = splat(_FLOAT)
        for at in range(key_dim):
            place, number = source + at * step, load_splat(key + at * 4)
            m0 = multiply_add(multiply(load(place, _FLOAT), decay), number, m0)
            m1 = multiply_add(multiply(load(place + WIDTH * 4, _FLOAT), decay), number, m1)
            m2 = multiply_add(multiply(load(place + 2 * WIDTH * 4, _FLOAT), decay), number, m2)
            m3 = multiply_add(multiply(load(place + 3 * WIDTH * 4, _FLOAT), decay), number, m3)
        w0, w1, w2, w3 = subtract(v0, m0), subtract(v1, m1), subtract(v2, m2), subtract(v3, m3)
    w0, w1, w2, w3 = multiply(w0, rate), multiply(w1, rate), multiply(w2, rate), multiply(w3, rate)
    o0 = o1 = o2 = o3 = splat(_FLOAT)
    if target == 0:
        for at in range(key_dim):
            place, number, asked = source + at * step, load_splat(key + at * 4), load_splat(query + at * 4)
            o0 = multiply_add(multiply_add(number, w0, multiply(load(place, _FLOAT), decay)), asked, o0)
            o1 = multiply_add(multiply_add(number, w1, multiply(load(place + WIDTH * 4, _FLOAT), decay)), asked, o1)
            o2 = multiply_add(multiply_add(number, w2, multiply(load(place + 2 * WIDTH * 4, _FLOAT), decay)), asked, o2)
            o3 = multiply_add(multiply_add(number, w3, multiply(load(place + 3 * WIDTH * 4, _FLOAT), decay)), asked, o3)
    elif output == 0:
        for at in range(key_dim):
            place, into, number = source + at * step, target + at * step, load_splat(key + at * 4)
            store(into, multiply_add(number, w0, multiply(load(place, _FLOAT), decay)), _FLOAT)
            store(into + WIDTH * 4, multiply_add(number, w1, multiply(load(place + WIDTH * 4, _FLOAT), decay)), _FLOAT)
            store(into + 2 * WIDTH * 4, multiply_add(number, w2, multiply(load(place + 2 * WIDTH * 4, _FLOAT), decay)), _FLOAT)
            store(into + 3 * WIDTH * 4, multiply_add(number, w3, multiply(load(place + 3 * WIDTH * 4, _FLOAT), decay)), _FLOAT)
    else:
        for at in range(key_dim):
            place, into = source + at * step, target + at * step
            number, asked = load_splat(key + at * 4), load_splat(query + at * 4)
            s0 = multiply_add(number, w0, multiply(load(place, _FLOAT), decay))
            s1 = multiply_add(number, w1, multiply(load(place + WIDTH * 4, _FLOAT), decay))
            s2 = multiply_add(number, w2, multiply(load(place + 2 * WIDTH * 4, _FLOAT), decay))
            s3 = multiply_add(number, w3, multiply(load(place + 3 * WIDTH * 4, _FLOAT), decay))
            store(into, s0, _FLOAT)
            store(into + WIDTH * 4, s1, _FLOAT)
            store(into + 2 * WIDTH * 4, s2, _FLOAT)
            store(into + 3 * WIDTH * 4, s3, _FLOAT)
            o0, o1 = multiply_add(s0, asked, o0), multiply_add(s1, asked, o1)
            o2, o3 = multiply_add(s2, asked, o2), multiply_add(s3, asked, o3)
    if output:
        own = bytes_of(written)
        store(output, multiply_add(skip, v0, o0), written)
        store(output + WIDTH * own, multiply_add(skip, v1, o1), written)
        store(output + 2 * WIDTH * own, multiply_add(skip, v2, o2), written)
        store(output + 3 * WIDTH * own, multiply_add(skip, v3, o3), written)


@compiled
def _one(
    source: int, target: int, key_dim: int, key: int, query: int, decay: Any, rate: Any, value: int, delta: int, skip: Any,
    output: int, like: Any, written: Any,
) -> None:  # fmt: skip
    """As ``_four``, through a block of one vector."""
    step = WIDTH * 4
    v0 = load(value, like)
    w0 = v0
    if delta:
        m0 = splat(_FLOAT)
        for at in range(key_dim):
            m0 = multiply_add(multiply(load(source + at * step, _FLOAT), decay), load_splat(key + at * 4), m0)
        w0 = subtract(v0, m0)
    w0 = multiply(w0, rate)
    o0 = splat(_FLOAT)
    for at in range(key_dim):
        s0 = multiply_add(load_splat(key + at * 4), w0, multiply(load(source + at * step, _FLOAT), decay))
        if target:
            store(target + at * step, s0, _FLOAT)
        o0 = multiply_add(s0, load_splat(query + at * 4), o0)
    if output:
        store(output, multiply_add(skip, v0, o0), written)


@compiled
def _float_at(address: int) -> np.float32:
    return carray(address_of(address), 1, np.float32)[0]


@compiled
def _walk(rule: Any, walk: Any, head: int, like: Any, written: Any) -> None:
    """All steps of one head of a request."""
    key_dim, value_dim, wide = rule.key_dim, rule.value_dim, bytes_of(like)
    block = BLOCK if value_dim % BLOCK == 0 else WIDTH
    head_bytes, block_bytes, own = key_dim * value_dim * 4, key_dim * block * 4, head // rule.group
    slot = rule.states + walk.slot * rule.place_bytes + head * head_bytes
    kept = rule.kept + walk.slot * rule.kept_rows * rule.row_bytes
    key_bytes, value_bytes = rule.heads // rule.group * key_dim * wide, rule.heads * value_dim * wide
    if walk.fresh:
        carray(address_of(slot), key_dim * value_dim, np.float32)[:] = 0
    buffers = np.empty((walk.buffers - 1) * key_dim * value_dim, np.float32)
    keys, queries = np.empty((_TILE, key_dim), np.float32), np.empty((_TILE, key_dim), np.float32)
    decays, rates, values = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.int64)
    skip = splat(_float_at(rule.skip + head * 4) if rule.skip else _FLOAT)
    for begin in range(0, walk.num_steps, _TILE):
        count = min(_TILE, walk.num_steps - begin)
        for own_step in range(count):
            step = walk.steps + (begin + own_step) * 32
            kind, row = int_at(step), int_at(step + 8)
            if kind == SAVE:
                continue
            if kind == ADVANCE:
                source = kept + row * rule.row_bytes
                key, value = source + own * key_dim * wide, source + key_bytes + head * value_dim * wide
                numbers = source + key_bytes + value_bytes + head * 4
                decay, rate = _float_at(numbers), _float_at(numbers + rule.heads * 4)
            else:
                row += walk.offset
                key = rule.key + row * rule.key_row + own * key_dim * wide
                value = rule.value + row * rule.value_row + head * value_dim * wide
                query = rule.query + row * rule.query_row + own * key_dim * wide
                _prepare(query, queries[own_step].ctypes.data, key_dim, rule.normalise, np.float32(rule.scale), like)
                decay = _float_at(rule.decay + (row * rule.heads + head) * 4)
                rate = _float_at(rule.rate + (row * rule.heads + head) * 4)
            _prepare(key, keys[own_step].ctypes.data, key_dim, rule.normalise, _ONE, like)
            if rule.delta == 0:
                x = float(decay) + float(_float_at(rule.bias + head * 4))
                rate = np.float32(min(max(max(x, 0.0) + math.log1p(math.exp(-abs(x))), rule.least), rule.most))
                decay = rate * _float_at(rule.rates + head * 4)
            decays[own_step], rates[own_step] = np.float32(math.exp(np.float64(decay))), rate
            values[own_step] = value
        for part in range(value_dim // block):
            for own_step in range(count):
                step = walk.steps + (begin + own_step) * 32
                kind, row, source, target = int_at(step), int_at(step + 8), int_at(step + 16), int_at(step + 24)
                here = slot + part * block_bytes
                if kind == SAVE:
                    copy_bytes(here, here + (row - walk.slot) * rule.place_bytes, block_bytes)
                    continue
                spare = buffers.ctypes.data + part * block_bytes
                at = here if source == 0 else spare + (source - 1) * head_bytes
                into = 0 if target < 0 else here if target == 0 else spare + (target - 1) * head_bytes
                output = 0
                if kind == COMPUTE:
                    output = (((walk.offset + row) * rule.heads + head) * value_dim + part * block) * bytes_of(written)
                    output += rule.output
                key, query = keys[own_step].ctypes.data, queries[own_step].ctypes.data
                decay, rate = splat(decays[own_step]), splat(rates[own_step])
                value = values[own_step] + part * block * wide
                if block == BLOCK:
                    _four(at, into, key_dim, key, query, decay, rate, value, rule.delta, skip, output, like, written)
                else:
                    _one(at, into, key_dim, key, query, decay, rate, value, rule.delta, skip, output, like, written)


@compiled
def _keep_row(rule: Any, walk: Any, kept_row: int, like: Any) -> None:
    """Keeps the inputs of a row for the next forward."""
    row, wide = walk.offset + walk.keep_first + kept_row, bytes_of(like)
    target = rule.kept + (walk.slot * rule.kept_rows + kept_row) * rule.row_bytes
    key_bytes, value_bytes = rule.heads // rule.group * rule.key_dim * wide, rule.heads * rule.value_dim * wide
    copy_bytes(rule.key + row * rule.key_row, target, key_bytes)
    copy_bytes(rule.value + row * rule.value_row, target + key_bytes, value_bytes)
    target += key_bytes + value_bytes
    copy_bytes(rule.decay + row * rule.heads * 4, target, rule.heads * 4)
    copy_bytes(rule.rate + row * rule.heads * 4, target + rule.heads * 4, rule.heads * 4)


@compiled
def _run_rule(job: Any, like: Any, written: Any) -> None:
    """What every thread does: takes heads; when all are computed, and nobody needs what was kept before, keeps inputs of rows."""
    rules = carray(job, 1)
    rule, at = rules[0], rules.ctypes.data
    walks = carray(address_of(rule.walks), rule.num_walks, WALK)
    items = rule.num_walks * rule.heads
    while True:
        item = claim(at + _TAKEN)
        if item >= items:
            break
        _walk(rule, walks[item // rule.heads], item % rule.heads, like, written)
        claim(at + _DONE)
    wait_for(at + _DONE, items)
    row, number, begun = claim(at + _COPIED), 0, 0  # the kept rows before those of walk ``number``
    while number < rule.num_walks:
        if row - begun < walks[number].keep_count:
            _keep_row(rule, walks[number], row - begun, like)
            row = claim(at + _COPIED)
        else:
            begun += walks[number].keep_count
            number += 1


# ---- convolutions --------------------------------------------------------------------------------------------------------------


@compiled
def _column(conv: Any, walk: Any, code: int, wide: int) -> int:
    """The address of a row's numbers: of the forward where the code is not below 0; else of the window of the slot, -1 being the
    nearest row, and behind the window of the kept rows."""
    if code >= 0:
        return conv.input + (walk.offset + code) * conv.input_row
    back = -1 - code
    if back < conv.taps:
        return conv.states + walk.slot * conv.place_bytes + back * conv.channels * wide
    return conv.kept + (walk.slot * conv.kept_rows + back - conv.taps) * conv.channels * wide


@compiled
def _convolve(conv: Any, walk: Any, first: int, last: int, like: Any) -> None:
    """Some channels of all rows of a request; then the windows, and what is kept."""
    wide, taps = bytes_of(like), conv.taps
    if walk.fresh:
        for tap in range(taps):
            at = conv.states + walk.slot * conv.place_bytes + tap * conv.channels * wide
            for channel in range(first, last, WIDTH):
                store(at + channel * wide, splat(_FLOAT), like)
    for row in range(walk.rows):
        codes = walk.taps + row * walk.most_taps * 8
        own = conv.input + (walk.offset + row) * conv.input_row
        output = conv.output + (walk.offset + row) * conv.channels * wide
        for channel in range(first, last, WIDTH):
            place, weight = channel * wide, conv.weight + channel * 4
            sums = load(conv.bias + channel * 4, _FLOAT) if conv.bias else splat(_FLOAT)
            for tap in range(taps - 1, -1, -1):
                numbers = load(_column(conv, walk, int_at(codes + tap * 8), wide) + place, like)
                sums = multiply_add(numbers, load(weight + (taps - 1 - tap) * conv.channels * 4, _FLOAT), sums)
            sums = multiply_add(load(own + place, like), load(weight + taps * conv.channels * 4, _FLOAT), sums)
            sums = stored(sums, like)
            if conv.silu:
                sums = silu(sums)
            store(output + place, sums, like)
    held = np.empty(taps * (last - first), np.float32)
    for number in range(walk.num_windows):
        window = walk.windows + number * (1 + walk.most_taps) * 8
        target = conv.states + int_at(window) * conv.place_bytes
        for tap in range(taps):
            source = _column(conv, walk, int_at(window + (1 + tap) * 8), wide)
            for channel in range(first, last, WIDTH):
                numbers = load(source + channel * wide, like)
                store(held.ctypes.data + (tap * (last - first) + channel - first) * 4, numbers, _FLOAT)
        for tap in range(taps):
            for channel in range(first, last, WIDTH):
                numbers = load(held.ctypes.data + (tap * (last - first) + channel - first) * 4, _FLOAT)
                store(target + (tap * conv.channels + channel) * wide, numbers, like)
    for kept_row in range(walk.keep_count):
        source = conv.input + (walk.offset + walk.keep_first + kept_row) * conv.input_row + first * wide
        target = conv.kept + ((walk.slot * conv.kept_rows + kept_row) * conv.channels + first) * wide
        copy_bytes(source, target, (last - first) * wide)


@compiled
def _run_convolution(job: Any, like: Any) -> None:
    """What every thread does: takes some channels of a request until none are left."""
    convs = carray(job, 1)
    conv, at = convs[0], convs.ctypes.data
    walks = carray(address_of(conv.walks), conv.num_walks, WALK)
    parts = (conv.channels + _CHANNELS - 1) // _CHANNELS
    while True:
        item = claim(at + _CONV_TAKEN)
        if item >= parts * conv.num_walks:
            break
        first = item % parts * _CHANNELS
        _convolve(conv, walks[item // parts], first, min(first + _CHANNELS, conv.channels), like)


_RULE_SIGNATURE = types.void(types.CPointer(from_dtype(RULE)))
_CONV_SIGNATURE = types.void(types.CPointer(from_dtype(CONVOLUTION)))


@cache
def rule_entry(dtype: str, written: str) -> Any:
    """The C function ``void (NativeRule *)`` that every thread calls, with its ``address``; see ``native_attention.entry_point``.

    Args:
        dtype: of queries, keys and values.
        written: of the outputs.
    """
    like, output = TYPES[dtype], TYPES[written]

    def run(job: Any) -> None:
        _run_rule(job, like, output)

    run.__qualname__ = f"run_rule_{dtype}_{written}"  # by which it is kept on disk
    return compiled_callback(_RULE_SIGNATURE)(run)


@cache
def convolution_entry(dtype: str) -> Any:
    """The C function ``void (NativeConvolution *)`` that every thread calls, as ``rule_entry``."""
    like = TYPES[dtype]

    def run(job: Any) -> None:
        _run_convolution(job, like)

    run.__qualname__ = f"run_convolution_{dtype}"
    return compiled_callback(_CONV_SIGNATURE)(run)
