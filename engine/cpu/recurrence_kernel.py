"""Recurrent rules in compiled code, along the paths of ``walk_kernel``; one form serves prefill, decoding and draft trees.

Two rules are computed, both in float32 whatever the model's dtype, over a state S of [key_dim, value_dim] for each head:

- the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464): ``S <- d S + k (b (v - (d S)^T k))^T``, and ``S^T q``;
- the state space rule of Mamba-2 (Dao and Gu, arXiv 2405.21060), with B, C, x and dt as k, q, v and b: ``S <- d S + k (b v)^T``.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from outrider.decoding.jit import compiled, compiled_callback
from outrider.engine.cpu.simd import (
    TYPES,
    WIDTH,
    address_of,
    bytes_of,
    claim,
    copy_bytes,
    count_on,
    int_at,
    load,
    load_splat,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    total,
    wait_for,
)
from outrider.engine.cpu.walk_kernel import ADVANCE, COMPUTE, SAVE, WALK

BLOCK = 4 * WIDTH  # values of a head whose states share the L1 cache, if value_dim is a multiple
_TILE = 16  # steps of a walk per block
_FLOAT = np.float32(0)  # stands for its type
_ONE = np.float32(1)


class NativeRule(ctypes.Structure):
    """Job of a rule; addresses are of the first element, strides in bytes; the elements of a row are contiguous."""

    _fields_ = (
        ("query", ctypes.c_int64),  # [rows, key_heads, key_dim]
        ("query_row", ctypes.c_int64),
        ("key", ctypes.c_int64),  # [rows, key_heads, key_dim]
        ("key_row", ctypes.c_int64),
        ("value", ctypes.c_int64),  # [rows, heads, value_dim]
        ("value_row", ctypes.c_int64),
        ("decay", ctypes.c_int64),  # [rows, heads] float32: logarithms of d; with ``delta`` 0 the steps dt before ``bias``
        ("rate", ctypes.c_int64),  # [rows, heads] float32: b; with ``delta`` 0 as ``decay``
        ("output", ctypes.c_int64),  # [rows, heads, value_dim], with ``delta`` 0 float32
        ("states", ctypes.c_int64),  # per place, [heads, value_dim / block, key_dim, block] float32
        ("place_bytes", ctypes.c_int64),
        ("kept", ctypes.c_int64),  # [slots, kept_rows, row_bytes]: key, value, decay and rate of rows
        ("kept_rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("group", ctypes.c_int64),  # heads per key head
        ("key_dim", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("value_dim", ctypes.c_int64),  # a multiple of ``WIDTH``
        ("delta", ctypes.c_int64),  # 1: gated delta rule; 0: state space rule
        ("normalise", ctypes.c_int64),  # whether queries and keys are divided by their norm
        ("scale", ctypes.c_double),  # of the queries
        ("bias", ctypes.c_int64),  # with ``delta`` 0, [heads] float32: bias of the steps; the next two are alike
        ("rates", ctypes.c_int64),  # A
        ("skip", ctypes.c_int64),  # D
        ("least", ctypes.c_double),  # bounds of the steps
        ("most", ctypes.c_double),
        ("walks", ctypes.c_int64),  # address of ``NativeWalk``
        ("num_walks", ctypes.c_int64),
        ("taken", ctypes.c_int64),  # heads that threads have claimed; starts at 0, as the next two
        ("done", ctypes.c_int64),  # heads that are computed
        ("copied", ctypes.c_int64),  # rows whose inputs threads have claimed to keep
    )


RULE = np.dtype(NativeRule)
_TAKEN, _DONE, _COPIED = NativeRule.taken.offset, NativeRule.done.offset, NativeRule.copied.offset


@compiled
def _prepare(source: int, target: int, size: int, normalise: int, scale: np.float32, like: Any) -> None:
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
    """Advance a row's state through a block of four vectors; target 0: store no state, output 0: write no output."""
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
            place, number, queried = source + at * step, load_splat(key + at * 4), load_splat(query + at * 4)
            o0 = multiply_add(multiply_add(number, w0, multiply(load(place, _FLOAT), decay)), queried, o0)
            o1 = multiply_add(multiply_add(number, w1, multiply(load(place + WIDTH * 4, _FLOAT), decay)), queried, o1)
            o2 = multiply_add(multiply_add(number, w2, multiply(load(place + 2 * WIDTH * 4, _FLOAT), decay)), queried, o2)
            o3 = multiply_add(multiply_add(number, w3, multiply(load(place + 3 * WIDTH * 4, _FLOAT), decay)), queried, o3)
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
            number, queried = load_splat(key + at * 4), load_splat(query + at * 4)
            s0 = multiply_add(number, w0, multiply(load(place, _FLOAT), decay))
            s1 = multiply_add(number, w1, multiply(load(place + WIDTH * 4, _FLOAT), decay))
            s2 = multiply_add(number, w2, multiply(load(place + 2 * WIDTH * 4, _FLOAT), decay))
            s3 = multiply_add(number, w3, multiply(load(place + 3 * WIDTH * 4, _FLOAT), decay))
            store(into, s0, _FLOAT)
            store(into + WIDTH * 4, s1, _FLOAT)
            store(into + 2 * WIDTH * 4, s2, _FLOAT)
            store(into + 3 * WIDTH * 4, s3, _FLOAT)
            o0, o1 = multiply_add(s0, queried, o0), multiply_add(s1, queried, o1)
            o2, o3 = multiply_add(s2, queried, o2), multiply_add(s3, queried, o3)
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
    """Do the same as ``_four`` for a block of one vector."""
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
    # The inputs of some steps are prepared at once; then each block of the state goes through all of these steps in the cache.
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
                # The step is a softplus, which cannot overflow in this form; its product with A is the logarithm of the decay.
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
    row, wide = walk.offset + walk.keep_first + kept_row, bytes_of(like)
    target = rule.kept + (walk.slot * rule.kept_rows + kept_row) * rule.row_bytes
    key_bytes, value_bytes = rule.heads // rule.group * rule.key_dim * wide, rule.heads * rule.value_dim * wide
    copy_bytes(rule.key + row * rule.key_row, target, key_bytes)
    copy_bytes(rule.value + row * rule.value_row, target + key_bytes, value_bytes)
    target += key_bytes + value_bytes
    copy_bytes(rule.decay + row * rule.heads * 4, target, rule.heads * 4)
    copy_bytes(rule.rate + row * rule.heads * 4, target + rule.heads * 4, rule.heads * 4)


