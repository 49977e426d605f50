"""Vectors of sixteen float32 numbers for compiled code: LLVM's vector types, which numba does not offer.

Addresses are integers. ``like`` arguments name a type by a value of it: ``uint16`` for bfloat16, ``int16`` for float16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from outrider.decoding.jit import compiled

WIDTH = 16
_, _NAME, _FEATURES = cpu_target.target_context.codegen().magic_tuple()  # processor that is compiled for
FEATURES = set(_FEATURES.split(","))
TILE_ROWS = 12 if "+avx512f" in FEATURES else 2  # rows of products whose sums fit into registers
PAIRS = "+avx512bf16" in FEATURES  # bfloat16 pairs: multiplication and rounding
TILES = PAIRS and {"+amx-tile", "+amx-bf16"} <= FEATURES  # AMX: multiplies tiles of bfloat16 pairs, up to 16 rows

FLOAT, INT, LONG, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
FLOATS, INTS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)
HALVES, FLOAT16S = ir.VectorType(ir.IntType(16), WIDTH), ir.VectorType(ir.HalfType(), WIDTH)
TYPES = {"bfloat16": np.uint16(0), "float16": np.int16(0), "float32": np.float32(0)}  # a value of each type, by torch's name
_SPINS = 4096
# Prefetch target. On AMD past the caches, which keep what is used between steps. On Intel that is three times as slow as memory,
# so there, and in generic code, prefetches go into the L2 cache.
_LOCALITY = 0 if _NAME.startswith("znver") else 2
AHEAD = 8192  # prefetch distance in bytes; hardware prefetches too late


class LanesType(types.Type):
    """Numba type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = LanesType()
LIKE = None  # in a primitive's arguments: only the type counts


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: LanesType) -> None:
        super().__init__(manager, lanes, FLOATS)


def primitive(returns: types.Type, *takes: types.Type | None) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that emits LLVM code callable from compiled code; ``returns`` and ``takes`` are numba types.

    The function gets a builder and its arguments' values, numba's type for ``LIKE`` arguments, and returns the result's value.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def define(typing: Any, *given: Any) -> tuple[Any, Callable[..., Any]]:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                _align_stack(builder)
                arguments = [one if kind is LIKE else value for kind, one, value in zip(takes, given, values, strict=True)]
                value = emit(builder, *arguments)
                return context.get_dummy_value() if returns == types.void else value

            return returns(*(one if kind is LIKE else kind for kind, one in zip(takes, given, strict=True))), generate

        made: Any = intrinsic(define)
        # For use in other emitting functions.
        made.emit = emit
        return made

    return decorate


def _align_stack(builder: Any) -> None:
    """Align spilled registers of a function to cache lines."""
    function = builder.function
    if not getattr(function, "has_line", False):
        function.has_line = True
        # LLVM assumes a stack alignment of 16 bytes, and a vector that is spilled across two cache lines is read several times as
        # slowly, in some processes and not in others. So each function has one aligned, unused line.
        with builder.goto_entry_block():
            line = builder.alloca(FLOATS)
            line.align = WIDTH * 4
            kept = ir.FunctionType(ir.VoidType(), [line.type])
            builder.asm(kept, "", "r", (line,), side_effect=True)


def _all(value: float, kind: ir.VectorType = FLOATS) -> ir.Constant:
    return ir.Constant(kind, [value] * WIDTH)


def spread(builder: Any, number: Any, kind: ir.VectorType = FLOATS) -> Any:
    """Emit a number in all lanes."""
    undefined = ir.Constant(kind, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, number, INT(0)), undefined, _all(0, INTS))


def _rounded(builder: Any, numbers: Any) -> Any:
    """Return bits whose upper halves are the numbers in bfloat16."""
    # To nearest, ties to even: half a unit is added, or one bit less if the last kept bit is 0.
    bits = builder.bitcast(numbers, INTS)
    odd = builder.and_(builder.lshr(bits, _all(16, INTS)), _all(1, INTS))
    return builder.add(bits, builder.add(odd, _all(0x7FFF, INTS)))


