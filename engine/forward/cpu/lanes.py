"""Sixteen float32 numbers at a time, for compiled code: what LLVM's vector types offer and numba does not.

LLVM turns a vector of sixteen into one register where the processor has such (AVX-512), into two (AVX2) or four (SSE, NEON) where
not. Addresses are plain integers. ``like`` arguments name a type by a value of it: ``uint16`` stands for bfloat16, which is the
upper half of a float32, and ``int16`` for float16. Nothing may be added up in another order than it is written in, or a number
would depend on the code around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from decoding.jit import compiled

WIDTH = 16

_FLOAT, _INT, _HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_FLOATS, _INTS, _HALVES = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH), ir.VectorType(_HALF, WIDTH)
_FLOAT16S, LONG = ir.VectorType(ir.HalfType(), WIDTH), ir.IntType(64)
_SPINS = 4096

Generator = Callable[[Any, Any, Any, Any], Any]


def primitive(defined: Callable[..., tuple[Any, Generator]]) -> Callable[..., Any]:
    """numba's ``intrinsic``, for type checkers the function that compiled code sees."""
    primitive: Callable[..., Any] = intrinsic(defined)
    return primitive


class LanesType(types.Type):
    """numba's type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: LanesType) -> None:
        super().__init__(manager, lanes, _FLOATS)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * WIDTH)


def _ints(values: list[int]) -> ir.Constant:
    return ir.Constant(_INTS, values)


def _same(value: int) -> ir.Constant:
    return _ints([value] * WIDTH)


def spread_lanes(builder: Any, number: Any) -> Any:
    """Code for ``splat``."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, number, _INT(0)), undefined, _same(0))


def _rounded(builder: Any, numbers: Any) -> Any:
    """Bits whose upper halves are the numbers in bfloat16."""
    bits = builder.bitcast(numbers, _INTS)
    odd = builder.and_(builder.lshr(bits, _same(16)), _same(1))
    return builder.add(bits, builder.add(odd, _same(0x7FFF)))


def by_count(builder: Any, count: Any, most: int, emit: Callable[[int], None]) -> None:
    """Code for each count from one to the most, of which that of ``count`` is run."""
    end = builder.append_basic_block("counted")
    choice = builder.switch(count, end)
    for number in range(1, most + 1):
        block = builder.append_basic_block(f"count.{number}")
        choice.add_case(LONG(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(end)
    builder.position_at_end(end)


@primitive
def bytes_of(typing: Any, like: Any) -> tuple[Any, Generator]:
    """Bytes of one number of a type."""
    size = 4 if like == types.float32 else 2
    return types.int64(like), lambda context, builder, signature, args: LONG(size)


@primitive
def load(typing: Any, address: Any, like: Any) -> tuple[Any, Generator]:
    """Sixteen numbers that lie side by side at an address."""

    return LANES(types.int64, like), lambda context, builder, signature, args: load_lanes(builder, args[0], like)


def load_lanes(builder: Any, address: Any, like: Any) -> Any:
    """Code for ``load``."""
    if like == types.float32:
        return builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=4)
    if like == types.int16:
        return builder.fpext(builder.load(builder.inttoptr(address, _FLOAT16S.as_pointer()), align=2), _FLOATS)
    halves = builder.load(builder.inttoptr(address, _HALVES.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, _INTS), _same(16)), _FLOATS)


@primitive
def store(typing: Any, address: Any, numbers: Any, like: Any) -> tuple[Any, Generator]:
    """Writes sixteen numbers side by side; to half precision they are rounded to the nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            builder.store(args[1], builder.inttoptr(args[0], _FLOATS.as_pointer()), align=4)
            return context.get_dummy_value()
        if like == types.int16:
            halves = builder.fptrunc(args[1], _FLOAT16S)
        else:
            halves = builder.trunc(builder.lshr(_rounded(builder, args[1]), _same(16)), _HALVES)
        builder.store(halves, builder.inttoptr(args[0], halves.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, LANES, like), generate


@primitive
def stored(typing: Any, numbers: Any, like: Any) -> tuple[Any, Generator]:
    """The numbers as they would be read back after a ``store``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        if like == types.int16:
            return builder.fpext(builder.fptrunc(args[0], _FLOAT16S), _FLOATS)
        return builder.bitcast(builder.and_(_rounded(builder, args[0]), _same(0xFFFF0000)), _FLOATS)

    return LANES(LANES, like), generate


