"""Linear layers that read a weight once for several rows, with bits that do not depend on the other rows.

Each output of a row is one lane of a register, to which products are added in the order of the inner size, in float32. Weights
are stored in panels of ``PANEL`` outputs, [outputs / PANEL, size, PANEL].
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types
from numba.core import cgutils

from outrider.decoding.jit import compiled, compiled_callback
from outrider.engine.cpu.block_kernel import Forms, packed_bytes, packed_products, packed_rows, unpack
from outrider.engine.cpu.linear import COUNTER, PANEL, STEPS
from outrider.engine.cpu.simd import (
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

_PANEL_BYTES = PANEL * 4  # float32 sums of a row and a panel
MOST_ROWS = 32 if TILES else TILE_ROWS  # maximum of ``rows_at_once`` over all types
# In bfloat16 two numbers of an output are adjacent, [outputs / PANEL, size / 2, PANEL, 2]: AVX512-BF16 multiplies such pairs, and
# AMX tiles of them, sixteen rows by sixteen outputs.
_TILE = 32  # bfloat16 elements of a row in a tile
_FLOAT = np.float32(0)  # stands for its type


class Linear(ctypes.Structure):
    """Job of a linear layer; addresses are of the first element, strides in bytes; the elements of a row are contiguous."""

    _fields_ = (
        ("input", ctypes.c_int64),  # [rows, size]
        ("input_stride", ctypes.c_int64),
        ("weight", ctypes.c_int64),  # panels
        ("bias", ctypes.c_int64),  # [outputs, padded to whole panels]; 0: none
        ("up", ctypes.c_int64),  # panels; the output is silu(weight's) * up's; 0: weight's alone
        ("up_bias", ctypes.c_int64),
        ("added", ctypes.c_int64),  # [rows, outputs] added to the output, with its stride; 0: none
        ("output", ctypes.c_int64),  # [rows, outputs]
        ("output_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),  # a multiple of ``STEPS``, in bfloat16 of ``2 * STEPS``
        ("outputs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("taken", ctypes.c_int64),  # address of ``threads + 1`` counters, all 0; the last one numbers the threads
        ("form", ctypes.c_int64),  # format of the weight's panels; 0: not packed
        ("up_form", ctypes.c_int64),
        ("scratch", ctypes.c_int64),  # per thread, space for two unpacked panels, if panels are packed
        ("factor", ctypes.c_double),  # multiplier of the output before the addition; 0: none
    )


def _emit_products(
    b: Any, rows: int, input: Any, stride: Any, panel: Any, steps: Any, sums_at: Any, sums_stride: Any, ahead_at: Any,
    ahead_step: Any, like: Any,
) -> None:  # fmt: skip
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
    """Load half a panel's step: one register of float32 or of bfloat16 pairs, or two registers for split pairs."""
    b = builder
    if like != types.uint16:
        return (load.emit(b, address, like),)
    return _parts(b, b.load(b.inttoptr(address, INTS.as_pointer()), align=4))


def _parts(builder: Any, pairs: Any) -> tuple[Any, ...]:
    """Return pairs of bfloat16 as the processor multiplies them."""
    if PAIRS:
        return (pairs,)
    low = builder.shl(pairs, ir.Constant(INTS, [16] * WIDTH))
    high = builder.and_(pairs, ir.Constant(INTS, [0xFFFF0000] * WIDTH))
    return builder.bitcast(low, FLOATS), builder.bitcast(high, FLOATS)


def _spread(builder: Any, like: Any, address: Any) -> tuple[Any, ...]:
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
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in given])
    b.call(b.module.declare_intrinsic(f"llvm.x86.{name}", fnty=kind), given)


@primitive(types.void, types.int64, LIKE)
def shape_tiles(builder: Any, rows: Any, like: Any) -> None:
    """Configure AMX tiles for ``products`` of up to ``rows_at_once`` rows; this takes as long as the products of a panel."""
    if not TILES or like != types.uint16:
        return
    b, most = builder, LONG(16)
    with b.goto_entry_block():
        shape = b.alloca(ir.ArrayType(LONG, 8))
    # Palette 1; 16-bit bytes per row of each tile; 8-bit row counts: sixteen pairs of elements of a half.
    first = b.select(b.icmp_unsigned("<", rows, most), rows, most)
    # Tiles 0 and 1 hold the halves of a panel; each sixteen rows have one tile for the rows and two for their sums.
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
    """Release the AMX tiles after the last ``products``."""
    if TILES and like == types.uint16:
        _call(builder, "tilerelease")