def by_count(builder: Any, count: Any, most: int, emit: Callable[[int], None]) -> None:
    """Emit code for each count from 1 to ``most``; at run time that of ``count`` is executed."""
    end = builder.append_basic_block("counted")
    choice = builder.switch(count, end)
    for number in range(1, most + 1):
        block = builder.append_basic_block(f"count.{number}")
        choice.add_case(LONG(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(end)
    builder.position_at_end(end)


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch a cache line that is read once, at best ``AHEAD`` bytes before its use."""
    pointer = builder.inttoptr(address, BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, INT, INT, INT])
    builder.call(builder.module.declare_intrinsic("llvm.prefetch.p0", fnty=kind), (pointer, INT(0), INT(_LOCALITY), INT(1)))


@primitive(types.int64, LIKE)
def bytes_of(builder: Any, like: Any) -> Any:
    """Return the bytes per element of a type."""
    return LONG(4 if like == types.float32 else 2)


@primitive(LANES, types.int64, LIKE)
def load(builder: Any, address: Any, like: Any) -> Any:
    """Load sixteen adjacent numbers."""
    if like == types.float32:
        return builder.load(builder.inttoptr(address, FLOATS.as_pointer()), align=4)
    if like == types.int16:
        return builder.fpext(builder.load(builder.inttoptr(address, FLOAT16S.as_pointer()), align=2), FLOATS)
    halves = builder.load(builder.inttoptr(address, HALVES.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), _all(16, INTS)), FLOATS)


@primitive(types.void, types.int64, LANES, LIKE)
def store(builder: Any, address: Any, numbers: Any, like: Any) -> None:
    """Store sixteen adjacent numbers; half precision rounds to nearest, ties to even."""
    if like == types.float32:
        builder.store(numbers, builder.inttoptr(address, FLOATS.as_pointer()), align=4)
        return
    if like == types.int16:
        halves = builder.fptrunc(numbers, FLOAT16S)
    else:
        halves = builder.trunc(builder.lshr(_rounded(builder, numbers), _all(16, INTS)), HALVES)
    builder.store(halves, builder.inttoptr(address, halves.type.as_pointer()), align=2)


@primitive(LANES, LANES, LIKE)
def stored(builder: Any, numbers: Any, like: Any) -> Any:
    """Return the numbers as read back after a ``store``."""
    if like == types.float32:
        return numbers
    if like == types.int16:
        return builder.fpext(builder.fptrunc(numbers, FLOAT16S), FLOATS)
    return builder.bitcast(builder.and_(_rounded(builder, numbers), _all(0xFFFF0000, INTS)), FLOATS)


@primitive(LANES, types.float32)
def splat(builder: Any, number: Any) -> Any:
    """Return one float32 in all lanes."""
    return spread(builder, number)


@primitive(LANES, types.int64)
def load_splat(builder: Any, address: Any) -> Any:
    """Return the float32 at an address in all lanes."""
    return spread(builder, builder.load(builder.inttoptr(address, FLOAT.as_pointer()), align=4))


@primitive(LANES, LANES, LANES)
def add(builder: Any, left: Any, right: Any) -> Any:
    """Return the sums."""
    # No fast-math flags: additions keep the order in which they are written, or a number would depend on the code around it.
    return builder.fadd(left, right)


@primitive(LANES, LANES, LANES)
def multiply(builder: Any, left: Any, right: Any) -> Any:
    """Return the products."""
    return builder.fmul(left, right)


@primitive(LANES, LANES, LANES)
def subtract(builder: Any, left: Any, right: Any) -> Any:
    """Return the differences."""
    return builder.fsub(left, right)


@primitive(LANES, LANES, LANES)
def divide(builder: Any, left: Any, right: Any) -> Any:
    """Return the quotients."""
    return builder.fdiv(left, right)


@primitive(LANES, LANES)
def absolute(builder: Any, numbers: Any) -> Any:
    """Return the absolute values."""
    return builder.bitcast(builder.and_(builder.bitcast(numbers, INTS), _all(0x7FFFFFFF, INTS)), FLOATS)


@primitive(LANES, LANES, LANES)
def sign_of(builder: Any, numbers: Any, signs: Any) -> Any:
    """Return non-negative numbers with the signs of ``signs``."""
    sign = builder.and_(builder.bitcast(signs, INTS), _all(0x80000000, INTS))
    return builder.bitcast(builder.or_(builder.bitcast(numbers, INTS), sign), FLOATS)


@primitive(LANES, LANES, LANES, LANES)
def multiply_add(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    """Return ``left * right + addend``, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(builder.module.declare_intrinsic(f"llvm.fma.v{WIDTH}f32", fnty=kind), (left, right, addend))


@primitive(LANES, LANES, LANES)
def maximum(builder: Any, left: Any, right: Any) -> Any:
    """Return the larger number of each pair."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _fold(builder: Any, numbers: Any, operation: Callable[[Any, Any, Any], Any]) -> Any:
    distance = WIDTH // 2
    while distance:
        turn = ir.Constant(INTS, [(lane + distance) % WIDTH for lane in range(WIDTH)])
        numbers = operation(builder, numbers, builder.shuffle_vector(numbers, numbers, turn))
        distance //= 2
    return builder.extract_element(numbers, INT(0))


@primitive(types.float32, LANES)
def total(builder: Any, numbers: Any) -> Any:
    """Return the sum of all lanes, a float32."""
    return _fold(builder, numbers, add.emit)


@primitive(types.float32, LANES)
def largest(builder: Any, numbers: Any) -> Any:
    """Return the largest of all lanes, a float32."""
    return _fold(builder, numbers, maximum.emit)


@primitive(LANES, LANES)
def exponential(builder: Any, numbers: Any) -> Any:
    """Return e to the power of non-positive numbers, within 2 units in the last place; 0 below -87, where float32 ends."""
    # As in Cephes' ``expf``: ``x = n log 2 + r``, a polynomial for ``e ** r``, and ``n`` goes into the exponent's bits.
    vanishing = builder.fcmp_ordered("<", numbers, _all(-87.0))
    x = builder.select(vanishing, _all(-87.0), numbers)
    half = builder.fsub(builder.fmul(x, _all(1.44269504088896341)), _all(0.5))
    power = builder.fptosi(half, INTS)  # truncation towards zero: rounds x / log 2 to nearest
    n = builder.sitofp(power, FLOATS)
    r = builder.fsub(x, builder.fmul(n, _all(0.693359375)))  # log 2 in two parts, the first exact
    r = builder.fsub(r, builder.fmul(n, _all(-2.12194440e-4)))
    series = _all(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = multiply_add.emit(builder, series, r, _all(factor))
    series = multiply_add.emit(builder, series, builder.fmul(r, r), r)
    series = builder.fadd(series, _all(1.0))
    scale = builder.bitcast(builder.shl(builder.add(power, _all(127, INTS)), _all(23, INTS)), FLOATS)
    return builder.select(vanishing, _all(0.0), builder.fmul(series, scale))


@primitive(LANES, LANES)
def sigmoid(builder: Any, numbers: Any) -> Any:
    """Return ``1 / (1 + exp(-x))``."""
    # 1 / (1 + e) or e / (1 + e) with e = exp(-|x|), whose exponent is never positive.
    down = builder.bitcast(builder.or_(builder.bitcast(numbers, INTS), _all(0x80000000, INTS)), FLOATS)  # -|x|
    power = exponential.emit(builder, down)
    above = builder.select(builder.fcmp_ordered("<", numbers, _all(0.0)), power, _all(1.0))
    return builder.fdiv(above, builder.fadd(_all(1.0), power))


@primitive(LANES, LANES)
def silu(builder: Any, numbers: Any) -> Any:
    """Return ``x / (1 + exp(-x))``."""
    return builder.fmul(numbers, sigmoid.emit(builder, numbers))


@primitive(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, source: Any, target: Any, count: Any) -> None:
    """Copy ``count`` bytes."""
    source, target = (builder.inttoptr(address, BYTE.as_pointer()) for address in (source, target))
    cgutils.raw_memcpy(builder, target, source, count, 1)


@primitive(types.int64, types.int64, types.int64)
def count_on(builder: Any, address: Any, number: Any) -> Any:
    """Add to the int64 counter at an address and return its old value (acquire and release)."""
    return builder.atomic_rmw("add", builder.inttoptr(address, LONG.as_pointer()), number, "acq_rel")


@primitive(types.int64, types.int64)
def claim(builder: Any, address: Any) -> Any:
    """Take the next number of the int64 counter at an address; threads never get the same one."""
    return count_on.emit(builder, address, LONG(1))


@primitive(types.int64, types.int64)
def counted(builder: Any, address: Any) -> Any:
    """Load the int64 counter at an address (acquire): writes before other threads' counting are visible."""
    return builder.load_atomic(builder.inttoptr(address, LONG.as_pointer()), "acquire", align=8)


@primitive(types.void)
def _pause(builder: Any) -> None:
    triple = str(builder.module.triple)
    kind = ir.FunctionType(ir.VoidType(), [INT] if triple.startswith(("aarch64", "arm64")) else [])
    if triple.startswith(("x86_64", "i686")):
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=kind), ())
    elif triple.startswith(("aarch64", "arm64")):
        builder.call(builder.module.declare_intrinsic("llvm.aarch64.hint", fnty=kind), (INT(1),))


