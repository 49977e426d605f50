"""Linear layers that read a weight once for up to twelve rows: every output has the same bits whatever rows are beside it.

A library's product takes another kernel for one row than for two, and adds up in another order. Here each output of each row is
one lane of a register, to which the products are added one after another in the order of the inner size. How many rows share a
tile decides only how often a weight is loaded.

Weights lie in panels of ``PANEL`` outputs, [outputs / PANEL, size, PANEL], so that they are read as they lie. In bfloat16 two
numbers of an output lie side by side, [outputs / PANEL, size / 2, PANEL, 2]: processors with AVX512-BF16 multiply such pairs,
and those with AMX tiles of them, sixteen rows with sixteen outputs, whose every output is added up by itself as well.

Types: bfloat16 and float16, both with sums in float32, and float32.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types
from numba.core import cgutils

from decoding.jit import compiled, compiled_callback
from engine.forward.cpu.lanes import (
    AHEAD,
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LIKE,
    LONG,
    PAIRS,
    TILE_ROWS,
    TILES,
    TYPES,
    WIDTH,
    add,
    by_count,
    bytes_of,
    claim,
    copy_bytes,
    load,
    multiply,
    multiply_add,
    prefetch,
    primitive,
    silu,
    splat,
    spread,
    store,
    stored,
)
from engine.forward.cpu.products.native_blocks import Forms, packed_bytes, packed_products, packed_rows, unpack
from engine.forward.cpu.products.row_linear import COUNTER, PANEL, STEPS

_PANEL_BYTES = PANEL * 4  # float32 sums of a row and a panel
MOST_ROWS = 32 if TILES else TILE_ROWS  # of ``rows_at_once``, whatever the type
_TILE = 32  # bfloat16 numbers of a row in a tile
_FLOAT = np.float32(0)  # names the type


class Linear(ctypes.Structure):
    """A layer's work. Addresses are those of the first element, strides count bytes; the numbers of a row lie side by side."""

    _fields_ = (
        ("input", ctypes.c_int64),  # [rows, size]
        ("input_stride", ctypes.c_int64),
        ("weight", ctypes.c_int64),  # panels
        ("bias", ctypes.c_int64),  # [outputs, filled up to whole panels], 0 without one
        ("up", ctypes.c_int64),  # panels: the output is silu(weight's) * up's; 0 where it is weight's alone
        ("up_bias", ctypes.c_int64),
        ("added", ctypes.c_int64),  # [rows, outputs] as the output: is added to it; 0 where nothing is
        ("output", ctypes.c_int64),  # [rows, outputs]
        ("output_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),  # a multiple of ``STEPS``, in bfloat16 of twice as many
        ("outputs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("taken", ctypes.c_int64),  # address of ``threads + 1`` counters, all 0, the last of which numbers the threads
        ("form", ctypes.c_int64),  # number of the format of the weight's panels; 0 where they are of the type
        ("up_form", ctypes.c_int64),
        ("scratch", ctypes.c_int64),  # for each thread room for two unpacked panels, where there are packed ones
        ("factor", ctypes.c_double),  # that the output is multiplied with before it is added; 0: with none
    )


def _emit_products(
    b: Any, rows: int, input: Any, stride: Any, panel: Any, steps: Any, sums_at: Any, sums_stride: Any, ahead_at: Any,
    ahead_step: Any, like: Any,
) -> None:  # fmt: skip
    """Code for ``products`` of so many rows with one panel."""
    step_bytes, wide = PANEL * (2 if like == types.int16 else 4), 4 if like != types.int16 else 2
    before, head, loop = b.block, b.append_basic_block("head"), b.append_basic_block("products")
    after = b.append_basic_block("after")
    inputs = [b.add(input, b.mul(stride, LONG(row))) for row in range(rows)]
    zero = ir.Constant(FLOATS, [0.0] * WIDTH)
    b.branch(head)
    b.position_at_end(head)
    step, sums = b.phi(LONG), [b.phi(FLOATS) for _ in range(2 * rows)]
    step.add_incoming(LONG(0), before)
    b.cbranch(b.icmp_signed("<", step, steps), loop, after)
    b.position_at_end(loop)
    added: list[Any] = list(sums)
    weight = b.add(panel, b.mul(step, LONG(step_bytes)))
    number = b.mul(step, LONG(wide))
    ahead = b.add(ahead_at, b.mul(step, ahead_step))
    for offset in range(STEPS):
        place = b.add(weight, LONG(offset * step_bytes))
        for line in range(0, step_bytes, 64):
            prefetch(b, b.add(ahead, LONG(line)))
        ahead = b.add(ahead, ahead_step)
        weights = [_weights(b, like, b.add(place, LONG(half * step_bytes // 2))) for half in range(2)]
        for row, address in enumerate(inputs):
            numbers = _spread(b, like, b.add(b.add(address, number), LONG(offset * wide)))
            for half in range(2):
                added[2 * row + half] = _multiply_add(b, like, numbers, weights[half], added[2 * row + half])
    step.add_incoming(b.add(step, LONG(STEPS)), loop)
    for one, new in zip(sums, added, strict=True):
        one.add_incoming(zero, before)
        one.add_incoming(new, loop)
    b.branch(head)
    b.position_at_end(after)
    for place, total in enumerate(sums):
        target = b.add(b.add(sums_at, b.mul(sums_stride, LONG(place // 2))), LONG(place % 2 * WIDTH * 4))
        b.store(total, b.inttoptr(target, FLOATS.as_pointer()), align=4)


def _weights(builder: Any, like: Any, address: Any) -> tuple[Any, ...]:
    """Half a panel's numbers of a step: one register of float32, or of pairs of bfloat16 as they are or as two registers."""
    b = builder
    if like != types.uint16:
        return (load.emit(b, address, like),)
    return _parts(b, b.load(b.inttoptr(address, INTS.as_pointer()), align=4))


def _parts(builder: Any, pairs: Any) -> tuple[Any, ...]:
    """Pairs of bfloat16 as they are multiplied."""
    if PAIRS:
        return (pairs,)
    low = builder.shl(pairs, ir.Constant(INTS, [16] * WIDTH))
    high = builder.and_(pairs, ir.Constant(INTS, [0xFFFF0000] * WIDTH))
    return builder.bitcast(low, FLOATS), builder.bitcast(high, FLOATS)


def _spread(builder: Any, like: Any, address: Any) -> tuple[Any, ...]:
    """A row's number, or pair, in all lanes."""
    b = builder
    if like == types.uint16:
        return _parts(b, spread(b, b.load(b.inttoptr(address, INT.as_pointer()), align=2), INTS))
    kind = ir.HalfType() if like == types.int16 else FLOAT
    number = b.load(b.inttoptr(address, kind.as_pointer()), align=2)
    return (spread(b, number if like == types.float32 else b.fpext(number, FLOAT)),)


def _multiply_add(builder: Any, like: Any, left: tuple[Any, ...], right: tuple[Any, ...], addend: Any) -> Any:
    if like == types.uint16 and PAIRS:
        kind = ir.FunctionType(FLOATS, (FLOATS, INTS, INTS))
        multiply = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", fnty=kind)
        return builder.call(multiply, (addend, left[0], right[0]))
    for one, other in zip(left, right, strict=True):
        addend = multiply_add.emit(builder, one, other, addend)
    return addend


def _call(b: Any, name: str, *given: Any) -> None:
    """Calls an instruction of the processor's tiles."""
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
    b.call(b.module.declare_intrinsic(f"llvm.x86.{name}", fnty=kind), given)


@primitive(types.void, types.int64, LIKE)
def shape_tiles(builder: Any, rows: Any, like: Any) -> None:
    """Before ``products`` of so many rows, up to ``rows_at_once``: what tiles hold, which takes as long as a panel's products.

    Tiles 0 and 1 are either half of a panel; of each sixteen rows a tile is the rows, and two are their sums with the halves.
    """
    if not TILES or like != types.uint16:
        return
    b, most = builder, LONG(16)
    with b.goto_entry_block():
        shape = b.alloca(ir.ArrayType(LONG, 8))
    # Palette 1, bytes in the rows of each tile as 16 bits, and how many rows as 8: sixteen pairs of numbers of a half.
    first = b.select(b.icmp_unsigned("<", rows, most), rows, most)
    counts = b.add(LONG(0x1010), b.mul(first, LONG(0x010101 << 16)))
    counts = b.add(counts, b.mul(b.sub(rows, first), LONG(0x010101 << 40)))
    many = b.icmp_unsigned(">", rows, most)
    lines = LONG(0x0040004000400040)
    for place, value in enumerate(
        (LONG(1), LONG(0), lines, b.select(many, lines, LONG(0x40)), LONG(0), LONG(0), counts, LONG(0))
    ):
        b.store(value, b.gep(shape, [INT(0), INT(place)]))
    _call(b, "ldtilecfg", b.bitcast(shape, BYTE.as_pointer()))


@primitive(types.void, LIKE)
def release_tiles(builder: Any, like: Any) -> None:
    """After the last ``products``."""
    if TILES and like == types.uint16:
        _call(builder, "tilerelease")


def _emit_tiles(
    b: Any, input: Any, stride: Any, panel: Any, panels: Any, size: Any, sums: Any, sums_stride: Any, ahead: Any,
    ahead_step: Any, blocks: int,
) -> None:  # fmt: skip
    """Code for ``products`` of one to sixteen rows, or of more in two blocks of sixteen and less; ``size`` is a multiple of
    ``_TILE``. A row's products with a tile are added to its sum together: the even ones' sum and the odd ones', whatever rows
    are beside it.
    """

    def call(name: str, *given: Any) -> None:
        _call(b, name, *given)

    def at(address: Any) -> Any:
        return b.inttoptr(address, BYTE.as_pointer())

    halves = [(block, half) for block in range(blocks) for half in range(2)]
    with cgutils.for_range(b, panels, intp=LONG) as each:
        before = b.mul(each.index, b.mul(size, LONG(PANEL * 2)))
        own_panel, own_ahead = b.add(panel, before), b.add(ahead, before)
        for block, half in halves:
            call("tilezero", BYTE(3 + 3 * block + half))
        with cgutils.for_range(b, b.lshr(size, LONG(_TILE.bit_length() - 1)), intp=LONG) as loop:
            weight = b.add(own_panel, b.mul(loop.index, LONG(_TILE * PANEL * 2)))
            number = b.add(input, b.mul(loop.index, LONG(_TILE * 2)))
            later = b.add(own_ahead, b.mul(b.mul(loop.index, LONG(_TILE // 2)), ahead_step))
            for half in range(2):
                call("tileloadd64", BYTE(half), at(b.add(weight, LONG(half * 64))), LONG(PANEL * 4))
                for _ in range(_TILE // 4):
                    for line in range(0, PANEL * 4, 64):
                        prefetch(b, b.add(later, LONG(line)))
                    later = b.add(later, ahead_step)
            for block in range(blocks):
                first = 2 + 3 * block
                call("tileloadd64", BYTE(first), at(b.add(number, b.mul(stride, LONG(16 * block)))), stride)
                for half in range(2):
                    call("tdpbf16ps", BYTE(first + 1 + half), BYTE(first), BYTE(half))
        target = b.add(sums, b.mul(each.index, LONG(_PANEL_BYTES)))
        for block, half in halves:
            place = b.add(b.add(target, b.mul(sums_stride, LONG(16 * block))), LONG(half * 64))
            call("tilestored64", BYTE(3 + 3 * block + half), at(place), sums_stride)


@primitive(types.void, *[types.int64] * 10, LIKE)
def products(
    builder: Any, rows: Any, input: Any, stride: Any, panel: Any, panels: Any, size: Any, sums: Any, sums_stride: Any, ahead: Any,
    ahead_step: Any, like: Any,
) -> None:  # fmt: skip
    """Products of up to ``rows_at_once`` rows with panels that lie one behind another, [rows, panels * ``PANEL``] float32 at
    ``sums``, whose rows are ``sums_stride`` bytes apart. ``shape_tiles`` is called before.

    What comes later is asked for beside them: ``ahead`` and, with each step, ``ahead_step`` bytes on.
    """
    b, taken = builder, LONG(PANEL * (4 if like == types.float32 else 2))
    steps = b.lshr(size, LONG(int(like == types.uint16)))

    def by_rows(count: Any, first: Any) -> None:
        source, into = b.add(input, b.mul(first, stride)), b.add(sums, b.mul(first, sums_stride))
        with cgutils.for_range(b, panels, intp=LONG) as each:
            before = b.mul(each.index, b.mul(size, taken))
            own_panel, own_ahead = b.add(panel, before), b.add(ahead, before)
            target = b.add(into, b.mul(each.index, LONG(_PANEL_BYTES)))
            by_count(
                b, count, TILE_ROWS,
                lambda number: _emit_products(
                    b, number, source, stride, own_panel, steps, target, sums_stride, own_ahead, ahead_step, like
                ),
            )  # fmt: skip

    if not TILES or like != types.uint16:
        by_rows(rows, LONG(0))
        return
    with b.if_else(b.icmp_unsigned("==", b.and_(size, LONG(_TILE - 1)), LONG(0))) as (tiles, rest):
        with tiles:
            filled = b.lshr(b.add(rows, LONG(15)), LONG(4))  # none where there are no rows
            for blocks in (1, 2):
                with b.if_then(b.icmp_unsigned("==", filled, LONG(blocks))):
                    _emit_tiles(b, input, stride, panel, panels, size, sums, sums_stride, ahead, ahead_step, blocks)
        with rest, cgutils.for_range_slice(b, LONG(0), rows, LONG(TILE_ROWS), intp=LONG) as (first, _):
            left = b.sub(rows, first)
            by_rows(b.select(b.icmp_signed("<", left, LONG(TILE_ROWS)), left, LONG(TILE_ROWS)), first)


@primitive(types.int64, LIKE)
def rows_at_once(builder: Any, like: Any) -> Any:
    """Rows that ``products`` takes at most."""
    return LONG(MOST_ROWS if like == types.uint16 else TILE_ROWS)


@primitive(types.int64, LIKE)
def piece_of(builder: Any, like: Any) -> Any:
    """Bytes of an output that lie side by side in a panel."""
    return LONG(2 if like == types.int16 else 4)


@compiled
def _finish(job: Any, row: int, rows: int, first: int, sums: int, ups: int, like: Any) -> None:
    """Makes outputs of the sums of some rows and a panel, rounded where modules of torch round, and writes them."""
    size = bytes_of(like)
    for own in range(rows):
        for half in range(0, min(PANEL, job.outputs - first), WIDTH):
            place = (first + half) * size
            numbers = _with_bias(sums + own * _PANEL_BYTES + half * 4, job.bias, place, like)
            if job.up:
                up = _with_bias(ups + own * _PANEL_BYTES + half * 4, job.up_bias, place, like)
                numbers = multiply(stored(silu(numbers), like), up)
            if job.factor:
                numbers = multiply(stored(numbers, like), splat(np.float32(job.factor)))
            target = (row + own) * job.output_stride + place
            if first + half + WIDTH <= job.outputs:
                if job.added:
                    numbers = add(stored(numbers, like), load(job.added + target, like))
                store(job.output + target, numbers, like)
            else:  # the last ones of a layer that is no multiple: what is behind them belongs to others
                left = (job.outputs - first - half) * size
                if job.added:
                    copy_bytes(job.added + target, ups, left)
                    numbers = add(stored(numbers, like), load(ups, like))
                store(ups, numbers, like)
                copy_bytes(ups, job.output + target, left)


@compiled
def _with_bias(sums: int, bias: int, place: int, like: Any) -> Any:
    """Sixteen sums and their biases, rounded."""
    numbers = load(sums, _FLOAT)
    if bias:
        numbers = add(numbers, load(bias + place, like))
    return stored(numbers, like)


@compiled
def panels(job: Any) -> int:
    """How many panels a layer has."""
    return (job.outputs + PANEL - 1) // PANEL


@compiled
def multiply_rows(job: Any, rows: int, thread: int, threads: int, taken: int, forms: Any, like: Any) -> int:
    """What every thread does: its own part of the panels, then what is left of the others'; returns how many it computed."""
    return _take_panels(job, rows, thread, threads, taken, np.empty(2 * MOST_ROWS * PANEL, np.float32), forms, like)


@compiled
def _take_panels(job: Any, rows: int, thread: int, threads: int, taken: int, scratch: Any, forms: Any, like: Any) -> int:
    """See ``multiply_rows``. An array lives as long as a call that has it; who takes its address and no more loses it."""
    count, done, sums = panels(job), 0, scratch.ctypes.data
    ups, most = sums + MOST_ROWS * _PANEL_BYTES, rows_at_once(like)
    blocks, room = max(1, (rows + most - 1) // most), job.size * PANEL * bytes_of(like)
    unpacked = job.scratch + 2 * thread * room
    at_once, shaped = rows <= packed_rows(forms, like), 0
    weight_bytes, up_bytes = _panel_bytes(job.form, job.size, forms, like), _panel_bytes(job.up_form, job.size, forms, like)
    for turn in range(threads):
        part = (thread + turn) % threads
        first, last = part * count // threads, (part + 1) * count // threads
        while True:
            panel = first + claim(taken + COUNTER * part)
            if panel >= last:
                break
            weight, up = job.weight + panel * weight_bytes, job.up + panel * up_bytes
            if not at_once:
                if job.form:
                    unpack(forms, job.form, weight, unpacked, job.size, like)
                if job.up_form:
                    unpack(forms, job.up_form, up, unpacked + room, job.size, like)
            for block in range(blocks):
                row, end = block * rows // blocks, (block + 1) * rows // blocks
                source, own = job.input + row * job.input_stride, end - row
                if own != shaped:
                    shape_tiles(own, like)
                    shaped = own
                _products_of(
                    job, weight, job.form, weight_bytes, source, own, block, blocks, unpacked, at_once, sums, forms, like
                )
                if job.up:
                    _products_of(
                        job, up, job.up_form, up_bytes, source, own, block, blocks, unpacked + room, at_once, ups, forms, like
                    )
                _finish(job, row, own, panel * PANEL, sums, ups, like)
            done += 1
    release_tiles(like)
    return done


@compiled
def _panel_bytes(form: int, size: int, forms: Any, like: Any) -> int:
    """Of a panel as it lies in memory."""
    return packed_bytes(forms, form, size) if form else size * PANEL * bytes_of(like)


@compiled
def _products_of(
    job: Any, panel: int, form: int, panel_bytes: int, source: int, rows: int, block: int, blocks: int, unpacked: int,
    at_once: bool, sums: int, forms: Any, like: Any,
) -> None:  # fmt: skip
    """Products of some rows with a panel, and of the next panel a part is asked for."""
    if form and at_once:
        packed_products(forms, form, rows, source, job.input_stride, panel, job.size, sums, like)
        return
    further = AHEAD if blocks == 1 and not form else panel_bytes + block * panel_bytes // blocks
    ahead_step = panel_bytes * piece_of(like) // (job.size * bytes_of(like)) // blocks
    lies = unpacked if form else panel
    products(rows, source, job.input_stride, lies, 1, job.size, sums, _PANEL_BYTES, panel + further, ahead_step, like)


@compiled
def _run(jobs: Any, forms: Any, like: Any) -> None:
    job = carray(jobs, 1)[0]
    thread = claim(job.taken + COUNTER * job.threads)
    multiply_rows(job, job.rows, thread, job.threads, job.taken, forms, like)


_SIGNATURE = types.void(types.CPointer(from_dtype(np.dtype(Linear))))


@cache
def entry_point(dtype: str, names: tuple[str, ...] = ()) -> Any:
    """The C function ``void (Linear *)`` that every thread calls, for weights of a type and in some formats; it has its
    ``address``. See ``native_attention.entry_point``."""
    like, forms = TYPES[dtype], Forms(names)

    def run(job: Any) -> None:
        _run(job, forms, like)

    run.__qualname__ = f"run_{dtype}_{forms}"  # by which it is kept on disk
    return compiled_callback(_SIGNATURE)(run)
