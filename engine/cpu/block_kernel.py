"""Unpacking of block-quantized panels, sixteen numbers at a time; see ``engine.cpu.block_formats``."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.extending import models, register_model, typeof_impl

from outrider.decoding.jit import compiled, compiled_callback
from outrider.engine.cpu.block_formats import FORMATS, PANEL, SET, BlockFormat
from outrider.engine.cpu.simd import (
    BYTE,
    FEATURES,
    FLOAT16S,
    FLOATS,
    HALVES,
    INT,
    INTS,
    LIKE,
    LONG,
    PAIRS,
    TILES,
    TYPES,
    WIDTH,
    by_count,
    bytes_of,
    int_at,
    multiply_add,
    prefetch,
    primitive,
    spread,
    store,
)

_HALVES = "+f16c" in FEATURES or platform.machine() in ("aarch64", "arm64")
_VECTORS = SET * PANEL // WIDTH
_PACKED_ROWS = 4  # maximum rows multiplied with a panel while it is unpacked
_AHEAD = 2048  # prefetch distance in bytes


class Forms:
    """Formats to compile code for, fewer being faster to compile; as a numba constant it has a type but no value."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __str__(self) -> str:
        return "_".join(self.names)


class FormsType(types.Opaque):
    """Numba type of ``Forms``, distinct for each set of formats."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__(name=f"Forms{names}")


@typeof_impl.register(Forms)
def _type_of(forms: Forms, _: Any) -> FormsType:
    return FormsType(forms.names)


register_model(FormsType)(models.OpaqueModel)


@lower_constant(FormsType)
def _as_constant(context: Any, builder: Any, kind: Any, forms: Any) -> Any:
    return context.get_dummy_value()


def _constant(value: float, kind: ir.VectorType) -> ir.Constant:
    return ir.Constant(kind, [value] * WIDTH)


def _at(b: Any, address: Any, offset: int, kind: ir.Type) -> Any:
    return b.load(b.inttoptr(b.add(address, LONG(offset)), kind.as_pointer()), align=1)


def _halves(b: Any, address: Any, offset: int) -> Any:
    if _HALVES:
        return b.fpext(_at(b, address, offset, FLOAT16S), FLOATS)
    # Without the instruction: exponent and mantissa are moved into place, and a product corrects the exponent's bias.
    bits = b.zext(_at(b, address, offset, HALVES), INTS)
    size = b.bitcast(b.shl(b.and_(bits, _constant(0x7FFF, INTS)), _constant(13, INTS)), FLOATS)
    sign = b.shl(b.and_(bits, _constant(0x8000, INTS)), _constant(16, INTS))
    scaled = b.bitcast(b.fmul(size, _constant(2.0**112, FLOATS)), INTS)
    return b.bitcast(b.or_(scaled, sign), FLOATS)


def _octets(b: Any, address: Any, offset: int, signed: bool) -> Any:
    octets = _at(b, address, offset, ir.VectorType(BYTE, WIDTH))
    return b.sitofp((b.sext if signed else b.zext)(octets, INTS), FLOATS)


def _as_lanes(b: Any, numbers: list[Any], pair: int) -> list[Any]:
    if pair == 1:
        return numbers
    turned = []
    for own in numbers:
        for half in range(pair):
            order = ir.Constant(INTS, [half * WIDTH // pair + lane // pair for lane in range(WIDTH)])
            turned.append(b.shuffle_vector(own, own, order))
    return turned


def _emit_set(b: Any, form: BlockFormat, codes: Any, scales: list[Any], minima: list[Any]) -> Iterator[Any]:
    """Yield the 32 unrounded vectors of a set one by one, since they do not all fit into registers."""
    words: dict[tuple[int, int, bool], Any] = {}

    def part(bits: int, first: int, vector: int, unit: int, offset: int) -> Any:
        """Return ``unit * code - offset``, exactly."""
        turn, reach = vector // bits * bits, 23 // bits * bits  # bits below a float32's exponent
        key = bits, vector % bits, turn >= reach
        if key not in words:
            word = _at(b, codes, first + 64 * (vector % bits), INTS)
            words[key] = b.lshr(word, _constant(reach, INTS)) if turn >= reach else word
        place = turn % reach
        # The code's bits become the low bits of a float32 that is ``unit`` times 2 ** n.
        base = float(unit << 23 - place)
        mask, above = (1 << bits) - 1 << place, int(np.float32(base).view(np.int32))
        number = b.bitcast(b.or_(b.and_(words[key], _constant(mask, INTS)), _constant(above, INTS)), FLOATS)
        return b.fsub(number, _constant(base + offset, FLOATS))

    for vector in range(_VECTORS):
        if form.high_bits:
            code = part(4, 0, vector, 1, 0)
            code = b.fadd(code, part(form.high_bits, SET * PANEL // 2, vector, 16, form.offset))
        else:
            code = part(form.bits, 0, vector, 1, form.offset)
        scale = scales[vector % len(scales)]
        yield multiply_add.emit(b, code, scale, minima[vector % len(minima)]) if minima else b.fmul(code, scale)


def _emit_blocks(
    b: Any, form: BlockFormat, source: Any, size: Any, pair: int, ahead: bool, use: Callable[[Any, Iterator[Any]], None]
) -> None:
    """Emit code for a panel; ``use(number, vectors)`` gets each set, by its number in the panel."""
    heads_bytes, sets = 2 * PANEL * (1 + form.minimum), form.group // SET
    own = PANEL * (1 + form.minimum) * form.byte_scales
    groups = form.block // form.group
    with cgutils.for_range(b, b.udiv(size, LONG(form.block)), intp=LONG) as outer:
        start = b.add(source, b.mul(outer.index, LONG(form.block_bytes)))
        heads = [[_halves(b, start, 2 * (PANEL * part + half)) for half in (0, WIDTH)] for part in range(1 + form.minimum)]

        def group(number: Any) -> None:
            at = b.add(b.add(start, LONG(heads_bytes)), b.mul(number, LONG(form.group_bytes)))
            # Pays only if a set takes longer than the hardware prefetcher's reach, so not for one row.
            for line in range(0, form.group_bytes, 64) if ahead else ():
                prefetch(b, b.add(at, LONG(_AHEAD + line)))
            lanes = []
            for part, numbers in enumerate(heads):
                if form.byte_scales:
                    octets = [_octets(b, at, PANEL * part + half, form.signed) for half in (0, WIDTH)]
                    numbers = [b.fmul(one, other) for one, other in zip(numbers, octets, strict=True)]
                    if part:
                        numbers = [b.fneg(one) for one in numbers]
                lanes.append(_as_lanes(b, numbers, pair))
            first = b.mul(b.add(b.mul(outer.index, LONG(groups)), number), LONG(sets))
            with cgutils.for_range(b, LONG(sets), intp=LONG) as each:  # a loop, because each emitted set takes long to compile
                codes = b.add(at, b.add(LONG(own), b.mul(each.index, LONG(form.set_bytes))))
                use(b.add(first, each.index), _emit_set(b, form, codes, lanes[0], lanes[1] if form.minimum else []))

        with cgutils.for_range(b, LONG(groups), intp=LONG) as inner:
            group(inner.index)


def _emit_unpack(b: Any, form: BlockFormat, source: Any, target: Any, size: Any, like: Any) -> None:
    pair, wide = (2 if like == types.uint16 else 1), (4 if like == types.float32 else 2)

    def write(place: Any, vectors: Iterator[Any]) -> None:
        at = b.add(target, b.mul(place, LONG(SET * PANEL * wide)))
        if like == types.uint16 and PAIRS:
            for place, two in enumerate(_rounded_pairs(b, vectors)):
                b.store(two, b.inttoptr(b.add(at, LONG(64 * place)), INTS.as_pointer()), align=4)
            return
        for place, vector in enumerate(vectors):
            store.emit(b, b.add(at, LONG(place * WIDTH * wide)), vector, like)

    _emit_blocks(b, form, source, size, pair, True, write)


def _rounded_pairs(b: Any, vectors: Iterator[Any]) -> Iterator[Any]:
    """Convert pairs of vectors to bfloat16; no number is below 2 ** -126, where the instruction rounds to 0."""
    kind = ir.FunctionType(ir.VectorType(ir.IntType(16), 2 * WIDTH), (FLOATS, FLOATS))
    convert = b.module.declare_intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", fnty=kind)
    return (b.bitcast(b.call(convert, (next(vectors), low)), INTS) for low in vectors)


def _emit_products(b: Any, form: BlockFormat, rows: int, input: Any, stride: Any, source: Any, size: Any, sums_at: Any) -> None:
    inputs = [b.add(input, b.mul(stride, LONG(row))) for row in range(rows)]
    zero = ir.Constant(FLOATS, [0.0] * WIDTH)
    totals = [cgutils.alloca_once_value(b, zero) for _ in range(2 * rows)]
    for total in totals:
        b.store(zero, total)
    kind = ir.FunctionType(FLOATS, (FLOATS, INTS, INTS))
    multiply = b.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", fnty=kind)

    def use(place: Any, vectors: Iterator[Any]) -> None:
        at = b.mul(place, LONG(2 * SET))
        sums = [b.load(total) for total in totals]
        weights = _rounded_pairs(b, vectors)
        for step in range(SET // 2):
            halves = next(weights), next(weights)
            for row, address in enumerate(inputs):
                pair = b.load(b.inttoptr(b.add(b.add(address, at), LONG(4 * step)), INT.as_pointer()), align=2)
                for half in range(2):
                    own = 2 * row + half
                    sums[own] = b.call(multiply, (sums[own], spread(b, pair, INTS), halves[half]))
        for total, changed in zip(totals, sums, strict=True):
            b.store(changed, total)

    _emit_blocks(b, form, source, size, 2, rows > 1, use)
    for place, total in enumerate(totals):
        b.store(b.load(total), b.inttoptr(b.add(sums_at, LONG(place * WIDTH * 4)), FLOATS.as_pointer()), align=4)


def _by_form(b: Any, forms: Any, number: Any, emit: Callable[[BlockFormat], None]) -> None:
    """Emit code for each format; at run time that of ``number`` is executed."""
    end = b.append_basic_block("unpacked")
    choice = b.switch(number, end)
    for name in forms.names:
        block = b.append_basic_block(name)
        choice.add_case(LONG(FORMATS[name].number), block)
        b.position_at_end(block)
        emit(FORMATS[name])
        b.branch(end)
    b.position_at_end(end)


@primitive(types.void, LIKE, *[types.int64] * 4, LIKE)
def unpack(builder: Any, forms: Any, number: Any, source: Any, target: Any, size: Any, like: Any) -> None:
    """Unpack a panel of rows of a size from a format to a type."""
    _by_form(builder, forms, number, lambda form: _emit_unpack(builder, form, source, target, size, like))


@primitive(types.int64, LIKE, LIKE)
def packed_rows(builder: Any, forms: Any, like: Any) -> Any:
    """Return the maximum rows of ``packed_products``, 0 if unpacking a panel first is at least as fast (more rows, AMX)."""
    return LONG(_PACKED_ROWS if forms.names and like == types.uint16 and PAIRS and not TILES else 0)


@primitive(types.void, LIKE, *[types.int64] * 7, LIKE)
def packed_products(
    builder: Any, forms: Any, number: Any, rows: Any, input: Any, stride: Any, panel: Any, size: Any, sums: Any, like: Any
) -> None:
    """Compute ``linear_kernel.products`` of up to ``_PACKED_ROWS`` rows with a packed panel, in bfloat16 pairs."""
    if like != types.uint16 or not PAIRS or TILES:
        return
    _by_form(
        builder, forms, number,
        lambda form: by_count(
            builder, rows, _PACKED_ROWS,
            lambda count: _emit_products(builder, form, count, input, stride, panel, size, sums),
        ),
    )  # fmt: skip


@primitive(types.int64, LIKE, types.int64, types.int64)
def packed_bytes(builder: Any, forms: Any, number: Any, size: Any) -> Any:
    """Return the bytes of a panel of rows of a size in a format."""
    found = LONG(0)
    for form in (FORMATS[name] for name in forms.names):
        own = builder.mul(builder.udiv(size, LONG(form.block)), LONG(form.block_bytes))
        found = builder.select(builder.icmp_unsigned("==", number, LONG(form.number)), own, found)
    return found


class Unpacking(ctypes.Structure):
    """Job that unpacks several panels of one matrix."""

    _fields_ = (
        ("form", ctypes.c_int64),
        ("sources", ctypes.c_int64),  # [count] int64: addresses
        ("count", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("target", ctypes.c_int64),  # [count, unpacked panel]
    )


@compiled
def _run(jobs: Any, forms: Any, like: Any) -> None:
    job = carray(jobs, 1)[0]
    panel_bytes = job.size * PANEL * bytes_of(like)
    for panel in range(job.count):
        unpack(forms, job.form, int_at(job.sources + panel * 8), job.target + panel * panel_bytes, job.size, like)


_SIGNATURE = types.void(types.CPointer(from_dtype(np.dtype(Unpacking))))


@cache
def entry_point(dtype: str, names: tuple[str, ...]) -> Any:
    """Return the C function ``void (Unpacking *)`` for some formats; see ``attention_kernel.entry_point``."""
    like, forms = TYPES[dtype], Forms(names)

    def run(job: Any) -> None:
        _run(job, forms, like)

    run.__qualname__ = f"run_{dtype}_{forms}"  # key of the cache on disk
    return compiled_callback(_SIGNATURE)(run)