_give_way = types.ExternalFunction("sched_yield", types.int32())


@compiled
def wait_for(address: int, number: int) -> None:
    """Wait until the int64 counter at an address reaches a number; after ``_SPINS`` turns, yield the processor."""
    turns = 0
    while counted(address) < number:
        turns += 1
        if turns < _SPINS:
            _pause()
        else:
            _give_way()


@primitive(LANES, LANES, types.int64, LANES)
def keep(builder: Any, numbers: Any, seen: Any, otherwise: Any) -> Any:
    """Return the numbers where the sixteen bytes at address ``seen`` are not 0, elsewhere ``otherwise``."""
    octets = ir.VectorType(BYTE, WIDTH)
    flags = builder.load(builder.inttoptr(seen, octets.as_pointer()), align=1)
    return builder.select(builder.icmp_unsigned("!=", flags, _all(0, octets)), numbers, otherwise)


@primitive(types.uint8, types.int64)
def byte_at(builder: Any, address: Any) -> Any:
    """Load a byte."""
    return builder.load(builder.inttoptr(address, BYTE.as_pointer()))


@primitive(types.int64, types.int64)
def int_at(builder: Any, address: Any) -> Any:
    """Load an int64."""
    return builder.load(builder.inttoptr(address, LONG.as_pointer()))


@primitive(types.voidptr, types.int64)
def address_of(builder: Any, address: Any) -> Any:
    """Return an address as a pointer, for ``numba.carray``."""
    return builder.inttoptr(address, BYTE.as_pointer())