def _emit_tiles(
    b: Any, input: Any, stride: Any, panel: Any, panels: Any, size: Any, sums: Any, sums_stride: Any, ahead: Any,
    ahead_step: Any, blocks: int,
) -> None:  # fmt: skip
    """Emit ``products`` with AMX for 1 to 16 rows, or for more in two blocks; ``size`` is a multiple of ``_TILE``."""

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
                    # Adds a sum of even and a sum of odd products, whatever rows are beside.
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
    """Multiply up to ``rows_at_once`` rows with adjacent panels, after ``shape_tiles``; prefetch from ``ahead`` on."""
    # The sums are [rows, panels * ``PANEL``] float32 at ``sums``, with rows ``sums_stride`` bytes apart.
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
            filled = b.lshr(b.add(rows, LONG(15)), LONG(4))  # 0 without rows
            for blocks in (1, 2):
                with b.if_then(b.icmp_unsigned("==", filled, LONG(blocks))):
                    _emit_tiles(b, input, stride, panel, panels, size, sums, sums_stride, ahead, ahead_step, blocks)
        with rest, cgutils.for_range_slice(b, LONG(0), rows, LONG(TILE_ROWS), intp=LONG) as (first, _):
            left = b.sub(rows, first)
            by_rows(b.select(b.icmp_signed("<", left, LONG(TILE_ROWS)), left, LONG(TILE_ROWS)), first)


@primitive(types.int64, LIKE)
def rows_at_once(builder: Any, like: Any) -> Any:
    """Return the maximum number of rows of ``products``."""
    return LONG(MOST_ROWS if like == types.uint16 else TILE_ROWS)


@primitive(types.int64, LIKE)
def piece_of(builder: Any, like: Any) -> Any:
    """Return the bytes of an output that are adjacent in a panel."""
    return LONG(2 if like == types.int16 else 4)


@compiled
def _finish(job: Any, row: int, rows: int, first: int, sums: int, ups: int, like: Any) -> None:
    """Compute and write the outputs for the sums of some rows and a panel, rounded as in torch's modules."""
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
            else:  # incomplete vector: memory behind it belongs to others
                left = (job.outputs - first - half) * size
                if job.added:
                    copy_bytes(job.added + target, ups, left)
                    numbers = add(stored(numbers, like), load(ups, like))
                store(ups, numbers, like)
                copy_bytes(ups, job.output + target, left)


@compiled
def _with_bias(sums: int, bias: int, place: int, like: Any) -> Any:
    numbers = load(sums, _FLOAT)
    if bias:
        numbers = add(numbers, load(bias + place, like))
    return stored(numbers, like)


@compiled
def panels(job: Any) -> int:
    """Return the number of panels of a layer."""
    return (job.outputs + PANEL - 1) // PANEL


@compiled
def multiply_rows(job: Any, rows: int, thread: int, threads: int, taken: int, forms: Any, like: Any) -> int:
    """Compute this thread's share of the panels, then what is left of the others'; return the number computed."""
    return _take_panels(job, rows, thread, threads, taken, np.empty(2 * MOST_ROWS * PANEL, np.float32), forms, like)


@compiled
def _take_panels(job: Any, rows: int, thread: int, threads: int, taken: int, scratch: Any, forms: Any, like: Any) -> int:
    # ``scratch`` is an argument to stay alive: numba frees an array after its last use, even if its address is still in use.
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
                # Shaping tiles takes as long as the products of a panel: only if the number of rows changes.
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
    return packed_bytes(forms, form, size) if form else size * PANEL * bytes_of(like)


@compiled
def _products_of(
    job: Any, panel: int, form: int, panel_bytes: int, source: int, rows: int, block: int, blocks: int, unpacked: int,
    at_once: bool, sums: int, forms: Any, like: Any,
) -> None:  # fmt: skip
    """Compute the products of some rows with a panel, and prefetch a part of the next panel."""
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
    """Return the C function ``void (Linear *)`` for a dtype and packed formats; see ``attention_kernel.entry_point``."""
    like, forms = TYPES[dtype], Forms(names)

    def run(job: Any) -> None:
        _run(job, forms, like)

    run.__qualname__ = f"run_{dtype}_{forms}"  # key of the cache on disk
    return compiled_callback(_SIGNATURE)(run)