@primitive
def splat(typing: Any, number: Any) -> tuple[Any, Generator]:
    """One float32 sixteen times."""
    return LANES(types.float32), lambda context, builder, signature, args: spread_lanes(builder, args[0])


@primitive
def load_splat(typing: Any, address: Any) -> tuple[Any, Generator]:
    """The float32 at an address sixteen times."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return spread_lanes(builder, builder.load(builder.inttoptr(args[0], _FLOAT.as_pointer()), align=4))

    return LANES(types.int64), generate


@primitive
def add(typing: Any, left: Any, right: Any) -> tuple[Any, Generator]:
    """Sums."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: builder.fadd(*args)


@primitive
def multiply(typing: Any, left: Any, right: Any) -> tuple[Any, Generator]:
    """Products."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: builder.fmul(*args)


@primitive
def subtract(typing: Any, left: Any, right: Any) -> tuple[Any, Generator]:
    """Differences."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: builder.fsub(*args)


@primitive
def divide(typing: Any, left: Any, right: Any) -> tuple[Any, Generator]:
    """Quotients."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: builder.fdiv(*args)


@primitive
def absolute(typing: Any, numbers: Any) -> tuple[Any, Generator]:
    """The numbers without their signs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.and_(builder.bitcast(args[0], _INTS), _same(0x7FFFFFFF)), _FLOATS)

    return LANES(LANES), generate


@primitive
def sign_of(typing: Any, numbers: Any, signs: Any) -> tuple[Any, Generator]:
    """The numbers, none of which is negative, with the signs of others."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sign = builder.and_(builder.bitcast(args[1], _INTS), _same(0x80000000))
        return builder.bitcast(builder.or_(builder.bitcast(args[0], _INTS), sign), _FLOATS)

    return LANES(LANES, LANES), generate


@primitive
def multiply_add(typing: Any, left: Any, right: Any, addend: Any) -> tuple[Any, Generator]:
    """``left * right + addend``, rounded once."""
    return LANES(LANES, LANES, LANES), lambda context, builder, signature, args: fused(builder, *args)


def fused(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    """Code for ``multiply_add``."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(builder.module.declare_intrinsic(f"llvm.fma.v{WIDTH}f32", fnty=kind), (left, right, addend))


@primitive
def maximum(typing: Any, left: Any, right: Any) -> tuple[Any, Generator]:
    """The larger of each pair."""
    return LANES(LANES, LANES), lambda context, builder, signature, args: _larger(builder, *args)


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _fold(builder: Any, numbers: Any, operation: Callable[[Any, Any, Any], Any]) -> Any:
    distance = WIDTH // 2
    while distance:
        turned = builder.shuffle_vector(numbers, numbers, _ints([(lane + distance) % WIDTH for lane in range(WIDTH)]))
        numbers, distance = operation(builder, numbers, turned), distance // 2
    return builder.extract_element(numbers, _INT(0))


@primitive
def total(typing: Any, numbers: Any) -> tuple[Any, Generator]:
    """The sum of all sixteen, a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fold(builder, args[0], lambda b, left, right: b.fadd(left, right))

    return types.float32(LANES), generate


@primitive
def largest(typing: Any, numbers: Any) -> tuple[Any, Generator]:
    """The largest of all sixteen, a float32."""
    return types.float32(LANES), lambda context, builder, signature, args: _fold(builder, args[0], _larger)


@primitive
def exponential(typing: Any, numbers: Any) -> tuple[Any, Generator]:
    """e to each number, none of which is positive; 0 below -87, where float32 ends.

    As in Cephes' ``expf``: ``x = n log 2 + r``, a polynomial for ``e ** r``, and ``n`` goes into the exponent's bits. The error
    is below 2 units in the last place.
    """

    return LANES(LANES), lambda context, builder, signature, args: _exponential(builder, args[0])


def _exponential(builder: Any, numbers: Any) -> Any:
    vanishing = builder.fcmp_ordered("<", numbers, _floats(-87.0))
    x = builder.select(vanishing, _floats(-87.0), numbers)
    half = builder.fsub(builder.fmul(x, _floats(1.44269504088896341)), _floats(0.5))
    power = builder.fptosi(half, _INTS)  # cut towards zero, and so rounded to the nearest
    n = builder.sitofp(power, _FLOATS)
    r = builder.fsub(x, builder.fmul(n, _floats(0.693359375)))  # log 2 in two parts, the first without rounding
    r = builder.fsub(r, builder.fmul(n, _floats(-2.12194440e-4)))
    series = _floats(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fused(builder, series, r, _floats(factor))
    series = fused(builder, series, builder.fmul(r, r), r)
    series = builder.fadd(series, _floats(1.0))
    scale = builder.bitcast(builder.shl(builder.add(power, _same(127)), _same(23)), _FLOATS)
    return builder.select(vanishing, _floats(0.0), builder.fmul(series, scale))


@primitive
def silu(typing: Any, numbers: Any) -> tuple[Any, Generator]:
    """``x / (1 + exp(-x))`` of each number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        down = builder.bitcast(builder.or_(builder.bitcast(args[0], _INTS), _same(0x80000000)), _FLOATS)  # -|x|
        power = _exponential(builder, down)
        above = builder.select(builder.fcmp_ordered("<", args[0], _floats(0.0)), power, _floats(1.0))
        return builder.fmul(args[0], builder.fdiv(above, builder.fadd(_floats(1.0), power)))

    return LANES(LANES), generate