@compiled
def walk_heads(rule: Any, walks: Any, taken: int, like: Any, written: Any) -> int:
    """Compute heads of requests until none is left; return the number computed by this thread."""
    done = 0
    while True:
        item = claim(taken)
        if item >= len(walks) * rule.heads:
            return done
        _walk(rule, walks[item // rule.heads], item % rule.heads, like, written)
        done += 1


@compiled
def keep_rows(rule: Any, walks: Any, taken: int, like: Any) -> int:
    """Keep inputs of rows until none is left; return the number kept by this thread."""
    # All heads must be computed before, because they read what was kept before.
    row, number, begun, done = claim(taken), 0, 0, 0  # number of kept rows before walk ``number``
    while number < len(walks):
        if row - begun < walks[number].keep_count:
            _keep_row(rule, walks[number], row - begun, like)
            row, done = claim(taken), done + 1
        else:
            begun += walks[number].keep_count
            number += 1
    return done


@compiled
def kept_rows(walks: Any) -> int:
    """Return the number of kept rows."""
    count = 0
    for number in range(len(walks)):
        count += walks[number].keep_count
    return count


@compiled
def _run(job: Any, like: Any, written: Any) -> None:
    rules = carray(job, 1)
    rule, at = rules[0], rules.ctypes.data
    walks = carray(address_of(rule.walks), rule.num_walks, WALK)
    count_on(at + _DONE, walk_heads(rule, walks, at + _TAKEN, like, written))
    wait_for(at + _DONE, rule.num_walks * rule.heads)
    keep_rows(rule, walks, at + _COPIED, like)


_SIGNATURE = types.void(types.CPointer(from_dtype(RULE)))


@cache
def rule_entry(dtype: str, written: str) -> Any:
    """Return the C function ``void (NativeRule *)`` for input and output dtypes; see ``attention_kernel.entry_point``."""
    like, output = TYPES[dtype], TYPES[written]

    def run(job: Any) -> None:
        _run(job, like, output)

    run.__qualname__ = f"run_{dtype}_{written}"  # key of the cache on disk
    return compiled_callback(_SIGNATURE)(run)