@primitive
def copy_bytes(typing: Any, source: Any, target: Any, count: Any) -> tuple[Any, Generator]:
    """Copies so many bytes from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        octets = ir.IntType(8).as_pointer()
        source, target = (builder.inttoptr(address, octets) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@primitive
def claim(typing: Any, address: Any) -> tuple[Any, Generator]:
    """Takes the next number from the int64 counter at an address; threads never get the same."""
    return types.int64(types.int64), lambda context, builder, signature, args: _count(builder, args[0], LONG(1))


@primitive
def count_on(typing: Any, address: Any, number: Any) -> tuple[Any, Generator]:
    """Adds a number to the int64 counter at an address. Who sees the sum sees what this thread wrote before."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, args: _count(builder, *args)


def _count(builder: Any, address: Any, number: Any) -> Any:
    return builder.atomic_rmw("add", builder.inttoptr(address, LONG.as_pointer()), number, "acq_rel")


@primitive
def counted(typing: Any, address: Any) -> tuple[Any, Generator]:
    """The int64 counter at an address, as the other threads have left it. What they wrote before they counted is there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], LONG.as_pointer()), "acquire", align=8)

    return types.int64(types.int64), generate


@primitive
def _pause(typing: Any) -> tuple[Any, Generator]:
    """Tells the processor that this thread waits in a loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        triple = str(builder.module.triple)
        kind = ir.FunctionType(ir.VoidType(), [_INT] if triple.startswith(("aarch64", "arm64")) else [])
        if triple.startswith(("x86_64", "i686")):
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=kind), ())
        elif triple.startswith(("aarch64", "arm64")):
            builder.call(builder.module.declare_intrinsic("llvm.aarch64.hint", fnty=kind), (_INT(1),))
        return context.get_dummy_value()

    return types.void(), generate


_give_way = types.ExternalFunction("sched_yield", types.int32())


@compiled
def wait_for(address: int, number: int) -> None:
    """Until the int64 counter at an address has reached a number. After some time in vain others may have the processor."""
    turns = 0
    while counted(address) < number:
        turns += 1
        if turns < _SPINS:
            _pause()
        else:
            _give_way()


@primitive
def keep(typing: Any, numbers: Any, seen: Any, otherwise: Any) -> tuple[Any, Generator]:
    """The numbers where the sixteen bytes at address ``seen`` are not 0, and ``otherwise`` where they are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        octets = ir.VectorType(ir.IntType(8), WIDTH)
        flags = builder.load(builder.inttoptr(args[1], octets.as_pointer()), align=1)
        return builder.select(builder.icmp_unsigned("!=", flags, ir.Constant(octets, [0] * WIDTH)), args[0], args[2])

    return LANES(LANES, types.int64, LANES), generate


@primitive
def byte_at(typing: Any, address: Any) -> tuple[Any, Generator]:
    """The byte at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(8).as_pointer()))

    return types.uint8(types.int64), generate


@primitive
def int_at(typing: Any, address: Any) -> tuple[Any, Generator]:
    """The int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], LONG.as_pointer()))

    return types.int64(types.int64), generate


@primitive
def address_of(typing: Any, address: Any) -> tuple[Any, Generator]:
    """An address as a pointer, for ``numba.carray``."""
    return types.voidptr(types.int64), lambda context, builder, signature, args: builder.inttoptr(
        args[0], ir.IntType(8).as_pointer()
    )
